"""vLLM's V2 model runner on CPU ranks: kernels as Triton's interpreter has them, and tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat.worker import v2_logits, v2_runner, v2_sampling

STEPS = Path(__file__).with_name("v2_steps.py")
PARTS = ("tables", "lengths", "inputs", "updates", "samples", "penalties", "biases", "words")
has_triton = find_spec("triton") is not None

Results = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[Results, Results]:
    """Results of this project's kernels, and of vLLM's in Triton's interpreter."""
    found = []
    for kernels in ("ours", "stock"):
        path = tmp_path_factory.mktemp(kernels) / "results.pt"
        command = [sys.executable, str(STEPS), kernels, str(path)]
        ran = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ))
        assert ran.returncode == 0, ran.stderr[-4000:]
        found.append(torch.load(path))
    return found[0], found[1]


@pytest.mark.skipif(not has_triton, reason="needs Triton, whose interpreter runs vLLM's kernels")
@pytest.mark.parametrize("part", PARTS)
def test_kernels_give_what_those_of_triton_do(part: str, results: tuple[Results, Results]) -> None:
    ours, stock = ({name: one[name] for name in one if name.startswith(part)} for one in results)
    assert ours.keys() == stock.keys()
    assert len({name.split()[1] for name in ours}) == 12
    for name, value in ours.items():
        # Sums of logprobs are added up in another order.
        torch.testing.assert_close(value, stock[name], atol=2e-5, rtol=0, msg=name)
    # Not a test if nothing is computed.
    assert all(len(value.unique()) > 1 for name, value in ours.items() if "0 ids" in name)


def test_noise_of_tokens_is_that_of_their_distribution() -> None:
    noise = np.concatenate(
        [v2_sampling.gumbel_noise(seed, 7, np.arange(50_000)) for seed in (3, -(2**60))]
    )
    assert noise.dtype == np.float32
    # Mean and variance of Gumbel's distribution.
    assert abs(noise.mean() - np.euler_gamma) < 0.01
    assert abs(noise.var() - np.pi**2 / 6) < 0.03
    assert not np.array_equal(noise[:50_000], noise[50_000:])


def test_grammars_leave_allowed_tokens_only() -> None:
    random = np.random.default_rng(5)
    logits = torch.randn(3, 70, dtype=torch.bfloat16)
    before = logits.clone()
    masks = random.integers(-(2**31), 2**31, (2, 3)).astype(np.int32)
    batch = SimpleNamespace(req_ids=["a", "b", "c"])
    v2_logits.apply_grammar_bitmask(None, logits, batch, ["c", "a"], masks)
    assert torch.equal(logits[1], before[1])
    for row, words in ((2, masks[0]), (0, masks[1])):
        for token in range(70):
            is_allowed = int(words[token // 32]) >> (token % 32) & 1
            expected = float(before[row, token]) if is_allowed else -np.inf
            assert float(logits[row, token]) == expected


def _step(requests: list[str], computed: list[int], tokens: list[list[int]]) -> Any:
    return SimpleNamespace(
        scheduled_cached_reqs=SimpleNamespace(
            req_ids=requests, num_computed_tokens=computed, new_token_ids=tokens
        )
    )


def test_tokens_of_decoding_requests_come_with_their_step() -> None:
    tokens = v2_runner.DriverTokens(4, 0, torch.device("cpu"))
    states = SimpleNamespace(
        req_id_to_index={"prompt": 3, "decodes": 1, "too": 0},
        prefill_len=SimpleNamespace(np=np.array([4, 9, 0, 50])),
    )
    tokens.attach(SimpleNamespace(req_states=states))
    tokens.begin_step(_step(["prompt", "decodes", "too"], [20, 9, 11], [[5, 6, 7], [8], [9]]))
    found = tokens.get_prev_sampled_outputs()
    assert found is not None
    assert found["idx_mapping"].tolist() == [1, 0]
    assert found["sampled_tokens"].tolist() == [[8], [9]]
    assert found["num_sampled"].tolist() == [1, 1]
    assert found["num_rejected"].tolist() == [0, 0]
    assert found["sampled_tokens"].dtype == torch.int64
    # They are of this step alone.
    tokens.begin_step(_step(["prompt"], [23], [[7]]))
    assert tokens.get_prev_sampled_outputs() is None
    output = object()
    assert tokens.relay_aux_hidden_states(None, output) is output
    assert tokens.receive(None) is False


@pytest.mark.parametrize("is_ours", [True, False])
def test_triton_is_asked_for_by_other_engines_only(
    *, is_ours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "_validate_v2_model_runner"
    monkeypatch.setattr(VllmConfig, name, getattr(VllmConfig, name))
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for _ in range(2):
        v2_runner.run_without_triton(lambda config: is_ours)
    model = write_demo_model(tmp_path / "model", shape=DemoShape(layers=2, hidden=64, heads=2))
    args = EngineArgs(model=str(model), max_model_len=128)
    if is_ours:
        assert args.create_engine_config().use_v2_model_runner
        monkeypatch.setattr(
            VllmConfig, "_get_v2_model_runner_unsupported_features", lambda self: ["this"]
        )
        v2_runner.run_without_triton(lambda config: True)
        with pytest.raises(ValueError, match="V2 does not support: this"):
            args.create_engine_config()
        return
    with pytest.raises(ValueError, match="V2 requires Triton"):
        args.create_engine_config()

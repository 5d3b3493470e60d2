"""Hybrids with layers of Mamba 2 over CPU ranks answer as stock vLLM in one process does."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from engines import (
    IN_THIS_PROCESS,
    TOTALS,
    Json,
    batch,
    engine,
    hetero,
    metrics,
    prompts,
    run_engines,
)
from leftovers import Scene
from test_tokens import check_beside_stock, has_no_native

sys.path.append(str(Path(__file__).parents[1]))

from families.checkpoints import write_checkpoint

pytestmark = pytest.mark.timeout(900)
LENGTH = 1024


def prompt(length: int, seed: int) -> list[int]:
    """Tokens of the small vocabulary, as many as asked for."""
    return [(7919 * (seed + 1) * (at + 1) + 31 * at) % 490 + 8 for at in range(length)]


@pytest.mark.slow
def test_prefixes_are_kept(scene: Scene, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "model", "GraniteMoeHybridForCausalLM")
    base = prompt(900, 1)
    # Of the whole, of a part, beside others, and shorter than what is kept.
    asked = [
        batch(given, max_tokens=12)
        for given in (
            [base[:700]],
            [base[:700]],
            [base, base[:640] + prompt(60, 3), prompt(50, 4)],
            [base[:600] + prompt(40, 5), base[:700] + prompt(3, 6), base[:32], base[:513]],
        )
    ]
    given = {"dtype": "float32", "max_model_len": LENGTH}
    cpu = {"ranks_per_socket": 2, "linear_kernel": "vllm"}
    runs = [
        # Stock vLLM keeps none on CPUs.
        (engine(path, **given, enable_prefix_caching=False), asked),
        (
            engine(path, 2, **given, enable_prefix_caching=True, disable_log_stats=False,
                   **hetero(cpu=cpu)),
            [*asked, metrics("vllm:prefix_cache_hits")],
        ),
    ]  # fmt: skip
    theirs, (*ours, (hits,)) = run_engines(scene, tmp_path / "run", runs, extra=IN_THIS_PROCESS)
    assert ours == theirs
    assert hits["vllm:prefix_cache_hits"] > 3 * 512


MULTIPLIERS = [0.8, 1.2, 0.9, 1.1, 0.7]
"""Factors of gates, values, keys, queries and steps."""
SIZES: dict[str, tuple[str, Json, int]] = {
    # All experts are chosen: rounding alone changes a choice otherwise.
    "granite": (
        "GraniteMoeHybridForCausalLM",
        {"hidden_size": 256, "mamba_n_heads": 32, "mamba_d_head": 16, "num_experts_per_tok": 8},
        2,
    ),
    "falcon": (
        "FalconH1ForCausalLM",
        {"mamba_d_ssm": 1024, "mamba_n_heads": 64, "mamba_d_head": 16,
         "ssm_multipliers": MULTIPLIERS},
        4,
    ),
}  # fmt: skip
"""By name an architecture, sizes of which all linear layers have whole blocks of outputs, on two
tensor-parallel ranks of Falcon-H1 too, and how many of four layers have a mixer."""


@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize(
    ("name", "pipeline", "tensor"), [("granite", 2, 1), ("falcon", 2, 1), ("falcon", 1, 2)]
)
def test_mixers_of_this_project(
    name: str, pipeline: int, tensor: int, scene: Scene, tmp_path: Path
) -> None:
    architecture, changed, mixers = SIZES[name]
    path = write_checkpoint(tmp_path / "model", architecture, changed=changed)
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
    asked = batch(prompts(vocabulary=490), logprobs=2)
    stock = {"enable_prefix_caching": False}
    runs = [
        (engine(path, dtype="float32", **stock), [asked]),
        (engine(path, dtype="bfloat16", **stock), [asked]),
        (engine(path, pipeline, tensor, dtype="bfloat16", **hetero(cpu=cpu)), [asked, TOTALS]),
    ]
    folder = tmp_path / "run"
    (exact,), (theirs,), (ours, totals) = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
    log = (folder / "log").read_text()
    assert f"{mixers // pipeline} mixers of Mamba 2 are computed as one operator" in log
    assert "mixers of Mamba 2 are computed operator by operator" not in log
    native = [rank["native_layer_tokens"] for rank in totals]
    assert all(count >= mixers // pipeline * 16 * 20 for count in native), native
    check_beside_stock(f"{name} {pipeline} {tensor}", exact, theirs, ours, times=1.25, more=3)

"""Quantised checkpoints on this project's kernels: the tokens of stock vLLM.

Stock vLLM computes the same weights in bf16, and where it has a kernel for the format on this
processor, the checkpoint itself.  Kernels round activations in other places, so that tokens may
differ where two are equally likely.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from dequantised import dequantised
from engines import IN_THIS_PROCESS, TOTALS, batch, engine, hetero, prompts, run_engines, tokens
from gpt_oss import write_gpt_oss
from leftovers import Scene
from test_tokens import NEARLY_EQUAL, gap_where_different

from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.cli.demo.stored import FORMATS
from ray_hetero.kernels.linear import streaming_linear

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.slow,
    pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module"),
]
SHAPE = DemoShape(layers=2, hidden=768, heads=24)
"""All sizes are multiples of 128."""
IN_STOCK = {"w4a16", "w4a16-zeros", "gptq", "awq"} if torch.cpu._is_avx512_supported() else set()
"""Formats that stock vLLM computes on this processor without quantising activations; its kernels
for AVX2 have none of them."""
HELD = {
    "int8": "int8", "w8a16": "int8", "fp8": "fp8", "fp8-channel": "fp8", "fp8-tensor": "fp8",
    "fp8-weight": "fp8", "fp8-32": "fp8", "w4a16": "int4", "w4a16-32": "int4",
    "w4a16-zeros": "int4", "gptq": "int4", "awq": "int4",
    "mxfp4": "fp4", "mxfp8": "fp8", "nvfp4": "fp4", "nvfp4-modelopt": "fp4",
}  # fmt: skip
"""The format of ray_hetero/kernels/formats that holds each."""


NEARLY_EQUAL_ROUTED = 0.3
"""The same as `NEARLY_EQUAL` for mixtures of experts, where a rounding may send a token to another
expert: 0.22 was seen between this backend and vLLM's kernel for experts with the same weights in
bf16, whose logprobs this backend gives for the quantised ones to 0.006."""


def test_every_format_of_demo_models_is_here() -> None:
    assert HELD.keys() == FORMATS.keys()


@pytest.fixture
def compared(scene: Scene, tmp_path: Path) -> Callable[..., str]:
    """Compare tokens of a quantised checkpoint with those of stock vLLM; gives the log.

    Stock vLLM is given the same weights in bf16, and the checkpoint itself too if it is to be.
    """

    def compare(
        quantised: Path, plain: Path, *, in_stock: bool = False, nearly: float = NEARLY_EQUAL
    ) -> str:
        cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
        arguments = [
            engine(plain, dtype="bfloat16"),
            engine(quantised, 2, dtype="bfloat16", **hetero(cpu=cpu)),
            *([engine(quantised, dtype="bfloat16")] if in_stock else []),
        ]
        asked = [batch(prompts(), logprobs=2)]
        folder = tmp_path / "run"
        runs = [(one, asked) for one in arguments]
        (expected,), (ours,), *same = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
        for theirs in (expected, *(one for (one,) in same)):
            found = [gap_where_different(*pair) for pair in zip(ours, theirs, strict=True)]
            gaps = [gap for gap in found if gap is not None]
            assert len(gaps) <= 4
            assert all(gap < nearly for gap in gaps)
        return (folder / "log").read_text()

    return compare


@pytest.mark.parametrize("name", HELD)
def test_tokens_are_those_of_stock(name: str, compared: Callable[..., str], tmp_path: Path) -> None:
    quantised = write_demo_model(tmp_path / "quantised", stored=name, shape=SHAPE)
    plain = dequantised(quantised, tmp_path / "plain")
    log = compared(quantised, plain, in_stock=name in IN_STOCK)
    assert log.count(f"4 linear layers are computed from the checkpoint's own {HELD[name]}") == 2
    assert log.count("1 layers are computed as one operator") == 2


def test_a_quantised_checkpoint_that_names_float16_takes_these_kernels(
    scene: Scene, tmp_path: Path
) -> None:
    path = write_demo_model(tmp_path / "awq", stored="awq", shape=SHAPE)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "dtype": "float16"}))
    ours = hetero(cpu={"linear_kernel": "streaming"})
    runs = [
        (engine(path, **given, **ours), [batch(prompts()), TOTALS])
        for given in ({}, {"dtype": "bfloat16"})
    ]
    (found, totals), (expected, _) = run_engines(
        scene, tmp_path / "run", runs, extra=IN_THIS_PROCESS
    )
    log = (tmp_path / "run/log").read_text()
    # Of the first engine only.
    assert log.count("dtype: bfloat16; the quantised checkpoint names float16") == 1
    assert "--dtype float16 keeps it" in log
    assert all(rank["native_layer_tokens"] for rank in totals)
    assert tokens(found) == tokens(expected)


# Of GPTQ, vLLM does not load a dense MLP before layers with experts; with zero points of
# compressed-tensors it has no experts.  tests/unit/kernels/test_quantised_experts.py has both.
@pytest.mark.parametrize(
    "name", ["fp8", "fp8-channel", "fp8-32", "w4a16", "w4a16-32", "awq", "int8"]
)
def test_experts_of_a_quantised_checkpoint_are_those_of_stock(
    name: str, compared: Callable[..., str], tmp_path: Path
) -> None:
    # vLLM wants experts on every stage, and the first layer has none.
    deep = replace(SHAPE, layers=4)
    quantised = write_demo_model(tmp_path / "quantised", "qwen3_moe", stored=name, shape=deep)
    plain = dequantised(quantised, tmp_path / "plain")
    log = compared(quantised, plain, nearly=NEARLY_EQUAL_ROUTED)
    for count in (1, 2):
        assert f"experts of {count} layers are the checkpoint's own {HELD[name]}" in log


def test_gpt_oss_as_it_is_published(compared: Callable[..., str], tmp_path: Path) -> None:
    log = compared(*write_gpt_oss(tmp_path, replace(SHAPE, layers=4)))
    assert log.count("experts of 2 layers are the checkpoint's own mxfp4") == 2

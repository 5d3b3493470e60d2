"""Linear layers of a CPU rank that the GPU computes: alone, and in whole engines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from cpu_rank import replace_streams
from gpu_host import IS_PRETENDED, needs_gpus
from token_checks import Answer, Case, answers_of, check

from ray_hetero.kernels.formats import FORMATS
from ray_hetero.kernels.formats.base import pack
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu

streaming_linear = pytest.importorskip("ray_hetero._streaming_linear")

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

# Each linear layer of these has more than a MiB; OPT's have biases.
CASES = [
    Case("llama-wide", "bfloat16", "c/g", has_prompt_gpu=True),
    Case("llama-wide", "bfloat16", "g/c", is_compiled=True, has_prompt_gpu=True),
    Case("opt-wide", "bfloat16", "c/g", has_prompt_gpu=True),
    Case("llama-wide", "bfloat16", "gc", has_prompt_gpu=True),
    Case("llama-wide", "bfloat16", "g/c", has_prompt_gpu=True),
    Case("llama-wide", "bfloat16", "c/g", has_prompt_gpu=True, is_long=True),
    Case("qwen3-wide", "bfloat16", "g/c", has_prompt_gpu=True, is_long=True),
    Case("llama-wide", "bfloat16", "c/g", has_prompt_gpu=True, share=1.0),
    Case("qwen3-wide", "bfloat16", "g/c", has_prompt_gpu=True, is_long=True, share=1.0),
    Case("llama-wide", "bfloat16", "cc/g", has_prompt_gpu=True, share=1.0),
]


@pytest.mark.parametrize("kind", FORMATS)
def test_it_computes_what_torch_computes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_streams(monkeypatch)
    torch.manual_seed(0)
    # The shapes of an 8B model: one, two and four pieces, the last of them smaller or not.
    shapes = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
    weights = [torch.randn(n, k).mul_(k**-0.5).bfloat16() for n, k in shapes]
    found = [FORMATS[kind].made(pack(weight), streaming_linear) for weight in weights]
    made = [weight for weight in found if weight is not None]
    assert len(made) == len(weights)
    gpu = OffloadGpu(torch.device("cpu" if IS_PRETENDED else "cuda:0"), 1024)
    for weight in made:
        gpu.add(weight)
    taken = gpu.take()
    assert taken.weight_bytes == sum(weight.data.nbytes for weight in made)
    for turn in ([0, 1, 2, 3], [0, 1, 2, 3], [3, 0, 0, 2], [0, 1, 2, 3]):
        for index in turn:
            outputs, inputs = shapes[index]
            tokens = 1024 if index == 2 else 100
            x, bias = torch.randn(tokens, inputs).bfloat16(), torch.randn(outputs).bfloat16()
            found = gpu.linear(x, made[index].data, bias.float())[-20:].float()
            expected = torch.nn.functional.linear(x[-20:], weights[index], bias).float()
            torch.testing.assert_close(found, expected, rtol=2**-7, atol=2**-6)


answers = answers_of(CASES, "prompt-gpu")


@pytest.mark.parametrize("case", CASES, ids=str)
def test_tokens_are_those_of_the_gpu_alone(
    case: Case, answers: dict[Case, Answer], logs: Path
) -> None:
    check(case, answers)
    log = "".join(path.read_text(errors="replace") for path in logs.glob("lane*"))
    tokens = 64 if case.is_long else 8
    assert f"steps of {tokens} tokens and more are computed by the GPU" in log
    if "opt" not in case.model:
        assert "prompts are computed by the GPU in whole layers" in log
    if case.share:
        assert "in decode steps the GPU computes output and MLP matrices of" in log
        assert answers[case]["gpu_tokens"] > 0
        alone = replace(case, share=0.0)
        if alone in answers:  # else this run was asked for other tests
            assert answers[case]["native_tokens"] < answers[alone]["native_tokens"]

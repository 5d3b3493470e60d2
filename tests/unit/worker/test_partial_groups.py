"""Experts in integers of four bits whose last group has fewer inputs than the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from native_module import native as NATIVE  # noqa: E402, N812
from native_module import needs_native  # noqa: E402
from safetensors.torch import save_file  # noqa: E402

from placement.model.expert_tensors import ExpertTensors  # noqa: E402
from ray_hetero.compat.models.quantised_experts import StoredExperts  # noqa: E402
from ray_hetero.config import HeteroConfig  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.quantised_experts import codes_of  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.worker import expert_files  # noqa: E402
from ray_hetero.worker.expert_rows import Share  # noqa: E402
from ray_hetero.world import ExpertSource  # noqa: E402

EXPERTS, GROUP = 2, 64


def tensors_of(group: int | None) -> ExpertTensors | None:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": group}
    settings = {
        "quant_method": "compressed-tensors", "format": "pack-quantized",
        "config_groups": {"g": {"weights": weights}},
    }  # fmt: skip
    config = {"num_experts_per_tok": 1, "hidden_act": "silu", "quantization_config": settings}
    return ExpertTensors.of("Qwen3MoeForCausalLM", config)


class Checkpoint:
    """One layer of experts, random."""

    def __init__(self, path: Path, hidden: int, inner: int, *, missing: int = 0) -> None:
        torch.manual_seed(0)
        self.path, self.hidden = path, hidden
        self.weights: dict[tuple[int, str], Any] = {}
        found = {}
        for expert in range(EXPERTS):
            for name, (outputs, inputs) in {
                "gate_proj": (inner, hidden), "up_proj": (inner, hidden),
                "down_proj": (hidden, inner),
            }.items():  # fmt: skip
                codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8)
                # Such as tell groups from each other.
                scales = (torch.rand(outputs, -(-inputs // GROUP)) * 0.01).bfloat16()
                scales[:, -1] *= 8
                of_each = scales.float().repeat_interleave(GROUP, 1)[:, :inputs]
                self.weights[expert, name] = (codes.float() - 8) * of_each
                at = f"model.layers.0.mlp.experts.{expert}.{name}"
                packed = (codes[:, ::2] | codes[:, 1::2] << 4).contiguous()
                found[f"{at}.weight_packed"] = packed.view(torch.int32)
                found[f"{at}.weight_scale"] = scales[:, : scales.shape[1] - missing].contiguous()
        save_file(found, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps({"model_type": "int4"}))

    def load(self, ranks: int = 1) -> Any:
        tensors = tensors_of(GROUP)
        assert tensors is not None
        kernel = StreamingLinear(NATIVE, NATIVE.levels()[-1])
        config = HeteroConfig.model_validate({"experts": {"prefill_on_gpu": False}})
        source = ExpertSource(str(self.path), tensors, 1)
        ((_, held),) = expert_files.load_from_files(
            source, config, kernel, 1, Share(0, ranks)
        ).items()
        return held.experts

    def expected(self, x: Any, ids: Any) -> Any:
        found = torch.zeros(len(x), self.hidden)
        for token, chosen in enumerate(ids):
            for expert in chosen.tolist():
                gate, up, down = (
                    self.weights[expert, name] for name in ("gate_proj", "up_proj", "down_proj")
                )
                inner = torch.nn.functional.silu(x[token].float() @ gate.T) * (
                    x[token].float() @ up.T
                )
                found[token] += inner @ down.T
        return found


@needs_native
@pytest.mark.parametrize(("hidden", "inner"), [(96, 64), (128, 96), (160, 160), (96, 32)])
def test_the_last_group_may_have_fewer_inputs(hidden: int, inner: int, tmp_path: Path) -> None:
    checkpoint = Checkpoint(tmp_path, hidden, inner)
    experts = checkpoint.load()
    x, ids = torch.randn(5, hidden).bfloat16(), torch.tensor([[0], [1], [0], [1], [1]])
    found, expected = experts(x, None, ids).float(), checkpoint.expected(x, ids)
    assert (found - expected).abs().max() < 0.02 * expected.abs().max()
    assert {one.facts["group"] for pair in experts.weights for one in pair} <= {GROUP, inner}


@needs_native
def test_a_group_of_two_ranks_is_refused_with_the_arithmetic(tmp_path: Path) -> None:
    said = r"a multiple of 64 inputs of down in each expert rank, got 192 / 2 = 96"
    with pytest.raises(UnsupportedError, match=said):
        Checkpoint(tmp_path, 96, 192).load(2)


@needs_native
def test_too_few_scales_are_refused_with_the_arithmetic(tmp_path: Path) -> None:
    said = r"expected 160 / 64 = 2\.5, so 3 scales of an output, got 2"
    with pytest.raises(UnsupportedError, match=said):
        Checkpoint(tmp_path, 160, 128, missing=1).load()


def test_groups_of_a_size_that_nothing_says_are_left_to_vllm() -> None:
    assert tensors_of(None) is None
    assert tensors_of(-1) is None
    found = tensors_of(32)
    assert found is not None
    assert found.block == (1, 32)


def stored(inputs: int, groups: int, block: tuple[int, int] | None) -> StoredExperts:
    w13 = torch.zeros((1, 64, inputs // 8), dtype=torch.int32)
    w2 = torch.zeros((1, 64, 4), dtype=torch.int32)
    return StoredExperts(
        "int4", w13, w2, torch.ones(1, 64, groups), torch.ones(1, 64, 1), block=block
    )


def test_scales_that_vllm_has_loaded() -> None:
    assert codes_of(stored(96, 2, (1, 64)), 0)[0].group == 64
    assert codes_of(stored(96, 1, (1, 128)), 0)[0].group == 96
    assert codes_of(stored(96, 2, None), 0)[0].group == 48
    # vLLM makes room for whole groups only.
    with pytest.raises(UnsupportedError, match=r"96 / 64 = 1\.5, so 2 scales of an output, got 1"):
        codes_of(stored(96, 1, (1, 64)), 0)
    with pytest.raises(UnsupportedError, match=r"160 inputs with 3 scales.*160 / 3 is no whole"):
        codes_of(stored(160, 3, None), 0)

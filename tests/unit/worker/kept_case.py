"""A checkpoint with experts, and a folder that keeps them in the order of the kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("safetensors")

from native_module import native as NATIVE  # noqa: E402, N812
from safetensors.torch import save_file  # noqa: E402

from placement.model.expert_tensors import ExpertTensors  # noqa: E402
from ray_hetero.config import HeteroConfig  # noqa: E402
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear  # noqa: E402
from ray_hetero.worker import expert_files  # noqa: E402
from ray_hetero.worker.expert_rows import Share  # noqa: E402
from ray_hetero.world import ExpertSource  # noqa: E402

LAYERS, EXPERTS, HIDDEN, INNER = 2, 4, 64, 64
FORMS = {
    "bf16": ("Qwen3MoeForCausalLM", None),
    "fp8": ("Qwen3MoeForCausalLM", {"quant_method": "fp8", "weight_block_size": [32, 32]}),
    "mxfp4": ("GptOssForCausalLM", {"quant_method": "mxfp4"}),
    "together": ("GptOssForCausalLM", None),
}  # fmt: skip


def tensors_of(form: str) -> dict[str, Any]:
    torch.manual_seed(0)
    found = {}

    def codes(*shape: int) -> Any:
        return torch.randint(0, 256, shape, dtype=torch.uint8)

    for layer in range(LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        sizes = {"gate_up_proj": (2 * INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}
        if form in ("mxfp4", "together"):
            for name, (outputs, inputs) in sizes.items():
                one = f"{at}.{name}"
                found[f"{one}_bias"] = torch.randn(EXPERTS, outputs).bfloat16()
                if form == "together":
                    found[one] = torch.randn(EXPERTS, inputs, outputs).bfloat16()
                    continue
                found[f"{one}_blocks"] = codes(EXPERTS, outputs, inputs // 32, 16)
                found[f"{one}_scales"] = codes(EXPERTS, outputs, inputs // 32) % 16 + 118
            continue
        for expert in range(EXPERTS):
            for name in ("gate_proj", "up_proj", "down_proj"):
                weight = f"{at}.{expert}.{name}.weight"
                found[weight] = torch.randn(HIDDEN, INNER).bfloat16()
                if form == "fp8":
                    found[weight] = found[weight].to(torch.float8_e4m3fn)
                    found[f"{weight}_scale_inv"] = torch.rand(2, 2)
    return found


class Case:
    """A checkpoint and a folder for its packed experts."""

    def __init__(self, path: Path, form: str = "bf16") -> None:
        self.model, self.folder, self.form = path / "model", path / "kept", form
        self.startup: dict[str, float] = {}
        self.model.mkdir()
        save_file(tensors_of(form), self.model / "model.safetensors")
        (self.model / "config.json").write_text(json.dumps({"model_type": form}))

    def load(
        self, *, ranks: int = 1, number: int = 0, level: int = -1, compact: bool = False,
        kept: bool = True,
    ) -> list[Any]:  # fmt: skip
        """Bytes of all that is held."""
        architecture, settings = FORMS[self.form]
        said = {"num_experts_per_tok": 2, "hidden_act": "silu", "quantization_config": settings}
        tensors = ExpertTensors.of(architecture, said)
        assert tensors is not None
        config = HeteroConfig.model_validate(
            {
                "cpu": {"compact_weights": compact},
                "startup": self.startup,
                "experts": {
                    "prefill_on_gpu": False, "keep_packed": str(self.folder) if kept else "",
                },
            }
        )  # fmt: skip
        kernel = StreamingLinear(NATIVE, NATIVE.levels()[level])
        source = ExpertSource(str(self.model), tensors, LAYERS)
        held = expert_files.load_from_files(source, config, kernel, LAYERS, Share(number, ranks))
        found = []
        for name, layer in sorted(held.items()):
            assert layer.experts is not None
            x, ids = torch.ones(3, HIDDEN).bfloat16(), torch.tensor([[0, 1], [2, 3], [1, 2]])
            found.append((name, layer.experts(x, None, ids).float().tolist()))
            for pair in layer.experts.weights:
                found += [(type(one), one.shape, one.facts, one.data.tolist()) for one in pair]
        return found

    @property
    def files(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())


def warnings(log: pytest.LogCaptureFixture) -> list[str]:
    found = [one.getMessage() for one in log.records if one.levelname == "WARNING"]
    log.clear()
    return found


def stale(case: Case, caplog: pytest.LogCaptureFixture, **how: Any) -> str:
    """Lines said once of files that do not fit; the experts are right, and kept again."""
    assert case.load(**how) == case.load(kept=False, **how)
    (said,) = warnings(caplog)
    case.load(**how)
    assert warnings(caplog) == []
    assert said.startswith("experts.keep_packed: experts are packed again: ")
    return said

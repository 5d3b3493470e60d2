"""Checkpoints that hold nothing but experts, of known shapes, with random content.

A layer is a file.  Codes are random bytes without NaN; weights in bf16 are heavy-tailed, some rows
of them again and again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

BLOCK = 128
"""Outputs, and inputs, that share a scale of FP8."""
WIDTHS = {"U8": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4}
AT_ONCE = 1 << 24
"""Values that are drawn at once."""


@dataclass(frozen=True)
class Form:
    """A shape of experts and how a checkpoint holds them."""

    architecture: str
    experts: int
    hidden: int
    inner: int
    chosen: int
    quantisation: dict[str, Any] | None
    layers: int
    """Number of layers that makes some gigabytes."""

    def config(self) -> dict[str, Any]:
        """Content of config.json, as far as loading experts needs it."""
        return {
            "architectures": [self.architecture], "num_hidden_layers": self.layers,
            "hidden_size": self.hidden, "num_experts_per_tok": self.chosen, "hidden_act": "silu",
            "quantization_config": self.quantisation,
        }  # fmt: skip

    def tensors(self, layer: int) -> Iterator[tuple[str, str, tuple[int, ...]]]:
        """Names, types and shapes of a layer's tensors."""
        at = f"model.layers.{layer}.mlp.experts"
        if self.architecture == "GptOssForCausalLM":
            groups, inner_groups = self.hidden // 32, self.inner // 32
            yield f"{at}.gate_up_proj_blocks", "U8", (self.experts, 2 * self.inner, groups, 16)
            yield f"{at}.gate_up_proj_scales", "U8", (self.experts, 2 * self.inner, groups)
            yield f"{at}.gate_up_proj_bias", "BF16", (self.experts, 2 * self.inner)
            yield f"{at}.down_proj_blocks", "U8", (self.experts, self.hidden, inner_groups, 16)
            yield f"{at}.down_proj_scales", "U8", (self.experts, self.hidden, inner_groups)
            yield f"{at}.down_proj_bias", "BF16", (self.experts, self.hidden)
            return
        shapes = {
            "gate_proj": (self.inner, self.hidden), "up_proj": (self.inner, self.hidden),
            "down_proj": (self.hidden, self.inner),
        }  # fmt: skip
        for expert in range(self.experts):
            for name, (outputs, inputs) in shapes.items():
                one = f"{at}.{expert}.{name}.weight"
                yield one, "F8_E4M3" if self.quantisation else "BF16", (outputs, inputs)
                if self.quantisation:
                    yield f"{one}_scale_inv", "F32", (-(-outputs // BLOCK), -(-inputs // BLOCK))


FORMS = {
    "mxfp4": Form("GptOssForCausalLM", 128, 2880, 2880, 4, {"quant_method": "mxfp4"}, 3),
    "fp8": Form(
        "Qwen3MoeForCausalLM", 128, 4096, 1536, 8,
        {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}, 2,
    ),
    "bf16": Form("Qwen3MoeForCausalLM", 128, 2048, 768, 8, None, 4),
}  # fmt: skip
"""gpt-oss-120b, Qwen3-235B-A22B in FP8, Qwen3-30B-A3B."""


def write_checkpoint(folder: Path, form: Form) -> Path:
    """Write a checkpoint into a new folder, unless it is there."""
    done = folder / "config.json"
    if done.is_file() and json.loads(done.read_text()) == form.config():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    draw = _Drawn(np.random.default_rng(0))
    for layer in range(form.layers):
        tensors = list(form.tensors(layer))
        header: dict[str, Any] = {}
        at = 0
        for name, dtype, shape in tensors:
            end = at + math.prod(shape) * WIDTHS[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
            at = end
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        path = folder / f"model-{layer + 1:05}-of-{form.layers:05}.safetensors"
        with path.open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for name, dtype, shape in tensors:
                file.writelines(draw.of(name, dtype, math.prod(shape)))
    done.write_text(json.dumps(form.config()))
    return folder


class _Drawn:
    """Random content of tensors."""

    def __init__(self, random: np.random.Generator) -> None:
        tailed = random.standard_t(5, AT_ONCE) / 64
        self._floats = tailed.astype(np.float32)
        self._halves = (self._floats.view(np.uint32) >> 16).astype(np.uint16)
        self._random = random

    def of(self, name: str, dtype: str, count: int) -> Iterator[bytes]:
        """Bytes of so many values."""
        make: dict[str, Callable[[int], np.ndarray[Any, Any]]] = {
            "F32": lambda some: np.abs(self._floats[:some]) + np.float32(0.001),
            "BF16": lambda some: np.roll(self._halves, int(self._random.integers(AT_ONCE)))[:some],
            "F8_E4M3": lambda some: self._bytes(some) & np.uint8(0xF7),
            # Exponents about that of 1, so that no product is a denormal number.
            "U8": lambda some: (
                self._bytes(some) % 16 + 118 if name.endswith("_scales") else self._bytes(some)
            ),
        }
        for begin in range(0, count, AT_ONCE):
            yield make[dtype](min(AT_ONCE, count - begin)).tobytes()

    def _bytes(self, count: int) -> np.ndarray[Any, Any]:
        return self._random.integers(0, 256, count, dtype=np.uint8)

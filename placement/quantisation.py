"""What the formats of quantised checkpoints store in place of one linear layer's weight."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from placement.model_config import UnknownModelError

INT32 = 4
FLOAT32 = 4
FLOAT16 = 2
INT64 = 8


@dataclass(frozen=True)
class Linear:
    """A linear layer as the architecture has it, before quantisation."""

    name: str
    out: int
    in_: int
    bias: bool = False
    quantised: bool = True
    """False for what every format leaves alone: routers, output heads, embeddings."""


@dataclass(frozen=True)
class Stored:
    """One tensor in the file."""

    name: str
    elements: int
    dtype_bytes: int
    values: int = 1
    """Weights per element, as in `tensors.Tensor`."""


Format = Callable[[Linear], list[Stored]]
"""Gives what is stored instead of a linear layer's weight (bias left out)."""


def store(linear: Linear, prefix: str, dtype_bytes: int, quantised: Quantised) -> list[Stored]:
    """Tensors that hold a linear layer in the checkpoint.

    Args:
        linear: the layer.
        prefix: module path in front of its name, for the format's ignore lists.
        dtype_bytes: width of what is not quantised.
        quantised: the checkpoint's format.

    """
    if linear.quantised and quantised.applies_to(prefix + linear.name):
        tensors = quantised.format(linear)
    else:
        tensors = [Stored(f"{linear.name}.weight", linear.out * linear.in_, dtype_bytes)]
    if linear.bias:
        tensors.append(Stored(f"{linear.name}.bias", linear.out, dtype_bytes, values=0))
    return tensors


@dataclass(frozen=True)
class Quantised:
    """The format of a checkpoint and the modules it leaves alone."""

    format: Format
    ignored: tuple[str, ...] = ()
    """Module names, parts of them, or `re:` and a regular expression."""

    def applies_to(self, module: str) -> bool:
        """Whether that module's weight is stored in the format."""
        return not any(_matches(pattern, module) for pattern in self.ignored)


def _matches(pattern: str, module: str) -> bool:
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), module) is not None
    return re.search(rf"(^|\.){re.escape(pattern)}(\.|$)", module) is not None


def quantised_from(config: Mapping[str, Any], dtype_bytes: int) -> Quantised:
    """Read a config's `quantization_config`; without one, weights are stored plainly.

    Raises:
        UnknownModelError: the method or one of its options is not known.

    """
    settings = config.get("quantization_config")
    if not settings:
        return Quantised(lambda linear: [_plain(linear, dtype_bytes)])
    method = settings.get("quant_method")
    reader = _METHODS.get(str(method))
    if reader is None:
        raise UnknownModelError(
            f"quantization method {method!r} is not known from its config alone "
            f"(known: {', '.join(_METHODS)}). Plan from a local checkpoint instead: the headers of "
            "its safetensors files say everything."
        )
    ignored = (
        settings.get("modules_to_not_convert")
        or settings.get("ignore")
        or settings.get("ignored_layers")
        or ()
    )
    return Quantised(reader(settings, dtype_bytes), tuple(ignored))


def _plain(linear: Linear, dtype_bytes: int) -> Stored:
    return Stored(f"{linear.name}.weight", linear.out * linear.in_, dtype_bytes)


def _group(settings: Mapping[str, Any], in_: int) -> int:
    size = int(settings.get("group_size") or -1)
    return in_ if size < 0 else size


def _gptq(settings: Mapping[str, Any], dtype_bytes: int) -> Format:
    bits = int(settings["bits"])

    def tensors(linear: Linear) -> list[Stored]:
        groups = -(-linear.in_ // _group(settings, linear.in_))
        packed_out = -(-linear.out * bits // 32)
        return [
            Stored(
                f"{linear.name}.qweight", linear.in_ * bits // 32 * linear.out, INT32, 32 // bits
            ),
            Stored(f"{linear.name}.qzeros", groups * packed_out, INT32, values=0),
            Stored(f"{linear.name}.scales", groups * linear.out, FLOAT16, values=0),
            Stored(f"{linear.name}.g_idx", linear.in_, INT32, values=0),
        ]

    return tensors


def _awq(settings: Mapping[str, Any], dtype_bytes: int) -> Format:
    bits = int(settings.get("bits") or settings.get("w_bit") or 4)

    def tensors(linear: Linear) -> list[Stored]:
        groups = -(-linear.in_ // _group(settings, linear.in_))
        packed_out = linear.out * bits // 32
        return [
            Stored(f"{linear.name}.qweight", linear.in_ * packed_out, INT32, 32 // bits),
            Stored(f"{linear.name}.qzeros", groups * packed_out, INT32, values=0),
            Stored(f"{linear.name}.scales", groups * linear.out, FLOAT16, values=0),
        ]

    return tensors


def _fp8(settings: Mapping[str, Any], dtype_bytes: int) -> Format:
    block = settings.get("weight_block_size")
    static = settings.get("activation_scheme") == "static"

    def tensors(linear: Linear) -> list[Stored]:
        stored = [Stored(f"{linear.name}.weight", linear.out * linear.in_, 1)]
        if block:
            scales = -(-linear.out // block[0]) * -(-linear.in_ // block[1])
            stored.append(Stored(f"{linear.name}.weight_scale_inv", scales, FLOAT32, values=0))
        else:
            stored.append(Stored(f"{linear.name}.weight_scale", 1, FLOAT32, values=0))
        if static:
            stored.append(Stored(f"{linear.name}.input_scale", 1, FLOAT32, values=0))
        return stored

    return tensors


def _compressed_tensors(settings: Mapping[str, Any], dtype_bytes: int) -> Format:
    groups = list(settings.get("config_groups", {}).values())
    if len(groups) != 1 or "Linear" not in groups[0].get("targets", ()):
        raise UnknownModelError(
            f"compressed-tensors with {len(groups)} config groups: only one group that targets "
            "Linear is known from the config alone. Plan from a local checkpoint instead."
        )
    weights = groups[0]["weights"]
    inputs = groups[0].get("input_activations")
    packed = (groups[0].get("format") or settings.get("format")) == "pack-quantized"

    def tensors(linear: Linear) -> list[Stored]:
        stored = _packed(linear, weights) if packed else _bytes_wide(linear, weights)
        scales = _scales(linear, weights)
        stored.append(Stored(f"{linear.name}.weight_scale", scales, dtype_bytes, values=0))
        if inputs and not inputs.get("dynamic", False):
            stored.append(Stored(f"{linear.name}.input_scale", 1, dtype_bytes, values=0))
        return stored

    return tensors


def _packed(linear: Linear, weights: Mapping[str, Any]) -> list[Stored]:
    bits = int(weights["num_bits"])
    per_int = 32 // bits
    row = -(-linear.in_ // per_int)
    stored = [
        Stored(f"{linear.name}.weight_packed", linear.out * row, INT32, per_int),
        Stored(f"{linear.name}.weight_shape", 2, INT64, values=0),
    ]
    if not weights.get("symmetric", True):
        columns = _scales(linear, weights) // linear.out
        zeros = -(-linear.out // per_int) * columns
        stored.append(Stored(f"{linear.name}.weight_zero_point", zeros, INT32, values=0))
    if weights.get("actorder") in ("group", True):
        stored.append(Stored(f"{linear.name}.weight_g_idx", linear.in_, INT32, values=0))
    return stored


def _bytes_wide(linear: Linear, weights: Mapping[str, Any]) -> list[Stored]:
    if int(weights["num_bits"]) != 8:
        raise UnknownModelError(
            f"compressed-tensors with {weights['num_bits']}-bit weights that are not "
            "pack-quantized is not known from the config alone. Plan from a local checkpoint."
        )
    return [Stored(f"{linear.name}.weight", linear.out * linear.in_, 1)]


def _scales(linear: Linear, weights: Mapping[str, Any]) -> int:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return 1
    if strategy == "channel":
        return linear.out
    if strategy == "group":
        return linear.out * -(-linear.in_ // int(weights["group_size"]))
    if strategy == "block":
        rows, columns = map(int, weights["block_structure"])
        return -(-linear.out // rows) * -(-linear.in_ // columns)
    raise UnknownModelError(
        f"compressed-tensors strategy {strategy!r} is not known from the config alone "
        "(known: tensor, channel, group, block). Plan from a local checkpoint."
    )


_METHODS: dict[str, Callable[[Mapping[str, Any], int], Format]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
}

"""Tensors that formats of quantised checkpoints store in place of one linear layer's weight."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from placement.given import shown
from placement.model.config import Config, UnknownModelError
from placement.model.ignored import Ignored, ignored_from

INT32 = 4
FLOAT32 = 4
FLOAT16 = 2
INT64 = 8
PACKED_BITS = (2, 3, 4, 8, 16, 32)
"""Widths of weights in checkpoints that anything reads; 16 and 32 are not packed."""
MXFP4_GROUP = 32
"""Values of MXFP4 with one scale."""


RENAMED = {"gpt_oss_mxfp4": "mxfp4"}
"""vLLM's names in a configuration that it has read → those of the checkpoints."""


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
"""Function that gives the tensors stored instead of a linear layer's weight, without the bias."""


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
    ignored: Ignored | None = None

    def applies_to(self, module: str) -> bool:
        """Whether that module's weight is stored in the format."""
        return self.ignored is None or not self.ignored.has(module)


def quantised_from(config: Config, dtype_bytes: int) -> Quantised:
    """Read a config's `quantization_config`; without one, weights are stored plainly.

    Raises:
        UnknownModelError: the method or one of its options is not known.

    """
    settings = config.section("quantization_config")
    if settings is None:
        return Quantised(lambda linear: [_plain(linear, dtype_bytes)])
    method = method_of(settings)
    reader = _METHODS.get(str(method))
    if reader is None:
        raise UnknownModelError(
            f"quantization_config: quant_method {shown(method)} is not known from its config alone "
            f"(known: {', '.join(_METHODS)}). Plan from a local checkpoint instead: the headers of "
            "its safetensors files say everything."
        )
    ignored = settings.texts("modules_to_not_convert", "ignore", "ignored_layers")
    return Quantised(reader(settings, dtype_bytes), ignored_from(ignored))


def method_of(settings: Config) -> str:
    """The method of a `quantization_config`, by the checkpoint's name where vLLM has another."""
    method = str(settings.values.get("quant_method"))
    return RENAMED.get(method, method)


def packed_bits(settings: Config, *keys: str, default: int | None = None) -> int:
    """Width of a packed weight; without a default the key has to be there."""
    if default is not None and not any(map(settings.has, keys)):
        return default
    found = settings.number(*keys, most=32)
    if found not in PACKED_BITS:
        raise UnknownModelError(
            f"quantization_config: expected {', '.join(map(str, PACKED_BITS))} for "
            f"{' or '.join(keys)}, got {found}"
        )
    return found


def config_groups(settings: Config) -> list[Config]:
    """The groups of a `compressed-tensors` config; empty where it has none."""
    groups = settings.section("config_groups")
    found = [groups.section(name) for name in groups.values] if groups else []
    return [group for group in found if group is not None]


def weights_of(group: Config) -> Config:
    """How a group stores weights.

    Raises:
        UnknownModelError: it does not say.

    """
    weights = group.section("weights")
    if weights is None:
        raise UnknownModelError("config_groups: expected keys and values for weights, got nothing")
    return weights


def stored_together(config: Config) -> int:
    """Neighbouring inputs, or outputs, of a weight that share a scale, so that no cut parts them.

    Raises:
        UnknownModelError: an option of the format has a wrong value.

    """
    settings = config.section("quantization_config")
    if settings is None:
        return 1
    method = method_of(settings)
    if method == "mxfp4":
        return MXFP4_GROUP
    if method == "fp8" and settings.has("weight_block_size"):
        return math.lcm(*_block(settings, "weight_block_size"))
    if method in ("gptq", "awq"):
        return max(1, settings.number_or(-1, "group_size", least=-1))
    groups = config_groups(settings) if method == "compressed-tensors" else []
    weights = groups[0].section("weights") if groups else None
    if weights is None:
        return 1
    if weights.has("block_structure"):
        return math.lcm(*_block(weights, "block_structure"))
    return max(1, weights.number_or(1, "group_size", least=-1))


def _plain(linear: Linear, dtype_bytes: int) -> Stored:
    return Stored(f"{linear.name}.weight", linear.out * linear.in_, dtype_bytes)


def _group(settings: Config, in_: int) -> int:
    size = settings.number_or(-1, "group_size", least=-1)
    return size if size > 0 else in_


def _gptq(settings: Config, dtype_bytes: int) -> Format:
    bits = packed_bits(settings, "bits")

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


def _awq(settings: Config, dtype_bytes: int) -> Format:
    bits = packed_bits(settings, "bits", "w_bit", default=4)

    def tensors(linear: Linear) -> list[Stored]:
        groups = -(-linear.in_ // _group(settings, linear.in_))
        packed_out = linear.out * bits // 32
        return [
            Stored(f"{linear.name}.qweight", linear.in_ * packed_out, INT32, 32 // bits),
            Stored(f"{linear.name}.qzeros", groups * packed_out, INT32, values=0),
            Stored(f"{linear.name}.scales", groups * linear.out, FLOAT16, values=0),
        ]

    return tensors


def _fp8(settings: Config, dtype_bytes: int) -> Format:
    block = _block(settings, "weight_block_size") if settings.has("weight_block_size") else None
    static = settings.values.get("activation_scheme") == "static"

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


def _compressed_tensors(settings: Config, dtype_bytes: int) -> Format:
    groups = config_groups(settings)
    if len(groups) != 1 or "Linear" not in groups[0].texts("targets"):
        raise UnknownModelError(
            f"compressed-tensors with {len(groups)} config groups: only one group that targets "
            "Linear is known from the config alone. Plan from a local checkpoint instead."
        )
    weights = weights_of(groups[0])
    inputs = groups[0].section("input_activations")
    static = inputs is not None and not inputs.flag("dynamic")
    formats = (groups[0].values.get("format"), settings.values.get("format"))
    packed = next(filter(None, formats), None) == "pack-quantized"

    def tensors(linear: Linear) -> list[Stored]:
        stored = _packed(linear, weights) if packed else _bytes_wide(linear, weights)
        scales = _scales(linear, weights)
        stored.append(Stored(f"{linear.name}.weight_scale", scales, dtype_bytes, values=0))
        if static:
            stored.append(Stored(f"{linear.name}.input_scale", 1, dtype_bytes, values=0))
        return stored

    return tensors


def _packed(linear: Linear, weights: Config) -> list[Stored]:
    bits = packed_bits(weights, "num_bits")
    per_int = 32 // bits
    row = -(-linear.in_ // per_int)
    stored = [
        Stored(f"{linear.name}.weight_packed", linear.out * row, INT32, per_int),
        Stored(f"{linear.name}.weight_shape", 2, INT64, values=0),
    ]
    if not weights.flag("symmetric", True):
        columns = _scales(linear, weights) // linear.out
        zeros = -(-linear.out // per_int) * columns
        stored.append(Stored(f"{linear.name}.weight_zero_point", zeros, INT32, values=0))
    if weights.values.get("actorder") in ("group", True):
        stored.append(Stored(f"{linear.name}.weight_g_idx", linear.in_, INT32, values=0))
    return stored


def _bytes_wide(linear: Linear, weights: Config) -> list[Stored]:
    if (bits := packed_bits(weights, "num_bits")) != 8:
        raise UnknownModelError(
            f"compressed-tensors with {bits}-bit weights that are not "
            "pack-quantized is not known from the config alone. Plan from a local checkpoint."
        )
    return [Stored(f"{linear.name}.weight", linear.out * linear.in_, 1)]


def _block(settings: Config, key: str) -> tuple[int, int]:
    rows, columns = settings.numbers(key, 2)
    return max(1, rows), max(1, columns)


def _scales(linear: Linear, weights: Config) -> int:
    strategy = weights.values.get("strategy")
    if strategy == "tensor":
        return 1
    if strategy == "channel":
        return linear.out
    if strategy == "group":
        return linear.out * -(-linear.in_ // weights.number("group_size"))
    if strategy == "block":
        rows, columns = _block(weights, "block_structure")
        return -(-linear.out // rows) * -(-linear.in_ // columns)
    raise UnknownModelError(
        f"compressed-tensors strategy {shown(strategy)} is not known from the config alone "
        "(known: tensor, channel, group, block). Plan from a local checkpoint."
    )


def _mxfp4(settings: Config, dtype_bytes: int) -> Format:
    """Only routed experts are stored in it, in tensors of their own names (`architectures`)."""
    return lambda linear: [_plain(linear, dtype_bytes)]


_METHODS: dict[str, Callable[[Config, int], Format]] = {
    "gptq": _gptq,
    "awq": _awq,
    "fp8": _fp8,
    "compressed-tensors": _compressed_tensors,
    "mxfp4": _mxfp4,
}

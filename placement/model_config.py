"""A model's config.json: its values with errors that name the key, and the widths of its dtypes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.errors import PlacementError

DTYPE_BYTES = {
    "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


class UnknownModelError(PlacementError):
    """Sizes of that architecture or quantisation cannot be told from its config."""


class Config:
    """A model's config.json with errors that name the key and the model type."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.model_type = str(values.get("model_type"))

    def number(self, *keys: str) -> int:
        """The first of these keys that has a value.

        Raises:
            UnknownModelError: none has, or the value is not a whole number.

        """
        value = next((self.values[key] for key in keys if self.values.get(key) is not None), None)
        if isinstance(value, bool) or not isinstance(value, int):
            raise UnknownModelError(
                f"config of model_type {self.model_type!r}: expected a whole number for "
                f"{' or '.join(keys)}, got {value!r}"
            )
        return value

    def flag(self, key: str, default: bool = False) -> bool:
        """A yes or no; the default where the key is absent or null."""
        value = self.values.get(key)
        return default if value is None else bool(value)

    def has(self, key: str) -> bool:
        """Whether the key is there with a value."""
        return self.values.get(key) is not None

    @property
    def hidden(self) -> int:
        """Hidden size."""
        return self.number("hidden_size", "n_embd", "d_model")

    @property
    def heads(self) -> int:
        """Attention heads."""
        return self.number("num_attention_heads", "n_head")

    @property
    def kv_heads(self) -> int:
        """KV heads; as many as heads where the config does not say."""
        return self.number("num_key_value_heads", "num_attention_heads", "n_head")

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        if self.has("head_dim"):
            return self.number("head_dim")
        return self.hidden // self.heads

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.number("num_hidden_layers", "n_layer")

    @property
    def experts(self) -> int:
        """Routed experts of a mixture layer; 0 in a dense model."""
        keys = ("n_routed_experts", "num_local_experts", "num_experts")
        return self.number(*keys) if any(self.has(key) for key in keys) else 0


def dtype_bytes(dtype: str | None, config: Mapping[str, Any]) -> int:
    """Bytes of one value of vLLM's `--dtype`; None or auto takes the config's.

    Raises:
        UnknownModelError: that dtype is not known.

    """
    if dtype in (None, "auto"):
        found = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16")
    else:
        found = str(dtype)
    return _width(found)


def kv_bytes(kv_dtype: str | None, width: int) -> int:
    """Bytes of one value of vLLM's `--kv-cache-dtype`; None or auto takes the model's width."""
    return width if kv_dtype in (None, "auto") else _width(str(kv_dtype))


def _width(dtype: str) -> int:
    name = dtype.removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise UnknownModelError(f"dtype {dtype!r} is not known (known: {', '.join(DTYPE_BYTES)})")
    return DTYPE_BYTES[name]

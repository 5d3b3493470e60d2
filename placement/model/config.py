"""A model's config.json: its values with errors that name the key, and the widths of its dtypes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from placement.errors import PlacementError
from placement.given import file_shown, shown
from placement.text_file import FileError, MissingFileError, read_text

DTYPE_BYTES = {
    "float32": 4, "float": 4, "bfloat16": 2, "float16": 2, "half": 2,
    "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1,
}  # fmt: skip


class UnknownModelError(PlacementError):
    """Sizes of that architecture or quantisation cannot be told from its config."""


class DamagedCheckpointError(UnknownModelError):
    """Files of a checkpoint are missing, cut off or contradict each other: no engine loads it."""


MOST = 2**31 - 1
"""Limit above any size in a config."""
MOST_LAYERS = 1000
MOST_CONFIG_BYTES = 16 << 20
"""Limit of a config.json; those with a long list of modules that are not quantised have 0.5 MB."""
EXPERT_KEYS = ("n_routed_experts", "num_local_experts", "num_experts")


def read_object(file: Path, what: str, most: int = MOST_CONFIG_BYTES) -> dict[str, Any]:
    """Content of a JSON file that holds an object.

    Args:
        file: its path.
        what: a noun for the file, for errors.
        most: limit of its size in bytes.

    Raises:
        MissingFileError: there is no such file.
        UnknownModelError: it cannot be read, is too large, is not JSON, or not an object.

    """
    try:
        text = read_text(file, most)
    except MissingFileError:
        raise
    except FileError as error:
        raise UnknownModelError(f"{file_shown(file)}: expected {what}: {error}") from None
    return json_object(text, file_shown(file))


def json_object(text: str, where: object) -> dict[str, Any]:
    """Content of a JSON text that holds an object.

    Raises:
        UnknownModelError: it is not JSON, or not an object.

    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise UnknownModelError(f"{where}: not JSON: {error}") from None
    except RecursionError:
        raise UnknownModelError(f"{where}: not JSON that can be read: nested too deeply") from None
    if not isinstance(content, dict):
        raise UnknownModelError(f"{where}: expected a JSON object, got {type(content).__name__}")
    return content


class Config:
    """A JSON object of a model's files, with errors that name the key and where it is missing."""

    def __init__(self, values: Mapping[str, Any], where: str | None = None) -> None:
        self.values = values
        self.model_type = str(values.get("model_type"))
        self._where = where or f"config.json of model_type {shown(self.model_type)}"

    def number(self, *keys: str, least: int = 1, most: int = MOST) -> int:
        """The first of these keys that has a value.

        Raises:
            UnknownModelError: none has, or the value is not a whole number of that range.

        """
        value = next((self.values[key] for key in keys if self.has(key)), None)
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(f"a whole number from {least} to {most}", keys, value)
        return value

    def number_or(self, default: int, *keys: str, least: int = 1, most: int = MOST) -> int:
        """The same, with a default for when no key has a value."""
        return self.number(*keys, least=least, most=most) if any(map(self.has, keys)) else default

    def factor(self, key: str, default: float = 1.0, most: float = 1e6) -> float:
        """A number above 0 that scales something; the default where the key has no value."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) in (int, float) and 0 < value <= most:
            return float(value)
        raise self._wrong(f"a number above 0 and up to {most:,.0f}", (key,), value)

    def numbers(self, key: str, count: int | None = None) -> tuple[int, ...]:
        """A list of whole numbers, of that length if one is given."""
        value = self.values.get(key)
        numbers = value if isinstance(value, list) else [None]
        if all(type(one) is int and one >= 0 for one in numbers) and count in (None, len(numbers)):
            return tuple(numbers)
        words = "whole numbers" if count is None else f"{count} whole numbers"
        raise self._wrong(f"a list of {words}", (key,), value)

    def texts(self, *keys: str) -> tuple[str, ...]:
        """The list of texts under the first of these keys that has one; empty without any."""
        value: object = next((self.values[key] for key in keys if self.values.get(key)), [])
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise self._wrong("a list of texts", keys, value)
        return tuple(value)

    def section(self, key: str) -> Config | None:
        """An object inside the object; None where it is absent, null or empty."""
        value = self.values.get(key)
        if not value:
            return None
        if not isinstance(value, dict):
            raise self._wrong("keys and values", (key,), value)
        return Config(value, f"config.json, {key}")

    def flag(self, key: str, default: bool = False) -> bool:
        """A yes or no; the default where the key is absent or null."""
        value = self.values.get(key)
        if not isinstance(value, bool | None):
            raise self._wrong("true or false", (key,), value)
        return default if value is None else value

    def has(self, key: str) -> bool:
        """Whether the key is there with a value."""
        return self.values.get(key) is not None

    def _wrong(self, expected: str, keys: tuple[str, ...], value: object) -> UnknownModelError:
        return UnknownModelError(
            f"{self._where}: expected {expected} for {' or '.join(keys)}, got {shown(value)}"
        )

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
        """KV heads, of which each serves as many heads; as many where the config does not say."""
        keys = ("num_key_value_heads", "num_attention_heads", "n_head")
        found = self.number(*keys)
        if self.heads % found:
            raise self._wrong(f"a divisor of the {self.heads} attention heads", keys[:1], found)
        return found

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        if self.has("head_dim"):
            return self.number("head_dim")
        if self.heads > self.hidden:
            raise self._wrong(f"at most {self.hidden}", ("num_attention_heads",), self.heads)
        return self.hidden // self.heads

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return self.number("num_hidden_layers", "n_layer", most=MOST_LAYERS)

    @property
    def experts(self) -> int:
        """Routed experts of a mixture layer; 0 in a dense model."""
        return self.number_or(0, *EXPERT_KEYS, least=0)


def decoder_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a config.json that describes the decoder: `text_config`, or all of it.

    Raises:
        UnknownModelError: `text_config` is something else than keys and values.

    """
    section = Config(config, "config.json").section("text_config")
    return config if section is None else section.values


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
        raise UnknownModelError(
            f"dtype {shown(dtype)} is not known (known: {', '.join(DTYPE_BYTES)})"
        )
    return DTYPE_BYTES[name]

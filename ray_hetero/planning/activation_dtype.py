"""The dtype that a model is computed in where nobody has said any.

Kernels of CPU ranks take activations in bfloat16.  Quantisation tools mostly name float16 in a
checkpoint's config.json, for the GPU kernels of their time; the codes are the same in either.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from placement.model.config import decoder_section

BFLOAT16, FLOAT16 = "bfloat16", "float16"


def dtype_with_cpus(own: str, is_quantised: bool) -> str:
    """The dtype of an engine with CPU ranks or expert ranks and `--dtype auto`.

    Args:
        own: what vLLM chooses.
        is_quantised: whether the checkpoint is; a dense one would lose digits of every weight.

    """
    return BFLOAT16 if own == FLOAT16 and is_quantised else own


def dtype_of_config(config: Mapping[str, Any], asked: str = "auto") -> str:
    """The same told from a checkpoint's config.json, as vLLM and `dtype_with_cpus` choose it.

    Args:
        config: content of config.json.
        asked: vLLM's --dtype.

    """
    if asked != "auto":
        return asked
    own = own_dtype(config)
    # vLLM computes what is stored in float32, or does not say, in bfloat16.
    stock = BFLOAT16 if own in ("", "float32") else own
    return dtype_with_cpus(stock, _is_quantised(config))


def own_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that a checkpoint's config.json names, without "torch.".

    Raises:
        UnknownModelError: `text_config` is something else than keys and values.

    """
    named = (
        one.get(key)
        for one in (config, decoder_section(config))
        for key in ("dtype", "torch_dtype")
        if one.get(key)
    )
    return str(next(named, "")).removeprefix("torch.")


def _is_quantised(config: Mapping[str, Any]) -> bool:
    sections = (config, decoder_section(config))
    keys = ("quantization_config", "compression_config")
    return any(section.get(key) for section in sections for key in keys)

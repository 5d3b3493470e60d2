"""Arguments of vLLM's for a small checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MAMBA_2 = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "nemotron_h", "zamba2")
"""Architectures with layers of Mamba 2, of which stock vLLM on a CPU keeps no prefixes."""


def stock_arguments(directory: Path) -> dict[str, Any]:
    """Arguments of an engine of one process, without a backend of this project.

    A folder without weights makes vLLM take dummy ones.
    """
    config = json.loads((directory / "config.json").read_text())
    given: dict[str, Any] = {
        "model": str(directory),
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "max_model_len": 256,
        "max_num_seqs": 8,
        "dtype": "float32",
    }
    if not any(directory.glob("*.safetensors")):
        given["load_format"] = "dummy"
    if config.get("model_type") in MAMBA_2:
        # vLLM's operator for CPUs gives no states of a prompt's chunks.
        given["enable_prefix_caching"] = False
    if config.get("kv_lora_rank"):
        # vLLM's backend of latent attention for AMX computes no float32.
        given["attention_backend"] = "CPU_MLA"
        # vLLM's operator for CPUs leaves most heads of its queries as they are.
        given["compilation_config"] = {"custom_ops": ["-rotary_embedding"]}
    return given

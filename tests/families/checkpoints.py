"""Small random checkpoints of the architectures in vLLM's registry."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from families.configurations import small_config
from families.own_weights import model_of, named_weights

SIMILAR = {
    "ExaoneMoEForCausalLM": "ExaoneMoeForCausalLM",
    "IQuestCoderForCausalLM": "LlamaForCausalLM",
    "InternLM3ForCausalLM": "LlamaForCausalLM",
    "LLaMAForCausalLM": "LlamaForCausalLM",
    "MiMoForCausalLM": "Qwen2ForCausalLM",
    "MiMoV2ForCausalLM": "MiMoV2FlashForCausalLM",
    "NemotronHPuzzleForCausalLM": "NemotronHForCausalLM",
    "PhiMoEForCausalLM": "PhimoeForCausalLM",
    "SolarForCausalLM": "LlamaForCausalLM",
    "TeleChat3ForCausalLM": "LlamaForCausalLM",
    "TeleFLMForCausalLM": "LlamaForCausalLM",
}
"""Architectures whose weights have the names and shapes of another's, for which Transformers has a
class."""


class NoCheckpointError(Exception):
    """There is no small checkpoint of an architecture; the message says why."""


def write_checkpoint(
    directory: Path, architecture: str, seed: int = 0, changed: dict[str, Any] | None = None
) -> Path:
    """Write `config.json` and random weights in float32.

    Args:
        directory: where to; made if it is not there.
        architecture: a name of vLLM's registry.
        seed: each weight depends on this and on its own name only.
        changed: keys of the configuration that are not as `small_config` has them.

    Returns:
        The directory.

    Raises:
        NoCheckpointError: there is no small configuration.

    """
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    config = small_config(architecture)
    if isinstance(config, str):
        raise NoCheckpointError(config)
    config |= changed or {}
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    made_by = getattr(transformers, SIMILAR.get(architecture, architecture), None)
    if made_by is None:
        weights = dict(named_weights(model_of(directory)))
        _fill(weights.items(), seed)
        save_file(weights, directory / "model.safetensors")
        return directory
    model_type = config["model_type"]
    own = CONFIG_MAPPING if model_type in CONFIG_MAPPING else _CONFIG_REGISTRY
    made_from = own[model_type].from_dict(dict(config))
    with torch.device("cpu"):
        model = made_by._from_config(made_from, dtype=torch.float32)
    _fill(model.named_parameters(), seed)
    model.save_pretrained(directory)
    (directory / "generation_config.json").unlink(missing_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def _fill(weights: Iterable[tuple[str, Any]], seed: int) -> None:
    """Weights under which each layer changes the next token."""
    import numpy
    import torch

    with torch.no_grad():
        for name, weight in weights:
            generator = numpy.random.default_rng(zlib.crc32(f"{seed}/{name}".encode()))
            noise = torch.from_numpy(generator.standard_normal(weight.shape, dtype="float32"))
            if weight.dim() < 2:
                # Norms, biases, decays: near what the class begins with.
                weight.add_(0.1 * noise)
            elif "embed" in name or name.endswith("wte.weight"):
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(1.5 * noise / weight.shape[-1] ** 0.5)

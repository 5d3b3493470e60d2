"""Routed experts in a checkpoint's files: names of their tensors, by architecture and format.

What stands here is enough to load experts without vLLM's classes of models.  An architecture or a
format that does not stand here is loaded by vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Scheme = Literal["", "fp8", "mxfp4", "int4"]
"""Format of experts; "" where they are not quantised."""


@dataclass(frozen=True)
class ExpertNames:
    """Names of an architecture's experts."""

    block: str = "mlp"
    """Module of a decoder layer that holds the experts, in the files."""
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    vllm_block: str = ""
    """Module of a decoder layer that holds the experts, in vLLM; "" where both names are one."""
    layers: str = "model.layers"
    """Decoder layers in vLLM."""
    activation: str = "silu"
    """Value of vLLM's MoEActivation."""
    has_all_in_one: bool = False
    """Whether a tensor holds all experts of a layer, gate and up of each in turns, with biases."""

    def of_layer(self, number: int) -> str:
        """Name of vLLM's layer of experts in a decoder layer."""
        return f"{self.layers}.{number}.{self.vllm_block or self.block}.experts"


_MIXTRAL_PARTS = "w1", "w3", "w2"
_PLAIN = ExpertNames()
_MIXTRAL = ExpertNames("block_sparse_moe", _MIXTRAL_PARTS)

ARCHITECTURES: dict[str, ExpertNames] = {
    "AfmoeForCausalLM": _PLAIN,
    "BailingMoeForCausalLM": _PLAIN,
    "BailingMoeV2ForCausalLM": _PLAIN,
    "Cohere2MoeForCausalLM": _PLAIN,
    "DeepseekForCausalLM": _PLAIN,
    "DeepseekV2ForCausalLM": _PLAIN,
    "DeepseekV3ForCausalLM": _PLAIN,
    "DeepseekV32ForCausalLM": _PLAIN,
    "Ernie4_5_MoeForCausalLM": _PLAIN,
    "ExaoneMoEForCausalLM": _PLAIN,
    "ExaoneMoeForCausalLM": _PLAIN,
    "Glm4MoeForCausalLM": _PLAIN,
    "Glm4MoeLiteForCausalLM": _PLAIN,
    "GlmMoeDsaForCausalLM": _PLAIN,
    "GptOssForCausalLM": ExpertNames(activation="swigluoai", has_all_in_one=True),
    "Lfm2MoeForCausalLM": ExpertNames("feed_forward", _MIXTRAL_PARTS),
    "MiMoV2FlashForCausalLM": _PLAIN,
    "MiMoV2ForCausalLM": _PLAIN,
    "MiniMaxM2ForCausalLM": ExpertNames("block_sparse_moe", _MIXTRAL_PARTS, "mlp"),
    "MixtralForCausalLM": _MIXTRAL,
    "OlmoeForCausalLM": _PLAIN,
    "Param2MoEForCausalLM": _PLAIN,
    "PhiMoEForCausalLM": _MIXTRAL,
    "Qwen2MoeForCausalLM": _PLAIN,
    "Qwen3MoeForCausalLM": _PLAIN,
    "Qwen3NextForCausalLM": _PLAIN,
    "SarvamMLAForCausalLM": _PLAIN,
    "SarvamMoEForCausalLM": _PLAIN,
}
"""Names by architecture.  A test compares what is loaded by them with what vLLM loads."""

_ACTIVATION_KEYS = "hidden_act", "hidden_activation"
_LIMIT = re.compile(r"swiglu|situ")
_CHOSEN_KEYS = "num_experts_per_tok", "moe_k", "num_experts_per_token"


@dataclass(frozen=True)
class ExpertTensors:
    """Experts of a checkpoint that are loaded without vLLM."""

    names: ExpertNames
    chosen: int
    """Experts of a token."""
    scheme: Scheme = ""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale, in FP8 and in integers of four bits."""

    @classmethod
    def of(cls, architecture: str, config: Mapping[str, object]) -> ExpertTensors | None:
        """How an architecture's checkpoint holds its experts; None where it is not known here.

        Args:
            architecture: a name of vLLM's registry.
            config: keys of config.json that describe the decoder and its format.

        """
        names = ARCHITECTURES.get(architecture)
        found = _format_of(config.get("quantization_config"), names)
        chosen = next((config[key] for key in _CHOSEN_KEYS if config.get(key)), None)
        if names is None or found is None or type(chosen) is not int:
            return None
        if not names.has_all_in_one and not _is_plain_silu(config):
            return None
        return cls(names, chosen, *found)

    @property
    def of_experts(self) -> re.Pattern[str]:
        """Pattern of tensors' names: groups of the layer's number, of the expert's, if each has
        tensors of its own, and of the rest."""
        block = re.escape(self.names.block)
        one = "" if self.names.has_all_in_one else r"(\d+)\."
        return re.compile(rf"(?:^|\.)layers\.(\d+)\.{block}\.experts\.{one}([a-z0-9_.]+)$")


def _is_plain_silu(config: Mapping[str, object]) -> bool:
    """Whether gates pass SiLU, without limits; where nothing is said, they do."""
    said = {config[key] for key in _ACTIVATION_KEYS if config.get(key)}
    has_limit = any(value is not None and _LIMIT.search(key) for key, value in config.items())
    return said <= {"silu"} and not has_limit


def _format_of(
    settings: object, names: ExpertNames | None
) -> tuple[Scheme, tuple[int, int] | None] | None:
    """Format of experts and its blocks; None for one that is not loaded without vLLM."""
    if settings is None:
        return "", None
    if not isinstance(settings, Mapping) or names is None:
        return None
    method = settings.get("quant_method")
    if method == "mxfp4" and names.has_all_in_one:
        return "mxfp4", None
    if names.has_all_in_one:
        return None
    block = settings.get("weight_block_size")
    if method == "fp8" and isinstance(block, list | tuple) and len(block) == 2:
        return "fp8", (int(block[0]), int(block[1]))
    if method == "compressed-tensors" and (group := _group_of_four_bits(settings)):
        return "int4", (1, group)
    return None


def _group_of_four_bits(settings: Mapping[str, object]) -> int | None:
    """Inputs of a group, if all that is quantised are integers of four bits in groups, in their own
    order and without zero points."""
    groups = settings.get("config_groups")
    found = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(found) != 1 or settings.get("format") != "pack-quantized":
        return None
    weights = found[0].get("weights") or {}
    expected = {"num_bits": 4, "type": "int", "strategy": "group"}
    is_ordinary = weights.get("symmetric", True) and not weights.get("actorder")
    if not is_ordinary or any(weights.get(key) != value for key, value in expected.items()):
        return None
    group = weights.get("group_size")
    return group if type(group) is int and group > 0 else None

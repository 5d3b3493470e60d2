"""Names of the weights that encode images, video and sound."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

TOWERS = ("vision", "visual", "audio", "image", "vit", "tower", "projector", "connector")
"""Parts of the names of modules that are no decoder."""
_OTHERS = re.compile(r"(^|\.)(mm_|multi_modal|siglip)")
"""Beginnings of the names of such modules in checkpoints."""
CONFIGS = ("vision_config", "audio_config")
"""Keys of a config.json that describe encoders."""


def is_tower(name: str) -> bool:
    """Whether a module or a weight belongs to an encoder, by the first two parts of its name."""
    is_named = any(word in part for part in name.split(".")[:2] for word in TOWERS)
    return is_named or _OTHERS.search(name) is not None


def describes_encoders(config: Mapping[str, Any]) -> bool:
    """Whether a config.json has sizes of an encoder."""
    return any(isinstance(config.get(key), dict) and config[key] for key in CONFIGS)

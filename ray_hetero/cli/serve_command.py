"""The `vllm serve` that starts what `ray-hetero plan` has shown."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray_hetero.config_sources import ADDITIONAL_CONFIG, KEY
from ray_hetero.names import BACKEND


def serve_command(model: str, options: Mapping[str, object], settings: Mapping[str, Any]) -> str:
    """One line to type.

    Args:
        model: what the plan was asked for; a config.json alone cannot be served, and is MODEL.
        options: of vLLM, by their names, with None for those that are left to vLLM, and True for
            those without a value.
        settings: of this backend.

    """
    words = ["vllm", "serve", _served(model), "--distributed-executor-backend", BACKEND]
    for name, value in options.items():
        if value is not None:
            words += [name] if value is True else [name, str(value)]
    if settings:
        words += [ADDITIONAL_CONFIG, json.dumps({KEY: settings})]
    return shlex.join(words)


def speculative_option(drafts: int, model: str | None) -> str:
    """Value of vLLM's --speculative-config.

    Args:
        drafts: of a request in a step.
        model: that drafts; None for n-grams of the request's own tokens.

    """
    method = {"method": "ngram"} if model is None else {"model": _served(model, "DRAFT_MODEL")}
    return json.dumps(method | {"num_speculative_tokens": drafts})


def _served(model: str, otherwise: str = "MODEL") -> str:
    path = Path(model).expanduser()
    has_weights = path.is_dir() and any(path.glob("*.safetensors"))
    is_name = model.count("/") == 1 and not path.exists()
    return model if has_weights or is_name else otherwise

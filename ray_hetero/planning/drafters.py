"""Drafters of a model, as far as planning has to know them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.model.shape import ModelShape
from placement.plan.drafts import Drafter
from ray_hetero.compat.engine.draft_methods import source_of

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs


def drafter_of(
    method: str | None, drafts: int, model: object, target: ModelShape | None
) -> Drafter | None:
    """Drafter of a model, with sizes as far as they are known.

    Args:
        method: vLLM's name; None is a draft model where there is a model.
        drafts: of a request in a step.
        model: its checkpoint or config, as `shape_of` takes it; None where it has none.
        target: the model that it drafts for.

    Returns:
        None for no drafts.

    """
    return Drafter.of(source_of(method), drafts, model, target) if drafts > 0 else None


def drafter_in(speculative: SpeculativeConfig | None, target: ModelShape | None) -> Drafter | None:
    """The drafter of vLLM's configuration; None without speculative decoding."""
    if speculative is None:
        return None
    model: object = None
    if speculative.uses_draft_kv_cache():
        config = speculative.draft_model_config
        directory = Path(config.model)
        has_weights = any(directory.glob("*.safetensors"))
        model = directory if has_weights else config.hf_config.to_dict()
    return drafter_of(speculative.method, speculative.num_speculative_tokens, model, target)


def drafter_asked(engine_args: EngineArgs, target: ModelShape | None) -> Drafter | None:
    """The same of what the user has written, before vLLM has built its configuration."""
    given: Any = engine_args.speculative_config
    written = given if isinstance(given, Mapping) else vars(given) if given is not None else {}
    method = engine_args.spec_method or written.get("method")
    model = engine_args.spec_model or written.get("model")
    drafts = engine_args.spec_tokens or written.get("num_speculative_tokens") or 0
    return drafter_of(method, int(drafts), model, target)

"""What drafts for a model, as far as planning has to know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from placement.model.reading import UnknownModelError, shape_of
from placement.model.shape import ModelShape
from placement.plan.drafts import Drafter

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig
    from vllm.engine.arg_utils import EngineArgs

WITHOUT_MODEL = ("ngram", "suffix", "custom_class")
"""Methods that draft from the tokens so far, or in a way that nobody knows."""
HEADS = ("eagle", "eagle3", "mtp")
"""Methods whose layers have the embedding and the output matrix of the model."""


def drafter_of(
    method: str | None, drafts: int, model: object, target: ModelShape | None
) -> Drafter | None:
    """What drafts, with sizes as far as they are known.

    Args:
        method: vLLM's name; None is a draft model where there is a model.
        drafts: of a request in a step.
        model: its checkpoint or config, as `shape_of` takes it; None where it has none.
        target: the model that it drafts for.

    Returns:
        None for no drafts.

    """
    if drafts < 1:
        return None
    is_head = method is not None and (method in HEADS or method.endswith("_mtp"))
    if target is None or method in WITHOUT_MODEL or (model is None and not is_head):
        return Drafter(drafts)
    return Drafter(drafts, _shape(method, model, target), has_own_vocabulary=not is_head)


def _shape(method: str | None, model: object, target: ModelShape) -> ModelShape | None:
    like_target = replace(target, layers=target.layers[-1:], output_head=())
    if method is not None and method.endswith("mtp"):
        # Its layers are in the target's own checkpoint, behind those that count.
        return like_target
    try:
        shape = shape_of(model if isinstance(model, Mapping) else Path(str(model)))
    except UnknownModelError:
        return like_target if method in HEADS else None
    if method not in HEADS or not shape.layers:
        return shape
    # What combines the target's hidden states, and EAGLE-3's only layer, have names of their own.
    first = replace(shape.layers[0], tensors=(*shape.layers[0].tensors, *shape.extra))
    is_exact = shape.source == "safetensors"
    return replace(
        shape,
        layers=(first, *shape.layers[1:]),
        embedding=(shape.embedding if is_exact else ()) or target.embedding,
        output_head=shape.output_head if is_exact else (),
        extra=(),
    )


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

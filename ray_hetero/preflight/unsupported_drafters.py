"""Speculative decoding that does not work with CPU ranks.

The methods that are let through are the rows of compat/engine/draft_methods.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout
from ray_hetero.compat.engine import draft_methods
from ray_hetero.config import HeteroConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

METHODS = tuple(draft_methods.METHODS)
"""vLLM's names of the methods that work."""


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding as it was asked for, in a world with CPU ranks."""

    vllm_config: VllmConfig
    """The driver's, with a speculative configuration."""
    config: HeteroConfig
    layout: Layout


@dataclass(frozen=True)
class DraftedModel:
    """A model whose tokens are drafted, in a world with CPU ranks."""

    layout: Layout
    has_states: bool
    """Whether layers keep a state in the place of keys and values."""
    has_draft_model: bool
    """Whether a model of its own drafts, not a head or the tokens so far."""


def method_named(engine_args: EngineArgs) -> str | None:
    """A method that does not work, if the user names one; vLLM finds out others from the model."""
    return _unknown(_named(engine_args))


def package_missing(engine_args: EngineArgs) -> str | None:
    """The package of the method that the user names, if it is not installed here."""
    method = draft_methods.method_of(_named(engine_args))
    if method is None or not method.package:
        return None
    return method.package if find_spec(method.package.replace("-", "_")) is None else None


def _named(engine_args: EngineArgs) -> str | None:
    given = engine_args.speculative_config
    method = given.get("method") if isinstance(given, dict) else getattr(given, "method", None)
    return engine_args.spec_method or method


def method_found(drafting: Drafting) -> str | None:
    """The method that vLLM has found out, if it does not work."""
    speculative = drafting.vllm_config.speculative_config
    return draft_methods.untried_kind(speculative) or _unknown(speculative.method)


def _unknown(method: str | None) -> str | None:
    return method if draft_methods.method_of(method) is None else None


def batches_in_flight(drafting: Drafting) -> int | None:
    """How many batches in flight were asked for, if it is more than one."""
    asked = drafting.config.pipeline.batches_in_flight
    return asked if asked != "auto" and asked > 1 else None


def has_recurrent_states(drafted: DraftedModel) -> bool:
    """Whether a pipeline's model has states that go back by the tokens that are refused."""
    return len(drafted.layout.stages) > 1 and drafted.has_states


def has_draft_model_beside_states(drafted: DraftedModel) -> bool:
    """Whether a model of its own drafts for one that has states."""
    return drafted.has_states and drafted.has_draft_model


def is_acceptance_made_up(drafting: Drafting) -> bool:
    """Whether drafts are to be accepted at a given rate, where CPU ranks decide it."""
    method = drafting.vllm_config.speculative_config.rejection_sample_method
    return method == "synthetic" and "cpu" in drafting.layout.stages[-1]

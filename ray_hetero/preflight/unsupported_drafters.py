"""Speculative decoding that does not work with CPU ranks.

The methods that are let through were run over CPU ranks (tests/cluster/test_speculation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout
from ray_hetero.config import HeteroConfig

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp", "custom_class")
"""vLLM's names of the methods that work."""
PACKAGES = {"suffix": "arctic-inference"}
"""Method → the package that drafts for vLLM."""


@dataclass(frozen=True)
class Drafting:
    """Speculative decoding as it was asked for, in a world with CPU ranks."""

    vllm_config: VllmConfig
    """The driver's, with a speculative configuration."""
    config: HeteroConfig
    layout: Layout


def method_named(engine_args: EngineArgs) -> str | None:
    """A method that does not work, if the user names one; vLLM finds out others from the model."""
    return _unknown(_named(engine_args))


def package_missing(engine_args: EngineArgs) -> str | None:
    """The package of the method that the user names, if it is not installed here."""
    package = PACKAGES.get(_named(engine_args) or "")
    is_missing = package is not None and find_spec(package.replace("-", "_")) is None
    return package if is_missing else None


def _named(engine_args: EngineArgs) -> str | None:
    given = engine_args.speculative_config
    method = given.get("method") if isinstance(given, dict) else getattr(given, "method", None)
    return engine_args.spec_method or method


def method_found(drafting: Drafting) -> str | None:
    """The method that vLLM has found out, if it does not work."""
    speculative = drafting.vllm_config.speculative_config
    if speculative.use_gemma4_mtp():
        return "gemma4_mtp"
    if speculative.use_step3p5_mtp():
        return "step3p5_mtp"
    return _unknown(speculative.method)


def _unknown(method: str | None) -> str | None:
    is_known = method is None or method in METHODS or method.endswith("_mtp")
    return None if is_known else method


def batches_in_flight(drafting: Drafting) -> int | None:
    """How many batches in flight were asked for, if it is more than one."""
    asked = drafting.config.pipeline.batches_in_flight
    return asked if asked != "auto" and asked > 1 else None


def has_recurrent_states(drafting: Drafting) -> bool:
    """Whether a pipeline's model has states that go back by the tokens that are refused."""
    return len(drafting.layout.stages) > 1 and bool(drafting.vllm_config.model_config.is_hybrid)


def is_acceptance_made_up(drafting: Drafting) -> bool:
    """Whether drafts are to be accepted at a given rate, where CPU ranks decide it."""
    method = drafting.vllm_config.speculative_config.rejection_sample_method
    return method == "synthetic" and "cpu" in drafting.layout.stages[-1]

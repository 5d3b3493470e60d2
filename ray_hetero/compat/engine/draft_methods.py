"""Methods of speculative decoding that work with CPU ranks, by vLLM's names.

Nothing here imports vLLM: what is refused, what is planned and what a rank does is read from these
rows.  Those that are there were run over CPU ranks (tests/cluster/test_speculation.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from placement.plan.drafts import Source

if TYPE_CHECKING:
    from vllm.config import SpeculativeConfig

OF_A_FAMILY = "_mtp"
"""End of vLLM's names of MTP layers of one family of models; vLLM makes `mtp` of them."""


@dataclass(frozen=True)
class DraftMethod:
    """A method that works."""

    name: str
    """vLLM's name."""
    source: Source
    """Origin of its drafts, which tells the memory and the time that they take."""
    package: str = ""
    """Package that drafts for vLLM; empty where vLLM does."""
    layers_key: str = ""
    """Key of the head's `eagle_config` that says whether it reads hidden states from between the
    target's layers, as it does without the key; empty for methods that never do."""


METHODS = {
    one.name: one
    for one in (
        DraftMethod("ngram", Source.TOKENS),
        DraftMethod("suffix", Source.TOKENS, package="arctic-inference"),
        DraftMethod("draft_model", Source.MODEL),
        DraftMethod("eagle", Source.HEAD),
        DraftMethod("eagle3", Source.HEAD, layers_key="use_aux_hidden_state"),
        DraftMethod("mtp", Source.TARGET),
        # Nobody knows what a user's class does.
        DraftMethod("custom_class", Source.TOKENS),
    )
}
"""Methods by name.  A new one is added here."""


def method_of(name: str | None) -> DraftMethod | None:
    """The row of a method; None for one that is not known to work."""
    if name is not None and name.endswith(OF_A_FAMILY):
        return METHODS["mtp"]
    return METHODS.get(name or "")


def source_of(name: str | None) -> Source:
    """Where the drafts of a method come from, if it has a model; it need not be a known one."""
    method = method_of(name)
    return Source.MODEL if method is None else method.source


def untried_kind(speculative: SpeculativeConfig) -> str | None:
    """The kind of a drafter of a known method that works differently, if it is one."""
    if speculative.use_gemma4_mtp():
        return "gemma4_mtp"
    return "step3p5_mtp" if speculative.use_step3p5_mtp() else None


def reads_layers(speculative: SpeculativeConfig) -> bool:
    """Whether a drafter reads hidden states from between the target's layers."""
    method = method_of(speculative.method)
    if method is None or not method.layers_key:
        return False
    head = getattr(speculative.draft_model_config.hf_config, "eagle_config", None) or {}
    return bool(head.get(method.layers_key, True))

"""Speculative decoding that does not work with CPU ranks, refused with its reason.

The methods that are let through were run over CPU ranks (tests/cluster/test_speculation.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from placement.cluster.layout import Layout
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.preflight.unsupported_checkpoints import refuse_checkpoint

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHODS = ("ngram", "suffix", "draft_model", "eagle", "eagle3", "mtp")
WHY_NOT = {
    "ngram_gpu": "it looks for n-grams in GPU memory; method ngram drafts the same tokens",
    "dspark": "it needs vLLM's V2 model runner, CPU ranks have V1",
    "dflash": "its attention looks ahead, which vLLM's on CPUs does not",
}
"""vLLM's name of a method → why it does not work; the others were not tried."""
NOT_TRIED = "no rank of this project has run it yet"


def why_not(method: str | None) -> str | None:
    """Why a method does not work with CPU ranks; None if it does, or vLLM is to find it out."""
    if method is None or method in METHODS or method.endswith("_mtp"):
        return None
    return WHY_NOT.get(method, NOT_TRIED)


def refuse_drafter(vllm_config: VllmConfig, config: HeteroConfig, layout: Layout) -> None:
    """Refuse speculation that cannot work in a world with CPU ranks.

    Args:
        vllm_config: the driver's.
        config: what this backend was asked for.
        layout: kinds of all ranks.

    Raises:
        UnsupportedError: the method, the model or a setting beside it does not work.

    """
    speculative = vllm_config.speculative_config
    if speculative is None:
        return
    for problem in _problems(vllm_config, config, layout):
        raise UnsupportedError(
            f"--speculative-config with the method {speculative.method} does not work with "
            f"ray_hetero here: {problem}"
        )
    if speculative.uses_draft_kv_cache() and "cpu" in layout.stages[-1]:
        refuse_checkpoint(speculative.draft_model_config)


def _problems(vllm_config: VllmConfig, config: HeteroConfig, layout: Layout) -> Iterator[str]:
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    is_pipeline = len(layout.stages) > 1
    if why := why_not(speculative.method):
        yield f"{why}. Take one of {', '.join(METHODS)}, or leave it out."
    if speculative.use_gemma4_mtp() or speculative.use_step3p5_mtp():
        yield f"{NOT_TRIED}. Leave it out."
    if speculative.parallel_drafting:
        yield f"parallel_drafting: {NOT_TRIED}. Set it to false."
    in_flight = config.pipeline.batches_in_flight
    if in_flight != "auto" and in_flight > 1:
        yield (
            f"pipeline.batches_in_flight is {in_flight}, and vLLM's scheduler needs the tokens of "
            "one batch before it can verify drafts in the next. Set it to 1, or leave it out."
        )
    if is_pipeline and model.is_hybrid:
        yield (
            "the recurrent states of this model go back by as many tokens as were refused, which "
            "in a pipeline only the last stage knows. Write a layout of one stage, or leave it out."
        )

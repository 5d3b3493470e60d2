"""Experts of an expert rank as it offers them: memory to read, rates of its cores, slots."""

from __future__ import annotations

from collections.abc import Mapping

from placement.plan.devices import DeviceFigures
from placement.plan.expert_slots import SlotRates
from placement.units import GIB
from ray_hetero.distributed.expert_memory import MOST_TOKENS
from ray_hetero.distributed.expert_service import HeldLayer
from ray_hetero.kernels.experts import expert_rates
from ray_hetero.kernels.experts.expert_rates import CoreRates
from ray_hetero.kernels.formats import FORMATS
from ray_hetero.log import logger
from ray_hetero.offload.experts import linked_experts
from ray_hetero.runtime.shared_pages import SharedPages


def shared_pages(layers: Mapping[str, HeldLayer]) -> dict[str, SharedPages]:
    """Seal what stages can read of these layers; by vLLM's name."""
    found: dict[str, SharedPages] = {}
    try:
        for name, layer in layers.items():
            pages = None if layer.experts is None else linked_experts.shared(layer.experts)
            if pages is not None:
                found[name] = pages
    except OSError as error:
        logger.warning("no GPU can read these experts in prompts: %s", error)
        return {}
    if found:
        total = sum(pages.prepared_bytes for pages in found.values())
        huge = sum(pages.huge_bytes for pages in found.values())
        logger.info(
            "experts of %d layers lie in %.1f GiB of memory that GPUs can read in prompts, %.0f %% "
            "of it in huge pages (experts.prefill_on_gpu)",
            len(found),
            total / GIB,
            100 * huge / max(1, total),
        )
    return found


def core_rates(layers: Mapping[str, HeldLayer], tokens: int) -> CoreRates | None:
    """How long this rank's cores take for a layer, measured with the first one that they compute.

    Args:
        layers: of this rank.
        tokens: most of a step.

    """
    layer = next((one for one in layers.values() if one.experts is not None), None)
    if layer is None or layer.experts is None:
        return None
    most = min(tokens, MOST_TOKENS)
    experts = layer.experts

    return expert_rates.measured(
        experts, hidden=layer.hidden, experts=experts.count, chosen=layer.chosen,
        tokens=sorted({max(1, most // 4), most}),
    )  # fmt: skip


def slot_rates(
    layers: Mapping[str, HeldLayer], ranks: int, gpu: DeviceFigures | None
) -> SlotRates | None:
    """Rates of a GPU that would have slots for these experts; None where nothing is known of it.

    Args:
        layers: of this rank.
        ranks: expert ranks, each with a slice of every expert.
        gpu: of the first stage, as the plan knows it.

    """
    held = [layer.experts for layer in layers.values() if layer.experts is not None]
    if gpu is None or not held:
        return None
    of_one = held[0].weights[0]
    return SlotRates.of(
        ranks * sum(experts.nbytes for experts in held) / sum(experts.count for experts in held),
        ranks * sum(outputs * inputs for outputs, inputs in (half.shape for half in of_one)),
        gpu,
        is_16_bit=of_one[0].name in FORMATS,
    )

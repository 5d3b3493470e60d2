"""Gain of the same model in fewer bits a weight, which is often more than any placement's.

A GPU reads its memory about ten times as fast as a socket does.  So a checkpoint of which a
quantised form fits the GPUs, or is several times as fast, is better quantised before it is placed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from placement.errors import PlacementError
from placement.model.config import UnknownModelError
from placement.model.reading import shape_from_config
from placement.model.shape import ModelShape
from placement.units import GIB
from placement.words import duration, plural
from ray_hetero.errors import RayHeteroError
from ray_hetero.planning.planned_layers import LayerPlan

FP8_IN_BLOCKS: Mapping[str, Any] = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}
INTEGERS_OF_4_BITS: Mapping[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                "group_size": 128,
            },
        }
    },
}  # fmt: skip
SCHEMES: Mapping[str, Mapping[str, Any]] = {"FP8": FP8_IN_BLOCKS, "4-bit": INTEGERS_OF_4_BITS}
"""`quantization_config` of common checkpoints, those that lose least first."""
WORTH_IT = 2.0
"""Least factor by which a step has to be faster where sockets still hold layers."""


@dataclass(frozen=True)
class Quantised:
    """The sizes of a model in a common quantised form."""

    name: str
    shape: ModelShape


def quantised_forms(
    config: Mapping[str, Any], dtype: str | None = None, kv_dtype: str | None = None
) -> tuple[Quantised, ...]:
    """The quantised forms of an unquantised model; none where its sizes cannot be told.

    Args:
        config: content of config.json.
        dtype: vLLM's `--dtype`.
        kv_dtype: vLLM's `--kv-cache-dtype`.

    """
    if config.get("quantization_config"):
        return ()
    try:
        return tuple(
            Quantised(name, shape_from_config({**config, "quantization_config": scheme},
                                              dtype, kv_dtype))
            for name, scheme in SCHEMES.items()
        )  # fmt: skip
    except UnknownModelError:
        return ()


def quantise_first(
    forms: tuple[Quantised, ...],
    found: LayerPlan | None,
    plan: Callable[[ModelShape], LayerPlan],
) -> str:
    """Remark about quantised forms beside a plan; empty where they would gain little.

    Args:
        forms: of the same model.
        found: the plan of the model as it is; None where it does not fit.
        plan: plans a model with freely chosen stages on the same machine.

    """
    if found is not None and not _on_sockets(found):
        return ""
    best: tuple[Quantised, LayerPlan] | None = None
    for form in forms:
        try:
            planned = plan(form.shape)
        except (PlacementError, RayHeteroError):
            continue
        if not _on_sockets(planned):
            return _said(form, planned, found)
        # What loses least is enough to make it fit; the fewest bits are the fastest.
        best = best if best and found is None else (form, planned)
    if best is None:
        return ""
    if found is not None and _times(best[1], found) < WORTH_IT:
        return ""
    return _said(*best, found)


def _on_sockets(plan: LayerPlan) -> bool:
    return plan.world.has_cpu or bool(plan.world.experts)


def _times(planned: LayerPlan, found: LayerPlan) -> float:
    assert planned.split is not None
    assert found.split is not None
    return found.split.step_s / planned.split.step_s


def _said(form: Quantised, planned: LayerPlan, found: LayerPlan | None) -> str:
    assert planned.split is not None
    if not _on_sockets(planned):
        where = "on the GPUs alone"
    else:
        where = "on GPUs and sockets" if planned.world.has_gpu else "on the sockets"
    experts = len(planned.world.experts)
    beside = f", experts on {plural(experts, 'socket')}" if experts else ""
    step = f"a decode step takes {duration(planned.split.step_s)}"
    if found is not None and found.split is not None:
        step += (
            f" instead of {duration(found.split.step_s)}, "
            f"{_times(planned, found):.1f} times as fast"
        )
    return (
        f"Quantise first: with {form.name} weights this model has "
        f"{form.shape.weight_bytes / GIB:.1f} GiB, fits {where} "
        f"({planned.world.layout.words}{beside}), and {step}."
    )

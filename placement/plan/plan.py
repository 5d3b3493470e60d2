"""A plan: a model on a cluster, every rank's device, layers and budgets, and what a step costs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from placement.cluster.assignment import assign
from placement.cluster.layout import auto_layout
from placement.errors import DoesNotFitError, LayoutError
from placement.model.shape import ModelShape
from placement.plan.described import DescribedCluster
from placement.plan.devices import RankDevice, StageDevices
from placement.plan.split import Objective, Split, choose_split

MANY_STAGES = 8
"""Without a number asked for, more stages than this are tried only where fewer do not fit."""
WORTH_A_STAGE = 0.99
"""A further stage must bring the step below this share of what fewer stages reach."""


@dataclass(frozen=True)
class Plan:
    """A model on a cluster.  In a notebook it shows itself as a picture."""

    model: str
    shape: ModelShape
    split: Split
    devices: tuple[RankDevice, ...]
    """All devices there are, those without a rank too."""

    @property
    def idle(self) -> tuple[RankDevice, ...]:
        """Devices that no rank is on."""
        used = {(rank.device.node, rank.device.label) for rank in self.split.ranks}
        return tuple(device for device in self.devices if (device.node, device.label) not in used)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the plan should know beside its numbers."""
        split, notes = self.split, []
        if not any(stage.devices.has_cpu for stage in split.stages):
            if any(device.kind == "cpu" for device in self.idle):
                notes.append("The model fits on the GPUs alone: no CPU rank is asked to work.")
        elif split.gpu_only is not None:
            alone = split.gpu_only
            notes.append(
                f"The model fits on the GPUs alone: no CPU rank is needed. With "
                f"--pipeline-parallel-size {len(alone.stages)} a decode step takes "
                f"{alone.step_s * 1e3:.2f} ms instead of {split.step_s * 1e3:.2f} ms."
            )
        sources = {rank.device.figures.source for rank in split.ranks}
        if "table" in sources:
            notes.append(
                "Speeds are from a table of known parts, not measured: expect the step to differ."
            )
        return tuple(notes)

    def _repr_svg_(self) -> str:
        from placement.plan.picture import plan_svg

        return plan_svg(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON: bytes and seconds."""
        split, shape = self.split, self.shape
        return {
            "model": self.model,
            "model_type": shape.model_type,
            "sizes_from": shape.source,
            "layers": len(shape.layers),
            "weight_bytes": shape.weight_bytes,
            "weight_bytes_by_role": shape.bytes_by_role(),
            "kv_bytes_per_token": shape.kv_bytes_per_token(),
            "objective": split.objective,
            "batch": split.work.batch,
            "context": split.work.context,
            "max_model_len": split.work.max_model_len,
            "max_sequences": split.work.max_sequences,
            "kv_tokens": split.kv_tokens,
            "decode_step_s": split.step_s,
            "slowest_stage_s": split.slowest_s,
            "tokens_per_s": split.tokens_per_s,
            "prefill_s": split.prefill_s,
            "layer_partition": list(split.layers),
            "stages": [_stage_dict(split, index) for index in range(len(split.stages))],
            "idle": [f"{device.node} {device.label}" for device in self.idle],
            "notes": list(self.notes),
        }


def _stage_dict(split: Split, index: int) -> dict[str, Any]:
    stage = split.stages[index]
    return {
        "stage": index,
        "first_layer": stage.first_layer,
        "layers": stage.layers,
        "decode_s": stage.decode.seconds,
        "decode_parts_s": stage.decode.parts(),
        "prefill_s": stage.prefill.seconds,
        "ranks": [
            {
                "rank": rank.rank,
                "node": rank.device.node,
                "device": rank.device.label,
                "kind": rank.device.kind,
                "part": rank.device.figures.name,
                "figures_from": rank.device.figures.source,
                "weight_bytes": rank.memory.weights,
                "kv_budget_bytes": rank.kv_bytes,
                "activation_bytes": rank.memory.activations,
                "runtime_bytes": rank.memory.runtime,
                "usable_bytes": rank.device.usable_bytes,
                "free_bytes": rank.free_bytes,
            }
            for rank in stage.ranks
        ],
    }


def plan_model(
    model: str,
    shape: ModelShape,
    cluster: DescribedCluster,
    *,
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int | None = None,
    batch: int = 1,
    context: int = 4096,
    max_model_len: int | None = None,
    max_sequences: int | None = None,
    max_batched_tokens: int = 2048,
    objective: Objective = "latency",
    layers: tuple[int, ...] | None = None,
) -> Plan:
    """Plan a model on a described cluster.

    Args:
        model: what to call it.
        shape: its sizes.
        cluster: what there is.
        tensor_parallel_size: ranks in a stage.
        pipeline_parallel_size: stages; None takes the number with the best step.
        batch: sequences in the decode step that is priced.
        context: tokens that each of them has.
        max_model_len: longest sequence; None is `context`.
        max_sequences: sequences of that length that the KV cache must hold; None is `batch`.
        max_batched_tokens: prompt tokens in one step.
        objective: shortest step of one batch, or shortest slowest stage.
        layers: the user's layers per stage; needs `pipeline_parallel_size` of the same length.

    Raises:
        LayoutError: there are too few devices, or `layers` does not add up.
        DoesNotFitError: no split fits.

    """

    def split(stages: int, explained: bool = True) -> Split:
        return choose_split(
            shape,
            stages_on(cluster, stages, tensor_parallel_size),
            batch=batch,
            context=context,
            max_sequences=max_sequences or batch,
            objective=objective,
            layers=layers,
            max_model_len=max_model_len,
            max_batched_tokens=max_batched_tokens,
            links=cluster.links,
            explained=explained,
        )

    if pipeline_parallel_size is None and layers is not None:
        pipeline_parallel_size = len(layers)
    if pipeline_parallel_size is not None:
        chosen = split(pipeline_parallel_size)
    else:
        nodes = cluster.nodes
        gpus = sum(len(node.gpus) for node in nodes) // tensor_parallel_size
        sockets = sum(len(node.sockets) for node in nodes) // tensor_parallel_size
        chosen = _best_number_of_stages(split, min(max(1, gpus + sockets), len(shape.layers)))
    return Plan(model, shape, chosen, cluster.devices)


def _best_number_of_stages(split: Callable[[int, bool], Split], most: int) -> Split:
    best: Split | None = None
    for stages in range(1, most + 1):
        if best is not None and stages > MANY_STAGES:
            break
        try:
            found = split(stages, False)
        except (DoesNotFitError, LayoutError):
            continue
        if best is None or found.value[0] < WORTH_A_STAGE * best.value[0]:
            best = found
    # Where none fits, the error is that of the most stages.
    return split(most, True) if best is None else best


def stages_on(
    cluster: DescribedCluster, pipeline_parallel_size: int, tensor_parallel_size: int
) -> tuple[StageDevices, ...]:
    """Devices of each stage, as the executor would seat its ranks on that cluster.

    Raises:
        LayoutError: there are too few devices.

    """
    nodes = cluster.as_nodes()
    gpus, sockets = sum(n.gpus for n in nodes), sum(len(n.sockets) for n in nodes)
    layout = auto_layout(pipeline_parallel_size, tensor_parallel_size, gpus, sockets)
    seats = assign(layout, nodes)
    return tuple(
        StageDevices(tuple(cluster.device_of(seat) for seat in seats if seat.stage == stage))
        for stage in range(len(layout.stages))
    )

"""A plan: a model on a cluster, every rank's device, layers and budgets, and what a step costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from placement.cluster.layout import Layout
from placement.model.shape import ModelShape
from placement.plan.devices import RankDevice
from placement.plan.drafts import Speculation
from placement.plan.encoders import encoder_line
from placement.plan.split import Split
from placement.plan.stage_plan import ExpertPlan
from placement.plan.users import UserTimes
from placement.units import GB, GIB
from placement.words import duration, plural


@dataclass(frozen=True)
class Plan:
    """A model on a cluster.  In a notebook it shows itself as a picture."""

    model: str
    shape: ModelShape
    split: Split
    devices: tuple[RankDevice, ...]
    """All devices there are, those without a rank too."""
    remarks: tuple[str, ...] = ()
    """Remarks of whoever made the plan."""
    speculation: Speculation | None = None
    """Gain of speculative decoding, if the plan has drafts."""
    experts: tuple[ExpertPlan, ...] = ()
    """The expert ranks, if there are any."""
    family: str | None = None
    """Sentence on what was tested of the model's family; None where nothing is said."""
    users: tuple[UserTimes, ...] = ()
    """Times of several users who are served at the same time; none with drafts."""

    @property
    def idle(self) -> tuple[RankDevice, ...]:
        """Devices that no rank is on."""
        used = {(rank.device.node, rank.device.label) for rank in self.split.ranks + self.experts}
        return tuple(device for device in self.devices if (device.node, device.label) not in used)

    def experts_on(self, device: RankDevice) -> ExpertPlan | None:
        """The expert rank on a device; None where there is none."""
        place = (device.node, device.label)
        found = (one for one in self.experts if (one.device.node, one.device.label) == place)
        return next(found, None)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes for a reader of the plan beside its numbers."""
        split, notes = self.split, list(self.remarks)
        if self.experts:
            layers, ranks = self.experts[0].layers, len(self.experts)
            notes.append(
                f"The experts of the last {plural(layers, 'layer')} are on "
                f"{plural(ranks, 'expert rank')} (experts.ranks, experts.layers); everything else "
                "is on the GPUs."
            )
            if buffer := max(stage.devices.expert_buffer_bytes for stage in split.stages):
                notes.append(
                    f"In long prompts, the GPUs read these experts over their links; each reserves "
                    f"{buffer / GIB:.1f} GiB of its memory for that (experts.prefill_on_gpu)."
                )
        elif not any(stage.devices.has_cpu for stage in split.stages):
            if any(device.kind == "cpu" for device in self.idle):
                notes.append("The model fits on the GPUs alone: there are no CPU ranks.")
        elif split.gpu_only is not None:
            alone = split.gpu_only
            notes.append(
                f"The model fits on the GPUs alone: no CPU rank is needed. With "
                f"--pipeline-parallel-size {len(alone.stages)} a decode step takes "
                f"{duration(alone.step_s)} instead of {duration(split.step_s)}."
            )
        kinds = tuple(tuple(rank.device.kind for rank in stage.ranks) for stage in split.stages)
        notes += filter(None, [encoder_line(self.shape, Layout(kinds))])
        notes += _sources([rank.device for rank in split.ranks + self.experts])
        return tuple(notes)

    def _repr_svg_(self) -> str:
        from placement.plan.picture import plan_svg

        return plan_svg(self)

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain values, for JSON: bytes and seconds."""
        split, shape = self.split, self.shape
        speculation = {} if self.speculation is None else {"speculation": asdict(self.speculation)}
        return {
            "model": self.model,
            "model_type": shape.model_type,
            "tested": self.family,
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
            "users": [asdict(one) for one in self.users],
            "layer_partition": list(split.layers),
            "stages": [_stage_dict(split, index) for index in range(len(split.stages))],
            "experts": [_expert_dict(one) for one in self.experts],
            "idle": [f"{device.node} {device.label}" for device in self.idle],
            "notes": list(self.notes),
            **speculation,
        }


def _sources(devices: Sequence[RankDevice]) -> Iterator[str]:
    """Sentences on speeds that were neither measured nor given."""
    ways = {
        "table": "from a table of published figures",
        "computed": "computed from the clock and the bus of its memory, as its driver tells them",
    }
    for source, way in ways.items():
        names = {one.figures.name for one in devices if one.figures.source == source}
        if names:
            yield (
                f"The memory bandwidth of {', '.join(sorted(names))} is {way}, not measured: "
                "expect the step to differ."
            )
    for one in devices:
        link = one.figures.host_link
        if one.kind == "gpu" and link is not None and one.figures.link_source == "assumed":
            yield (
                f"The link of {one.label} ({one.figures.name}) is not known: {link / GB:.0f} GB/s "
                "are assumed. Set gpu.link_gb_s, or host_link_gb_s in a description."
            )
            return


def _stage_dict(split: Split, index: int) -> dict[str, Any]:
    stage = split.stages[index]
    return {
        "stage": index,
        "first_layer": stage.first_layer,
        "layers": stage.layers,
        "decode_s": stage.decode.seconds,
        "decode_parts_s": stage.decode.parts(),
        "prefill_s": stage.prefill.seconds,
        "prefill_parts_s": stage.prefill.parts(),
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


def _expert_dict(one: ExpertPlan) -> dict[str, Any]:
    return {
        "rank": one.rank,
        "node": one.device.node,
        "device": one.device.label,
        "part": one.device.figures.name,
        "figures_from": one.device.figures.source,
        "layers": one.layers,
        "weight_bytes": one.weight_bytes,
        "usable_bytes": one.device.usable_bytes,
    }

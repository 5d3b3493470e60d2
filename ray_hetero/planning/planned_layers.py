"""Result of planning the layers: a world with its layers, and the predicted step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction

from placement.model.shape import ModelShape
from placement.plan.devices import DeviceFigures
from placement.plan.split import Split, rows_of_sockets
from placement.plan.stage_plan import ExpertPlan
from placement.plan.step_time import PICO
from ray_hetero.world import Forecast, World


@dataclass(frozen=True)
class LayerPlan:
    """A world with its layers, and the split that they are priced as."""

    world: World
    split: Split | None
    """Priced split; None where model or devices are unknown, or the given layers do not fit."""
    kv_tokens: int = 0
    """Tokens that the KV cache will hold."""
    warning: str = ""
    unknown: str = ""
    """Why nothing is priced: what is not known of the model or of a device, and what to set."""
    is_too_large: bool = False
    """Whether model or KV cache do not fit as the layers are."""
    threads: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Logical CPUs of each CPU rank's compute threads, by rank."""
    expert_bytes: int = 0
    """Bytes of the experts that each expert rank holds, as the checkpoint has them."""

    def shape(self, model: ModelShape) -> ModelShape:
        """The model as the stages hold it, without the experts that lie on expert ranks."""
        return model.with_remote_experts(self.world.expert_layers) if self.world.experts else model

    @property
    def experts(self) -> tuple[ExpertPlan, ...]:
        """Experts that each expert rank holds; none where there are none, or nothing is known."""
        if self.split is None:
            return ()
        devices, layers = self.split.stages[0].devices.experts, self.world.expert_layers
        return tuple(
            ExpertPlan(seat.rank, device, self.expert_bytes, layers)
            for seat, device in zip(self.world.experts, devices, strict=False)
        )

    @property
    def expert_step_s(self) -> float | None:
        """Seconds that expert ranks compute in the priced decode step; None where it is unknown."""
        if self.split is None:
            return None
        return sum(stage.decode.experts for stage in self.split.stages) / PICO

    @property
    def expert_gpu(self) -> DeviceFigures | None:
        """Figures of the GPU that expert ranks compute for; None where nothing is known."""
        return None if self.split is None else self.split.stages[0].devices.ranks[0].figures

    def forecast(self, rank: int) -> Forecast | None:
        """Predictions of the plan for one rank."""
        if self.split is None or self.world.members[rank].serves_experts:
            return None
        work = self.split.work
        stage = self.split.stages[self.world.seats[rank].stage]
        return Forecast(work.batch, work.context, stage.decode.seconds, self.kv_tokens)

    @property
    def held_split(self) -> Split:
        """The split with the KV cache that the engine will really have, which may be smaller."""
        assert self.split is not None
        share = Fraction(self.kv_tokens, max(1, self.split.kv_tokens))
        stages = tuple(
            replace(
                stage,
                ranks=tuple(replace(r, kv_bytes=int(r.kv_bytes * share)) for r in stage.ranks),
            )
            for stage in self.split.stages
        )
        return replace(self.split, stages=stages, kv_tokens=self.kv_tokens)

    def memory_bytes(self) -> dict[int, int]:
        """Host memory that each CPU rank will take, by rank; none where nothing is known."""
        if self.split is None:
            return {}
        experts = {seat.rank: self.expert_bytes for seat in self.world.experts}
        share = Fraction(self.kv_tokens, max(1, self.split.kv_tokens))
        return experts | {
            rank.rank: rank.memory.beside_kv + int(rank.kv_bytes * share)
            for rank in self.split.ranks
            if rank.device.kind == "cpu"
        }


def describe_split(plan: LayerPlan) -> tuple[str, ...]:
    """Predictions of a plan, in lines for the log; none where nothing is known."""
    split = plan.split
    if split is None:
        return ()
    work = split.work
    stages = "; ".join(
        f"stage {number}: {1e3 * stage.decode.seconds:.2f} ms"
        + "".join(
            f", {name} {1e3 * seconds:.2f}"
            for name, seconds in stage.decode.parts().items()
            if seconds >= 5e-6
        )
        for number, stage in enumerate(split.stages)
    )
    sources = sorted({f"{rank.device.kind} {rank.device.figures.source}" for rank in split.ranks})
    lines = [
        f"predicted decode step {1e3 * split.step_s:.2f} ms at batch {work.batch} and context "
        f"{work.context} ({stages}); KV cache {plan.kv_tokens} tokens; bandwidths: "
        f"{', '.join(sources)}"
    ]
    known = (rows for rows in rows_of_sockets(split) if rows.costs is not None)
    lines.extend(dict.fromkeys(map(str, known)))
    if split.gpu_only is not None:
        alone = split.gpu_only
        lines.append(
            "the model fits on the GPUs alone: with --pipeline-parallel-size "
            f"{len(alone.stages)} a decode step would take {1e3 * alone.step_s:.2f} ms"
        )
    return tuple(lines)

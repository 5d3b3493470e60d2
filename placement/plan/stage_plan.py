"""A split as a value: stages, their ranks, their budgets and their predicted times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from placement.plan.devices import RankDevice, StageDevices
from placement.plan.memory import Memory
from placement.plan.step_time import PICO, Step
from placement.plan.workload import Workload

Objective = Literal["latency", "throughput"]


@dataclass(frozen=True)
class RankPlan:
    """Memory that one rank holds and may hold."""

    rank: int
    device: RankDevice
    memory: Memory
    """Memory of the rank by use, with the KV cache that was asked for."""
    kv_bytes: int
    """Budget of the rank's KV cache: room for the split's `kv_tokens`."""

    @property
    def kv_room(self) -> int:
        """Bytes that its KV cache could take at most; negative where the weights do not fit."""
        return kv_room(self.device, self.memory)

    @property
    def free_bytes(self) -> int:
        """Bytes that stay free when the KV budget is used up."""
        return self.device.usable_bytes - self.memory.beside_kv - self.kv_bytes


@dataclass(frozen=True)
class ExpertPlan:
    """Weights that one expert rank holds: a slice of every expert that is not on the stages."""

    rank: int
    device: RankDevice
    weight_bytes: int
    layers: int
    """Number of layers whose experts the rank holds slices of: the model's last ones."""


def kv_room(device: RankDevice, memory: Memory) -> int:
    """Bytes of a device that a KV cache could take beside the rest of what its rank holds."""
    room = device.usable_bytes - memory.beside_kv
    return room if device.kv_limit_bytes is None else min(room, device.kv_limit_bytes)


@dataclass(frozen=True)
class StagePlan:
    """One stage of the pipeline."""

    given: int
    """Index of the stage among those that were handed in."""
    devices: StageDevices
    first_layer: int
    layers: int
    decode: Step
    prefill: Step
    """A prompt of the priced context, in passes of at most `max_batched_tokens`."""
    ranks: tuple[RankPlan, ...]


@dataclass(frozen=True)
class Split:
    """A model cut into stages, in pipeline order."""

    stages: tuple[StagePlan, ...]
    objective: Objective
    work: Workload
    kv_tokens: int
    """Tokens that the KV cache holds: the smallest rank decides."""
    gpu_only: Split | None = None
    """The split over the GPU stages alone, where the model fits on them and is no slower so."""

    @property
    def order(self) -> tuple[int, ...]:
        """Places of the stages handed in, in pipeline order."""
        return tuple(stage.given for stage in self.stages)

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers of each stage, in pipeline order."""
        return tuple(stage.layers for stage in self.stages)

    @property
    def ranks(self) -> tuple[RankPlan, ...]:
        """All ranks, in vLLM's order."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def step_s(self) -> float:
        """One decode step from the first stage to the last, in seconds."""
        return sum(stage.decode.total for stage in self.stages) / PICO

    @property
    def slowest_s(self) -> float:
        """Decode step of the slowest stage: what limits throughput when stages overlap."""
        return max(stage.decode.total for stage in self.stages) / PICO

    @property
    def prefill_s(self) -> float:
        """A prompt of the priced context through all stages, in seconds."""
        return sum(stage.prefill.total for stage in self.stages) / PICO

    @property
    def tokens_per_s(self) -> float:
        """Decoded tokens per second: one batch at a time, or for throughput one batch per stage."""
        return self.work.batch / (self.step_s if self.objective == "latency" else self.slowest_s)

    @property
    def value(self) -> tuple[int, int]:
        """Value that is minimised, in picoseconds: the objective's, then the tie-break's."""
        totals = [stage.decode.total for stage in self.stages]
        return objective_value(totals, self.objective)


def objective_value(totals: list[int], objective: Objective) -> tuple[int, int]:
    """Sum and maximum of the stages' times, in the objective's order of importance."""
    both = (sum(totals), max(totals))
    return both if objective == "latency" else (both[1], both[0])

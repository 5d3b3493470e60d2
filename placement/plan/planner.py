"""The search behind `choose_split`: prices every stage at every place, then cuts the layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from typing import Literal

from placement.cluster.layout import Layout
from placement.model.shape import ModelShape
from placement.plan import cost
from placement.plan.devices import Links, RankDevice, StageDevices, boundary_link
from placement.plan.drafts import Drafter
from placement.plan.encoders import are_on_gpu
from placement.plan.memory import (
    Memory,
    activation_bytes,
    around_weights,
    has_whole_embedding,
    kv_bytes,
    layer_weights,
)
from placement.plan.partition import StageCosts, fits, reach_of, shortest_sum, smallest_peak
from placement.plan.passes import Pass, decode_pass, prefill_passes
from placement.plan.stage_plan import (
    Objective,
    RankPlan,
    Split,
    StagePlan,
    kv_room,
    objective_value,
)
from placement.plan.step_time import PICO, Step, total_step
from placement.plan.workload import Workload, asked_sequences, asked_tokens

Order = Literal["auto", "fixed"]

ALL_ORDERS = 4
"""Most stages of which all orders are tried; of more, only those that keep each kind together."""


@dataclass(frozen=True)
class Planner:
    """One question: this model on these stages for this work."""

    shape: ModelShape
    stages: tuple[StageDevices, ...]
    work: Workload
    objective: Objective
    links: Links
    drafter: Drafter | None = None
    """Drafter whose drafts decode steps verify; None without speculative decoding."""

    def best(self, order: Order) -> Split | None:
        """The best split over all orders; None where none fits.

        Of equal splits the one whose order comes first in `orders` is taken.  A model with encoders
        of images or sound begins on a GPU, if it fits so: the first stage computes them.
        """
        orders = list(self.orders(order))
        on_gpu = [places for places in orders if self._encodes_on_gpu(places)]
        others = [places for places in orders if places not in on_gpu]
        return self._best_of(on_gpu) or self._best_of(others)

    def _encodes_on_gpu(self, places: Sequence[int]) -> bool:
        layout = Layout(
            tuple(tuple(rank.kind for rank in self.stages[place].ranks) for place in places)
        )
        return not self.shape.has_encoders or are_on_gpu(layout)

    def _best_of(self, orders: Sequence[tuple[int, ...]]) -> Split | None:
        cut = shortest_sum if self.objective == "latency" else smallest_peak
        best: tuple[tuple[int, int], tuple[int, ...], tuple[int, ...]] | None = None
        for places in orders:
            costs = self.costs(places)
            layers = cut(costs, self.shape.barred)
            if layers is None:
                continue
            value = objective_value(_totals(costs, layers), self.objective)
            if best is None or value < best[0]:
                best = (value, places, layers)
        return None if best is None else self.build(best[1], best[2])

    def fits(self, order: Order) -> bool:
        """Whether any split in any order fits."""
        barred = self.shape.barred
        return any(fits(self.costs(places), barred) for places in self.orders(order))

    def orders(self, order: Order) -> Iterator[tuple[int, ...]]:
        """Orders of the stages worth a look, the given one first, no two alike."""
        given = tuple(range(len(self.stages)))
        if order == "fixed":
            yield given
            return
        cpu_first = tuple(sorted(given, key=lambda place: not self.stages[place].has_cpu))
        gpu_first = tuple(sorted(given, key=lambda place: self.stages[place].has_cpu))
        few = (given, cpu_first, gpu_first)
        seen: set[tuple[StageDevices, ...]] = set()
        for places in permutations(given) if len(given) <= ALL_ORDERS else few:
            alike = tuple(_unnamed(self.stages[place]) for place in places)
            if alike not in seen:
                seen.add(alike)
                yield places

    def costs(self, places: Sequence[int]) -> tuple[StageCosts, ...]:
        """Costs of the layers at each place of the pipeline, for stages in that order."""
        row = [self.stages[place] for place in places]
        return tuple(
            StageCosts(
                self._layer_times[_anywhere(stage)],
                self._beside_layers(row, place).total,
                self._reach(stage, place),
            )
            for place, stage in enumerate(row)
        )

    def build(self, places: Sequence[int], layers: Sequence[int]) -> Split:
        """Price a split and give every rank its budget, whether it fits or not."""
        row = [self.stages[place] for place in places]
        stages, first = [], 0
        for place, (stage, count) in enumerate(zip(row, layers, strict=True)):
            memory = self._memory(stage, place, first, count)
            stages.append(
                StagePlan(
                    given=places[place],
                    devices=stage,
                    first_layer=first,
                    layers=count,
                    decode=self._time(row, place, first, count, self._decode),
                    prefill=total_step(
                        self._time(row, place, first, count, run) * times
                        for times, run in self._prefill
                    ),
                    ranks=tuple(
                        RankPlan(
                            sum(before.size for before in row[:place]) + i,
                            device,
                            replace(memory, runtime=_runtime_bytes(stage, device)),
                            0,
                        )
                        for i, device in enumerate(stage.ranks)
                    ),
                )
            )
            first += count
        return self._budgeted(tuple(stages))

    def pass_seconds(self, layers: Sequence[int], run: Pass) -> list[float]:
        """Seconds of one pass in each stage, in the order given, with these layers."""
        found, first = [], 0
        for place, count in enumerate(layers):
            found.append(self._time(self.stages, place, first, count, run).total / PICO)
            first += count
        return found

    def _budgeted(self, stages: tuple[StagePlan, ...]) -> Split:
        ranks = [rank for stage in stages for rank in stage.ranks]
        asked = asked_tokens(self.work) * asked_sequences(self.work)
        block = self.work.kv_block
        tokens = min(
            (max(0, rank.kv_room) * asked // rank.memory.kv for rank in ranks if rank.memory.kv),
            default=asked,
        )
        tokens = tokens // block * block
        stages = tuple(
            replace(
                stage,
                ranks=tuple(
                    replace(rank, kv_bytes=-(-rank.memory.kv * tokens // asked))
                    for rank in stage.ranks
                ),
            )
            for stage in stages
        )
        return Split(stages, self.objective, self.work, tokens)

    @property
    def _drafts(self) -> int:
        return 0 if self.drafter is None else self.drafter.drafts

    @property
    def _decode(self) -> Pass:
        return decode_pass(self.work.batch, self.work.context, self._drafts)

    @property
    def _prefill(self) -> tuple[tuple[int, Pass], ...]:
        return prefill_passes(self.work.context, self.work.max_batched_tokens)

    @cached_property
    def _layer_times(self) -> dict[StageDevices, tuple[int, ...]]:
        return {stage: self._times_on(stage) for stage in set(map(_anywhere, self.stages))}

    def _times_on(self, stage: StageDevices) -> tuple[int, ...]:
        times = {
            first: cost.layer_step(
                self.shape, self.shape.layers[first], stage, self._decode, self.links
            ).total
            for first in set(self._first_alike)
        }
        return tuple(times[first] for first in self._first_alike)

    @cached_property
    def _first_alike(self) -> tuple[int, ...]:
        """First layer that is like each layer; most models have one or two kinds."""
        first: dict[tuple[object, ...], int] = {}
        return tuple(
            first.setdefault((layer.tensors, layer.kv, layer.remote), index)
            for index, layer in enumerate(self.shape.layers)
        )

    @cached_property
    def _layer_weights(self) -> dict[int, tuple[int, ...]]:
        """Weight bytes of a rank by layer, by size of its stage."""
        return {
            size: tuple(layer_weights(layer, size) for layer in self.shape.layers)
            for size in self._sizes
        }

    @cached_property
    def _layer_kv(self) -> dict[int, tuple[int, ...]]:
        """KV bytes of a rank by layer, by size of its stage."""
        tokens, sequences = asked_tokens(self.work), asked_sequences(self.work)
        chunk = self.work.max_batched_tokens
        return {
            size: tuple(
                kv_bytes(layer, size, tokens, sequences, chunk, self._drafts)
                for layer in self.shape.layers
            )
            for size in self._sizes
        }

    @property
    def _sizes(self) -> frozenset[int]:
        return frozenset(stage.size for stage in self.stages)

    def _beside_layers(
        self, row: Sequence[StageDevices], place: int, run: Pass | None = None
    ) -> Step:
        run = run or self._decode
        fixed = cost.fixed_step(self.shape, row[place], run)
        if place == len(row) - 1:
            if self.drafter is not None and run == self._decode:
                fixed += self.drafter.step(self.shape, row[place], self.work, self.links)
            return fixed + cost.output_step(self.shape, row[place], run)
        only_gpus = not any(stage.has_cpu for stage in row)
        link = boundary_link(row[place], row[place + 1], self.links, only_gpus=only_gpus)
        return fixed + cost.send_step(self.shape, row[place], row[place + 1], link, run)

    def _time(
        self, row: Sequence[StageDevices], place: int, first: int, count: int, run: Pass
    ) -> Step:
        kinds = Counter(self._first_alike[first : first + count])
        inside = (
            cost.layer_step(self.shape, self.shape.layers[kind], row[place], run, self.links)
            * times
            for kind, times in kinds.items()
        )
        return total_step(inside) + self._beside_layers(row, place, run)

    def _reach(self, stage: StageDevices, place: int) -> tuple[int, ...]:
        beside = self._memory(stage, place, 0, 0)
        weights, kv = self._layer_weights[stage.size], self._layer_kv[stage.size]
        room = min(
            kv_room(
                replace(rank, kv_limit_bytes=None),
                replace(beside, runtime=_runtime_bytes(stage, rank)),
            )
            for rank in stage.ranks
        )
        needs = [held + cached for held, cached in zip(weights, kv, strict=True)]
        reach = reach_of(needs, room - beside.kv)
        limits = [r.kv_limit_bytes for r in stage.ranks if r.kv_limit_bytes is not None]
        if not limits:
            return reach
        return tuple(map(min, reach, reach_of(kv, min(limits) - beside.kv)))

    def _memory(self, stage: StageDevices, place: int, first: int, count: int) -> Memory:
        is_first, is_last = place == 0, place == len(self.stages) - 1
        size, end = stage.size, first + count
        drafts = self.drafter is not None and self.drafter.shape is not None
        is_whole = has_whole_embedding(
            [rank.kind for rank in stage.ranks],
            is_first=is_first,
            is_last=is_last,
            is_shared=self.shape.tied or drafts,
        )
        around = around_weights(self.shape, size, first=is_first, last=is_last, is_whole=is_whole)
        memory = Memory(
            weights=around + sum(self._layer_weights[size][first:end]),
            kv=sum(self._layer_kv[size][first:end]),
            activations=activation_bytes(self.shape, size, self.work, last=is_last),
        )
        if self.drafter is None or not is_last:
            return memory
        return self.drafter.added(memory, size, self.work, is_first=is_first)


def _runtime_bytes(stage: StageDevices, device: RankDevice) -> int:
    return device.runtime_bytes + stage.expert_buffer_bytes + stage.slot_bytes


def _totals(costs: Sequence[StageCosts], layers: Sequence[int]) -> list[int]:
    totals, first = [], 0
    for stage, count in zip(costs, layers, strict=True):
        totals.append(stage.fixed + sum(stage.layers[first : first + count]))
        first += count
    return totals


def _unnamed(stage: StageDevices) -> StageDevices:
    def unnamed(rank: RankDevice) -> RankDevice:
        return replace(rank, label="")

    return replace(stage, ranks=tuple(map(unnamed, stage.ranks)))


def _anywhere(stage: StageDevices) -> StageDevices:
    """The stage with its nodes numbered: a layer costs the same wherever they are."""
    nodes = {name: str(number) for number, name in enumerate(sorted(stage.nodes))}
    return replace(
        stage, ranks=tuple(replace(rank, label="", node=nodes[rank.node]) for rank in stage.ranks)
    )

"""What each rank is told comes from the plan alone; the layers that vLLM is told are taken back."""

from __future__ import annotations

import os
from typing import Any

import pytest
from test_layer_plan import plan, server

from placement.host.cpulist import format_cpulist
from ray_hetero.compat.worker import layer_partition
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.planning import layer_plan
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.rank_specs import rank_specs, spare_cpus
from ray_hetero.world import EngineSpec, RankSpec

CONFIG = HeteroConfig(cpu=CpuConfig(reserved_cores=2))


def specs(nodes: Any) -> tuple[LayerPlan, tuple[RankSpec, ...]]:
    found = plan(CONFIG, nodes)
    engine: Any = EngineSpec(None, CONFIG, None)  # type: ignore[arg-type]
    shared: Any = None
    return found, rank_specs(found, nodes, engine, shared)


def test_ranks_are_told_the_plans_threads_layers_and_forecast() -> None:
    nodes = server(1, 1)
    found, told = specs(nodes)
    assert [rank.seat for rank in told] == list(found.world.seats)
    for rank in told:
        assert rank.world.layers == found.world.layers
        assert rank.forecast == found.forecast(rank.seat.rank)
        assert rank.spare == spare_cpus(found, nodes[0])
        assert len(rank.threads) == (54 if rank.seat.kind == "cpu" else 0)
        assert not set(rank.threads) & set(rank.spare)


def test_threads_move_with_their_seats() -> None:
    nodes = server(1, 2)
    found = plan(CONFIG, nodes, pipeline=3)
    assert sorted(found.world.layout.kinds) == ["cpu", "cpu", "gpu"]
    for seat in found.world.seats:
        if seat.socket is None:
            assert seat.rank not in found.threads
        else:
            assert set(found.threads[seat.rank]) < set(seat.socket.cpus)


def test_a_place_tells_all_that_computes_at_the_same_time() -> None:
    nodes = server(1, 2)
    found = plan(CONFIG, nodes, pipeline=3)
    engine: Any = EngineSpec(None, CONFIG, None)  # type: ignore[arg-type]
    shared: Any = None
    two = [rank for rank in rank_specs(found, nodes, engine, shared) if rank.seat.kind == "cpu"]
    assert len({rank.place for rank in two}) == 2
    for rank in two:
        own = f"stage {rank.seat.stage} on CPUs {format_cpulist(rank.threads)}"
        assert rank.place.count(" on CPUs ") == 2
        assert f", OpenMP auto, {own}, stage " in rank.place
    (alone,) = (rank for rank in specs(server(1, 1))[1] if rank.seat.kind == "cpu")
    assert all(alone.place != rank.place for rank in two)
    assert {rank.place for rank in specs(server(1, 1))[1] if rank.seat.kind == "gpu"} == {""}


def test_threads_are_counted_once_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    count = layer_plan.compute_threads
    counted: list[int] = []

    def counting(seat: Any, *more: Any) -> tuple[int, ...]:
        counted.append(seat.rank)
        return count(seat, *more)

    monkeypatch.setattr(layer_plan, "compute_threads", counting)
    specs(server(1, 1))
    assert len(counted) == 1


def test_planning_changes_no_environment() -> None:
    before = dict(os.environ)
    specs(server(1, 1))
    assert dict(os.environ) == before


@pytest.mark.parametrize("given", [None, "3,5"])
def test_what_vllm_is_told_of_layers_is_taken_back(
    given: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(layer_partition.VARIABLE, raising=False)
    if given is not None:
        monkeypatch.setenv(layer_partition.VARIABLE, given)
    found = layer_partition.given_partition()
    assert found == given
    layer_partition.set_partition((41, 39))
    assert layer_partition.given_partition() == "41,39"
    layer_partition.restore_partition(found)
    assert os.environ.get(layer_partition.VARIABLE) == given

"""From a described cluster to a world; layers, compute threads and what is left for others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import layout, node, socket, world

from placement.cluster.assignment import Node, Seat, Turn, assign
from placement.errors import LayoutError
from placement.host.topology import Gpu, Host
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.errors import ConfigError
from ray_hetero.planning.world_plan import (
    compute_threads,
    cpus_near_gpus,
    cpus_on_nodes_of_gpus,
    gpus_beside,
    locality_line,
    plan_world,
    sharing_warning,
    spare_cpus,
    split_layers,
)
from ray_hetero.world import World

AUTO = HeteroConfig()


def seat(cores: int, *, is_driver: bool = True, first: int = 0, threads: int = 1) -> Seat:
    one = world("c").seats[0]
    return replace(
        one, socket=socket(0, cores, first, threads), is_driver_node=is_driver, node_name="a"
    )


def test_a_world_takes_stages_from_the_cluster() -> None:
    made = plan_world(
        AUTO, [node(sockets=1, gpus=1)], pipeline_parallel_size=2, tensor_parallel_size=1,
        layers=(3, 1),
    )  # fmt: skip
    assert made.layout.kinds == ("cpu", "gpu")
    assert made.layers == (3, 1)
    assert made.has_cpu
    assert not made.is_cpu_only


def test_nodes_may_have_different_numbers_of_cores() -> None:
    nodes = [node("a", cores=4, is_driver=True), node("b", cores=16)]
    made = plan_world(
        AUTO, nodes, pipeline_parallel_size=2, tensor_parallel_size=1, layers=(2, 2)
    )  # fmt: skip
    assert [seat.bundle_cpus for seat in made.seats] == [4, 16]
    # None is kept back of so few, one for Ray on a node without the driver.
    assert [len(compute_threads(seat, CpuConfig())) for seat in made.seats] == [4, 15]


@pytest.mark.parametrize(("free", "held", "kinds"), [(4, 0, "cgg"), (2, 2, "cgg"), (1, 3, "ccg")])
def test_engines_that_start_together_get_equal_numbers_of_gpus(
    free: int, held: int, kinds: str
) -> None:
    there = replace(node(sockets=4, gpus=free), held_gpus=held)
    made = plan_world(
        AUTO, [there], pipeline_parallel_size=3, tensor_parallel_size=1, layers=(1, 1, 1),
        turn=Turn(0, 2),
    )  # fmt: skip
    assert "".join(kind[0] for kind in made.layout.kinds) == kinds


def test_who_holds_the_sockets_is_told() -> None:
    held = replace(node(sockets=1), holders=("pid 7 (python), engine 'x'",))
    with pytest.raises(LayoutError, match=r"2 ranks.*Sockets are held by a: pid 7"):
        plan_world(AUTO, [held], pipeline_parallel_size=2, tensor_parallel_size=1, layers=(2, 2))


@given(st.integers(1, 100), st.integers(1, 12))
def test_layers_are_shared_out_evenly(layers: int, stages: int) -> None:
    if layers < stages:
        with pytest.raises(ConfigError, match=f"{layers} layers, fewer than the {stages}"):
            split_layers(AUTO, layers, stages, None)
        return
    split = split_layers(AUTO, layers, stages, None)
    assert sum(split) == layers
    assert len(split) == stages
    assert max(split) - min(split) <= 1
    assert list(split) == sorted(split, reverse=True)


def test_given_layers_win_over_vllms_variable() -> None:
    assert split_layers(HeteroConfig(layers=[1, 3]), 4, 2, "2,2") == (1, 3)
    assert split_layers(AUTO, 4, 2, " 3, 1") == (3, 1)


@pytest.mark.parametrize(
    ("layers", "partition", "said"),
    [
        ([2, 3], None, r"2 \+ 3 = 5 in 2 stages, but the model has 4 layers.*add up to 4"),
        ([4], None, r"4 = 4 in 1 stage, but the model has 4 layers.*Give 2 numbers"),
        ([1, 1, 2], None, "in 3 stages"),
        ("auto", "4,0", "at least 1"),
        ("auto", "2;2", r"VLLM_PP_LAYER_PARTITION='2;2': expected numbers with commas"),
    ],
)
def test_layers_that_do_not_add_up(
    layers: list[int] | str, partition: str | None, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        split_layers(HeteroConfig.model_validate({"layers": layers}), 4, 2, partition)


@pytest.mark.parametrize(
    ("cores", "is_driver", "computing"),
    [(1, True, 1), (7, True, 7), (8, True, 6), (8, False, 7), (56, True, 54)],
)
def test_cores_are_kept_back_where_there_are_many(
    cores: int, is_driver: bool, computing: int
) -> None:
    threads = compute_threads(seat(cores, is_driver=is_driver), CpuConfig())
    assert threads == tuple(range(cores))[cores - computing :]


def test_ranks_of_the_drivers_node_share_what_is_kept_back() -> None:
    for ranks, computing in ((1, 6), (2, 7), (4, 7)):
        assert len(compute_threads(seat(8, is_driver=True), CpuConfig(), ranks)) == computing


def test_asked_cores() -> None:
    assert compute_threads(seat(8), CpuConfig(cores=3, reserved_cores=1)) == (1, 2, 3)
    assert compute_threads(seat(8), CpuConfig(reserved_cores=0)) == tuple(range(8))


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (CpuConfig(cores=9), r"9 asked for, but socket 0 of a has 8 cores less 2 reserved = 6"),
        (CpuConfig(reserved_cores=8), "8 of the 8 cores of socket 0 of a leaves none"),
    ],
)
def test_cores_that_are_not_there(config: CpuConfig, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        compute_threads(seat(8), config)


def test_spare_cpus_are_those_of_cores_without_compute_threads() -> None:
    # Two CPUs a core: core k has CPUs k and k + 8.
    one = seat(8, threads=2)
    threads = compute_threads(one, CpuConfig())
    assert threads == (2, 3, 4, 5, 6, 7)
    assert spare_cpus([one], [threads]) == (0, 1, 8, 9)
    assert spare_cpus([one], [range(8)]) == ()


def _two_packages(*numa_nodes: int | None) -> Host:
    """Packages 0 and 1 of 8 cores, CPUs 0-7 and 8-15, and a GPU on each of these NUMA nodes."""
    gpus = tuple(Gpu(index, numa_node=numa) for index, numa in enumerate(numa_nodes))
    return replace(node(sockets=2, cores=8).host, gpus=gpus)


def test_a_gpu_rank_runs_near_its_gpu_and_off_the_compute_cores() -> None:
    host = _two_packages(0, 1, 1, None, 7)
    both = [range(2, 8), range(10, 16)]
    near = cpus_near_gpus(host, both, CpuConfig(), is_driver_node=True)
    assert near == {0: (0, 1), 1: (8, 9), 2: (8, 9)}
    # Another engine may compute on package 1, where it keeps two cores back as well.
    one = [range(2, 8)]
    assert cpus_near_gpus(host, one, CpuConfig(), is_driver_node=True)[1] == (8, 9)
    assert cpus_near_gpus(host, one, CpuConfig(), is_driver_node=False)[1] == (8,)
    three = CpuConfig(reserved_cores=3)
    assert cpus_near_gpus(host, one, three, is_driver_node=True)[1] == (8, 9, 10)


def test_until_it_serves_a_gpu_rank_has_all_of_the_engines_cores_near_its_gpu() -> None:
    host = _two_packages(0, 1, None, 7)
    assert cpus_on_nodes_of_gpus(host, range(2, 10)) == {0: (2, 3, 4, 5, 6, 7), 1: (8, 9)}
    assert cpus_on_nodes_of_gpus(host, range(8)) == {0: tuple(range(8))}
    assert cpus_on_nodes_of_gpus(host, ()) == {}


def test_a_cpu_rank_knows_the_gpus_of_its_own_socket() -> None:
    there = node(sockets=2, gpus=2)
    nodes = (0, 1, 1)  # one of them is not Ray's
    gpus = tuple(Gpu(index=number, numa_node=nodes[number]) for number in range(3))
    host = replace(there.host, gpus=gpus)
    shape = layout("cc", "gg")
    first, second, *others = assign(shape, [there])
    assert [gpus_beside(seat, host) for seat in (first, second)] == [(0,), (1, 2)]
    assert all(gpus_beside(seat, host) == () for seat in others)
    assert gpus_beside(first, replace(host, gpus=(Gpu(index=0),))) == ()


def test_a_gpu_without_free_cores_nearby_is_left_out() -> None:
    assert cpus_near_gpus(_two_packages(0), [range(8)], CpuConfig(), is_driver_node=True) == {}
    small = replace(node(sockets=1, cores=4).host, gpus=(Gpu(0, numa_node=0),))
    assert cpus_near_gpus(small, [], CpuConfig(), is_driver_node=True) == {}


def test_sharing_is_told() -> None:
    apart = world("c", "c").seats
    assert sharing_warning(apart) is None
    together = [replace(one, socket=apart[0].socket) for one in apart]
    warning = sharing_warning(together)
    assert warning is not None
    assert "2 CPU ranks share 4 cores" in warning
    assert sharing_warning(world("g").seats) is None


def plan_of(config: HeteroConfig, there: Node, *stages: str) -> World:
    shape = layout(*stages)
    return plan_world(
        HeteroConfig(layout=[list(stage) for stage in shape.stages], cpu=config.cpu), [there],
        pipeline_parallel_size=len(stages), tensor_parallel_size=max(map(len, stages)),
        layers=(1,) * len(stages),
    )  # fmt: skip


def on_numa_node(numa_node: int | None, sockets: int = 2) -> Node:
    there = node(sockets=sockets, gpus=1)
    return replace(there, host=replace(there.host, gpus=(Gpu(0, numa_node=numa_node),)))


def test_the_log_tells_which_sockets_are_near_the_gpus_that_they_feed() -> None:
    there = on_numa_node(1)
    hosts = {there.node_id: there.host}

    def line(*stages: str) -> str | None:
        return locality_line(plan_of(AUTO, there, *stages).seats, hosts)

    assert line("c", "g") == "rank 0 on socket 1, near GPU 0 (cpu.sockets chooses others)"
    assert line("cc", "g") == (
        "rank 0 on socket 1, near GPU 0; rank 1 on socket 0, far from GPU 0 "
        "(cpu.sockets chooses others)"
    )
    assert line("g") is None
    assert line("cc") is None
    unknown = on_numa_node(None)
    seats = plan_of(AUTO, unknown, "c", "g").seats
    assert locality_line(seats, {unknown.node_id: unknown.host}) is None


def test_sockets_that_are_asked_for_are_taken_in_their_order() -> None:
    there = on_numa_node(1, sockets=3)

    def taken(sockets: list[int], *stages: str) -> list[int]:
        config = HeteroConfig(cpu=CpuConfig(sockets=sockets))
        return [seat.socket.id for seat in plan_of(config, there, *stages).seats if seat.socket]

    assert taken([0], "c", "g") == [0]
    assert taken([2, 0], "cc", "g") == [2, 0]
    with pytest.raises(LayoutError):
        taken([0], "cc", "g")
    with pytest.raises(
        ConfigError, match=r"expected sockets that are free \(a: 0, 1, 2\), got \[7"
    ):
        taken([7], "c", "g")
    with pytest.raises(ConfigError, match="expected each socket once"):
        taken([1, 1], "cc", "g")

"""Plan of a world from a described cluster: layout, seats, layers and cores.  No Ray, no actors."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from placement.cluster.assignment import ALONE, Node, Seat, Turn, assign, gpus_near
from placement.cluster.layout import auto_layout, given_layout
from placement.errors import LayoutError
from placement.given import numbers
from placement.host.topology import Core, Gpu, Host, Socket
from placement.plan.partition import StageCosts, smallest_peak
from placement.words import plural
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.errors import ConfigError
from ray_hetero.world import World

KV_ROUNDS = 2
"""Sequences that an automatic KV cache holds, in units of what runs at once: prefixes of finished
requests stay for the next ones."""
KV_SHARE_OF_FREE = 0.5
"""Most of the free memory that an automatic KV cache takes, shared by the ranks of a host."""
CORES_TO_SPARE = 8
"""Least cores of a socket of which `auto` keeps some for the engine and for Ray."""
DRIVER_CORES = 2
"""Cores kept on the driver's node, of all its CPU ranks' sockets together but one of each at least:
one for the engine's loop, one for API server and Ray."""
OTHER_CORES = 1
"""Cores kept on every other node, for Ray."""


def plan_world(
    config: HeteroConfig,
    nodes: Sequence[Node],
    *,
    pipeline_parallel_size: int,
    tensor_parallel_size: int,
    layers: Sequence[int],
    turn: Turn = ALONE,
) -> World:
    """Decide which device is which rank.

    Args:
        config: the user's configuration.
        nodes: the cluster.
        pipeline_parallel_size: stages.
        tensor_parallel_size: ranks of a stage.
        layers: layers of each stage.
        turn: the engine's place among those that start together, which get equal numbers of GPUs.

    Raises:
        LayoutError: there are too few devices.

    """
    nodes = with_chosen_sockets(config.cpu, nodes)
    free, held = (sum(getattr(node, name) for node in nodes) for name in ("gpus", "held_gpus"))
    gpus = free if turn.engines == 1 else min(free, (free + held) // turn.engines)
    sockets = sum(len(node.sockets) for node in nodes)
    sizes = (pipeline_parallel_size, tensor_parallel_size)
    try:
        layout = (
            auto_layout(*sizes, gpus, sockets)
            if config.layout == "auto"
            else given_layout(config.layout, *sizes, gpus, sockets)
        )
    except LayoutError as error:
        raise LayoutError(f"{error}{_held(nodes)}") from None
    is_near = config.cpu.sockets == "auto"
    # How many auto is, `plan_layers` tells: by itself a world has none.
    expert_ranks = 0 if config.experts.ranks == "auto" else config.experts.ranks
    seats = assign(layout, nodes, turn, expert_ranks, near_gpus=is_near)
    ranks = layout.world_size
    return World(layout, seats[:ranks], tuple(layers), experts=seats[ranks:])


def with_chosen_sockets(config: CpuConfig, nodes: Sequence[Node]) -> list[Node]:
    """The nodes with those of their sockets that CPU ranks may take, in the order of `cpu.sockets`.

    Raises:
        ConfigError: a number is there twice, or no node has one of them.

    """
    if config.sockets == "auto":
        return list(nodes)
    asked = config.sockets
    if len(set(asked)) < len(asked):
        raise ConfigError(f"cpu.sockets: expected each socket once, got {asked}")
    chosen = [
        replace(
            node,
            sockets=tuple(
                socket for number in asked for socket in node.sockets if socket.id == number
            ),
        )
        for node in nodes
    ]
    if not any(node.sockets for node in chosen):
        there = "; ".join(
            f"{node.host.name}: {', '.join(str(socket.id) for socket in node.sockets) or 'none'}"
            for node in nodes
        )
        raise ConfigError(f"cpu.sockets: expected sockets that are free ({there}), got {asked}")
    return chosen


def _held(nodes: Sequence[Node]) -> str:
    holders = [f"{node.host.name}: {holder}" for node in nodes for holder in node.holders]
    return f" Sockets are held by {'; '.join(holders)}." if holders else ""


def split_layers(
    config: HeteroConfig,
    hidden_layers: int,
    stages: int,
    partition: str | None,
    barred: frozenset[int] = frozenset(),
) -> tuple[int, ...]:
    """Layers of each stage: the user's, else equal shares, the earlier stages one more.

    Args:
        config: its `layers` wins over `partition`.
        hidden_layers: layers of the model.
        stages: pipeline stages.
        partition: VLLM_PP_LAYER_PARTITION, if set.
        barred: layers that no stage may begin with; shares are then as equal as these leave them.

    Raises:
        ConfigError: the numbers do not add up, or there are fewer layers than stages.

    """
    given: Sequence[int] | None = None
    if config.layers != "auto":
        given = config.layers
    elif partition:
        given = numbers(partition)
        if given is None:
            raise ConfigError(
                f"VLLM_PP_LAYER_PARTITION={partition!r}: expected numbers with commas, like 20,12"
            )
    if given is None:
        if hidden_layers < stages:
            raise ConfigError(
                f"the model has {plural(hidden_layers, 'layer')}, fewer than the "
                f"{plural(stages, 'pipeline stage')}; "
                f"type: --pipeline-parallel-size {hidden_layers}"
            )
        share, rest = divmod(hidden_layers, stages)
        equal = tuple(share + (stage < rest) for stage in range(stages))
        if barred.isdisjoint(accumulate(equal)):
            return equal
        alike = StageCosts((1,) * hidden_layers, 0, (hidden_layers,) * hidden_layers)
        return smallest_peak([alike] * stages, barred) or equal
    if len(given) != stages or sum(given) != hidden_layers or min(given) < 1:
        arithmetic = " + ".join(map(str, given))
        raise ConfigError(
            f"layers: {arithmetic} = {sum(given)} in {plural(len(given), 'stage')}, but the "
            f"model has "
            f"{plural(hidden_layers, 'layer')} and the pipeline {plural(stages, 'stage')}. "
            f"Give {plural(stages, 'number')} of "
            f"at least 1 that add up to {hidden_layers}."
        )
    return tuple(given)


def compute_threads(seat: Seat, config: CpuConfig, ranks: int = 1) -> tuple[int, ...]:
    """Logical CPUs that a CPU rank computes on: one per core, the first cores kept back.

    Args:
        seat: of the rank.
        config: how many cores are asked for or kept back.
        ranks: CPU ranks on its node.

    Raises:
        ConfigError: more cores are asked for or kept back than the socket has.

    """
    socket = seat.socket
    assert socket is not None
    kept = _reserved(socket, seat, config, ranks)
    usable = socket.cpus[kept:]
    if config.cores == "auto":
        return usable
    if config.cores > len(usable):
        raise ConfigError(
            f"cpu.cores: {config.cores} asked for, but socket {socket.id} of {seat.node_name} has "
            f"{plural(len(socket.cores), 'core')} less {kept} reserved = {len(usable)}"
        )
    return usable[: config.cores]


def _reserved(socket: Socket, seat: Seat, config: CpuConfig, ranks: int) -> int:
    cores = len(socket.cores)
    kept = _kept(cores, config, ranks, is_driver_node=seat.is_driver_node)
    if kept >= cores:
        raise ConfigError(
            f"cpu.reserved_cores: {kept} of the {plural(cores, 'core')} of socket {socket.id} of "
            f"{seat.node_name} leaves none to compute on"
        )
    return kept


def _kept(cores: int, config: CpuConfig, ranks: int = 1, *, is_driver_node: bool) -> int:
    """How many of so many cores of a socket are kept back, as on each of its node's CPU ranks."""
    if config.reserved_cores != "auto":
        return config.reserved_cores
    if cores < CORES_TO_SPARE:
        return 0
    return -(-DRIVER_CORES // ranks) if is_driver_node else OTHER_CORES


def spare_cpus(seats: Sequence[Seat], threads: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Logical CPUs of one node that no CPU rank computes on, for everything else that runs there.

    SMT siblings of compute cores are not spare: what runs there slows the core down.

    Args:
        seats: the CPU ranks of the node.
        threads: logical CPUs of each of these ranks' compute threads.

    """
    cores = [core for seat in seats if seat.socket for core in seat.socket.cores]
    return _cpus(_idle(cores, threads))


def _idle(cores: Iterable[Core], threads: Sequence[Sequence[int]]) -> list[Core]:
    busy = {cpu for cpus in threads for cpu in cpus}
    return [core for core in cores if busy.isdisjoint(core.cpus)]


def _cpus(cores: Iterable[Core]) -> tuple[int, ...]:
    return tuple(sorted({cpu for core in cores for cpu in core.cpus}))


def gpus_beside(seat: Seat, host: Host) -> tuple[int, ...]:
    """Numbers of the GPUs on the NUMA nodes of a CPU rank's socket, as far as the host tells."""
    if seat.socket is None:
        return ()
    nodes = seat.socket.numa_nodes
    return tuple(gpu.index for gpu in host.gpus if gpu.numa_node in nodes)


def cpus_near_gpus(
    host: Host, threads: Sequence[Sequence[int]], config: CpuConfig, *, is_driver_node: bool
) -> dict[int, tuple[int, ...]]:
    """Logical CPUs for the rank of each GPU of a node: on the GPU's own NUMA node.

    They are those of cores that no CPU rank computes on.  Where no rank of this engine computes on
    that NUMA node, they are the cores that would be kept back there: another engine may compute on
    the others.

    Args:
        host: the node.
        threads: logical CPUs of the compute threads of each CPU rank there.
        config: how many cores are kept back.
        is_driver_node: whether the engine itself runs there.

    Returns:
        By number of the GPU, without GPUs whose NUMA node is not known or has no such core.

    """
    near = {}
    for gpu in host.gpus:
        cores = _cores_beside(gpu, host)
        idle = _idle(cores, threads)
        if len(idle) == len(cores):
            idle = idle[: _kept(len(cores), config, is_driver_node=is_driver_node)]
        if idle:
            near[gpu.index] = _cpus(idle)
    return near


def _cores_beside(gpu: Gpu, host: Host) -> tuple[Core, ...]:
    """Cores of a GPU's NUMA node; none where that is not known."""
    return next((node.cores for node in host.numa_nodes if node.id == gpu.numa_node), ())


def cpus_on_nodes_of_gpus(host: Host, cpus: Collection[int]) -> dict[int, tuple[int, ...]]:
    """Logical CPUs out of `cpus` that are on the NUMA node of each GPU.

    Args:
        host: the node.
        cpus: of which.

    Returns:
        By number of the GPU, without GPUs whose NUMA node is not known or has none of them.

    """
    found = {}
    for gpu in host.gpus:
        cores = _cores_beside(gpu, host)
        if near := [cpu for cpu in _cpus(cores) if cpu in cpus]:
            found[gpu.index] = tuple(near)
    return found


def locality_line(seats: Sequence[Seat], hosts: Mapping[str, Host]) -> str | None:
    """A line for the log about sockets and the GPUs that their ranks exchange tensors with.

    Args:
        seats: all ranks.
        hosts: by node.

    Returns:
        None where there are no such GPUs, or the system does not tell where they are.

    """
    said = []
    for seat in seats:
        near = gpus_near(seat, seats, hosts[seat.node_id]) if seat.socket is not None else {}
        if not near or seat.socket is None:
            continue
        beside = [gpu for gpu, node in near.items() if node in seat.socket.numa_nodes]
        far = [gpu for gpu in near if gpu not in beside]
        words = [f"{word} GPU {', '.join(map(str, some))}"
                 for word, some in (("near", beside), ("far from", far)) if some]  # fmt: skip
        said.append(f"rank {seat.rank} on socket {seat.socket.id}, {' and '.join(words)}")
    return f"{'; '.join(said)} (cpu.sockets chooses others)" if said else None


def sharing_warning(seats: Sequence[Seat]) -> str | None:
    """A line for the log where CPU ranks compute on the same cores."""
    used: dict[tuple[str, int], int] = {}
    for seat in seats:
        for core in seat.socket.cores if seat.socket else ():
            key = (seat.node_id, core.cpus[0])
            used[key] = used.get(key, 0) + 1
    if max(used.values(), default=1) == 1:
        return None
    ranks = sum(seat.kind == "cpu" for seat in seats)
    return (
        f"{plural(ranks, 'CPU rank')} share {plural(len(used), 'core')}: right for trying things "
        "out, slow for serving"
    )

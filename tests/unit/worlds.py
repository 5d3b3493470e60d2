"""Small clusters and worlds that several tests share."""

from __future__ import annotations

from placement.cluster.assignment import Node, assign
from placement.cluster.layout import Kind, Layout
from placement.host.topology import Core, Host, NumaNode, Socket
from ray_hetero.world import World


def socket(number: int = 0, cores: int = 4, first: int = 0, threads: int = 1) -> Socket:
    """A socket of `cores` cores with `threads` logical CPUs each, numbered from `first`."""
    return Socket(
        id=number,
        package=number,
        numa_nodes=(number,),
        cores=tuple(
            Core(tuple(first + core + sibling * cores for sibling in range(threads)))
            for core in range(cores)
        ),
    )


def node(
    name: str = "a", *, sockets: int = 1, gpus: int = 0, cores: int = 4, is_driver: bool = False
) -> Node:
    """A node with `cores` cores in each of its sockets."""
    parts = tuple(socket(number, cores, number * cores) for number in range(sockets))
    numa = tuple(NumaNode(id=part.id, package=part.id, cores=part.cores) for part in parts)
    return Node(
        node_id=f"id-{name}",
        address=f"10.0.0.{ord(name[0]) - ord('a') + 1}",
        host=Host(name=name, numa_nodes=numa),
        sockets=parts,
        gpus=gpus,
        cpus=float(sockets * cores),
        is_driver=is_driver,
    )


def layout(*stages: str) -> Layout:
    """A layout from words: layout("gg", "cc") is two GPUs, then two sockets."""
    kinds: dict[str, Kind] = {"c": "cpu", "g": "gpu"}
    return Layout(tuple(tuple(kinds[letter] for letter in stage) for stage in stages))


def world(*stages: str, layers: int = 2) -> World:
    """A world on one node that has just enough devices."""
    shape = layout(*stages)
    there = node(sockets=shape.count("cpu"), gpus=shape.count("gpu"), is_driver=True)
    return World(shape, assign(shape, [there]), (layers,) * len(stages))

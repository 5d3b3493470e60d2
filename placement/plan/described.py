"""A cluster as described in a YAML file: hosts, devices and their figures, to plan without it.

The file's keys are those of `description.ClusterSection`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from placement.cluster.assignment import Node, Seat
from placement.cluster.layout import Kind
from placement.errors import TopologyError
from placement.given import file_shown, key_of, listed, shown
from placement.host.row_costs import RowCosts
from placement.host.sockets import sockets_of
from placement.host.topology import Core, Gpu, Host, NumaNode
from placement.plan.description import (
    ClusterSection,
    DevicesSection,
    LinkSection,
    LinksSection,
    NodeSection,
    SocketsSection,
)
from placement.plan.devices import DeviceFigures, Link, Links, RankDevice
from placement.plan.gpu_figures import ASSUMED_HOST_LINK
from placement.plan.parts import known_part
from placement.text_file import FileError
from placement.units import GB, GIB
from placement.yaml_file import read_yaml

MOST_DEVICES = 10_000
"""Most devices; more are a slip of the pen, and take minutes to plan."""


@dataclass(frozen=True)
class DescribedNode:
    """One node with the figures of its devices."""

    host: Host
    gpus: tuple[RankDevice, ...]
    sockets: tuple[RankDevice, ...]

    @property
    def devices(self) -> tuple[RankDevice, ...]:
        """GPUs, then sockets."""
        return self.gpus + self.sockets


@dataclass(frozen=True)
class DescribedCluster:
    """All nodes and the ways between ranks."""

    nodes: tuple[DescribedNode, ...]
    links: Links

    @property
    def devices(self) -> tuple[RankDevice, ...]:
        """Devices of all nodes."""
        return tuple(device for node in self.nodes for device in node.devices)

    def as_nodes(self) -> tuple[Node, ...]:
        """The nodes in the form in which seats are assigned; the first is the driver's."""
        return tuple(
            Node(
                node_id=node.host.name,
                # Nodes without addresses stay in the order of the file.
                address="",
                host=node.host,
                sockets=sockets_of(node.host),
                gpus=len(node.gpus),
                cpus=float(len(node.host.cores)),
                is_driver=index == 0,
            )
            for index, node in enumerate(self.nodes)
        )

    def device_of(self, seat: Seat) -> RankDevice:
        """The device that a seat is on."""
        node = next(node for node in self.nodes if node.host.name == seat.node_id)
        return (node.gpus if seat.kind == "gpu" else node.sockets)[seat.local_rank]


def read_described(path: str | Path) -> DescribedCluster:
    """Read a cluster description.

    Raises:
        TopologyError: the file cannot be read, is not YAML, or a key or value is wrong.

    """
    try:
        content = read_yaml(path)
    except FileError as error:
        raise TopologyError(f"{file_shown(path)}: {error}") from None
    return described(content, file_shown(path))


def described(content: object, where: str = "cluster description") -> DescribedCluster:
    """Check a cluster description and turn it into hosts and figures.

    Args:
        content: what the YAML file holds.
        where: name of the source for errors.

    Raises:
        TopologyError: a key is unknown, or a value is wrong or missing.

    """
    try:
        cluster = ClusterSection.model_validate(content)
    except ValidationError as error:
        problems = listed([_problem(dict(detail)) for detail in error.errors()])
        raise TopologyError(f"{where}: {problems}") from None
    _check_size(cluster, where)
    names = [name for section in cluster.nodes for name in _names(section)]
    twice = sorted(name for name, count in Counter(names).items() if count > 1)
    if twice:
        raise TopologyError(f"{where}: nodes need different names, twice: {listed(twice)}")
    return DescribedCluster(
        tuple(_node(section, name) for section in cluster.nodes for name in _names(section)),
        _links(cluster.links),
    )


def _check_size(cluster: ClusterSection, where: str) -> None:
    kinds = [(node.count, kind) for node in cluster.nodes for kind in (node.gpus, node.sockets)]
    devices = sum(count * kind.count for count, kind in kinds if kind is not None)
    if devices > MOST_DEVICES:
        raise TopologyError(f"{where}: {devices} GPUs and sockets, at most {MOST_DEVICES}")


def _problem(detail: dict[str, Any]) -> str:
    key = key_of(detail["loc"]) or "file"
    if detail["type"] == "extra_forbidden":
        return f"{key}: unknown key"
    if detail["type"] == "missing":
        return f"{key}: missing"
    said = str(detail["msg"]).removeprefix("Value error, ")
    # A section's own check names what is wrong in it.
    is_section = isinstance(detail["input"], dict)
    return f"{key}: {said}" if is_section else f"{key}: {said}, got {shown(detail['input'])}"


def _names(section: NodeSection) -> Sequence[str]:
    if section.count == 1:
        return [section.name]
    return [f"{section.name}-{number}" for number in range(section.count)]


def _links(section: LinksSection) -> Links:
    links = Links()
    for field in fields(Links):
        given: LinkSection | None = getattr(section, field.name)
        if given is not None:
            assumed: Link = getattr(links, field.name)
            link = Link(
                assumed.name, given.bandwidth_gb_s * GB, given.latency_us / 1e6, "configured"
            )
            links = replace(links, **{field.name: link})
    return links


def _node(section: NodeSection, name: str) -> DescribedNode:
    gpus, sockets = section.gpus, section.sockets
    return DescribedNode(
        host=_host(section, name),
        gpus=() if gpus is None else _devices(gpus, name, "GPU", gpus.host_link_gb_s),
        sockets=() if sockets is None else _devices(sockets, name, "socket", None),
    )


def _host(section: NodeSection, name: str) -> Host:
    gpus, sockets = section.gpus, section.sockets
    numa_nodes = []
    if sockets is not None:
        memory = _figures(sockets, "cpu", None).memory_bytes
        for package in range(sockets.count):
            first = package * sockets.cores
            cores = tuple(Core((cpu,)) for cpu in range(first, first + sockets.cores))
            numa_nodes.append(NumaNode(package, package, cores, memory, memory))
    found = []
    if gpus is not None:
        figures = _figures(gpus, "gpu", gpus.host_link_gb_s)
        found = [
            Gpu(index, name=figures.name, memory_bytes=figures.memory_bytes)
            for index in range(gpus.count)
        ]
    model = None if sockets is None else _figures(sockets, "cpu", None).name
    sets = frozenset() if sockets is None else frozenset(sockets.instruction_sets)
    return Host(name, tuple(numa_nodes), tuple(found), cpu_model=model, instruction_sets=sets)


def _devices(
    section: DevicesSection, node: str, noun: str, link: float | None
) -> tuple[RankDevice, ...]:
    kind: Kind = "gpu" if noun == "GPU" else "cpu"
    figures = _figures(section, kind, link)
    limit = section.kv_cache_gib if isinstance(section, SocketsSection) else None
    return tuple(
        RankDevice(
            node=node,
            label=f"{noun} {index}",
            figures=figures,
            usable_bytes=int(figures.memory_bytes * section.memory_utilization),
            runtime_bytes=int(section.runtime_gib * GIB),
            kv_limit_bytes=None if limit is None else int(limit * GIB),
        )
        for index in range(section.count)
    )


def _figures(section: DevicesSection, kind: Kind, link: float | None) -> DeviceFigures:
    part = known_part(section.part) if section.part is not None else None
    if part is not None and part.kind != kind:
        raise TopologyError(f"part {section.part!r} is a {part.kind}, it is given as a {kind}")
    assumed = ASSUMED_HOST_LINK if kind == "gpu" else None
    base = part.figures if part else DeviceFigures(kind.upper(), kind, 0, 0, 0, assumed)
    return DeviceFigures(
        name=section.name or base.name,
        kind=kind,
        read_bandwidth=section.read_gb_s * GB if section.read_gb_s else base.read_bandwidth,
        compute=section.bf16_tflop_s * 1e12 if section.bf16_tflop_s else base.compute,
        memory_bytes=int(section.memory_gib * GIB) if section.memory_gib else base.memory_bytes,
        host_link=base.host_link if link is None else link * GB,
        source="configured" if section.read_gb_s or section.bf16_tflop_s else "table",
        link_source=base.link_source if link is None else "configured",
        layer_latency_s=section.layer_latency_us / 1e6,
        row_costs=_row_costs(section),
    )


def _row_costs(section: DevicesSection) -> RowCosts | None:
    given = section.row_costs if isinstance(section, SocketsSection) else None
    return None if given is None else RowCosts(tuple(given), is_measured=False)

"""A host as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import Any

from pydantic import TypeAdapter, ValidationError
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from placement.errors import TopologyError
from placement.host.cpulist import format_cpulist
from placement.host.topology import Gpu, Host, NumaNode

GIBIBYTE = 1 << 30
UNKNOWN = "?"

_hosts = TypeAdapter(Host)


def host_table(host: Host) -> RenderableType:
    """Table for `rich`: NUMA nodes, GPUs, and what limits the process."""
    parts: list[RenderableType] = [_node_table(host)]
    if host.gpus:
        parts.append(_gpu_table(host.gpus))
    parts += [Text(line) for line in _facts(host)]
    return Group(*parts)


def to_dict(host: Host) -> dict[str, Any]:
    """The host as JSON types; the same for equal hosts."""
    fields: dict[str, Any] = _hosts.dump_python(host, mode="json")
    return fields | {"instruction_sets": sorted(host.instruction_sets)}


def to_json(host: Host, *, indent: int | None = None) -> str:
    """The host as JSON text; `host_from_json` reads it."""
    return json.dumps(to_dict(host), indent=indent)


def host_from_json(text: str) -> Host:
    """The host that `to_json` wrote.

    Raises:
        TopologyError: it is not JSON, or a field is missing or of a wrong type.

    """
    try:
        return _hosts.validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "text"
        raise TopologyError(f"host as JSON, {where}: {first['msg']}") from None


def _node_table(host: Host) -> Table:
    table = Table(
        title=f"{host.name}: {host.cpu_model or 'CPU model unknown'}", title_justify="left"
    )
    for heading in ("NUMA node", "package", "cores", "CPUs", "memory", "available", "distances"):
        table.add_column(heading, justify="left" if heading == "CPUs" else "right")
    for node in host.numa_nodes:
        table.add_row(
            str(node.id),
            UNKNOWN if node.package is None and node.cores else _blank(node.package),
            str(len(node.cores)),
            _cpus(node),
            _gib(node.memory_bytes),
            _gib(node.free_bytes),
            " ".join(map(str, node.distances)) or UNKNOWN,
        )
    return table


def _gpu_table(gpus: tuple[Gpu, ...]) -> Table:
    table = Table()
    for heading in ("GPU", "name", "memory", "PCI address", "NUMA node"):
        table.add_column(heading)
    for gpu in gpus:
        node = UNKNOWN if gpu.numa_node is None else str(gpu.numa_node)
        memory = _gib(gpu.memory_bytes)
        table.add_row(str(gpu.index), gpu.name or UNKNOWN, memory, gpu.pci_address or UNKNOWN, node)
    return table


def _facts(host: Host) -> list[str]:
    lines = [f"instruction sets: {', '.join(sorted(host.instruction_sets)) or 'none of use here'}"]
    if host.memory_limit_bytes is not None:
        lines.append(f"memory limit of the control group: {_gib(host.memory_limit_bytes)}")
    if host.cpu_limit is not None:
        lines.append(f"CPU time limit of the control group: {host.cpu_limit:g} CPUs")
    if host.offline_cpus:
        lines.append(f"offline CPUs: {format_cpulist(host.offline_cpus)}")
    return lines


def _cpus(node: NumaNode) -> str:
    if node.cores:
        return format_cpulist(cpu for core in node.cores for cpu in core.cpus)
    return "memory only" if node.package is None else "none for this process"


def _blank(number: int | None) -> str:
    return "" if number is None else str(number)


def _gib(size: int | None) -> str:
    return UNKNOWN if size is None else f"{size / GIBIBYTE:.1f} GiB"

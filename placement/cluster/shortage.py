"""Resources of Ray's nodes, their holders, and the reason why bundles do not fit."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from placement.units import GIB

Asked = Sequence[tuple[str, Mapping[str, float]]]
"""(node, bundle) of each rank."""


@dataclass
class NodeResources:
    """One node's resources in Ray, and what placement groups hold of them."""

    name: str
    resources: Mapping[str, float]
    held: dict[str, dict[str, float]] = field(default_factory=dict)
    """Resources that are held, by placement group."""

    def hold(self, group: str, bundle: Mapping[str, float]) -> None:
        """Count a bundle that is on this node."""
        mine = self.held.setdefault(group, {})
        for resource, amount in bundle.items():
            mine[resource] = mine.get(resource, 0) + amount

    def total(self, resource: str) -> float:
        """Amount of a resource on the node."""
        return self.resources.get(resource, 0.0)

    def free(self, resource: str) -> float:
        """Amount that no placement group holds; tasks and actors outside are not known."""
        return self.total(resource) - self.held_of(resource)

    def held_of(self, resource: str) -> float:
        """Amount that placement groups hold."""
        return sum(bundle.get(resource, 0) for bundle in self.held.values())

    def __str__(self) -> str:
        parts = [
            f"{_amount(name, self.total(name))} {name}"
            for name in ("CPU", "GPU", "memory")
            if name in self.resources
        ]
        holders = [
            f"{group} holds {_amounts(bundle)}" for group, bundle in sorted(self.held.items())
        ]
        return f"{self.name}: {', '.join([*parts, *holders]) or 'nothing'}"


def impossible(asked: Asked, nodes: Mapping[str, NodeResources]) -> str | None:
    """Why these bundles can never be given, however long one waits; None if they can."""
    short = [
        f"node {nodes[node].name}: {resource} asked {_amount(resource, amount)}, "
        f"Ray has {_amount(resource, nodes[node].total(resource))} there"
        for node, resource, amount in _sums(asked)
        if node in nodes and amount > nodes[node].total(resource)
    ]
    if gone := {node for node, _ in asked} - nodes.keys():
        short.append(f"gone since they described themselves: node {', '.join(sorted(gone))}")
    if not short:
        return None
    return (
        f"Ray cannot give these ranks their bundles: {'; '.join(short)}. {_there(nodes)} A node "
        "that was started with fewer CPUs than cores, or without its GPUs, needs what "
        "`ray-hetero ray-args` prints on it."
    )


def missing(asked: Asked, nodes: Mapping[str, NodeResources], timeout_s: float) -> str:
    """Why these bundles were not given in time."""
    short = [
        f"node {nodes[node].name}: {resource} asked {_amount(resource, amount)}, "
        f"free {_amount(resource, max(0.0, nodes[node].free(resource)))} "
        f"of {_amount(resource, nodes[node].total(resource))}"
        for node, resource, amount in _sums(asked)
        if node in nodes and amount > nodes[node].free(resource)
    ]
    if not short:
        wanted = ", ".join(
            f"node {nodes[node].name}: {resource} {_amount(resource, amount)}"
            for node, resource, amount in _sums(asked)
            if node in nodes
        )
        short = [f"asked {wanted}; tasks or actors outside of placement groups hold some of it"]
    return (
        f"Ray gave no placement group in {timeout_s:g} s (placement.timeout_s): "
        f"{'; '.join(short)}. {_there(nodes)} Wait for the other jobs (`ray status`) or stop them."
    )


def _sums(asked: Asked) -> Iterable[tuple[str, str, float]]:
    """(node, resource, amount) of all bundles together, without those that only name the node."""
    sums: dict[tuple[str, str], float] = {}
    for node, bundle in asked:
        for resource, amount in bundle.items():
            if not resource.startswith("node:"):
                sums[node, resource] = sums.get((node, resource), 0) + amount
    return [(node, resource, amount) for (node, resource), amount in sorted(sums.items())]


def _there(nodes: Mapping[str, NodeResources]) -> str:
    return f"Nodes: {'; '.join(sorted(map(str, nodes.values())))}."


def _amounts(bundle: Mapping[str, float]) -> str:
    named = sorted(
        (name, amount) for name, amount in bundle.items() if not name.startswith("node:")
    )
    return ", ".join(f"{_amount(name, amount)} {name}" for name, amount in named)


def _amount(resource: str, amount: float) -> str:
    return f"{amount / GIB:.1f} GiB" if resource == "memory" else f"{amount:g}"

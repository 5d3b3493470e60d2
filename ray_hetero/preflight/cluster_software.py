"""Software of every node of a world for its ranks, compared before actors start there."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from placement.cluster import ray_cluster
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import CpuSiteError, StartupError
from ray_hetero.log import logger
from ray_hetero.preflight.node_software import (
    NodeSoftware,
    install_cpu_site,
    read_node_software,
    vllm_release,
)
from ray_hetero.world import World


def software_of(world: World, config: HeteroConfig, model: str) -> dict[str, NodeSoftware]:
    """Look at every node of a world, and install CPU kernels where that is allowed.

    Args:
        world: all ranks.
        config: `cpu.install_kernels` allows to install.
        model: name or directory of the model.

    Returns:
        By node; each has what its ranks need.

    Raises:
        CpuSiteError: nodes with CPU ranks lack the CPU kernels that these need; names them.
        StartupError: nodes do not answer, have another vLLM or no such model, or are set up so
            that no engine can run there; names them.

    """
    directory = str(Path(model).absolute()) if Path(model).is_dir() else None
    read = functools.partial(read_node_software, directory)
    limit_s = config.placement.timeout_s
    software = ray_cluster.on_nodes(read, world.node_ids, limit_s)
    lacking = _without_kernels(world, software, config)
    if lacking and config.cpu.install_kernels:
        _install(world, lacking, config.startup.load_timeout_s)
        software |= ray_cluster.on_nodes(read, lacking, limit_s)
        lacking = _without_kernels(world, software, config)
    if problems := list(_problems(world, software, directory, limit_s)):
        raise StartupError(f"{'; '.join(problems)}. Every node needs the same as the driver's.")
    _judge_surroundings(world, software)
    if lacking:
        told = "; ".join(f"node {_name(world, node)}: {lacking[node]}" for node in sorted(lacking))
        raise CpuSiteError(
            f"{told}. `cpu.install_kernels: true` lets the engine do it on each node"
        )
    return software


def _without_kernels(
    world: World, software: Mapping[str, NodeSoftware], config: HeteroConfig
) -> dict[str, str]:
    """Nodes with CPU ranks that cannot start, and why.

    Experts are computed by this project's kernels, unless others are asked for.
    """
    nodes = {
        seat.node_id
        for seat in world.members
        if seat.kind == "cpu" and not (seat.serves_experts and config.cpu.linear_kernel != "vllm")
    } & software.keys()
    return {node: problem for node in nodes if (problem := software[node].problem) is not None}


def _install(world: World, nodes: Collection[str], limit_s: float) -> None:
    names = ", ".join(sorted(_name(world, node) for node in nodes))
    logger.info("installing CPU kernels (cpu.install_kernels) on %s", names)
    for node, problem in ray_cluster.on_nodes(install_cpu_site, nodes, limit_s).items():
        if problem is not None:
            raise CpuSiteError(f"node {_name(world, node)}: {problem}")


def _problems(
    world: World, software: Mapping[str, NodeSoftware], model: str | None, limit_s: float
) -> Iterator[str]:
    release = vllm_release()
    for node in sorted(world.node_ids):
        name, found = _name(world, node), software.get(node)
        if found is None:
            yield f"node {name} did not say in {limit_s:g} s (placement.timeout_s) what it has"
        elif found.vllm != release:
            yield f"node {name} has vLLM {found.vllm or 'nowhere'}, expected {release}"
        elif not found.has_model:
            yield f"node {name} has no {model}: expected a copy of the model, or a shared disk"


def _judge_surroundings(world: World, software: Mapping[str, NodeSoftware]) -> None:
    """Warn of settings that can end the engine later on; raise for those that would do so now."""
    for node in sorted(world.node_ids):
        for check in software[node].checks:
            told = f"node {_name(world, node)}: {check.name}: {check.found} → {check.remedy}"
            if check.status == "fail":
                raise StartupError(told)
            if check.status == "warn":
                logger.warning("%s", told)


def _name(world: World, node_id: str) -> str:
    seat = next(seat for seat in world.members if seat.node_id == node_id)
    return f"{seat.node_name} ({seat.address})"

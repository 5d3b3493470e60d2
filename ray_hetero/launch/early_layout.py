"""The one layout that can be told before the cluster is described: GPUs only.

vLLM chooses its model runner and its scheduling mode while it builds its configuration, before any
executor exists, and worlds with CPU ranks need the V1 runner, whose ranks schedule nothing ahead.
`auto` takes sockets only for stages that the GPUs do not suffice for.  So where all GPUs can be
counted early, a world without CPU ranks is known early, and keeps what vLLM would choose.  That
layout is then as good as written: should the GPUs be gone when the executor plans, it is an error
and not another world.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import ray

from placement.cluster.layout import auto_layout, given_layout
from placement.errors import LayoutError
from placement.host.gpus import read_gpus, visible_gpus
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from ray_hetero.config import HeteroConfig

OVERRIDE = "RAY_OVERRIDE_RESOURCES"


def resolve_auto_layout(
    config: HeteroConfig, stages: int, ranks: int, gpus: int | None
) -> HeteroConfig:
    """Write `layout: auto` out where it means GPUs only.

    Args:
        config: the user's configuration.
        stages: pipeline stages.
        ranks: tensor-parallel ranks of a stage.
        gpus: all GPUs that the engine may get; None where that is not known yet.

    """
    if config.layout != "auto" or gpus is None or min(stages, ranks) < 1:
        return config
    try:
        layout = auto_layout(stages, ranks, gpus, sockets=0)
    except LayoutError:
        return config
    return config.model_copy(update={"layout": [list(stage) for stage in layout.stages]})


def refuse_missing_sockets(config: HeteroConfig, stages: int, ranks: int) -> None:
    """Refuse, on a host without GPUs, what its sockets can never be enough for.

    The executor would say the same, but only once the engine's process and a Ray have started.
    Sockets that others hold count: they may be free by then.

    Raises:
        LayoutError: more ranks are asked for than there are sockets, or a GPU.

    """
    host = read_host(gpus=False)
    sockets = len(sockets_of(host, config.cpu.unit, config.cpu.ranks_per_socket))
    if config.layout == "auto":
        auto_layout(stages, ranks, gpus=0, sockets=sockets)
    else:
        given_layout(config.layout, stages, ranks, gpus=0, sockets=sockets)


def known_gpus(environment: Mapping[str, str] = os.environ) -> int | None:
    """GPUs of the cluster that this process is connected to, or of the Ray that will be started.

    None where Ray is told otherwise, or has to be connected to first (RAY_ADDRESS).
    """
    if ray.is_initialized():
        return sum(int(node["Resources"].get("GPU", 0)) for node in ray.nodes() if node["Alive"])
    if environment.get("RAY_ADDRESS") or environment.get(OVERRIDE):
        return None
    return visible_gpus(len(read_gpus()), environment.get("CUDA_VISIBLE_DEVICES"))

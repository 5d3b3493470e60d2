"""vLLM's CPUWorker: where a CPU rank's memory is bound."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.compat.patching import replace


def bind_memory_to(numa_nodes: Sequence[int]) -> None:
    """Spread what a CPU rank allocates from its weights on over all NUMA nodes of its socket.

    Replaces: `CPUWorker.init_device`.
    Why: CPUWorker binds to the node of its first core only, which with sub-NUMA clustering is a
    part of the socket's memory and of its memory controllers.
    Can go when: CPUWorker binds to all nodes that its cores are on.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    from placement.host.native import set_membind

    def make(init_device: Any) -> Any:
        def init_device_and_bind(self: Any) -> None:
            init_device(self)
            set_membind(numa_nodes)

        return init_device_and_bind

    replace(CPUWorker, "init_device", make)

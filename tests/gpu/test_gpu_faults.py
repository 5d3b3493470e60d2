"""A rank beside a GPU, or on it, that dies: everybody is told, and the GPU is as it was before."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from engines import prompts
from faulty_server import Client, FaultyServer, errors_of
from gpu_host import (
    IS_PRETENDED,
    SHARES,
    Checkpoint,
    GpuState,
    environment,
    gpu_state,
    needs_gpus,
)
from leftovers import Scene, marked_processes, wait_until

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

END_SECONDS = 60.0
GPU_SECONDS = 30.0
PIPELINE, MIXED = [["cpu"], ["gpu"]], [["gpu", "cpu"]]
SIZES = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30))


@pytest.fixture(scope="module")
def before() -> GpuState:
    """The GPUs without an engine."""
    return gpu_state()


def serving(
    scene: Scene,
    directory: Path,
    model: Path,
    layout: list[list[str]],
    fault: dict[str, Any] | None = None,
) -> FaultyServer:
    return FaultyServer(
        scene,
        directory,
        model,
        fault,
        sizes=(len(layout), len(layout[0])),
        more=SIZES,
        extra=environment(),
        layout=layout,
        cpu={"ranks_per_socket": SHARES},
    )


def on_the_gpu(server: FaultyServer) -> set[int]:
    """The server's processes that compute on the GPU; other programs may use it too."""
    return set(gpu_state().processes) & set(marked_processes(server.scene.marker))


def check_end(server: FaultyServer, before: GpuState, computing: set[int]) -> None:
    """The server has ended, with a line that says why, and the GPU is as it was.

    Args:
        server: that a fault has ended.
        before: the GPU without it.
        computing: its processes that computed on the GPU; empty if the driver names others'.

    """
    assert server.server.child.wait(END_SECONDS) == 1, server.server.child.tail()
    assert server.last_line().startswith("ray_hetero: ")
    server.scene.assert_clean()

    def is_free() -> bool:
        now = gpu_state()
        if computing and (before.processes or now.processes):
            # What other programs take of its memory changes meanwhile.
            return computing.isdisjoint(now.processes)
        return now.processes == before.processes and now.used_mib <= before.used_mib + 64

    assert wait_until(is_free, GPU_SECONDS), (before, computing, gpu_state())


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(PIPELINE, "gpu"), (PIPELINE, "cpu"), (MIXED, "cpu")],
    ids=["gpu stage", "cpu stage", "cpu rank of a mixed group"],
)
def test_a_rank_that_is_killed_while_it_serves(
    layout: list[list[str]], kind: str, scene: Scene, logs: Path, checkpoint: Checkpoint,
    before: GpuState,
) -> None:  # fmt: skip
    name = f"kill-{len(layout)}-{kind}"
    server = serving(scene, logs / name, checkpoint("llama", "bfloat16"), layout)
    clients = server.wait_until_in("decode")
    rank = [one for stage in layout for one in stage].index(kind)
    computing = on_the_gpu(server)
    pid = server.send(signal.SIGKILL, rank)
    check_end(server, before, computing)
    assert errors_of(clients)
    assert f"rank {rank} ({kind}, " in server.last_line()
    assert f"pid {pid}" in server.last_line()
    assert "SIGKILL" in server.last_line()


def test_an_error_of_the_gpu_ends_with_it(
    scene: Scene, logs: Path, checkpoint: Checkpoint, before: GpuState
) -> None:
    fault = {"rank": 1, "do": "index"}
    server = serving(scene, logs / "error", checkpoint("llama", "bfloat16"), PIPELINE, fault)
    server.wait_until_in("idle")
    computing = on_the_gpu(server)
    clients = [Client(server.server, {"prompt": prompts()[3], "max_tokens": 4})]
    check_end(server, before, computing)
    assert errors_of(clients)
    assert "rank 1 (gpu, " in server.last_line()
    assert ("index" if IS_PRETENDED else "CUDA") in server.last_line()

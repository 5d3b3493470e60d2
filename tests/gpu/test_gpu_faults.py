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
EXPERTS_S = 8
"""Longest wait for an expert rank."""
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
    cpu: dict[str, Any] | None = None,
    **keys: Any,
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
        cpu={"ranks_per_socket": SHARES, **(cpu or {})},
        **keys,
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


def test_a_rank_that_is_killed_while_the_gpu_computes_its_prompts(
    scene: Scene, logs: Path, checkpoint: Checkpoint, before: GpuState
) -> None:
    prefill_on_gpu = {
        "linear_kernel": "streaming", "prefill_on_gpu": True, "prefill_on_gpu_tokens": 8,
        "decode_gpu_share": 1.0,
    }  # fmt: skip
    model = checkpoint("llama-wide", "bfloat16")
    server = serving(scene, logs / "kill-prompt", model, PIPELINE, cpu=prefill_on_gpu)
    clients = server.wait_until_in("prefill")
    computing = on_the_gpu(server)
    pid = server.send(signal.SIGKILL, 0)
    check_end(server, before, computing)
    assert errors_of(clients)
    assert "steps of 8 tokens and more are computed by the GPU" in server.log
    assert f"pid {pid}" in server.last_line()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_expert_rank_that_ends_or_stops(
    number: signal.Signals, scene: Scene, logs: Path, checkpoint: Checkpoint, before: GpuState
) -> None:
    model = checkpoint("mixtral", "bfloat16")
    server = serving(
        scene, logs / f"expert-{number.name}", model, [["gpu"]],
        experts={"ranks": 1, "layers": "all"}, exchange={"timeout_s": EXPERTS_S},
    )  # fmt: skip
    clients = server.wait_until_in("decode")
    computing = on_the_gpu(server)
    pid = server.send(number, 1)
    if number is signal.SIGSTOP:
        # One that is not in the middle of a step waits there for ever.
        clients.append(Client(server.server, {"prompt": prompts()[1], "max_tokens": 4}))
    check_end(server, before, computing)
    assert errors_of(clients)
    assert "rank 1 (experts, socket " in server.last_line()
    said = f"pid {pid}" if number is signal.SIGKILL else f"in {EXPERTS_S} s (exchange.timeout_s)"
    assert said in server.last_line()


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

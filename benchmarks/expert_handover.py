"""The handover of tokens to expert ranks and back, beside computing: microseconds a layer.

    python benchmarks/expert_handover.py --out expert-handover.json

A CUDA graph of layers that do next to nothing is replayed with and without a handover in each of
them, to expert ranks whose experts have no size: the difference is what the handover costs.  Also
measured is a stage that computes on the host (`--host`), which needs no GPU.  At the end one expert
rank is stopped in the middle of a step and killed: the step must end.

Needs PyTorch and this repository, not vLLM.  The native module is compiled with the pybind11 that
PyTorch brings where it was not built.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
MODULE = "ray_hetero._expert_handover"
HIDDEN = 2048
CHOSEN = 8
LIMIT_S = 60.0
WARM = 20


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--tokens", default="1,8,32")
    parser.add_argument("--ranks", default="1,2", help="numbers of expert ranks")
    parser.add_argument("--rounds", type=int, default=200, help="steps of each measurement")
    parser.add_argument("--host", action="store_true", help="a stage on the host, without a GPU")
    parser.add_argument("--out", type=Path, help="where the figures go, as JSON")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        options.folder = Path(folder)
        native_module(options.folder)
        modes = ["host"] if options.host else ["memory operations", "host functions"]
        found = []
        for ranks in map(int, options.ranks.split(",")):
            for mode in modes:
                found += measured(options, ranks, mode)
                print(*found[-1 - options.tokens.count(",") - 1 :], sep="\n", flush=True)
    device = "host" if options.host else torch.cuda.get_device_name()
    if options.out is not None:
        about = {"device": device, "layers": options.layers, "hidden": HIDDEN, "points": found}
        options.out.write_text(json.dumps(about, indent=1) + "\n")


def native_module(folder: Path) -> None:
    """Make the native module of the handover importable, built or not, by child processes too."""
    sys.path.insert(0, str(ROOT))
    if importlib.util.find_spec(MODULE) is not None:
        return
    path = folder / "_expert_handover.so"
    include = [Path(torch.__file__).parent / "include", sysconfig.get_paths()["include"]]
    if not path.exists():
        subprocess.run(
            [
                "c++", "-O3", "-std=c++17", "-shared", "-fPIC", *(f"-I{one}" for one in include),
                str(ROOT / "csrc/handover/expert_handover.cpp"), "-o", str(path),
            ],
            check=True,
        )  # fmt: skip
    spec = importlib.util.spec_from_file_location(MODULE, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    spec.loader.exec_module(module)


def measured(options: argparse.Namespace, ranks: int, mode: str) -> list[dict[str, Any]]:
    """Points of one number of expert ranks, whose processes live as long as this call."""
    from ray_hetero.distributed.expert_channel import ExpertChannel, HostSignals
    from ray_hetero.distributed.expert_meeting import ExpertMeeting
    from ray_hetero.distributed.expert_memory import Geometry, RemoteLayer

    layers = [RemoteLayer(str(layer), HIDDEN, CHOSEN) for layer in range(options.layers)]
    tokens = [int(one) for one in options.tokens.split(",")]
    meeting = uuid.uuid4().hex
    listener = ExpertMeeting(meeting, 0)
    # Before this process has a GPU, which a child could not use.
    context = multiprocessing.get_context("fork" if mode == "host" else "spawn")
    children = [
        context.Process(
            target=expert_rank, args=(options.folder, meeting, number, options.layers), daemon=True
        )
        for number in range(ranks)
    ]
    for child in children:
        child.start()
    geometry = Geometry.of(layers, ranks=ranks, tokens=max(tokens), dtype=torch.bfloat16)
    names = [f"expert rank {number}" for number in range(ranks)]
    memory, connections = listener.accept(geometry, layers, names, LIMIT_S)
    kind: Any = HostSignals
    if mode != "host":
        from ray_hetero.distributed.gpu_signals import GpuSignals

        kind = GpuSignals
    channel = ExpertChannel(memory, layers, connections, names, LIMIT_S, kind)
    signals: Any = channel._signals
    if mode == "host functions":
        signals.has_operations = False
    try:
        how = mode if mode != "memory operations" or signals.has_operations else "refused"
        found = [point(options, channel, count, ranks, how) for count in tokens]
        return [*found, fault(options, channel, children[-1].pid or 0, ranks, how)]
    finally:
        channel.close()
        for child in children:
            child.kill()
            child.join()


def expert_rank(folder: Path, meeting: str, number: int, layers: int) -> None:
    """A process whose experts give tokens back."""
    native_module(folder)
    from ray_hetero.distributed.expert_meeting import is_ready, reach
    from ray_hetero.distributed.expert_memory import native
    from ray_hetero.distributed.expert_service import ExpertService, HeldLayer

    cpus = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cpus[-1 - number % len(cpus)]})

    class Echo:
        function = native().ECHO
        context = 0
        with_team = 0

    held = {
        str(layer): HeldLayer(HIDDEN, torch.bfloat16, lambda x, w, i: x, Echo())
        for layer in range(layers)
    }
    service = ExpertService(held, number)
    reached = reach(meeting, 0, number, (), LIMIT_S)
    service.add(reached)
    is_ready(reached)
    with contextlib.suppress(torch.distributed.DistNetworkError):
        service.serve()


def point(
    options: argparse.Namespace, channel: Any, tokens: int, ranks: int, mode: str
) -> dict[str, Any]:
    """Microseconds a layer of so many tokens; the sums are checked."""
    device = "cpu" if mode == "host" else "cuda"
    x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16)

    def alone() -> torch.Tensor:
        y = x
        for _ in range(options.layers):
            y = y * 1
        return y

    without = timed(captured(alone, device), options.rounds)
    run = captured(handing_over(options.layers, channel, x, ranks), device)
    among = timed(run, options.rounds)
    x.normal_()
    torch.testing.assert_close(run(), x, rtol=2**-6, atol=2**-6)
    if channel.problem is not None:
        raise channel.problem
    return {
        "mode": mode,
        "ranks": ranks,
        "tokens": tokens,
        "us_a_layer": round((among - without) / options.layers, 2),
        "us_a_step_without": round(without, 1),
    }


def handing_over(
    layers: int, channel: Any, x: torch.Tensor, ranks: int
) -> Callable[[], torch.Tensor]:
    """A step of layers whose tokens are handed over."""
    tokens = x.shape[0]
    weights = torch.rand(tokens, CHOSEN, device=x.device)
    ids = torch.zeros(tokens, CHOSEN, device=x.device, dtype=torch.int32)

    def step() -> torch.Tensor:
        y = x
        for layer in range(layers):
            channel.hand_over(y, weights, ids, layer)
            y = channel.take(tokens, layer) * (1 / ranks)
        return y

    return step


def fault(
    options: argparse.Namespace, channel: Any, pid: int, ranks: int, mode: str
) -> dict[str, Any]:
    """Seconds from the death of an expert rank, in the middle of a step, to the end of the step."""
    device = "cpu" if mode == "host" else "cuda"
    x = torch.randn(1, HIDDEN, device=device, dtype=torch.bfloat16)
    run = captured(handing_over(options.layers, channel, x, ranks), device)
    os.kill(pid, signal.SIGSTOP)
    begin = time.perf_counter()
    killer = threading.Timer(1.0, lambda: os.kill(pid, signal.SIGKILL))
    killer.start()
    with contextlib.suppress(torch.distributed.DistNetworkError):
        run()
        if device == "cuda":
            torch.cuda.synchronize()
    ended = time.perf_counter() - begin - 1.0
    assert channel.problem is not None
    return {"mode": mode, "ranks": ranks, "ended_s": round(ended, 3), "said": str(channel.problem)}


def captured(step: Callable[[], torch.Tensor], device: str) -> Callable[[], torch.Tensor]:
    """Function that runs a step: a CUDA graph of it where there is a GPU."""
    if device == "cpu":
        return step
    # What is captured must have run before.
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()

    def replay() -> torch.Tensor:
        graph.replay()
        return y

    return replay


def timed(step: Callable[[], torch.Tensor], rounds: int) -> float:
    """Median microseconds of a step."""
    times = []
    for _ in range(WARM + rounds):
        begin = time.perf_counter()
        step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return 1e6 * sorted(times[WARM:])[rounds // 2]


if __name__ == "__main__":
    main()

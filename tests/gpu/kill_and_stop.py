"""kill -9 and SIGSTOP of each process that belongs to an engine on this host, in ten minutes.

    python tests/gpu/kill_and_stop.py                  a GPU with expert ranks, and [[gpu], [cpu]]
    python tests/gpu/kill_and_stop.py --layout cpu     two CPU ranks, on a host without a GPU
    python tests/gpu/kill_and_stop.py --lanes 4 --kill raylet --kill gcs_server

Ranks, engine, API server, and the raylet, head and keeper of the engine's own Ray.  Each ending is
checked for its reason, status, time, and for what it leaves behind.  The exit status is 0 if all
are as they should be.

A server takes 40 s to start, and 60 to 80 s to end with its Ray's agents; that whose engine is
killed lives through 70 s of other faults before.  All ten servers take four minutes in four lanes,
on 16 cores, the four whose raylet or head is killed two minutes.  A result is printed when it is
there.  Behind `--limit-s` no server is started; those that are left out are named.
"""

from __future__ import annotations

import argparse
import queue
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE), str(HERE.parent / "cluster")]

from faulty_server import FaultyServer  # noqa: E402
from gpu_host import SHARES, confined, environment, gpu_state  # noqa: E402
from leftovers import clean_scene, wait_until  # noqa: E402
from process_faults import LIMITS, OTHERS, RESTARTS, all_faults  # noqa: E402

from ray_hetero.cli.demo.model import write_demo_model  # noqa: E402

ORDER = ("raylet", "gcs_server", "engine", "keeper", "api server")
"""Of `OTHERS`: raylet and head first, whose ends are known least."""
GPU_SECONDS = 30.0
"""Longest wait for the memory of a GPU to be free again."""
GPU_OPTIONS = ("--gpu-memory-utilization", "0.2", "--kv-cache-memory-bytes", str(1 << 30))


@dataclass(frozen=True)
class Layout:
    """A kind of engine."""

    architecture: str
    sizes: tuple[int, int]
    options: tuple[str, ...] = ()
    keys: dict[str, Any] = field(default_factory=dict)


LAYOUTS = {
    "cpu": Layout("llama", (2, 1)),
    "pipeline": Layout("llama", (2, 1), GPU_OPTIONS, {"layout": [["gpu"], ["cpu"]]}),
    "experts": Layout(
        "mixtral", (1, 1), GPU_OPTIONS,
        {"layout": [["gpu"]], "experts": {"ranks": 1, "layers": "all"}},
    ),
}  # fmt: skip


@dataclass
class Work:
    """What threads take from: kinds of engine with the process that is killed last."""

    models: dict[str, Path]
    folder: Path
    limit_s: float
    left: queue.SimpleQueue[tuple[str, str]] = field(default_factory=queue.SimpleQueue)
    failed: list[str] = field(default_factory=list)
    began: float = field(default_factory=time.monotonic)

    def run(self, lane: int, lanes: int) -> None:
        """Take what is left until there is nothing."""
        with confined(lane, lanes):
            while time.monotonic() - self.began < self.limit_s:
                try:
                    name, last = self.left.get_nowait()
                except queue.Empty:
                    return
                try:
                    self._faults(name, last)
                # Whatever it is, the others go on.
                except BaseException as error:  # noqa: BLE001
                    # The end of the server's output is above.
                    told = f"{type(error).__name__}: {str(error)[:300]}"
                    self.failed.append(f"{name}, {last}: {told}")
                    self._say(name, f"FAILED, {last}: {told}")

    def not_reached(self) -> list[str]:
        """What the limit has left out."""
        return [", ".join(self.left.get_nowait()) for _ in range(self.left.qsize())]

    def _say(self, name: str, text: object) -> None:
        print(f"{time.monotonic() - self.began:6.0f} s  {name:<9} {text}", flush=True)

    def _faults(self, name: str, last: str) -> None:
        layout = LAYOUTS[name]
        with clean_scene() as scene:
            server = FaultyServer(
                scene, self.folder / f"{name}-{last.replace(' ', '-')}",
                self.models[layout.architecture], sizes=layout.sizes,
                more=("--dtype", "float32", *layout.options), extra=environment(),
                max_restarts=RESTARTS, **LIMITS, **layout.keys,
                cpu={"ranks_per_socket": SHARES},
            )  # fmt: skip
            try:
                # The one whose end is the slowest lives through nothing else.
                for fault in all_faults(server, last, lives=last == "engine"):
                    self._say(name, fault)
            except BaseException:
                print(server.server.child.tail(), flush=True)
                raise


def main() -> int:
    """Run all; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layout", action="append", choices=LAYOUTS, default=None)
    parser.add_argument("--kill", action="append", choices=OTHERS, default=None)
    parser.add_argument("--lanes", type=int, default=1, help="servers at the same time")
    parser.add_argument("--limit-s", type=float, default=600.0, help="no server is started behind")
    given = parser.parse_args()
    names = given.layout or ["experts", "pipeline"]
    before = None if names == ["cpu"] else gpu_state()
    with tempfile.TemporaryDirectory(prefix="kill-and-stop-", dir="/tmp") as root:
        folder = Path(root)
        models = {one: folder / one for one in {LAYOUTS[name].architecture for name in names}}
        for architecture, path in models.items():
            write_demo_model(path, architecture, dtype="f32")
        work = Work(models, folder, given.limit_s)
        for last in given.kill or ORDER:
            for name in names:
                work.left.put((name, last))
        lanes = [
            threading.Thread(target=work.run, args=(lane, given.lanes))
            for lane in range(given.lanes)
        ]
        for thread in lanes:
            thread.start()
        for thread in lanes:
            thread.join()
    if before is not None:
        most = before.used_mib + 64
        if not wait_until(lambda: gpu_state().used_mib <= most, GPU_SECONDS):
            work.failed.append(f"GPU memory: {before} before, {gpu_state()} after")
    for name in work.not_reached():
        print(f"not reached within {given.limit_s:g} s: {name}")
    print(f"{len(work.failed)} failed, {time.monotonic() - work.began:.0f} s", flush=True)
    for line in work.failed:
        print(line)
    return bool(work.failed)


if __name__ == "__main__":
    sys.exit(main())

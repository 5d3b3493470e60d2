"""Faults by seed over engines with ranks of three kinds: pretended GPUs, sockets, experts.

    python tests/soak --minutes 60                # prints its seed
    python tests/soak --minutes 10 --seed 1234    # the same faults in the same order

Clients send requests of any legal combination of parameters; answers are compared with those of
the same requests one by one, before the first fault.  An engine that ends is replaced by another,
once its status, its last line and what it has left behind are looked at.  With root, /dev/shm and
TMPDIR are file systems of the soak's own, which are filled up too.  Exit status 1, and a list, if
something is not as it ought to be.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "cluster"))

import httpx
import openai
import psutil
from clients import Clients, Findings, ask, requests
from engines import Server, is_healthy
from faults import DISKS, PROCESSES, Fault
from faulty_server import FaultyServer
from leftovers import AGENTS_GONE_SECONDS, Scene, clean_scene, segments, wait_until

from ray_hetero.cli.demo.model import write_demo_model

START_S = 600.0
"""Longest start of an engine on a busy machine."""
BACK_S = 480.0
"""Longest time from a fault to an engine that serves, or has ended: the limits below together."""
STOP_S = 120.0
CLIENTS = 6
LAYOUTS: tuple[dict[str, Any], ...] = (
    {"layout": [["gpu"]], "experts": {"ranks": 2}, "sizes": (1, 1)},
    {"layout": [["cpu"], ["gpu"]], "sizes": (2, 1)},
)
"""Of engines in turns: expert ranks are for stages of GPUs only."""
KEYS: dict[str, Any] = {
    "cpu": {"ranks_per_socket": 2, "kv_cache_gib": 0.25},
    "max_restarts": 20,
    "serving": {"step_timeout_s": 60},
    "warmup": {"step_timeout_s": 60},
    "exchange": {"timeout_s": 30},
    "startup": {"actor_timeout_s": 180, "load_timeout_s": 180},
}
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1", "RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'}
OPTIONS = ("--dtype", "float32", "--max-num-seqs", "8", "--num-gpu-blocks-override", "24")
"""Few blocks, so that requests are set back and computed again."""
OWN_FILES = "RAY_HETERO_SOAK_HAS_FILE_SYSTEMS"


class Soak:
    """One engine after the other, until the time is over."""

    def __init__(self, options: argparse.Namespace, scene: Scene, folder: Path) -> None:
        self._options, self._scene, self._folder = options, scene, folder
        self._draw = random.Random(options.seed)
        self._asked = requests(options.seed, options.requests)
        self._answers: list[list[int]] = []
        self._faults = PROCESSES + (DISKS if OWN_FILES in os.environ else ())
        self._ends = 0.0
        self._engines = 0
        self.findings = Findings()
        self.faults: list[dict[str, Any]] = []
        self.sizes: list[dict[str, float]] = []
        self._model = write_demo_model(folder / "model", "mixtral", dtype="f32")

    def run(self) -> None:
        """Everything."""
        while not self._ends or time.monotonic() < self._ends:
            server = self._start()
            clients = Clients(
                server.server, self._asked, self._answers, self.findings,
                limit_s=BACK_S, count=CLIENTS, seed=self._draw.randrange(2**31),
            )  # fmt: skip
            alive = True
            for _ in range(self._options.faults):
                if not alive or time.monotonic() > self._ends:
                    break
                alive = self._fault(server)
            if alive:
                self._check_answers(server.server)
            clients.stop()
            self._end(server, asked=alive)

    def _start(self) -> FaultyServer:
        self._engines += 1
        server = FaultyServer(
            self._scene, self._folder / f"engine-{self._engines}", self._model,
            more=OPTIONS, extra=PRETENDED | {"TORCHINDUCTOR_CACHE_DIR": str(self._folder / "code")},
            **KEYS, **LAYOUTS[self._engines % len(LAYOUTS)],
        )  # fmt: skip
        process = server.server.child.process
        up = wait_until(
            lambda: is_healthy(server.server.url) or process.poll() is not None, START_S
        )
        if not up or process.poll() is not None:
            raise RuntimeError(
                f"engine {self._engines} does not start:\n{server.server.child.tail()}"
            )
        if not self._answers:
            print("answers one by one …", flush=True)
            self._answers = [self._answer(server.server, one) for one in self._asked]
            self._ends = time.monotonic() + 60 * self._options.minutes
        self._say(f"engine {self._engines} serves")
        return server

    def _answer(self, server: Server, request: dict[str, Any]) -> list[int]:
        """The answer of an engine with nothing else to do."""
        found = ask(server, request, BACK_S)
        assert found is not None
        return found

    def _fault(self, server: FaultyServer) -> bool:
        """Inject one, and wait until the engine serves again or has ended; whether it lives."""
        pause = self._draw.expovariate(1 / self._options.every)
        process = server.server.child.process
        if wait_until(lambda: process.poll() is not None, min(pause, 4 * self._options.every)):
            self._wrong(f"engine {self._engines} ended with nobody's doing")
            return False
        fault = self._draw.choices(self._faults, [one.weight for one in self._faults])[0]
        # Drawn before: how long a fault takes must not change those after it.
        draw = random.Random(self._draw.randrange(2**31))
        start = time.monotonic()
        whom = fault.inject(server, draw)
        self._say(f"{fault.name}: {whom}")
        self.faults.append({"fault": fault.name, "whom": whom, "engine": self._engines})
        injected = time.monotonic()
        if not self._settled(server, fault):
            self._wrong(f"{fault.name} ({whom}): neither served nor ended in {BACK_S:g} s")
            server.server.child.process.kill()
        took = time.monotonic() - injected
        self.faults[-1] |= {"took_s": round(injected - start, 1), "back_s": round(took, 1)}
        if process.poll() is not None:
            return False
        self._measure(server)
        return True

    def _measure(self, server: FaultyServer) -> None:
        """Note sizes of the processes that live as long as the engine."""
        size: dict[str, float] = {"engine": self._engines, "segments": len(segments())}
        # It may be about to end.
        with contextlib.suppress(psutil.Error, StopIteration):
            own = psutil.Process(server.server.child.process.pid)
            for name, process in (("server", own), ("engine", server.engine)):
                size[f"{name}_mib"] = process.memory_full_info().uss >> 20
                size[f"{name}_descriptors"] = process.num_fds()
            self.sizes.append(size)

    def _settled(self, server: FaultyServer, fault: Fault) -> bool:
        process = server.server.child.process

        def settled() -> bool:
            if process.poll() is not None:
                return True
            try:
                if server.server.get("/health").status_code != 200:
                    return False
                return ask(server.server, self._asked[0], 60) == self._answers[0]
            # Whatever it says, it is not back.
            except Exception:  # noqa: BLE001
                return False

        return wait_until(settled, BACK_S, 0.5)

    def _check_answers(self, server: Server) -> None:
        """All requests once more, one by one."""
        for number, one in enumerate(self._asked):
            if self._answer(server, one) != self._answers[number]:
                self._wrong(f"request {number} has another answer in the end")

    def _end(self, server: FaultyServer, *, asked: bool) -> None:
        """End the engine, and look at status, reason and what is left."""
        child = server.server.child
        if asked:
            child.signal(signal.SIGTERM)
        if not wait_until(lambda: child.process.poll() is not None, STOP_S):
            self._wrong(f"engine {self._engines} runs {STOP_S:g} s after SIGTERM")
            child.process.kill()
        status = child.process.wait()
        last = server.last_line()[:300]
        self._say(f"engine {self._engines} ended with status {status}: {last}")
        if not asked:
            is_killed = status == -signal.SIGKILL  # The server itself: nobody is left to say why.
            if status == 0:
                self._wrong(f"engine {self._engines} ended with status 0: {last}")
            elif not is_killed and "ray_hetero" not in last:
                self._wrong(f"engine {self._engines} ended without a reason: {last}")
        elif status not in (0, -signal.SIGTERM, 143):
            self._wrong(f"engine {self._engines} ended with status {status} after SIGTERM")
        if not wait_until(lambda: not self._scene.leftovers(), AGENTS_GONE_SECONDS):
            self._wrong(f"engine {self._engines} left behind: {self._scene.leftovers()}")
            self._scene.sweep()

    def _wrong(self, text: str) -> None:
        self._say(f"WRONG: {text}")
        with self.findings.lock:
            self.findings.violations.append(text)

    def _say(self, text: str) -> None:
        print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)


def within_own_file_systems(arguments: list[str]) -> None:
    """Start this program again where /dev/shm is its own; goes on where that cannot be."""
    if OWN_FILES in os.environ or not shutil.which("unshare"):
        return
    unshare = ["unshare", "--mount", "--propagation", "private"]
    mount = ["mount", "-t", "tmpfs", "-o", "size=1g", "soak", "/dev/shm"]
    if subprocess.run([*unshare, *mount], capture_output=True, check=False).returncode:
        print("without file systems of its own: no full disks", flush=True)
        return
    again = 'mount -t tmpfs -o size=1g soak /dev/shm && exec "$@"'
    environment = os.environ | {OWN_FILES: "1"}
    os.execvpe(  # noqa: S606
        "unshare", [*unshare, "sh", "-c", again, "sh", sys.executable, *arguments], environment
    )


def main() -> int:
    """Run, and print what was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument(
        "--every", type=float, default=15, help="seconds between faults, on average"
    )
    parser.add_argument(
        "--faults", type=int, default=8, help="most of one engine, before the other's turn"
    )
    parser.add_argument("--requests", type=int, default=30, help="different ones")
    parser.add_argument("--seed", type=int, default=None, help="default: another one each time")
    parser.add_argument("--out", type=Path, default=Path("soak"), help="folder for logs")
    options = parser.parse_args()
    if options.seed is None:
        options.seed = random.SystemRandom().randrange(2**31)
    within_own_file_systems([str(Path(__file__).parent), *_arguments(options)])
    print(f"seed {options.seed}", flush=True)
    folder = options.out.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    found: Soak | None = None
    try:
        with clean_scene() as scene:
            if OWN_FILES in os.environ:
                _mount(scene.temporary)
            try:
                found = Soak(options, scene, folder)
                found.run()
            finally:
                scene.sweep()
                if OWN_FILES in os.environ:
                    subprocess.run(["umount", "--lazy", str(scene.temporary)], check=True)
    except (AssertionError, RuntimeError, httpx.HTTPError, openai.APIError) as error:
        if found is None:
            raise
        found.findings.violations.append(str(error))
    return _report(found, options, folder)


def _mount(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256m", "soak", str(folder)], check=True)


def _arguments(options: argparse.Namespace) -> list[str]:
    return [part for name, value in vars(options).items() for part in (f"--{name}", str(value))]


def _growth(sizes: list[dict[str, float]]) -> list[str]:
    """Sizes of the engine that has lived through most faults, behind its first and its last."""
    lived = Counter(size["engine"] for size in sizes)
    if not lived:
        return []
    longest, faults = lived.most_common(1)[0]
    first, *_, last = [size for size in sizes if size["engine"] == longest] * 2
    names = [name for name in first if name != "engine"]
    return [f"engine {longest:g}, behind the first and the last of {faults} faults: "
            + ", ".join(f"{name} {first[name]:g} → {last[name]:g}" for name in names)]  # fmt: skip


def _report(found: Soak, options: argparse.Namespace, folder: Path) -> int:
    kinds = Counter(one["fault"] for one in found.faults)
    result = {
        "seed": options.seed, "minutes": options.minutes, "faults": found.faults,
        "outcomes": found.findings.outcomes, "violations": found.findings.violations,
        "reasons": found.findings.reasons.most_common(40), "sizes": found.sizes,
    }  # fmt: skip
    (folder / "report.json").write_text(json.dumps(result, indent=1))
    longest = max((one.get("back_s", 0) for one in found.faults), default=0)
    print(f"seed {options.seed}: {len(found.faults)} faults: "
          + ", ".join(f"{count} × {name}" for name, count in kinds.most_common()))  # fmt: skip
    print("answers: " + ", ".join(f"{n} {kind}" for kind, n in found.findings.outcomes.items()))
    print(f"longest time back {longest:g} s; logs and report.json in {folder}")
    for line in _growth(found.sizes):
        print(line)
    for text in found.findings.violations:
        print(f"WRONG: {text}")
    print(f"{len(found.findings.violations)} things are not as they ought to be")
    return 1 if found.findings.violations else 0


if __name__ == "__main__":
    sys.exit(main())

"""Hours of mixed requests, with clients that leave and ranks that die; a report in the end.

    python benchmarks/soak.py --minutes 60 --out soak    # a tiny model, two ranks
    python benchmarks/soak.py --minutes 480 --restart 100 --fault-every 300 --out soak MODEL

Serves MODEL (a demo model unless given) over a pipeline of CPU ranks.  Clients ask for a mixture
of lengths, streamed or whole, sampled or greedy; some leave in the middle.  Greedy answers are
compared with those of the engine's first minute.  With --restart, a rank is killed or stopped now
and then.  OUT.json has all figures, OUT.md the summary.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import psutil
from soak_report import summary

from ray_hetero.cli.demo.model import write_demo_model

NAME = "soak"
STARTED = re.compile(r"started rank (\d+) \(.*\), pid (\d+)$", re.M)
SAMPLE_SECONDS = 10.0
START_SECONDS = 900.0
STOP_SECONDS = 120.0
STEP_LIMIT_SECONDS = 20.0
"""Of a step, so that a stopped rank does not hold the soak up for long."""


@dataclass
class Outcome:
    """What became of one request."""

    kind: str
    """done, left, refused (503), failed, wrong or lost."""
    at_s: float
    seconds: float
    tokens: int
    said: str = ""


@dataclass
class Fault:
    """A signal sent to a rank, and when the engine served again."""

    signal: str
    rank: int
    at_s: float
    back_after_s: float | None = None


@dataclass
class Sample:
    """Sizes of the engine's processes at one time."""

    at_s: float
    resident_mib: dict[str, float]
    descriptors: dict[str, int]
    segments: int


@dataclass
class Findings:
    """Everything that a run has found."""

    options: dict[str, Any]
    asked: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    status: int | None = None
    left_behind: list[str] = field(default_factory=list)


class Engine:
    """The server under test."""

    def __init__(self, options: argparse.Namespace, model: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._segments = _segments()
        keys = {
            "max_restarts": options.restart,
            "serving": {"step_timeout_s": STEP_LIMIT_SECONDS},
            "cpu": {"ranks_per_socket": options.ranks, "kv_cache_gib": options.kv_cache_gib},
        }
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(model),
            "--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(port),
            "--enforce-eager", "--max-model-len", str(options.context),
            "--distributed-executor-backend", "ray_hetero",
            "--pipeline-parallel-size", str(options.ranks),
            "--additional-config", json.dumps({"ray_hetero": keys}),
        ]  # fmt: skip
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
            )

    def is_healthy(self) -> bool:
        """Whether /health is good."""
        try:
            return httpx.get(f"{self.url}/health", trust_env=False, timeout=30).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_healthy(self, limit_s: float) -> None:
        """Wait; ends the program when the server does."""
        deadline = time.monotonic() + limit_s
        while not self.is_healthy():
            if self.process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"the server does not answer; its output is in {self._log}")
            time.sleep(0.5)

    @property
    def ranks(self) -> dict[int, int]:
        """Process ids of the ranks that were started last."""
        found = STARTED.findall(self._log.read_text(errors="replace"))
        return {int(rank): int(pid) for rank, pid in found}

    def sample(self, at_s: float) -> Sample:
        """Sizes now."""
        server = psutil.Process(self.process.pid)
        named = {"api server": server}
        for child in server.children():
            if "EngineCore" in " ".join(child.cmdline()):
                named["engine"] = child
        named |= {f"rank {rank}": psutil.Process(pid) for rank, pid in self.ranks.items()}
        return Sample(
            at_s,
            {name: round(p.memory_info().rss / 2**20, 1) for name, p in named.items()},
            {name: p.num_fds() for name, p in named.items()},
            len(_segments() - self._segments),
        )

    def stop(self) -> tuple[int, list[str]]:
        """Stop it; its status, and what it has left behind."""
        session = self.process.pid
        self.process.send_signal(signal.SIGTERM)
        status = self.process.wait(STOP_SECONDS)
        time.sleep(10)
        left = [f"shared memory {name}" for name in _segments() - self._segments]
        for process in psutil.process_iter(["pid", "name", "status"]):
            # A process of somebody else may end meanwhile.
            try:
                if os.getsid(process.pid) == session and process.info["status"] != "zombie":
                    left.append(f"process {process.pid}: {process.info['name']}")
            except OSError:
                continue
        return status, left


def _segments() -> frozenset[str]:
    return frozenset(path.name for path in Path("/dev/shm").iterdir())  # noqa: S108


class Load:
    """Clients, faults and samples, each in threads of its own."""

    def __init__(self, engine: Engine, options: argparse.Namespace) -> None:
        self._engine, self._options = engine, options
        self._random = random.Random(options.seed)
        self._start = time.monotonic()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.findings = Findings(vars(options) | {"out": str(options.out)})
        self._known = [self._prompt(16 + 40 * number) for number in range(8)]
        self._answers: dict[int, str] = {}

    @property
    def _now(self) -> float:
        return round(time.monotonic() - self._start, 2)

    def _prompt(self, tokens: int) -> list[int]:
        return [self._random.randrange(8, 600) for _ in range(tokens)]

    def run(self) -> None:
        """Everything, for as long as was asked."""
        for number, prompt in enumerate(self._known):
            self._answers[number] = self._ask({"prompt": prompt, "max_tokens": 24})[0]
        tasks: list[Callable[[], None]] = [self._client] * self._options.clients + [self._watch]
        if self._options.restart:
            tasks.append(self._break_ranks)
        threads = [threading.Thread(target=task) for task in tasks]
        for thread in threads:
            thread.start()
        self._stop.wait(60 * self._options.minutes)
        self._stop.set()
        for thread in threads:
            thread.join(STOP_SECONDS)

    def _client(self) -> None:
        while not self._stop.is_set() and self._engine.process.poll() is None:
            with self._lock:
                self.findings.asked += 1
                request, known, leave_after = self._next()
            start = time.monotonic()
            kind, said, tokens = self._outcome(request, known, leave_after)
            seconds = round(time.monotonic() - start, 3)
            with self._lock:
                self.findings.outcomes.append(Outcome(kind, self._now, seconds, tokens, said))
            if kind == "refused":
                self._stop.wait(1)

    def _next(self) -> tuple[dict[str, Any], int | None, int | None]:
        """A request, its number if the answer is known, and when its client leaves."""
        draw = self._random
        if draw.random() < 0.3:
            known = draw.randrange(len(self._known))
            return {"prompt": self._known[known], "max_tokens": 24}, known, None
        longest = self._options.context // 2
        tokens = min(longest, int(2 ** draw.uniform(0, longest.bit_length())))
        request = {
            "prompt": self._prompt(tokens),
            "max_tokens": draw.randrange(1, 128),
            "stream": draw.random() < 0.5,
            "temperature": draw.choice([0, 0.7]),
        }
        is_leaving = request["stream"] and draw.random() < self._options.leaving
        return request, None, draw.randrange(1, 8) if is_leaving else None

    def _outcome(
        self, request: dict[str, Any], known: int | None, leave_after: int | None
    ) -> tuple[str, str, int]:
        try:
            text, tokens = self._ask(request, leave_after)
        except openai.APIStatusError as error:
            return "refused" if error.status_code == 503 else "failed", error.message[:200], 0
        except openai.APIError as error:
            return "failed", error.message[:200], 0
        if known is not None and text != self._answers[known]:
            return "wrong", f"prompt {known}: {text!r}", tokens
        return "done" if leave_after is None else "left", "", tokens

    def _ask(self, request: dict[str, Any], leave_after: int | None = None) -> tuple[str, int]:
        web = openai.DefaultHttpxClient(trust_env=False, timeout=600)
        with openai.OpenAI(
            base_url=f"{self._engine.url}/v1", api_key="none", http_client=web, max_retries=0
        ) as client:
            given = {"temperature": 0, **request}
            answer = client.completions.create(model=NAME, **given)
            if not request.get("stream"):
                return answer.choices[0].text, answer.usage.completion_tokens
            text, chunks = "", 0
            for chunk in answer:
                text, chunks = text + chunk.choices[0].text, chunks + 1
                if chunks == leave_after:
                    answer.close()
                    break
            return text, chunks

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS) and self._engine.process.poll() is None:
            # Ranks come and go.
            try:
                sample = self._engine.sample(self._now)
            except psutil.Error:
                continue
            self.findings.samples.append(sample)

    def _break_ranks(self) -> None:
        draw = random.Random(self._options.seed)
        for _ in range(self._options.restart):
            if self._stop.wait(draw.expovariate(1 / self._options.fault_every)):
                return
            ranks = self._engine.ranks
            rank = draw.choice(sorted(ranks))
            number = draw.choice([signal.SIGKILL, signal.SIGSTOP])
            fault = Fault(number.name, rank, self._now)
            self.findings.faults.append(fault)
            os.kill(ranks[rank], number)
            while self._engine.ranks == ranks or not self._engine.is_healthy():
                if self._stop.wait(0.5):
                    return
            fault.back_after_s = round(self._now - fault.at_s, 1)


def parse_options() -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a demo model unless given")
    parser.add_argument("--out", type=Path, required=True, help="without ending")
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--ranks", type=int, default=2, help="stages, one CPU rank each")
    parser.add_argument("--context", type=int, default=1024, help="longest request in tokens")
    parser.add_argument("--kv-cache-gib", type=float, default=0.5)
    parser.add_argument("--leaving", type=float, default=0.2, help="share of streams left early")
    parser.add_argument("--restart", type=int, default=0, help="most faults; 0 for none")
    parser.add_argument("--fault-every", type=float, default=300, help="seconds, on average")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    """Serve, load, stop, write."""
    options = parse_options()
    with tempfile.TemporaryDirectory(prefix="soak-") as scratch:
        model = Path(options.model or scratch) if options.model else Path(scratch) / "model"
        if not options.model:
            write_demo_model(model)
        engine = Engine(options, model, options.out.with_suffix(".log"))
        engine.wait_until_healthy(START_SECONDS)
        load = Load(engine, options)
        load.run()
        found = load.findings
        if engine.process.poll() is None:
            found.status, found.left_behind = engine.stop()
        else:
            found.status = engine.process.returncode
    options.out.with_suffix(".json").write_text(json.dumps(asdict(found), default=str))
    text = summary(json.loads(options.out.with_suffix(".json").read_text()))
    options.out.with_suffix(".md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()

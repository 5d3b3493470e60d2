"""Serve a model over two CPU ranks, ask three questions, stop it, and leave nothing behind.

    python examples/serve_and_chat.py MODEL [options of `vllm serve` …]

This is what `make demo` runs: the same two commands that anyone would type, one after the other.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from openai import OpenAI

from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host

RANKS = 2
STOP_TIMEOUT_S = 60
LAST_LINES = 30
# (EngineCore pid=123) INFO 11-21 06:02:47 [progress.py:48] text
PREFIX = re.compile(r"^(?:\([^)]*pid=\d+\) )?(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?")
STEP = re.compile(r"\[\d/\d\] ")
TABLE = "┏┃┡│└"
PHASES = (
    (re.compile(""), "loading vLLM"),
    (re.compile("non-default args: "), "reading the model's configuration"),
    (re.compile("Using max model len "), "loading vLLM in the engine's process"),
    (re.compile("Initializing a V1 "), "[1/6] discover: starting Ray"),  # codespell:ignore
    (re.compile(r"\[1/6\] "), "[2/6] plan"),
    (re.compile(r"\[3/6\] "), "[4/6] spawn: loading vLLM in the process of each rank"),
    (re.compile(r"\[4/6\] "), "[5/6] connect: loading weights"),
    (re.compile(r"\[5/6\] "), "[6/6] warm up"),
    (re.compile("init engine "), "starting the HTTP server"),
)
"""What vLLM and this package write into the log, and what the start is busy with from then on."""
EVERY_S = 10
QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What does a baker do?",
)
NEXT = """
What to try next:
  ray-hetero doctor                 what this host has, and what is missing
  ray-hetero plan MODEL             where a model of yours would go, and how fast it would be
  vllm serve MODEL --distributed-executor-backend ray_hetero
"""


class StartDisplay:
    """Shows what a start is busy with: a line that counts seconds, in a file one now and then."""

    def __init__(self) -> None:
        """Begin with the first phase."""
        self._lock = threading.Lock()
        self._is_live = sys.stdout.isatty()
        self._number = 0
        self._is_over = False
        self._began = self._told = time.monotonic()

    def saw(self, line: str) -> None:
        """Show a line of the log if it is about a step, and notice what begins with it."""
        text = PREFIX.sub("", line.rstrip("\n"))
        with self._lock:
            if STEP.match(text) or text.startswith(("Placement", "Start-up", *TABLE)):
                self._print(f"  {text.rstrip()}")
            # Later processes write what earlier ones have written, too.
            for number in range(self._number + 1, len(PHASES)):
                if PHASES[number][0].search(text):
                    self._begin(number)

    def _begin(self, number: int) -> None:
        # The six steps have lines of their own with their seconds.
        if not STEP.match(self._name):
            self._print(f"  {self._name}: {time.monotonic() - self._began:.1f} s")
        self._number, self._began = number, time.monotonic()

    @property
    def _name(self) -> str:
        return PHASES[self._number][1]

    def tick(self) -> None:
        """Show how long it has been busy with it."""
        with self._lock:
            now = time.monotonic()
            if self._is_over or (not self._is_live and now - self._told < EVERY_S):
                return
            self._write(f"  … {self._name}: {now - self._began:.0f} s", end="")
            self._told = now

    def end(self) -> None:
        """There is nothing to wait for any more."""
        with self._lock:
            self._is_over = True
            if self._is_live:
                self._write("", end="")

    def _print(self, text: str) -> None:
        self._write(text, end="\n")
        self._told = time.monotonic()

    def _write(self, text: str, end: str) -> None:
        if self._is_live:
            print(f"\r\x1b[K{text}", end=end, flush=True)
        else:
            print(text, flush=True)


class Server:
    """A `vllm serve` process whose log is read while it runs."""

    def __init__(self, model: str, backend: str, options: list[str]) -> None:
        """Start it; `wait_until_healthy` says when it answers."""
        self.port = free_port()
        self.lines: list[str] = []
        command = serve_command(model, backend, self.port, options)
        print(f"$ {shlex.join(command)}\n", flush=True)
        self._display = StartDisplay()
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            self.lines.append(line)
            self._display.saw(line)

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Wait until /health answers; returns the seconds it took."""
        start = time.monotonic()
        try:
            while not self._is_healthy():
                if self.process.poll() is not None:
                    raise SystemExit(f"{self.end()}vllm serve ended with {self.process.returncode}")
                if time.monotonic() - start > timeout_s:
                    raise SystemExit(f"{self.end()}no answer from /health in {timeout_s:g} s")
                self._display.tick()
                time.sleep(0.25)
        finally:
            self._display.end()
        return time.monotonic() - start

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:  # noqa: S310
                return bool(answer.status == 200)
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            return False

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def end(self) -> str:
        """The last lines of its log."""
        self._reader.join(timeout=2)
        return "".join(self.lines[-LAST_LINES:])

    def stop(self) -> int:
        """Ctrl-C, and its exit status."""
        self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise SystemExit(f"{self.end()}still there {STOP_TIMEOUT_S} s after Ctrl-C") from None


def serve_command(model: str, backend: str, port: int, options: list[str]) -> list[str]:
    """What anyone would type, and the split of a socket where the host has only one."""
    command = [
        *(str(Path(sys.executable).with_name("vllm")), "serve", model),
        *("--distributed-executor-backend", backend),
        *("--pipeline-parallel-size", str(RANKS)),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    sockets = len(sockets_of(read_host(gpus=False)))
    if backend == "ray_hetero" and sockets < RANKS:
        config = {"ray_hetero": {"cpu": {"ranks_per_socket": RANKS}}}
        command += ["--additional-config", json.dumps(config)]
    return command + options


def free_port() -> int:
    """A TCP port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def chat(address: str, model: str, question: str) -> int:
    """One streamed chat completion, printed as it comes; returns the number of its tokens."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
    print(f"\nuser: {question}\nassistant: ", end="", flush=True)
    began = time.monotonic()
    first = 0.0
    tokens = 0
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    for event in stream:
        text = event.choices[0].delta.content if event.choices else None
        if text:
            first = first or time.monotonic()
            print(text, end="", flush=True)
        if event.usage is not None:
            tokens = event.usage.completion_tokens
    seconds = time.monotonic() - (first or began)
    rate = f", {(tokens - 1) / seconds:.0f} tokens/s" if tokens > 1 and seconds else ""
    print(
        f"\n  ({tokens} tokens, the first after {(first or began) - began:.2f} s{rate})", flush=True
    )
    return tokens


def main() -> int:
    """Serve, chat, stop."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a local path or a name on the hub")
    parser.add_argument("--backend", default="ray_hetero", help="another executor, to compare")
    parser.add_argument("--timeout-s", type=float, default=600, help="longest wait for the start")
    arguments, options = parser.parse_known_args()
    server = Server(arguments.model, arguments.backend, options)
    try:
        took = server.wait_until_healthy(arguments.timeout_s)
        print(f"  ready after {took:.0f} s")
        tokens = [chat(server.address, arguments.model, question) for question in QUESTIONS]
    finally:
        status = server.stop() if server.process.poll() is None else server.process.returncode
    if status != 0 or not all(tokens):
        print(f"{server.end()}exit status {status}, answers of {tokens} tokens")
        return 1
    print(NEXT)
    print("stopped with exit status 0")
    return 0


if __name__ == "__main__":
    sys.exit(main())

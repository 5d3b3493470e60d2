"""Serve a model over two CPU ranks, chat with it once, stop it, and leave nothing behind.

    python examples/serve_and_chat.py MODEL [options of `vllm serve` …]

This is what `make demo` runs: the same two commands that anyone would type, one after the other.
"""

from __future__ import annotations

import argparse
import json
import re
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


class Server:
    """A `vllm serve` process whose log is read while it runs."""

    def __init__(self, model: str, backend: str, options: list[str]) -> None:
        """Start it; `wait_until_healthy` says when it answers."""
        self.port = free_port()
        self.lines: list[str] = []
        command = serve_command(model, backend, self.port, options)
        print(f"$ {' '.join(command)}\n", flush=True)
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        for line in self.process.stdout or ():
            text = PREFIX.sub("", line.rstrip("\n"))
            self.lines.append(line)
            if STEP.match(text) or text.startswith(("Placement", *TABLE)):
                print(f"  {text.rstrip()}", flush=True)

    def wait_until_healthy(self, timeout_s: float) -> float:
        """Wait until /health answers; returns the seconds it took."""
        start = time.monotonic()
        told = 0
        while not self._is_healthy():
            waited = time.monotonic() - start
            if self.process.poll() is not None:
                raise SystemExit(f"{self.end()}vllm serve ended with {self.process.returncode}")
            if waited > timeout_s:
                raise SystemExit(f"{self.end()}no answer from /health in {timeout_s:g} s")
            if waited // 10 > told:
                told = int(waited // 10)
                print(f"  … starting, {waited:.0f} s", flush=True)
            time.sleep(0.25)
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


def chat(address: str, model: str) -> int:
    """One streamed chat completion, printed as it comes; returns the number of its chunks."""
    client = OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=120)
    question = "What did the child write in the book?"
    print(f"\nuser: {question}\nassistant:", end="", flush=True)
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": question}],
        max_tokens=64,
        temperature=0,
        stream=True,
    )
    chunks = 0
    for event in stream:
        text = event.choices[0].delta.content if event.choices else None
        if text:
            chunks += 1
            print(text, end="", flush=True)
    print("\n", flush=True)
    return chunks


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
        chunks = chat(server.address, arguments.model)
    finally:
        status = server.stop() if server.process.poll() is None else server.process.returncode
    if status != 0 or chunks == 0:
        print(f"{server.end()}exit status {status}, {chunks} chunks of text")
        return 1
    print("stopped with exit status 0")
    return 0


if __name__ == "__main__":
    sys.exit(main())

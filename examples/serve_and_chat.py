"""Serve a model over two CPU ranks, ask three questions, stop it, and leave nothing behind.

    python examples/serve_and_chat.py MODEL [options of `vllm serve` …]

This is what `make demo` runs: the same two commands that anyone would type, one after the other.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from pathlib import Path

from openai import OpenAI

from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from ray_hetero.cli.serving.server_process import ServerProcess, free_port
from ray_hetero.errors import StartupError

RANKS = 2
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


def serve_command(model: str, backend: str, port: int, options: list[str]) -> list[str]:
    """Command that a user would type, with the split of a socket where the host has only one."""
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
    command = serve_command(arguments.model, arguments.backend, free_port(), options)
    print(f"$ {shlex.join(command)}\n", flush=True)
    server = ServerProcess(command)
    try:
        took = server.wait_until_healthy(arguments.timeout_s)
        print(f"  ready after {took:.0f} s")
        tokens = [chat(server.address, arguments.model, question) for question in QUESTIONS]
    except StartupError as error:
        print(error)
        tokens = [0]
    finally:
        status = server.stop()
    if status != 0 or not all(tokens):
        print(f"{server.end()}exit status {status}, answers of {tokens} tokens")
        return 1
    print(NEXT)
    print("stopped with exit status 0")
    return 0


if __name__ == "__main__":
    sys.exit(main())

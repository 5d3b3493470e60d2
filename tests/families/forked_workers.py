"""Ray's worker processes forked from one that has imported vLLM.

An engine's ranks are processes of Ray, and each would import vLLM anew: most of the time that a
small model takes.  Ray is given a program (`write_program`) that it starts in the place of Python.
For a worker, it asks a process with everything imported (`serve`) to fork, and stays until the
child has ended.  The child runs Ray's worker, with the arguments, environment and files that Ray
has chosen.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch._dynamo",
    "transformers",
    "vllm.model_executor.layers.fused_moe",
    "vllm.model_executor.model_loader",
    "vllm.v1.worker.cpu_worker",
)
"""Modules that ranks need, none of which imports Ray: that keeps the first environment it sees."""
PIECE = 1 << 16
"""Bytes that are read at once."""
ENTRY = "setup_worker.py"
"""Ray's program that sets a worker's environment and then becomes the worker."""
LONGEST_REQUEST = 1 << 20


def ask(address: str, words: list[str]) -> None:
    """Have a worker forked, and wait until it has ended.

    Args:
        address: path of the forking process's socket.
        words: arguments of the worker's program, its path first.

    """
    request = {"words": words, "environment": dict(os.environ), "folder": os.getcwd()}
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(address)
        socket.send_fds(connection, [b"f"], [0, 1, 2])
        connection.sendall(json.dumps(request).encode())
        connection.shutdown(socket.SHUT_WR)
        # The child holds the other end, so that it closes when the child has ended.
        connection.recv(1)


def serve(address: str) -> None:
    """Fork a child for every request, until this process is ended."""
    import_everything()
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(address)
        server.listen(16)
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            if os.fork() == 0:
                server.close()
                _become(connection)
            connection.close()


def import_everything() -> None:
    """Import what ranks would import one by one.

    Raises:
        RuntimeError: one of the modules imports Ray.

    """
    for name in IMPORTED:
        importlib.import_module(name)
    if "ray" in sys.modules:
        raise RuntimeError(f"one of {', '.join(IMPORTED)} imports Ray")


def _become(connection: socket.socket) -> None:
    """In the child: be the program that was asked for."""
    _, files, _, _ = socket.recv_fds(connection, 1, 3)
    text = b""
    while piece := connection.recv(PIECE):
        text += piece
    request: dict[str, Any] = json.loads(text)
    os.setsid()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = request["words"]
    os.execvp = _go_on  # type: ignore[assignment]
    _run(sys.argv[0])


def _go_on(_: str, args: list[str]) -> None:
    """In the place of `bash -c "exec python worker …"`: this process goes on as the worker."""
    import shlex

    words = shlex.split(args[-1])
    sys.argv = words[words.index("exec") + 2 :]
    _run(sys.argv[0])


def _run(program: str) -> None:
    import runpy

    runpy.run_path(program, run_name="__main__")
    os._exit(0)


def write_program(folder: Path, address: str) -> Path:
    """Write what Ray starts in the place of Python.

    Workers are forked, all other processes are Python's own.
    """
    program = folder / "python"
    program.write_text(
        f"#!/bin/sh\n"
        f'case "$1" in */{ENTRY}) exec {sys.executable} -I -S {__file__} {address} "$@";; esac\n'
        f'exec {sys.executable} "$@"\n'
    )
    program.chmod(0o755)
    return program


if __name__ == "__main__":
    ask(sys.argv[1], sys.argv[2:])

"""One contender in a process of its own: its lines of JSON, or the end of what it said."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Outcome:
    """What came of a contender."""

    status: int | str
    """Exit status, or why there is none."""
    seconds: float
    output: str

    def answers(self, mark: str) -> list[dict[str, Any]]:
        """The lines of JSON behind a mark."""
        return [
            json.loads(line.removeprefix(mark))
            for line in self.output.splitlines()
            if line.startswith(mark)
        ]

    @property
    def end_of_output(self) -> str:
        """For a contender that failed."""
        return "" if self.status == 0 else self.output[-2000:]


def run(
    command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float
) -> Outcome:
    """Run a command to its end, or until it is late; what it says goes into a file.

    Args:
        command: the program and its arguments.
        environment: added to this process's own.
        log: the file.
        timeout_s: after so many seconds it is stopped, with all that it has started.

    """
    log.parent.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    with log.open("w") as stream:
        process = subprocess.Popen(
            command,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment),
        )
        try:
            status: int | str = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            status = f"not done in {timeout_s:g} s"
            _stop(process)
    seconds = round(time.monotonic() - start, 1)
    return Outcome(status, seconds, log.read_text(errors="replace"))


def _stop(process: subprocess.Popen[bytes]) -> None:
    itself = psutil.Process(process.pid)
    family = [*itself.children(recursive=True), itself]
    for member in family:
        if member.is_running():
            member.terminate()
    for member in psutil.wait_procs(family, timeout=15)[1]:
        member.kill()
    process.wait()

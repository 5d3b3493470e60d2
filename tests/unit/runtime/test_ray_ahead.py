"""The process that keeps a Ray for an engine: whose it is and when it ends, with a faked Ray."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import ray
from vllm import envs

from ray_hetero.compat.engine import engine_environment
from ray_hetero.executor.hetero_executor import HeteroExecutor
from ray_hetero.launch import early_ray
from ray_hetero.runtime import ray_ahead
from ray_hetero.runtime.ray_ahead import VARIABLE, OwnedRay, RayAhead

ADDRESS = "10.0.0.9:6379"
SECONDS = 30.0
FAKED = """
import pathlib, sys
sys.path[:] = sys.argv[3:]
from ray_hetero.runtime import local_ray, ray_ahead
sys.excepthook = ray_ahead.say_failure
local_ray.start = lambda log_to_driver, folder: {start}
local_ray.logs = lambda: "logs"
local_ray.stop = lambda: pathlib.Path({stopped!r}).touch()
ray_ahead.keep(int(sys.argv[1]), sys.argv[2])
"""


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that is there once a keeper has stopped its Ray."""
    path = tmp_path / "stopped"
    monkeypatch.setattr(ray_ahead, "KEEP", FAKED.format(start=repr(ADDRESS), stopped=str(path)))
    return path


@pytest.fixture
def ahead(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayAhead]:
    started = RayAhead()
    monkeypatch.setenv(VARIABLE, started.address)
    yield started
    started.end()
    started.process.wait(SECONDS)


def claimed() -> OwnedRay:
    owned = OwnedRay.claimed()
    assert owned is not None
    return owned


def test_an_engine_owns_the_ray_and_ends_it(ahead: RayAhead, stopped: Path) -> None:
    owned = claimed()
    assert VARIABLE not in os.environ
    assert (owned.pid, owned.address) == (ahead.process.pid, ADDRESS)
    assert owned.processes() == [psutil.Process(owned.pid)]
    # An engine outlives the process that has started it for a moment.
    ahead.end()
    time.sleep(0.2)
    assert not stopped.exists()
    owned.end()
    assert stopped.exists()
    assert ahead.process.wait(SECONDS) == 0
    assert owned.processes() == []


def test_it_ends_with_an_engine_that_is_killed(ahead: RayAhead, stopped: Path) -> None:
    owned = claimed()
    owned.connection.close()
    assert ahead.process.wait(SECONDS) == 0
    assert stopped.exists()


def test_a_keeper_that_hangs_is_killed(
    ahead: RayAhead, stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    owned = claimed()
    os.kill(owned.pid, signal.SIGSTOP)
    monkeypatch.setattr(ray_ahead, "END_SECONDS", 0.2)
    owned.end()
    assert ahead.process.wait(SECONDS) == -signal.SIGKILL


def test_signals_to_all_processes_of_a_service_leave_it_to_the_engine(ahead: RayAhead) -> None:
    owned = claimed()
    os.kill(owned.pid, signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        ahead.process.wait(0.3)
    assert os.getpgid(owned.pid) != os.getpgid(0)
    assert os.getsid(owned.pid) == os.getsid(0)
    owned.end()


def test_its_folder_goes_with_it_however_it_ends(ahead: RayAhead) -> None:
    folder = Path(ahead.folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    # As Ray ends it when its head is gone.
    ahead.process.kill()
    ahead.wait()
    assert not folder.exists()


def test_without_an_engine_it_ends_with_its_starter(ahead: RayAhead, stopped: Path) -> None:
    ahead.end()
    assert ahead.process.wait(SECONDS) == 0
    assert stopped.exists()


def test_an_engine_starts_its_own_where_the_keeper_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ray_ahead, "KEEP", FAKED.format(start="1 / 0", stopped=str(tmp_path / "s")))
    failed = RayAhead()
    monkeypatch.setenv(VARIABLE, failed.address)
    assert OwnedRay.claimed() is None
    assert failed.process.wait(SECONDS) == 1
    monkeypatch.setenv(VARIABLE, failed.address)
    assert OwnedRay.claimed() is None
    said = capfd.readouterr()
    assert "Traceback" not in said.out + said.err
    assert "so that the engine starts another one: division by zero" in said.out + said.err


def test_no_ray_is_claimed_where_none_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert OwnedRay.claimed() is None


# --- when there is one -------------------------------------------------------------------------


class Started:
    """Stands for `RayAhead`."""

    all: list[Started] = []  # noqa: RUF012
    address = "name"
    folder = "/tmp/rh-1"

    def __init__(self) -> None:
        self.is_ended = False
        self.all.append(self)

    def end(self) -> None:
        self.is_ended = True


@pytest.fixture
def spawning(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("RAY_ADDRESS", "RAY_AUTH_MODE", "VLLM_RPC_BASE_PATH", VARIABLE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")
    monkeypatch.setattr(ray_ahead, "RayAhead", Started)
    monkeypatch.setattr(Started, "all", [])
    monkeypatch.setattr(early_ray, "spec_of", lambda config: config.spec)
    yield
    engine_environment.take_back()


def engine(backend: Any = HeteroExecutor, **spec: Any) -> Any:
    asked = {"ray_address": None, "placement_group": None, "engines": 1} | spec
    return SimpleNamespace(
        parallel_config=SimpleNamespace(distributed_executor_backend=backend),
        spec=SimpleNamespace(**asked),
    )


@pytest.mark.usefixtures("spawning")
def test_the_process_of_an_engine_is_told_of_its_ray() -> None:
    with early_ray.started_for(engine()), early_ray.started_for(engine()):
        assert os.environ[VARIABLE] == "name"
        assert os.environ["RAY_AUTH_MODE"] == "token"
        assert os.environ["VLLM_RPC_BASE_PATH"] == Started.folder
    (started,) = Started.all
    assert not started.is_ended
    engine_environment.take_back()
    assert VARIABLE not in os.environ
    assert "RAY_AUTH_MODE" not in os.environ


@pytest.mark.usefixtures("spawning")
def test_what_was_started_for_an_engine_that_fails_ends() -> None:
    with pytest.raises(RuntimeError, match="no engine"), early_ray.started_for(engine()):
        raise RuntimeError("no engine")
    assert [started.is_ended for started in Started.all] == [True]


@pytest.mark.usefixtures("spawning")
def test_a_mode_that_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with early_ray.started_for(engine()):
        assert os.environ["RAY_AUTH_MODE"] == "disabled"


@pytest.mark.usefixtures("spawning")
@pytest.mark.parametrize(
    "asked",
    [
        {"backend": "mp"},
        {"ray_address": ADDRESS},
        {"placement_group": object()},
        {"engines": 2},
    ],
)
def test_an_engine_that_has_another_ray_or_none_starts_none(asked: dict[str, Any]) -> None:
    with early_ray.started_for(engine(**asked)):
        assert Started.all == []


@pytest.mark.usefixtures("spawning")
@pytest.mark.parametrize(
    ("name", "value"),
    [("RAY_ADDRESS", ADDRESS), ("VLLM_WORKER_MULTIPROC_METHOD", "fork")],
)
def test_nor_does_one_that_a_variable_tells_of_another_or_that_is_forked(
    name: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    with early_ray.started_for(engine()):
        assert Started.all == []


@pytest.mark.usefixtures("spawning")
def test_nor_an_engine_of_this_process_or_where_this_process_is_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(ray, "is_initialized", lambda: True)
        with early_ray.started_for(engine()):
            assert Started.all == []
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    assert not envs.VLLM_ENABLE_V1_MULTIPROCESSING
    with early_ray.started_for(engine()):
        assert Started.all == []

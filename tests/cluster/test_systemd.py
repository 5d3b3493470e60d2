"""The unit of deploy/systemd, run by a systemd in namespaces of its own."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from engines import START_SECONDS, STOP_SECONDS, Model, environment_of, free_port
from leftovers import Scene, wait_until
from systemd_machine import ROOT, Machine, booted

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

UNIT = "ray-hetero@chat.service"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    with booted(tmp_path) as made:
        yield made


def test_the_unit_serves_starts_again_and_stops(
    machine: Machine, scene: Scene, model: Model, tmp_path: Path
) -> None:
    port = free_port()
    given = environment_of(scene)
    given.pop("PATH")
    given |= {
        "MODEL": str(model("llama")),
        "PORT": str(port),
        "OPTIONS": "--enforce-eager --max-model-len 256",
        "PYTHONPATH": str(ROOT),
    }
    lines = [f'{name}="{value}"\n' for name, value in given.items()]
    (tmp_path / "chat.env").write_text("".join(lines))

    def is_healthy() -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
        return False

    def said() -> str:
        return "".join(log.read_text(errors="replace")[-8000:] for log in tmp_path.glob("*.log"))

    def is_in(state: str) -> bool:
        return machine.state(UNIT, "SubState") == state

    def ranks() -> list[int]:
        listed = machine.run("ps", "-eo", "pid,args").splitlines()
        return [int(line.split()[0]) for line in listed if "ray::RankActor" in line]

    machine.run("systemctl", "start", "--no-block", UNIT)
    assert wait_until(is_healthy, START_SECONDS, 1), said()
    (rank,) = ranks()
    machine.run("kill", "-9", str(rank))
    assert wait_until(lambda: machine.state(UNIT, "SubState") == "auto-restart", STOP_SECONDS), (
        said()
    )
    ended = time.monotonic()
    # As `vllm serve` ends when a rank has died.
    assert (machine.state(UNIT, "ExecMainStatus"), machine.state(UNIT, "Result")) == (
        "1",
        "exit-code",
    )
    assert wait_until(lambda: is_in("running"), STOP_SECONDS), said()
    assert time.monotonic() - ended > 5
    assert machine.state(UNIT, "NRestarts") == "1"
    assert wait_until(is_healthy, START_SECONDS, 1), said()
    assert ranks() != [rank]
    machine.run("systemctl", "stop", UNIT, limit_s=2 * STOP_SECONDS)
    assert (machine.state(UNIT, "SubState"), machine.state(UNIT, "Result")) == ("dead", "success")
    left = machine.run("ps", "-eo", "pid,args").splitlines()[1:]
    assert [line for line in left if "systemd" not in line and " ps " not in line] == []
    scene.assert_clean()

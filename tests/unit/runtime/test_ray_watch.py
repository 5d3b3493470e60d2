"""The end of a Ray's process is noticed at once, and named; an end that was asked for is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from threading import Event

import psutil
import pytest

from ray_hetero.runtime.ray_watch import KEEPER, RayWatch, servers_among


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as running:
        yield running
        running.kill()


class Told:
    """What a watch has said."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.is_told = Event()

    def __call__(self, report: str) -> None:
        self.said.append(report)
        self.is_told.set()


def test_an_end_is_noticed_at_once(process: subprocess.Popen[bytes]) -> None:
    told = Told()
    watch = RayWatch({process.pid: "the head (gcs_server", os.getpid(): "this"}, told)
    assert not told.is_told.wait(0.2)
    process.kill()
    assert told.is_told.wait(2)
    watch.stop()
    said = f"the head (gcs_server, pid {process.pid}) has ended without being asked to"
    assert told.said == [said]


def test_of_those_that_end_together_the_first_is_named(process: subprocess.Popen[bytes]) -> None:
    told = Told()
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as keeper:
        watch = RayWatch({keeper.pid: "the keeper (ray_ahead", process.pid: "the raylet ("}, told)
        process.kill()
        keeper.kill()
        assert told.is_told.wait(5)
        watch.stop()
    assert told.said[0].startswith("the keeper (ray_ahead")


def test_what_has_ended_before_is_told_too(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    told = Told()
    watch = RayWatch({process.pid: "the head (gcs_server"}, told)
    assert told.is_told.wait(2)
    watch.stop()


def test_after_its_stop_a_watch_says_nothing(process: subprocess.Popen[bytes]) -> None:
    told, before = Told(), len(os.listdir("/proc/self/fd"))
    watch = RayWatch({process.pid: "the head (gcs_server"}, told)
    watch.stop()
    watch.stop()
    process.kill()
    time.sleep(0.2)
    assert told.said == []
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_servers_of_a_ray_are_found_by_name(process: subprocess.Popen[bytes]) -> None:
    assert servers_among([psutil.Process(process.pid)], None) == {}
    assert servers_among([psutil.Process()], 7) == {7: KEEPER}

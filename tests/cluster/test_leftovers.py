"""A scene tells shared memory that its own killed processes left from that of somebody else's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from multiprocessing.shared_memory import SharedMemory

import pytest
from leftovers import MARKER, WATCH_SECONDS, Scene, wait_until

HOLDER = """
from multiprocessing import resource_tracker, shared_memory
import time
held = shared_memory.SharedMemory(create=True, size=4096)
resource_tracker.unregister(held._name, "shared_memory")
print(held.name, flush=True)
time.sleep(600)
"""


def holder(environment: Mapping[str, str]) -> tuple[subprocess.Popen[str], str]:
    """A process that holds a segment, and the segment's name."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER], env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


@pytest.fixture
def abandoned(scene: Scene) -> tuple[str, str]:
    """Segments of two killed processes: one of the scene, and somebody else's."""
    names = []
    for environment in (dict(os.environ) | {MARKER: scene.marker}, dict(os.environ)):
        process, name = holder(environment)
        # A foreign one is known as such once it was seen to be held.
        wait_until(lambda name=name: name in scene.foreign, 4 * WATCH_SECONDS)
        process.kill()
        process.wait()
        names.append(name)
    return names[0], names[1]


def test_only_segments_of_the_scene_are_its_leftovers(
    scene: Scene, abandoned: tuple[str, str]
) -> None:
    own, foreign = abandoned
    assert scene.leftovers() == [f"/dev/shm/{own}"]
    for name in (own, foreign):
        segment = SharedMemory(name)
        segment.close()
        segment.unlink()
    assert foreign in scene.foreign
    assert not scene.leftovers()

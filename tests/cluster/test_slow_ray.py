"""An own Ray on a host so busy that Ray gives up its start: it is started again, with a limit."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from engines import environment_of
from leftovers import Scene

STARTS = """
import itertools, json, os, sys, time, types
from pathlib import Path

import psutil
import ray
from ray._private import node, services

from ray_hetero.errors import StartupError
from ray_hetero.runtime import local_ray

late, asked, get_node = int(sys.argv[1]), itertools.count(1), services.get_node
seconds = itertools.count(step=31)

def known_late(*args, **kwargs):
    if next(asked) <= late:
        raise RuntimeError("the raylet is not known yet")
    return get_node(*args, **kwargs)

# Ray's limit is a number in its code: its clock runs, the real raylet is up.
node.time = types.SimpleNamespace(**{**vars(time), "monotonic": lambda: next(seconds)})
services.get_node = known_late
found = {"error": ""}
try:
    local_ray.start()
except StartupError as error:
    found["error"] = str(error)
running = psutil.Process().children(recursive=True)
found["raylets"] = sum(one.name() == "raylet" for one in running)
found["heads"] = sum(one.name() == "gcs_server" for one in running)
if not found["error"]:
    found["cpus"] = ray.cluster_resources()["CPU"]
    local_ray.stop()
found["left"] = [one.name() for one in psutil.Process().children(recursive=True)]
found["folders"] = len(local_ray._folders)
print(json.dumps(found))
"""


@pytest.mark.parametrize("late", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_start_that_ray_gives_up_is_made_again(scene: Scene, late: int) -> None:
    answer = subprocess.run(
        [sys.executable, "-c", STARTS, str(late)], env=environment_of(scene), check=True,
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    found = json.loads(answer.stdout.splitlines()[-1])
    assert answer.stderr.count("Ray was not up within its own limit of 30 s") == late
    assert (found["left"], found["folders"]) == ([], 0)
    if late < 3:
        assert (found["error"], found["raylets"], found["heads"]) == ("", 1, 1)
        assert found["cpus"] >= 1
    else:
        assert "3 times it was not up in time" in found["error"]
        assert (found["raylets"], found["heads"]) == (0, 0)
    scene.assert_clean()

"""Bundles on a real Ray: those of others are used as they are, those that cannot be are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from engines import (
    HERE,
    START_SECONDS,
    Model,
    Stock,
    batch,
    engine,
    environment_of,
    hetero,
    prompts,
    start,
)
from leftovers import Scene

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

SHORT = """
import json, logging, ray, tempfile
from dataclasses import replace
from pathlib import Path
from placement.cluster import ray_cluster as cluster
from placement.cluster.assignment import assign
from placement.errors import ReservationError
from placement.cluster.layout import Layout
from ray_hetero.runtime import local_ray

def error_of(seats):
    try:
        cluster.reserve(seats, accelerator_type=None, timeout_s=2, name="mine")
    except ReservationError as error:
        return str(error)

local_ray.init_in(
    Path(tempfile.gettempdir()), num_cpus=1, num_gpus=1, object_store_memory=100 << 20,
    include_dashboard=False,
)
nodes = cluster.discover(unit="package", shares=2, timeout_s=60)
two = assign(Layout((("cpu",), ("cpu",))), nodes)
one = [replace(two[0], bundle_cpus=1.0)]
told = {"fewer CPUs than cores": error_of(two)}
other = ray.util.placement_group([{"CPU": 1}], name="another-job")
assert other.wait(60)
told["held by another job"] = error_of(one)
ray.util.remove_placement_group(other)
told["too much memory"] = cluster.reservable_memory({0: 1 << 60}, one)
fits = cluster.reservable_memory({0: 1 << 20}, one)
mine = cluster.reserve(
    one, accelerator_type=None, timeout_s=60, name="mine", memory_bytes=fits
)
told["reserved"] = mine.group.bundle_specs
cluster.release(mine.group)
print(json.dumps(told))
"""


def test_what_ray_cannot_give_is_told_with_the_nodes(scene: Scene) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SHORT], env=environment_of(scene), capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    fewer = told["fewer CPUs than cores"]
    assert "Ray cannot give these ranks their bundles: node " in fewer
    assert "CPU asked " in fewer
    assert ", Ray has 1 there. Nodes: " in fewer
    assert "`ray-hetero ray-args`" in fewer
    held = told["held by another job"]
    assert "Ray gave no placement group in 2 s (placement.timeout_s): node " in held
    assert "CPU asked 1, free 0 of 1. Nodes: " in held
    assert "another-job holds 1 CPU" in held
    assert told["too much memory"] == {}
    assert "are not reserved in Ray" in ran.stderr
    assert [bundle["memory"] for bundle in told["reserved"]] == [1 << 20]
    scene.assert_clean()


@pytest.mark.parametrize("stages", [2, None], ids=["two stages", "chosen"])
def test_an_engine_inside_a_group_uses_its_bundles_and_leaves_it(
    stages: int | None, scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    checkpoint = model("llama", "f32")
    shares = hetero(cpu={"ranks_per_socket": 2})
    request, answer = logs / "request.json", logs / "answer.json"
    request.write_text(
        json.dumps(
            {
                "ray": {
                    "num_cpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False
                },
                "bundles": [{"CPU": 1}, {"CPU": 1}, {"CPU": 1}],
                "wrong": [engine(checkpoint, 4, dtype="float32")],
                "engine": engine(checkpoint, stages or 1, dtype="float32", **shares),
                "batch": batch(prompts()),
            }
        )
    )  # fmt: skip
    command = [sys.executable, str(HERE / "group_process.py"), str(request), str(answer)]
    child = start(scene, command, logs / "group")
    assert child.wait(START_SECONDS) == 0, child.tail()
    log = (logs / "group").read_text()
    assert ("stages: " in log) == (stages is None), log
    found = json.loads(answer.read_text())
    (error,) = found["errors"]
    assert "4 pipeline stages" in error
    assert "inside a placement group and uses only its bundles" in error
    assert "0: {CPU: 1, GPU: 0}, 1: {CPU: 1, GPU: 0}, 2: {CPU: 1, GPU: 0}" in error
    assert found["tokens"] == stock("llama-f32")
    assert found["groups"] == found["after"] == {"trial": "CREATED"}
    scene.assert_clean()

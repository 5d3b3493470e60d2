"""A Ray cluster of one node in a child process, as an administrator starts it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines import START_SECONDS, STOP_SECONDS, environment_of, free_port, ray_command, start
from leftovers import Scene, wait_until

LOOK = """
import json, ray
ray.init("{address}", logging_level="error", log_to_driver=False)
groups = ray.util.placement_group_table().values()
print(json.dumps({{
    "free": ray.available_resources().get("CPU", 0), "all": ray.cluster_resources()["CPU"],
    "groups": [group["name"] for group in groups if group["state"] != "REMOVED"],
    "answer": ray.get(ray.remote(lambda: 6 * 7).remote(), timeout=60),
}}))
"""


@contextmanager
def cluster(scene: Scene, log: Path, *options: str) -> Iterator[str]:
    """Start a head node with two CPUs; its address.  Stopped in the end, with all its processes.

    Args:
        scene: where its processes belong.
        log: for its output.
        options: of `ray start`, after those that are given here.

    """
    port = free_port()
    command = [
        *ray_command(), "start", "--head", "--block",
        f"--port={port}", "--num-cpus=2",
        "--object-store-memory=100000000", "--include-dashboard=false", "--disable-usage-stats",
        f"--temp-dir={scene.temporary / 'ray'}", *options,
    ]  # fmt: skip
    child = start(scene, command, log)
    try:
        assert wait_until(lambda: "Ray runtime started" in child.log, START_SECONDS), child.tail()
        yield f"127.0.0.1:{port}"
    finally:
        child.signal(signal.SIGTERM)
        child.wait(STOP_SECONDS)


def wait_until_taken(submit: Callable[[], subprocess.CompletedProcess[str]]) -> None:
    """Have `ray job submit` typed until the cluster takes the job.

    Its agent comes up a little after its head; any other error fails the test.
    """

    def is_taken() -> bool:
        ran = submit()
        assert ran.returncode == 0 or "No available agent" in ran.stderr, ran.stderr
        return ran.returncode == 0

    assert wait_until(is_taken, START_SECONDS, 1), "the job's agent did not come up"


def look(scene: Scene, address: str) -> dict[str, Any]:
    """Connect like any other job: free CPUs, placement groups, the answer of a task."""
    ran = subprocess.run(
        [sys.executable, "-c", LOOK.format(address=address)],
        env=environment_of(scene), capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    found: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return found

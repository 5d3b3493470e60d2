"""`ray job submit -- vllm serve …` on a cluster, and the ways to see how its engine is.

The driver of a job has no GPU and no CPU of its own; the job's environment and working directory
reach the ranks; `ray job stop` leaves nothing, and the cluster goes on.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import (
    START_SECONDS,
    VLLM,
    Child,
    Model,
    environment_of,
    free_port,
    hetero,
    is_healthy,
    prompts,
    start,
)
from leftovers import MARKER, Scene, clean_scene, marked_processes, wait_until
from quiet import noise
from ray_cluster import cluster, look, wait_until_taken

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

Ran = subprocess.CompletedProcess[str]

JOB = "one-engine"
NAME = "model"
"""What the job calls its model: a folder of its working directory."""
TOKENS = 64
STRANGER = """
import sys
from ray_hetero.runtime.ray_connection import RayConnection
RayConnection(sys.argv[1])
"""


@dataclass(frozen=True)
class Head:
    """A head node, as its administrator knows it."""

    scene: Scene
    address: str
    dashboard: str

    def type(self, *words: str, address: str = "", **extra: str) -> Ran:
        """Run a command of this environment to its end."""
        command = [str(Path(sys.executable).with_name(words[0])), *words[1:]]
        environment = environment_of(self.scene, {"RAY_ADDRESS": address or self.address, **extra})
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=120, check=False
        )

    def job(self, *words: str) -> str:
        """What `ray job …` prints; fails the test when it fails."""
        ran = self.type("ray", "job", *words, address=self.dashboard)
        assert ran.returncode == 0, ran.stdout + ran.stderr
        return ran.stdout


@pytest.fixture(scope="module")
def head(logs: Path) -> Iterator[Head]:
    with clean_scene() as scene:
        port = free_port()
        options = (
            "--num-gpus=1", "--include-dashboard=true", f"--dashboard-port={port}",
            "--dashboard-agent-listen-port=0",
        )  # fmt: skip
        with cluster(scene, logs / "head", *options) as address:
            yield Head(scene, address, f"http://127.0.0.1:{port}")


@pytest.fixture(scope="module")
def stranger(head: Head, logs: Path) -> Child:
    """An engine's process without the cluster's token; it waits for Ray while others are tested."""
    command = [sys.executable, "-c", STRANGER, head.address]
    extra = {"RAY_AUTH_MODE": "disabled", "RAY_AUTH_TOKEN": ""}
    return start(head.scene, command, logs / "stranger", extra)


@pytest.fixture(scope="module")
def url(
    head: Head, stranger: Child, scene: Scene, model: Model, tmp_path_factory: Any
) -> Iterator[str]:
    """Where the job's server listens."""
    work = tmp_path_factory.mktemp("work")
    shutil.copytree(model("llama", "f32"), work / NAME)
    port = free_port()
    backend = hetero(layout=[["cpu"], ["gpu"]])
    runtime_env = {
        "env_vars": {
            # All that is the job's, and nothing else, belongs to the scene.
            MARKER: scene.marker,
            "TMPDIR": str(scene.temporary),
            "RAY_HETERO_CLAIM_DIR": str(scene.claims),
            "RAY_HETERO_PRETEND_GPU": "1",
        }
    }
    submit = (
        "submit", "--no-wait", "--submission-id", JOB, "--working-dir", str(work),
        "--runtime-env-json", json.dumps(runtime_env),
        "--", VLLM, "serve", NAME, "--host", "127.0.0.1", "--port", str(port),
        "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
        "--distributed-executor-backend", backend["distributed_executor_backend"],
        "--pipeline-parallel-size", "2",
        "--additional-config", json.dumps(backend["additional_config"]),
    )  # fmt: skip
    wait_until_taken(lambda: head.type("ray", "job", *submit, address=head.dashboard))
    found = f"http://127.0.0.1:{port}"
    assert wait_until(lambda: is_healthy(found), START_SECONDS, 0.5), head.job("logs", JOB)
    yield found
    head.type("ray", "job", "stop", JOB, address=head.dashboard)


@pytest.fixture(scope="module")
def answered(url: str) -> str:
    """What the engine has said to one request."""
    asked = {"model": NAME, "prompt": prompts()[9], "max_tokens": TOKENS, "ignore_eos": True}
    answer = httpx.post(f"{url}/v1/completions", json=asked, trust_env=False, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == TOKENS
    return str(answer["choices"][0]["text"])


def test_the_job_answers_from_its_working_directory(answered: str) -> None:
    assert len(answered) > 20


def test_the_jobs_environment_reaches_the_ranks(answered: str, scene: Scene) -> None:
    ranks = [words for words in marked_processes(scene.marker).values() if "RankActor" in words]
    assert len(ranks) == 2


def test_the_jobs_log_shows_start_up_and_who_writes_each_line(answered: str, head: Head) -> None:
    log = head.job("logs", JOB)
    assert [step for step in range(1, 7) if f"[{step}/6]" not in log] == []
    assert re.search(r"│ +1 │ +1 │ +0 │ gpu ", log)
    for rank, kind in enumerate(("cpu", "gpu")):
        assert re.search(rf"\(rank {rank} {kind} \S+ pid=\d+.*\)", log)


def test_actors_have_telling_names(answered: str, head: Head) -> None:
    listed = head.type("ray", "list", "actors", "--format", "json", address=head.dashboard)
    actors = json.loads(listed.stdout)
    alive = sorted(actor["name"] for actor in actors if actor["state"] == "ALIVE")
    ours = [name for name in alive if name.startswith("ray_hetero-")]
    assert [re.sub(r"^ray_hetero-\w+-", "", name) for name in ours] == [
        "rank0-stage0-tp0-cpu-socket0", "rank1-stage1-tp0-gpu-gpu0", "status",
    ]  # fmt: skip


def _status(head: Head, *options: str, **extra: str) -> str:
    ran = head.type("ray-hetero", "status", *options, **extra)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_status_for_programs(answered: str, head: Head, scene: Scene) -> None:
    def steps() -> list[int]:
        found[:] = json.loads(_status(head, "--json"))
        return [rank["steps"] for rank in found[0]["ranks"]]

    found: list[Any] = []
    # One step for the prompt and one for every token but the last; ranks report now and then.
    assert wait_until(lambda: steps() == [TOKENS, TOKENS], 20), found
    (engine,) = found
    assert (engine["state"], engine["model"], engine["healthy"]) == ("serving", NAME, True)
    assert [(rank["kind"], rank["layers"]) for rank in engine["ranks"]] == [("cpu", 2), ("gpu", 2)]
    for rank in engine["ranks"]:
        assert rank["health"] == "ok"
        assert "RankActor" in marked_processes(scene.marker)[rank["pid"]]
        assert rank["resident_bytes"] > 100 << 20
        assert rank["recent_busy_ms"] > 0


def test_status_for_people(answered: str, head: Head) -> None:
    rows = [line for line in _status(head).splitlines() if "│" in line]
    assert [re.split(r" *│ *", row)[3] for row in rows] == ["cpu", "gpu"]
    assert all(" ok " in row for row in rows)


def test_without_the_token_one_line_says_what_to_type(stranger: Child, head: Head) -> None:
    assert stranger.wait(START_SECONDS) == 1
    last = stranger.log.splitlines()[-1]
    assert f"StartupError: the Ray cluster at '{head.address}' asks for a token, and" in last
    assert "Type: export RAY_AUTH_MODE=token, and put the cluster's token in" in last


def test_stop_leaves_nothing_and_the_cluster_goes_on(url: str, head: Head, scene: Scene) -> None:
    assert "was stopped" in head.job("stop", JOB)
    assert noise(head.job("logs", JOB)) == []
    scene.assert_clean()
    found = look(head.scene, head.address)
    assert found == {"free": 2, "all": 2, "groups": [], "answer": 42}
    assert _status(head) == "no engine of ray_hetero runs on this cluster\n"

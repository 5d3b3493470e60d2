"""However an engine ends, nothing of it is left; a cluster that was there before stays.

The normal end is every engine of the other modules, whose scene must be clean as well; SIGTERM is
the end of test_server.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import (
    HERE,
    NAME,
    START_SECONDS,
    STOP_SECONDS,
    Model,
    Stock,
    backend,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    serve,
    start,
    tokens,
    wait_until_healthy,
)
from leftovers import AGENTS_GONE_SECONDS, Scene, clean_scene, marked_processes, wait_until
from quiet import noise
from ray_cluster import cluster, look

pytestmark = pytest.mark.timeout(1800)

EXECUTOR = "ray_hetero.executor.HeteroExecutor"


def _ray_processes(scene: Scene) -> list[str]:
    found = marked_processes(scene.marker).values()
    return [words for words in found if "ray::" in words or "/ray/" in words]


@pytest.mark.slow
def test_ctrl_c_while_serving(scene: Scene, logs: Path, model: Model) -> None:
    server = serve(scene, logs / "ctrl_c", model("llama", "bf16"), *backend(2))
    wait_until_healthy(server)
    running = _ray_processes(scene)
    assert any("raylet" in words for words in running)
    assert sum("ray::RankActor" in words for words in running) == 2
    with server.client() as client:
        stream = iter(
            client.completions.create(
                model=NAME, prompt=prompts()[1], max_tokens=1500, stream=True,
                extra_body={"ignore_eos": True},
            )
        )  # fmt: skip
        next(stream)
        server.ctrl_c()
        # vLLM's HTTP server stays until its clients have left; the engine does not.
        assert wait_until(lambda: not _ray_processes(scene), STOP_SECONDS)
    server.child.wait(STOP_SECONDS)
    assert noise(server.child.log) == []
    scene.assert_clean()


@pytest.mark.slow
def test_sigterm_while_an_engine_starts(scene: Scene, logs: Path, model: Model) -> None:
    """Asked where no rank hears of it: the server's process waits for its engine."""
    server = serve(scene, logs / "starts", model("llama", "bf16"), *backend(2))
    ended = server.child.process.poll
    assert wait_until(
        lambda: "] discover" in server.child.log or ended() is not None, START_SECONDS, 0.05
    )
    server.child.signal(signal.SIGTERM)
    assert server.child.wait(STOP_SECONDS) == 0, server.child.tail()
    assert "asked to end while the engine starts" in server.child.log
    assert "Traceback" not in server.child.log
    scene.assert_clean(AGENTS_GONE_SECONDS)


def test_a_script_that_ends_looks_normal(
    scene: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    # The script neither shuts its engine down nor drops it.
    left = {**engine(model("llama", "f32"), 2, dtype="float32"), "left": True}
    (answered,) = run_engines(scene, logs / "ends", [(left, [batch(prompts())])])
    assert tokens(answered[0]) == stock("llama-f32")
    assert noise((logs / "ends" / "log").read_text()) == []
    scene.assert_clean()


@pytest.mark.slow
def test_a_failed_start_leaves_nothing_and_the_next_engine_starts(
    scene: Scene, logs: Path, model: Model, stock: Stock, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model("llama", "f32"), broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    failed, answered = run_engines(
        scene,
        logs / "failed",
        [
            ({**engine(broken, 2), "fails": True}, []),
            (engine(model("llama", "f32"), 2, dtype="float32"), [batch(prompts())]),
        ],
    )
    assert "Engine core initialization failed" in failed[0]["error"]  # codespell:ignore
    assert failed[0]["left"] == []
    assert tokens(answered[0]) == stock("llama-f32")
    log = (logs / "failed" / "log").read_text()
    said = (
        r"ray_hetero cannot start: joining groups and loading weights: rank [01] \(cpu.*Safetensor"
    )
    assert re.search(said, log)
    scene.assert_clean()


@pytest.mark.slow
def test_a_start_that_vllm_ends_names_the_rank_and_looks_like_one_error(
    scene: Scene, logs: Path, model: Model
) -> None:
    little = {"max_model_len": 2048, "kv_cache_memory_bytes": 100_000}
    cpu = {"ranks_per_socket": 2, "kv_cache_gib": 0.001}
    settings = engine(model("llama", "f32"), 2, **little, **hetero(cpu=cpu))
    (failed,) = run_engines(scene, logs / "no_room", [({**settings, "fails": True}, [])])
    assert failed[0]["left"] == []
    log = (logs / "no_room" / "log").read_text()
    assert re.search(r"rank 0 \(cpu, .* GiB left for its KV cache, and one request of 2048", log)
    assert "RankWatch" not in log
    assert "Started a local Ray instance" not in log
    scene.assert_clean()


ABRUPT_END = """
import psutil, ray
from ray_hetero.runtime.ray_connection import RayConnection

connection = RayConnection(None)
(raylet,) = (child for child in psutil.Process().children() if child.name() == "raylet")
assert raylet.children()
shutdown = ray.shutdown

def kill_and_shut_down():
    raylet.kill()
    shutdown()

ray.shutdown = kill_and_shut_down
connection.close()
print("closed")
"""


def test_what_outlives_an_own_ray_is_ended(scene: Scene, logs: Path) -> None:
    child = start(scene, [sys.executable, "-c", ABRUPT_END], logs / "abrupt_end")
    assert child.wait(STOP_SECONDS) == 0, child.tail()
    assert child.log.rstrip().endswith("closed")
    assert scene.leftovers() == []


STARTER_IS_KILLED = """
import os, signal
from ray_hetero.runtime.ray_ahead import RayAhead

RayAhead()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_ray_that_was_started_ahead_ends_with_its_starter(scene: Scene, logs: Path) -> None:
    child = start(scene, [sys.executable, "-c", STARTER_IS_KILLED], logs / "starter")
    assert child.wait(STOP_SECONDS) == -signal.SIGKILL
    # It may not have got as far as Ray yet.
    scene.assert_clean(START_SECONDS)


@pytest.fixture(scope="module")
def other() -> Iterator[Scene]:
    """For a cluster that is not the engine's."""
    with clean_scene() as made:
        yield made


@pytest.mark.slow
def test_a_running_cluster_stays_and_serves_an_asynchronous_engine_by_its_dotted_path(
    scene: Scene, other: Scene, logs: Path, model: Model, stock: Stock
) -> None:
    request, answer = logs / "async.request.json", logs / "async.answer.json"
    own = {"dtype": "float32", "distributed_executor_backend": EXECUTOR}
    arguments = engine(model("llama", "f32"), 2, **own)
    request.write_text(json.dumps({"engine": arguments, "batch": batch(prompts())}))
    with cluster(other, logs / "cluster") as address:
        child = start(
            scene,
            [sys.executable, str(HERE / "async_process.py"), str(request), str(answer)],
            logs / "async",
            {"RAY_ADDRESS": address},
        )
        assert child.wait(START_SECONDS) == 0, child.tail()
        assert json.loads(answer.read_text()) == stock("llama-f32")
        scene.assert_clean()
        assert look(other, address) == {"free": 2, "all": 2, "groups": [], "answer": 42}
    other.assert_clean()

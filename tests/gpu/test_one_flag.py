"""The one flag alone, on a model that is larger than what the GPU may use: as a new user types it.

The seconds that each way took are in the report, FOLDER/one_flag.json.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from engines import (
    NAME,
    START_SECONDS,
    STOP_SECONDS,
    batch,
    environment_of,
    free_port,
    is_healthy,
    ray_command,
    run_engines,
    serve,
    tokens,
    vllm_command,
    wait_until_healthy,
)
from gpu_host import IS_PRETENDED, environment, needs_gpus
from leftovers import Scene, wait_until
from quiet import noise
from ray_cluster import cluster, wait_until_taken

from placement.host.gpus import read_gpus
from placement.units import GIB

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from heavy_tailed import CIRCLE, DRAWN, write_checkpoint
from shapes import SHAPES

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(IS_PRETENDED, reason="a pretended GPU has no memory to be short of"),
]

SHAPE = "1b-16"
"""2.8 GiB of weights in bf16."""
USABLE_GIB = 6.5
"""Of the GPU: with vLLM's defaults the weights, their KV cache for one request of the longest
length, and what sampling takes do not fit."""
FLAG = ("--distributed-executor-backend", "ray_hetero")
JOB = "one-flag"
PROMPTS = [[7], [100, 5000, 128000], [(31 * i) % 128000 + 3 for i in range(700)]]
ANSWER = 24
CHOSEN = r"stages: (GPU → socket|socket → GPU) – .* does not fit on the GPUs alone"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(SHAPE, tmp_path_factory.mktemp("models") / SHAPE)


@pytest.fixture(scope="module")
def share() -> float:
    memory = read_gpus()[0].memory_bytes
    assert memory is not None
    return round(USABLE_GIB * GIB / memory, 4)


def check(prompt: list[int], answer: list[int]) -> None:
    """Greedy text of such a checkpoint goes round in circles; some tokens have one embedding."""
    alike = DRAWN // SHAPES[SHAPE]["hidden_size"]
    expected, last = [], prompt[-1] % alike
    for _ in range(ANSWER):
        last = last // CIRCLE * CIRCLE + (last + 1) % CIRCLE
        expected.append(last)
    assert [token % alike for token in answer] == expected


def check_server(url: str) -> None:
    """Its answers to the prompts, as a client gets them."""
    for prompt in PROMPTS:
        asked = {
            "model": NAME, "prompt": prompt, "max_tokens": ANSWER, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True,
        }  # fmt: skip
        answered = httpx.post(f"{url}/v1/completions", json=asked, trust_env=False, timeout=120)
        check(prompt, answered.json()["choices"][0]["token_ids"])


def report(way: str, figures: dict[str, Any]) -> None:
    """Keep a way's seconds where RAY_HETERO_GPU_REPORT says, a folder."""
    if folder := os.environ.get("RAY_HETERO_GPU_REPORT"):
        path = Path(folder, "one_flag.json")
        found = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(found | {way: figures}, indent=1))


def test_a_server(scene: Scene, logs: Path, model: Path, share: float) -> None:
    more = ("--gpu-memory-utilization", str(share), "--skip-tokenizer-init")
    server = serve(scene, logs / "serve", model, *FLAG, *more, extra=environment())
    wait_until_healthy(server)
    server.child.saw("ready")
    check_server(server.url)
    server.child.signal(signal.SIGTERM)
    assert server.child.wait(STOP_SECONDS) == 0, server.child.tail()
    assert re.search(CHOSEN, server.child.log)
    assert noise(server.child.log) == []
    scene.assert_clean()
    report("vllm serve", server.child.seconds)


def test_a_notebook(scene: Scene, logs: Path, model: Path, share: float) -> None:
    engine = {
        "model": str(model), "distributed_executor_backend": "ray_hetero",
        "gpu_memory_utilization": share, "skip_tokenizer_init": True, "enforce_eager": True,
    }  # fmt: skip
    answers = run_engines(
        scene, logs / "notebook", [(engine, [batch(PROMPTS, max_tokens=ANSWER)])],
        extra=environment(), ray={},
    )  # fmt: skip
    for prompt, answer in zip(PROMPTS, tokens(answers[0][0]), strict=True):
        check(prompt, answer)
    log = (logs / "notebook" / "log").read_text()
    assert re.search(CHOSEN, log)
    found = re.search(r"Start-up: ([0-9.]+) s", log)
    assert found
    report("notebook", {"start": float(found[1])})
    scene.assert_clean()


def test_a_job(scene: Scene, logs: Path, model: Path, share: float) -> None:
    port, dashboard = free_port(), free_port()
    options = (
        # As `ray-hetero ray-args` counts them: a rank's bundle has all cores of its socket.
        f"--num-cpus={len(os.sched_getaffinity(0))}",
        # On two of them the model would fit, and no stage be on the socket.
        "--num-gpus=1", "--include-dashboard=true",
        f"--dashboard-port={dashboard}", "--dashboard-agent-listen-port=0",
    )  # fmt: skip
    submit = (
        "submit", "--no-wait", "--submission-id", JOB,
        "--runtime-env-json", json.dumps({"env_vars": environment()}),
        "--", *vllm_command(), "serve", str(model), "--served-model-name", NAME,
        "--host", "127.0.0.1", "--port", str(port), *FLAG,
        "--gpu-memory-utilization", str(share), "--skip-tokenizer-init",
    )  # fmt: skip

    def job(*words: str) -> subprocess.CompletedProcess[str]:
        address = {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        return subprocess.run(
            [*ray_command(), "job", *words], env=environment_of(scene, address),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    url = f"http://127.0.0.1:{port}"
    with cluster(scene, logs / "head", *options):
        wait_until_taken(lambda: job(*submit))
        began = time.monotonic()
        assert wait_until(lambda: is_healthy(url), START_SECONDS, 0.5), job("logs", JOB).stdout
        report("ray job submit", {"ready": time.monotonic() - began})
        check_server(url)
        log = job("logs", JOB).stdout
        assert job("stop", JOB).returncode == 0
    assert re.search(CHOSEN, log)
    assert set(re.findall(r"started rank \d+ \((\w+),", log)) == {"cpu", "gpu"}
    scene.assert_clean()

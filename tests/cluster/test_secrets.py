"""Planted secrets are found nowhere but where docs/security.md says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import psutil
import pytest
from engines import (
    STOP_SECONDS,
    TOKEN,
    Model,
    Server,
    backend,
    environment_of,
    ray_command,
    serve,
    start,
    wait_until_healthy,
)
from leftovers import AGENTS_GONE_SECONDS, SHARED_MEMORY, Scene, marked_processes, wait_until

pytestmark = pytest.mark.timeout(1800)

PLANTED = {
    name: f"planted-{name.lower().replace('_', '-')}-{uuid.uuid4().hex}"
    for name in (
        "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "VLLM_API_KEY", "AWS_SECRET_ACCESS_KEY",
        "VLLM_MY_SECRET", "HF_MY_PASSWORD",
    )
}  # fmt: skip
IN_URL = f"planted-in-url-{uuid.uuid4().hex}"
ENVIRONMENT = PLANTED | {
    "VLLM_MIRROR": f"https://user:{IN_URL}@mirror.example",
    # Ranks may have to download adapters, so that they get the hub's token.
    "HF_HUB_OFFLINE": "0",
}
SECRETS = (*PLANTED.values(), IN_URL)
LORA = ("--enable-lora", "--max-lora-rank", "8")
KEY = {"Authorization": f"Bearer {PLANTED['VLLM_API_KEY']}"}


def found_in(text: str) -> list[str]:
    return [secret for secret in SECRETS if secret in text]


def files_below(folder: Path) -> Iterator[tuple[Path, str]]:
    for path in folder.rglob("*"):
        # Logs come and go, and sockets cannot be read.
        with suppress(OSError):
            if path.is_file():
                yield path, path.read_bytes().decode(errors="replace")


def shared_memory(scene: Scene) -> Iterator[tuple[Path, str]]:
    for path in SHARED_MEMORY.iterdir():
        if path.name not in scene.before:
            with suppress(OSError):
                yield path, path.read_bytes().decode(errors="replace")


def assert_nowhere(places: Iterable[tuple[object, str]]) -> int:
    places = list(places)
    bad = {str(place): found for place, text in places if (found := found_in(text))}
    assert not bad
    return len(places)


def command_output(scene: Scene, address: str, *words: str) -> str:
    """Of a command that asks one Ray: those of tests side by side have other tokens."""
    ray_hetero = str(Path(sys.executable).with_name("ray-hetero"))
    ran = subprocess.run(
        [ray_hetero, *words],
        env=environment_of(scene, {"RAY_ADDRESS": address}),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "rank" in ran.stdout, (ran.stdout, ran.stderr)
    return ran.stdout + ran.stderr


def ask(server: Server, **request: object) -> httpx.Response:
    body = {"model": "demo", "max_tokens": 4, "prompt": [8, 9, 10], **request}
    return httpx.post(
        f"{server.url}/v1/completions", json=body, headers=KEY, trust_env=False, timeout=120
    )


def served(server: Server) -> Iterator[tuple[str, str]]:
    """What a client can be answered, rightly or not."""
    good, bad = ask(server), ask(server, prompt=[8] * 5000)
    assert (good.status_code, bad.status_code) == (200, 400)
    unknown = ask(server, model="no such model")
    assert httpx.post(f"{server.url}/v1/completions", json={}, trust_env=False).status_code == 401
    yield from (("answer", answer.text) for answer in (good, bad, unknown))
    for path in ("/metrics", "/health", "/version", "/openapi.json"):
        yield path, httpx.get(f"{server.url}{path}", trust_env=False, timeout=30).text


def processes_with_secrets(scene: Scene) -> dict[int, str]:
    """Processes of the scene that start with a secret in their environment or command line."""
    found = {}
    for pid, words in scene.processes().items():
        with suppress(OSError):
            texts = [Path(f"/proc/{pid}/{name}").read_bytes() for name in ("environ", "cmdline")]
            if found_in(b"".join(texts).decode(errors="replace")):
                found[pid] = words
    return found


def ranks_of(server: Server) -> list[int]:
    return [int(pid) for pid in re.findall(r"started rank .*, pid (\d+)$", server.child.log, re.M)]


def kill_a_rank(server: Server) -> None:
    os.kill(ranks_of(server)[1], signal.SIGKILL)
    assert server.child.wait(STOP_SECONDS) == 1
    assert server.child.log.splitlines()[-1].startswith("ray_hetero: rank 1")


def test_an_engine_with_a_ray_of_its_own(scene: Scene, logs: Path, model: Model) -> None:
    options = ("--max-model-len", "512", *backend(2), *LORA)
    server = serve(scene, logs / "own", model("llama"), *options, extra=ENVIRONMENT)
    wait_until_healthy(server)
    (folder,) = scene.temporary.glob("rh-*")
    assert (folder.stat().st_mode & 0o777, folder.stat().st_uid) == (0o700, os.getuid())
    assert_nowhere(served(server))
    (address,) = re.findall(r"a Ray for this engine alone, at (\S+) ", server.child.log)
    assert_nowhere([("status", command_output(scene, address, "status", "--json"))])
    assert_nowhere([("status", command_output(scene, address, "status"))])
    assert assert_nowhere(files_below(folder)) > 10
    # The user's own process and what vLLM itself starts below it; no process of Ray's, no rank.
    tree = psutil.Process(server.child.process.pid)
    own = {tree.pid, *(child.pid for child in tree.children(recursive=True))}
    knowing, ranks = processes_with_secrets(scene), ranks_of(server)
    assert set(knowing) <= own, knowing
    rays = re.compile(r"ray::|raylet|gcs_server|/ray/|descriptor, folder")
    assert not any(rays.search(words) for words in knowing.values()), knowing
    assert any(rays.search(words) for words in scene.processes().values())
    assert len(ranks) == 2
    assert not set(ranks) & set(knowing)
    kill_a_rank(server)
    scene.assert_clean(AGENTS_GONE_SECONDS)
    assert not folder.exists()
    assert_nowhere([("log", server.child.log), *files_below(scene.temporary)])
    assert_nowhere(shared_memory(scene))


DASHBOARD = (
    "/api/v0/actors?detail=true", "/api/v0/tasks?detail=true", "/api/v0/workers?detail=true",
    "/api/v0/runtime_envs?detail=true", "/api/v0/jobs?detail=true", "/api/jobs/",
    "/api/v0/placement_groups?detail=true", "/logical/actors", "/nodes?view=summary",
    "/api/cluster_status",
)  # fmt: skip


@pytest.mark.slow
def test_an_engine_on_a_cluster_with_a_dashboard(scene: Scene, logs: Path, model: Model) -> None:
    folder, port, web = scene.temporary / "r", "6391", "8291"
    words = [*ray_command(), "start", "--head", "--block", f"--port={port}", "--num-cpus=4",
             "--include-dashboard=true", f"--dashboard-port={web}", f"--temp-dir={folder}",
             "--object-store-memory=134217728"]  # fmt: skip
    head = start(scene, words, logs / "head")
    url, bearer = f"http://127.0.0.1:{web}", {"Authorization": f"Bearer {TOKEN}"}

    def get(path: str) -> httpx.Response:
        return httpx.get(f"{url}{path}", headers=bearer, trust_env=False, timeout=60)

    def is_up() -> bool:
        with suppress(httpx.TransportError):
            return get("/api/version").status_code == 200
        return False

    assert wait_until(is_up, 120, 1), head.tail()
    extra = ENVIRONMENT | {"RAY_ADDRESS": f"127.0.0.1:{port}"}
    options = ("--max-model-len", "512", *backend(2), *LORA)
    server = serve(scene, logs / "cluster", model("llama"), *options, extra=extra)
    wait_until_healthy(server)
    answers = [(path, get(path)) for path in DASHBOARD]
    assert [path for path, answer in answers if answer.status_code != 200] == []
    assert "RankActor" in answers[0][1].text
    assert_nowhere((path, answer.text) for path, answer in answers)
    assert_nowhere(served(server))
    kill_a_rank(server)
    assert assert_nowhere(files_below(folder)) > 10
    assert_nowhere([("log", server.child.log), ("head", head.log)])
    head.signal(signal.SIGTERM)
    head.wait(STOP_SECONDS)
    scene.assert_clean(AGENTS_GONE_SECONDS)
    assert marked_processes(scene.marker) == {}

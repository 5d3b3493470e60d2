"""Two models on one host behind a proxy, under load: one is upgraded, and no request is lost."""

from __future__ import annotations

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import httpx
import pytest
from engines import START_SECONDS, STOP_SECONDS, Model, environment_of, free_port, is_healthy
from leftovers import Scene, wait_until
from systemd_machine import ROOT, Machine, booted

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

PROXY = ROOT / "deploy/proxy"
REQUESTS, CLIENTS, TOKENS = 200, 10, 24
PAUSE_S = 2.0
"""Of each client before requests beyond `REQUESTS`, which leave cores to the start beside them."""
BEFORE = 40
"""Requests of each model that are answered before the upgrade begins."""
CONFIG = """
cpu: {ranks_per_socket: 2, reserved_cores: 0, kv_cache_gib: 0.25}
"""
"""Of every instance: half of this machine's socket."""


@dataclass
class Load:
    """Clients of one model, each with one request after the other."""

    url: str
    goes_on: threading.Event | None = None
    """Until it is set, requests do not end at `REQUESTS`."""
    answered: list[int] = field(default_factory=list)
    """Tokens of each answer."""
    lost: list[str] = field(default_factory=list)
    _numbers: Iterator[int] = field(default_factory=count)

    def send(self) -> None:
        """Requests of one client."""
        with httpx.Client(trust_env=False, timeout=2 * START_SECONDS) as client:
            while True:
                number = next(self._numbers)
                if number >= REQUESTS and (self.goes_on is None or self.goes_on.wait(PAUSE_S)):
                    return
                self._ask(client, number)

    def _ask(self, client: httpx.Client, number: int) -> None:
        asked = {
            "model": "demo", "prompt": [number % 500 + 8] * (number % 50 + 1), "temperature": 0,
            "max_tokens": TOKENS, "ignore_eos": True,
        }  # fmt: skip
        try:
            answer = client.post(f"{self.url}/v1/completions", json=asked)
        except httpx.HTTPError as error:
            self.lost.append(f"request {number}: {error!r}")
            return
        if answer.status_code != 200:
            self.lost.append(f"request {number}: {answer.status_code} {answer.text[:200]}")
            return
        self.answered.append(answer.json()["usage"]["completion_tokens"])


@contextmanager
def proxied(folder: Path, ports: dict[str, int]) -> Iterator[tuple[Path, subprocess.Popen[bytes]]]:
    """Socket of a proxy's administration, and its process.

    The configuration is that of deploy/ with other ports.

    Args:
        folder: of the configuration and the socket.
        ports: in place of those of deploy/, by these.

    """
    admin = folder / "admin.sock"
    text = (PROXY / "haproxy.cfg").read_text(encoding="utf-8")
    text = text.replace("/run/haproxy/admin.sock", str(admin))
    for old, new in ports.items():
        assert f":{old}\n" in text
        text = text.replace(f":{old}\n", f":{new}\n")
    (folder / "haproxy.cfg").write_text(text)
    process = subprocess.Popen(["haproxy", "-db", "-f", str(folder / "haproxy.cfg")])
    try:
        assert wait_until(admin.exists, STOP_SECONDS)
        yield admin, process
    finally:
        process.terminate()
        process.wait()


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    for program in ("haproxy", "socat"):
        if shutil.which(program) is None:
            pytest.skip(f"needs {program}; type: apt install {program}")
    with booted(tmp_path) as made:
        yield made


def answered_by(port: int) -> int:
    """Requests that the server at a port has answered."""
    text = httpx.get(f"http://127.0.0.1:{port}/metrics", trust_env=False, timeout=30).text
    return sum(
        int(float(value))
        for value in re.findall(r"^vllm:request_success_total\{.*\} (.*)$", text, re.M)
    )


def test_one_of_two_models_is_upgraded_and_no_request_is_lost(
    machine: Machine, scene: Scene, model: Model, tmp_path: Path
) -> None:
    (tmp_path / "config.yaml").write_text(CONFIG)
    ports = {"chat": free_port(), "chat-new": free_port(), "code": free_port()}
    models = {"chat": model("llama"), "chat-new": model("llama"), "code": model("qwen3")}
    for name, port in ports.items():
        given = environment_of(scene)
        given.pop("PATH")
        given |= {
            "MODEL": str(models[name]),
            "PORT": str(port),
            "OPTIONS": "--enforce-eager --max-model-len 256 --served-model-name demo "
            "--pipeline-parallel-size 1",
            "RAY_HETERO_CONFIG": str(tmp_path / "config.yaml"),
            "PYTHONPATH": str(ROOT),
        }
        lines = [f'{key}="{value}"\n' for key, value in given.items()]
        (tmp_path / f"{name}.env").write_text("".join(lines))

    def said() -> str:
        return "".join(log.read_text(errors="replace")[-8000:] for log in tmp_path.glob("*.log"))

    fronts = {"chat": free_port(), "code": free_port()}
    in_place_of = {
        "8000": fronts["chat"], "8001": ports["chat"],
        "8010": fronts["code"], "8011": ports["code"],
    }  # fmt: skip
    with proxied(tmp_path, in_place_of) as (admin, proxy):
        for name in ("chat", "code"):
            machine.run("systemctl", "start", "--no-block", f"ray-hetero@{name}")
            url = f"http://127.0.0.1:{ports[name]}"
            assert wait_until(lambda at=url: is_healthy(at), START_SECONDS, 1), said()  # type: ignore[misc]
        done = threading.Event()
        chat = Load(f"http://127.0.0.1:{fronts['chat']}")
        code = Load(f"http://127.0.0.1:{fronts['code']}", goes_on=done)
        with ThreadPoolExecutor(2 * CLIENTS) as pool:
            clients = [pool.submit(load.send) for load in (chat, code) for _ in range(CLIENTS)]
            try:
                enough = wait_until(
                    lambda: min(len(chat.answered), len(code.answered)) >= BEFORE, START_SECONDS
                )
                assert enough, (chat.lost, code.lost, said())
                upgraded = machine.run(
                    "env", f"HAPROXY_ADMIN={admin}", f"RAY_HETERO_ENV={tmp_path}",
                    str(PROXY / "upgrade.sh"), "chat", "chat", "chat-new", limit_s=START_SECONDS,
                )  # fmt: skip
                assert "chat is served by ray-hetero@chat-new" in upgraded, upgraded
                new = f"http://127.0.0.1:{ports['chat-new']}"
                assert wait_until(lambda: is_healthy(new), START_SECONDS, 1), said()
            except BaseException:
                # Clients would wait for a server that does not start.
                proxy.terminate()
                raise
            finally:
                done.set()
            for client in clients:
                client.result()
        assert (chat.lost, code.lost) == ([], [])
        assert chat.answered == [TOKENS] * REQUESTS
        assert len(code.answered) >= REQUESTS
        assert set(code.answered) == {TOKENS}
        # Some of them by either instance.
        assert 0 < answered_by(ports["chat-new"]) <= REQUESTS - BEFORE
        assert machine.state("ray-hetero@chat.service", "Result") == "success"
        for name in ("chat-new", "code"):
            machine.run("systemctl", "stop", f"ray-hetero@{name}", limit_s=2 * STOP_SECONDS)
    scene.assert_clean()

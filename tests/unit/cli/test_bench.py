"""`ray-hetero bench`: a server that streams at a known speed, and this host."""

from __future__ import annotations

import json
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from placement.errors import NativeError
from placement.host.gpu_rates import GpuRates
from placement.host.topology import Gpu
from ray_hetero.cli import host_speeds
from ray_hetero.cli.main import commands
from ray_hetero.cli.serving.load import Measured, Server, beside
from ray_hetero.cli.serving.speed_picture import WIDTH, speed_svg
from ray_hetero.errors import ConfigError, StartupError

FIRST_S, STEP_S = 0.15, 0.03
PLAN = [
    {"users": 1, "context": 16, "tokens_per_s": 40.0, "first_token_s": 0.1},
    {"users": 4, "context": 16, "tokens_per_s": 20.0, "first_token_s": 0.4},
]


class Vllm(BaseHTTPRequestHandler):
    """A server that answers as vLLM's does, a token every STEP_S."""

    bodies: list[dict[str, Any]]
    fails = False

    def do_GET(self) -> None:
        self._begin(200)
        listed = {"data": [{"id": "tiny", "max_model_len": 64}]}
        self.wfile.write(json.dumps(listed).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.bodies.append(body)
        if self.fails:
            self._begin(400)
            self.wfile.write(b'{"error": "too long"}')
            return
        self._begin(200)
        time.sleep(FIRST_S)
        for number in range(body["max_tokens"]):
            if number:
                time.sleep(STEP_S)
            self.wfile.write(b'data: {"choices": [{"text": "a"}]}\n\n')
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")

    def _begin(self, status: int) -> None:
        self.send_response(status)
        self.end_headers()

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    Vllm.bodies, Vllm.fails = [], False
    server = ThreadingHTTPServer(("127.0.0.1", 0), Vllm)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def run(*arguments: str) -> str:
    done = CliRunner().invoke(commands, ["bench", *arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout


def test_steps_and_first_tokens_are_those_of_the_server_beside_the_plan(
    url: str, tmp_path: Path
) -> None:
    plan, picture = tmp_path / "plan.json", tmp_path / "bench.svg"
    plan.write_text(json.dumps({"users": PLAN[::-1]}))
    asked = ("--url", url, "--plan", str(plan), "--users", "1,3", "--prompt-tokens", "16")
    answer = json.loads(run(*asked, "--tokens", "6", "--json", "--svg", str(picture)))
    assert (answer["model"], answer["url"]) == ("tiny", url)
    assert [row["users"] for row in answer["users"]] == [1, 3]
    for row in answer["users"]:
        # A first token that this process was late to read shortens the steps behind it.
        assert row["step_s"] > STEP_S / 2
        assert row["tokens_per_s"] == pytest.approx(1 / row["step_s"])
        assert FIRST_S <= row["first_token_s"] <= row["last_first_token_s"]
        assert row["total_per_s"] <= row["users"] * 6 / (FIRST_S + 5 * STEP_S)
    assert [row["predicted_per_s"] for row in answer["users"]] == [40.0, pytest.approx(24.0)]
    assert [row["predicted_first_s"] for row in answer["users"]] == [0.1, pytest.approx(0.3)]
    # One request before all others, then those of 1 and of 3 users, no two prompts alike.
    assert len(Vllm.bodies) == 5
    assert len({tuple(body["prompt"]) for body in Vllm.bodies}) == 5
    assert all(len(body["prompt"]) == 16 and body["ignore_eos"] for body in Vllm.bodies)
    assert ET.parse(picture).getroot().get("width") == str(WIDTH)  # noqa: S314


def test_the_table_fits_a_terminal(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = run("--url", url, "--users", "2", "--prompt-tokens", "8", "--tokens", "2")
    assert "prompts of 8 tokens, answers of 2" in shown
    assert "predicted" not in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_what_the_server_refuses_is_said(url: str) -> None:
    with pytest.raises(ConfigError, match=r"60 \+ --tokens 5 = 65, but .* at most 64 tokens"):
        run("--url", url, "--prompt-tokens", "60", "--tokens", "5")
    Vllm.fails = True
    with pytest.raises(
        StartupError, match=r"a request of 2 users at once failed: status 400: .*too"
    ):
        Server(url).measure(2, 8, 2)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--url", "ftp://a"), "expected one like http://localhost:8000"),
        (("--url", "http://x", "--users", "0"), "expected numbers from 1 to 512"),
        (("--url", "http://x", "--plan", "none.json"), r"none\.json: No such file"),
    ],
)
def test_wrong_options_are_refused(arguments: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run(*arguments)


def test_a_port_without_a_server_is_named() -> None:
    with pytest.raises(StartupError, match=r"http://127.0.0.1:9: no server listens there"):
        Server("127.0.0.1:9")


def test_first_tokens_are_compared_for_prompts_of_the_same_length() -> None:
    measured = Measured(2, 0.05, 0.2, 0.3, 30.0)
    assert beside(measured, PLAN, 16).predicted_first_s == pytest.approx(0.2)
    assert beside(measured, PLAN, 17).predicted_first_s is None
    assert beside(measured, PLAN, 17).predicted_per_s == pytest.approx(30.0)


def test_no_text_leaves_the_picture() -> None:
    rows = [Measured(1, 0.02, 0.2, 0.2, 45.0, 60.0), Measured(32, 0.2, 2.0, 3.0, 150.0)]
    root = ET.fromstring(speed_svg("a <model> " + "x" * 90, rows))  # noqa: S314
    texts = [one for one in root.iter() if one.tag.endswith("text")]
    assert [one.text for one in texts if one.text and one.text[0].isdigit()] == [
        "1 user", "50.0", "60.0", "32 users", "5.0",
    ]  # fmt: skip
    bars = [one for one in root.iter() if one.tag.endswith("rect")]
    assert max(float(one.get("x", 0)) + float(one.get("width", 0)) for one in bars) <= WIDTH - 130
    assert all(float(one.get("y", 0)) <= float(root.get("height", 0)) for one in texts)


def test_this_host_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = host_speeds.read_host()
    gpus = (Gpu(0, name="X", rates=GpuRates(2e12, 5e10, 5e10)), Gpu(1))
    host = host_speeds.replace(found, gpus=gpus, instruction_sets=frozenset({"avx2"}))
    monkeypatch.setattr(host_speeds, "read_host", lambda: host)
    monkeypatch.setattr(host_speeds, "with_gpu_rates", lambda host, wanted: host)
    monkeypatch.setattr(host_speeds, "cached_bandwidth", lambda cpus, model: 4e10)

    def timed(cpus: object, kernel: Any) -> tuple[int, list[float]]:
        if kernel.weight_format == "fp4":
            raise NativeError("no compiler")
        return 10**9, [0.1, 0.1, 0.1, 0.15, 0.2, 0.4]

    monkeypatch.setattr(host_speeds, "timed", timed)
    shown = run().splitlines()
    assert shown[:2] == [
        "GPU 0 (X): memory: 2,000.0 GB/s",
        "GPU 0 (X): link from the host: 50.0 GB/s",
    ]
    assert shown[2].startswith("GPU 1 (of unknown name): memory: not measured: ")
    assert any(line.endswith("memory: 40.0 GB/s") for line in shown)
    formats = [line for line in shown if "weights as" in line]
    assert [line.rpartition(" as ")[2] for line in formats] == [
        "packed: 10.0 GB/s", "compact: 10.0 GB/s", "int4: 10.0 GB/s", "int8: 10.0 GB/s",
        "fp8: 10.0 GB/s", "fp4: not measured: no compiler",
    ]  # fmt: skip
    assert any(line.endswith("8 tokens, int4: 1.50 times one token") for line in shown)
    assert len(json.loads(run("--json"))) == len(shown)

"""Sizes of a model that is on the hub alone: a server on this host speaks the hub's protocol."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from placement.model.reading import shape_from_safetensors
from ray_hetero.planning import engine_facts
from ray_hetero.planning.sizes import hub_headers
from ray_hetero.planning.sizes.hub_headers import HubError, HubModel, headers_on_hub, hub_model
from ray_hetero.planning.sizes.model_sizes import sizes_of

NAME, COMMIT = "someone/some-model", "0123456789" * 4
LAYERS, HIDDEN = 4, 64
COMMAND = str(Path(sys.executable).with_name("ray-hetero"))
CONFIG: dict[str, Any] = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 128, "vocab_size": 256, "max_position_embeddings": 512,
    "dtype": "bfloat16", "tie_word_embeddings": False,
}  # fmt: skip


@dataclass
class Hub:
    """What the server has, and how it answers."""

    files: dict[str, bytes]
    ranges: bool = True
    cut: int | None = None
    """Bytes after which it closes the connection."""
    pause_s: float = 0.0
    """Between pieces of 64 bytes."""
    sent: int = 0
    asked: list[str] = field(default_factory=list)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def __init__(self, hub: Hub, *given: Any) -> None:
        self.hub = hub
        super().__init__(*given)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, *, with_body: bool) -> None:
        path = self.path.removeprefix(f"/{NAME}/resolve/")
        revision, _, file = path.partition("/")
        content = self.hub.files.get(file) if revision in ("main", COMMIT) else None
        self.hub.asked.append(f"{self.command} {file}")
        if content is None:
            self.send_response(404)
            self.send_header("X-Error-Code", "EntryNotFound")
            self.send_header("Content-Length", "0")
            self.send_header("Connection", "close")
            self.end_headers()
            return
        asked = self.headers.get("Range")
        if asked and self.hub.ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            part = content[int(first) : int(last) + 1]
            self.send_response(206)
            end = int(first) + len(part) - 1
            self.send_header("Content-Range", f"bytes {first}-{end}/{len(content)}")
        else:
            part = content
            self.send_response(200)
        self.send_header("Content-Length", str(len(part)))
        self.send_header("ETag", f'"{file}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Connection", "close")
        self.end_headers()
        if with_body:
            self._send(part if file.endswith(".json") else part[: self.hub.cut])

    def _send(self, part: bytes) -> None:
        step = 64 if self.hub.pause_s else 1 << 16
        try:
            for at in range(0, len(part), step):
                time.sleep(self.hub.pause_s)
                self.wfile.write(part[at : at + step])
                self.hub.sent += step
        except OSError:
            return  # The client has read what it wanted.

    def log_message(self, *given: Any) -> None:
        """Nothing: the test says what was asked."""


def tensors() -> dict[str, tuple[int, ...]]:
    """Names and shapes, with a matrix that no reader of the configuration knows."""
    found: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (256, HIDDEN), "model.norm.weight": (HIDDEN,),
        "lm_head.weight": (256, HIDDEN),
    }  # fmt: skip
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        found[f"{prefix}.self_attn.q_proj.weight"] = (HIDDEN, HIDDEN)
        found[f"{prefix}.mlp.extra_proj.weight"] = (999, HIDDEN)
    return found


def safetensors_file(shapes: dict[str, tuple[int, ...]]) -> bytes:
    header: dict[str, Any] = {}
    at = 0
    for name, shape in shapes.items():
        size = 2 * functools.reduce(int.__mul__, shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(at)


def in_two_files() -> dict[str, bytes]:
    shapes = tensors()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    place = {name: names[at % 2] for at, name in enumerate(shapes)}
    index = {"metadata": {}, "weight_map": place}
    return {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
    } | {
        file: safetensors_file({name: shapes[name] for name in shapes if place[name] == file})
        for file in names
    }


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Hub], HubModel]]:
    """Start a hub; the model's config.json is in the cache, as vLLM and the command leave it."""
    from huggingface_hub import constants, hf_hub_download

    servers = []

    def start(hub: Hub) -> HubModel:
        server = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Handler, hub))
        servers.append(server)
        Thread(target=server.serve_forever, daemon=True).start()
        endpoint = f"http://127.0.0.1:{server.server_port}"
        address = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        hf_hub_download(NAME, "config.json", cache_dir=tmp_path / "hub")
        return HubModel(NAME, tmp_path / "hub/models--someone--some-model/snapshots" / COMMIT)

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def expected(tmp_path: Path) -> int:
    """Bytes of the weights as the files themselves tell them."""
    folder = tmp_path / "downloaded"
    folder.mkdir()
    for name, content in in_two_files().items():
        (folder / name).write_bytes(content)
    return shape_from_safetensors(folder).weight_bytes


def test_headers_come_from_the_hub(serve: Callable[[Hub], HubModel], expected: int) -> None:
    hub = Hub(in_two_files())
    model = serve(hub)
    shape = sizes_of(CONFIG, hub=model)
    assert (shape.source, shape.weight_bytes) == ("safetensors", expected)
    asked = len(hub.asked)
    assert hub.asked[-3] == "GET model.safetensors.index.json"
    # Kept: the second time asks nothing.
    assert sizes_of(CONFIG, hub=model) == shape
    assert len(hub.asked) == asked


def test_the_engine_reads_what_the_command_reads(
    serve: Callable[[Hub], HubModel], expected: int
) -> None:
    serve(Hub(in_two_files()))
    model: Any = SimpleNamespace(
        model=NAME, revision=None, hf_config=SimpleNamespace(to_dict=lambda: CONFIG),
        dtype="torch.bfloat16", trust_remote_code=False,
    )  # fmt: skip
    shape, why = engine_facts._shape(model, "auto", LAYERS)
    assert shape is not None, why
    assert (shape.source, shape.weight_bytes) == ("safetensors", expected)


def test_a_single_file(serve: Callable[[Hub], HubModel], expected: int) -> None:
    files = {
        "config.json": json.dumps(CONFIG).encode(),
        "model.safetensors": safetensors_file(tensors()),
    }
    assert sizes_of(CONFIG, hub=serve(Hub(files))).weight_bytes == expected


def test_files_that_are_here_are_read_here(serve: Callable[[Hub], HubModel], expected: int) -> None:
    hub = Hub(in_two_files())
    model = serve(hub)
    for name, content in in_two_files().items():
        (model.folder / name).write_bytes(content)
    asked = len(hub.asked)
    assert sizes_of(CONFIG, hub=model).weight_bytes == expected
    assert len(hub.asked) == asked
    # One of them is still on its way.
    (model.folder / "model-00002-of-00002.safetensors").unlink()
    assert sizes_of(CONFIG, hub=model).weight_bytes == expected
    assert len(hub.asked) == asked + 3


def test_a_server_without_ranges_sends_no_whole_file(
    serve: Callable[[Hub], HubModel], expected: int
) -> None:
    files = in_two_files()
    for name in files:
        if name.endswith(".safetensors"):
            start = files[name]
            header = json.loads(start[8 : 8 + int.from_bytes(start[:8], "little")])
            at = max(one["data_offsets"][1] for one in header.values())
            size = 128 << 20
            header["model.layers.9.more.weight"] = {
                "dtype": "U8", "shape": [size], "data_offsets": [at, at + size],
            }  # fmt: skip
            text = json.dumps(header).encode()
            files[name] = len(text).to_bytes(8, "little") + text + bytes(at + size)
    hub = Hub(files, ranges=False)
    assert sizes_of(CONFIG, hub=serve(hub)).weight_bytes == expected
    assert hub.sent < 32 << 20


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": {"config.json": b"{}"}}, "model.safetensors: the hub has no such file"),
        ({"cut": 100}, "does not give its headers|sent 100 of the header's"),
        ({"pause_s": 0.05}, "has not sent all headers in 1 s"),
    ],
)  # fmt: skip
def test_what_the_hub_does_not_give_is_said(
    change: dict[str, Any],
    message: str,
    serve: Callable[[Hub], HubModel],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(hub_headers, "LIMIT_S", 1.0)
    hub = Hub(**({"files": in_two_files()} | change))
    model = serve(hub)
    began = time.monotonic()
    with pytest.raises(HubError, match=message):
        headers_on_hub(model)
    assert time.monotonic() - began < 5
    shape = sizes_of(CONFIG, hub=model)
    assert shape.source == "config"
    assert "sizes are those of the model's configuration. someone/some-model" in caplog.text


def test_a_header_that_is_damaged(serve: Callable[[Hub], HubModel]) -> None:
    files = in_two_files()
    name = "model-00002-of-00002.safetensors"
    files[name] = (1 << 40).to_bytes(8, "little") + files[name][8:]
    with pytest.raises(HubError, match="no safetensors header"):
        headers_on_hub(serve(Hub(files)))


def test_offline_asks_nothing(
    serve: Callable[[Hub], HubModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    from huggingface_hub import constants

    hub = Hub(in_two_files())
    model = serve(hub)
    asked = len(hub.asked)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE is set"):
        headers_on_hub(model)
    assert len(hub.asked) == asked


def test_the_commit_is_that_of_the_configuration(serve: Callable[[Hub], HubModel]) -> None:
    model = serve(Hub(in_two_files()))
    assert hub_model(NAME) == model
    assert hub_model(NAME, COMMIT) == model
    assert hub_model("someone/else") is None
    assert hub_model("no name of the hub/") is None


def test_the_command_reads_them(serve: Callable[[Hub], HubModel], tmp_path: Path) -> None:
    from huggingface_hub import constants

    hub = Hub(in_two_files())
    serve(hub)
    topology = Path(__file__).parents[1] / "data" / "one_gpu_one_socket.yaml"
    environment = os.environ | {
        "HF_ENDPOINT": constants.ENDPOINT,
        "HF_HOME": str(tmp_path / "home"),
    }
    ran = subprocess.run(
        [COMMAND, "plan", NAME, "--json", "--topology", topology],
        env={name: value for name, value in environment.items() if name != "HF_HUB_OFFLINE"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["sizes_from"] == "safetensors"

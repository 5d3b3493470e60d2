"""Names of models where the hub does not answer: one message, soon."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from placement.model.config import UnknownModelError
from ray_hetero.planning import hub_config as module
from ray_hetero.planning.hub_config import hub_config

NAME = "someone/some-model"
TYPE = f"or type on a host that reaches the hub: hf download {NAME} config.json"


@pytest.fixture
def at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Point the hub's library to an address, with an empty cache and no proxy."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def point(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        template = address + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)

    return point


@pytest.fixture
def silent() -> Iterator[str]:
    """Address of a server that takes connections and answers nothing."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def refusal() -> tuple[str, float]:
    began = time.monotonic()
    with pytest.raises(UnknownModelError) as caught:
        hub_config(NAME)
    return str(caught.value), time.monotonic() - began


def test_a_hub_that_is_not_to_be_asked(
    at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    at("http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said, _ = refusal()
    assert said == (
        f"{NAME}: there is no such folder, it is not in the hub's cache, and HF_HUB_OFFLINE is "
        f"set. Give a folder with a config.json, {TYPE}"
    )


def test_a_hub_that_cannot_be_reached(at: Callable[[str], None]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    at(address)
    said, took_s = refusal()
    assert f"and {address} cannot be reached: " in said
    assert "refused" in said
    assert said.endswith(TYPE)
    assert "\n" not in said
    assert took_s < module.ANSWER_S


def test_a_hub_that_is_silent(
    at: Callable[[str], None], silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 1.0)
    at(silent)
    said, took_s = refusal()
    assert f"and {silent} " in said
    assert said.endswith(TYPE)
    assert took_s < 3


def unanswered(*given: object, **named: object) -> None:
    """`getaddrinfo` with a name server that does not answer."""
    time.sleep(5)
    raise socket.gaierror("no answer")


def test_a_name_that_takes_long_to_look_up(
    at: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "ANSWER_S", 0.5)
    monkeypatch.setattr(socket, "getaddrinfo", unanswered)
    at("http://hub.example")
    said, took_s = refusal()
    assert "and http://hub.example does not answer within 0.5 s. Give" in said
    assert took_s < 3


def test_a_config_in_the_cache_is_taken(at: Callable[[str], None], tmp_path: Path) -> None:
    at("http://127.0.0.1:9")
    commit = "0123456789" * 4
    model = tmp_path / "models--someone--some-model"
    (model / "refs").mkdir(parents=True)
    (model / "refs/main").write_text(commit)
    config = model / "snapshots" / commit / "config.json"
    config.parent.mkdir(parents=True)
    config.write_text("{}")
    began = time.monotonic()
    assert hub_config(NAME) == config
    assert time.monotonic() - began < module.ANSWER_S

"""What is said of a Ray cluster that cannot be reached; the real ones are in tests/cluster."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import ray
from ray.exceptions import AuthenticationError

from ray_hetero.errors import StartupError
from ray_hetero.runtime.ray_address import connect


@pytest.fixture
def head() -> Any:
    """Something listens there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def refuse(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def init(**options: Any) -> None:
        raise error

    monkeypatch.setattr(ray, "init", init)


def said(address: str) -> str:
    with pytest.raises(StartupError) as caught:
        connect(address)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_closed_port_is_named_before_ray_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, AssertionError("Ray was asked"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    assert f"'127.0.0.1:{port}' (RAY_ADDRESS): [Errno" in said(f"127.0.0.1:{port}")


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_the_address_of_a_dashboard_is_for_jobs(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, AssertionError("Ray was asked"))
    told = said(f"{scheme}://head:8265")
    assert f"expected host:port of a Ray head in RAY_ADDRESS, found '{scheme}://head:8265'" in told
    assert "Type: export RAY_ADDRESS=head:6379" in told


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (None, "RAY_AUTH_MODE is not set here. Type: export RAY_AUTH_MODE=token, and put"),
        ("disabled", "RAY_AUTH_MODE is 'disabled' here. Type: export RAY_AUTH_MODE=token"),
        ("token", "does not take this process's token. Put the cluster's token in RAY_AUTH_TOKEN"),
    ],
)
@pytest.mark.parametrize("is_auto", [False, True])
def test_an_open_port_that_refuses_wants_a_token(
    mode: str | None, words: str, is_auto: bool, head: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, ConnectionError(f"Failed to connect to Ray cluster at {head}"))
    if mode is None:
        monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    else:
        monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert words in said("auto" if is_auto else head)


def test_a_mode_without_a_token(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, AuthenticationError("no authentication token was found"))
    assert "RAY_AUTH_MODE is 'token', and this process has none. Put the cluster's" in said(head)


def test_no_cluster_on_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, ConnectionError("Could not find any running Ray instance."))
    assert "no Ray cluster answers at 'auto'" in said("auto")

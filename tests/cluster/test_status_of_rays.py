"""`ray-hetero status` on a host with several Rays, as engines start them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
from engines import TOKEN, environment_of
from leftovers import Scene

KEEPER = """
import os, sys, time
from ray_hetero.observability.engine_info import EngineInfo
from ray_hetero.observability.status_board import EngineBoard
from ray_hetero.runtime import local_ray
address, board = local_ray.start(), EngineBoard()
board.starting(EngineInfo(sys.argv[1], "model", os.getpid(), time.time(), (), ""))
print(address, flush=True)
sys.stdin.read()
board.take_down()
local_ray.stop()
"""
SECONDS = 120


@contextmanager
def engines(scene: Scene, tokens: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """Addresses of Rays, each with the status actor of an engine, by the engine's name.

    Args:
        scene: of the test.
        tokens: of the Rays, by the same names.

    """
    keepers = {
        name: subprocess.Popen(
            [sys.executable, "-c", KEEPER, name],
            env=environment_of(scene, {"RAY_AUTH_TOKEN": token}),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for name, token in tokens.items()
    }  # fmt: skip
    try:
        yield {name: str(keeper.stdout and keeper.stdout.readline().strip())
               for name, keeper in keepers.items()}  # fmt: skip
    finally:
        for keeper in keepers.values():
            assert keeper.stdin is not None
            keeper.stdin.close()
        for keeper in keepers.values():
            keeper.wait(SECONDS)


def status(scene: Scene, *options: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("ray-hetero")), "status", *options]
    return subprocess.run(
        command, env=environment_of(scene, extra), capture_output=True, text=True,
        timeout=SECONDS, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_engines_of_all_rays_of_the_host_are_shown(scene: Scene) -> None:
    tokens = {"first": TOKEN, "second": TOKEN, "foreign": secrets.token_hex(16)}
    with engines(scene, tokens) as there:
        foreign = there.pop("foreign")
        assert len({foreign, *there.values()}) == 3
        shown = status(scene, "--json")
        assert f"the Ray at {foreign} is left out: the Ray cluster at" in shown.stderr
        found = {one["engine"]: one["ray"] for one in json.loads(shown.stdout)}
        # Other tests may run engines on this host.
        assert there.items() <= found.items()
        text = status(scene).stdout
        for name, address in there.items():
            assert f"engine {name}: starting model, " in text
            assert f"on the Ray at {address}" in text
        named = json.loads(status(scene, "--json", RAY_ADDRESS=there["second"]).stdout)
        assert [one["engine"] for one in named] == ["second"]

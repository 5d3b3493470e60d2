"""What cannot work ends with one line that says what was expected, what came and what to type.

All servers of this module start at once: none of them gets as far as loading a model.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import Model
from engines import START_SECONDS, Server, serve
from leftovers import Scene

pytestmark = pytest.mark.timeout(600)

SPLIT = {"cpu": {"ranks_per_socket": 2}}


@dataclass(frozen=True)
class Bad:
    """One bad request and what its last line must say."""

    says: str
    """Regular expression that the line matches after `ray_hetero: `."""
    config: dict[str, object] = field(default_factory=lambda: dict(SPLIT))
    arguments: tuple[str, ...] = ("--pipeline-parallel-size", "2")
    model: str = ""
    environment: tuple[tuple[str, str], ...] = ()


CASES = {
    "unknown key": Bad(
        r".*cpu\.rankz: unknown key; known here: unit, ranks_per_socket, ",
        config={"cpu": {"rankz": 2}},
    ),
    "wrong type": Bad(
        r".*cpu\.ranks_per_socket: .*valid integer, got 'two'",
        config={"cpu": {"ranks_per_socket": "two"}},
    ),
    "layout of another size": Bad(
        r"layout: 1 stages of 2 ranks, .*--pipeline-parallel-size 2 .*Type: "
        r"--pipeline-parallel-size 1 --tensor-parallel-size 2",
        config={**SPLIT, "layout": [["cpu", "cpu"]]},
    ),
    "layers of another model": Bad(
        r"layers: 40 \+ 40 = 80 in 2 stages, but the model has \d+ layers .*add up to \d+",
        config={**SPLIT, "layers": [40, 40]},
    ),
    "more ranks than sockets": Bad(
        r"4 pipeline stages × 4 .*= 16 ranks.*0 GPUs.*CPU sockets.*ranks_per_socket",
        config={},
        arguments=("--pipeline-parallel-size", "4", "--tensor-parallel-size", "4"),
    ),
    "speculative decoding": Bad(
        r"--speculative-config does not work with ray_hetero: .*Leave it out",
        arguments=(
            "--pipeline-parallel-size", "2", "--speculative-config",
            '{"method": "ngram", "num_speculative_tokens": 2}',
        ),
    ),
    "no such model": Bad(
        r"model: there is no '/no/such/model' on this host\. .*ray-hetero demo-model",
        model="/no/such/model",
        # Offline, vLLM looks for the path among cached hub models before anybody else.
        environment=(("HF_HUB_OFFLINE", "0"),),
    ),
    "Ray too old": Bad(r"ray_hetero and Ray: 2\.40\.0, needed is 2\.55 .*pip install"),
}  # fmt: skip


@pytest.fixture(scope="module")
def old_ray(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that makes the installed Ray look old to whoever asks for its version."""
    folder = tmp_path_factory.mktemp("old")
    metadata = folder / "ray-2.40.0.dist-info" / "METADATA"
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.40.0\n")
    return folder


@pytest.fixture(scope="module")
def servers(scene: Scene, logs: Path, model: Model, old_ray: Path) -> dict[str, Server]:
    """Every bad request on its way."""
    good = model("llama", "bf16")
    started = {}
    for name, bad in CASES.items():
        extra = dict(bad.environment)
        if name == "Ray too old":
            extra["PYTHONPATH"] = str(old_ray)
        more = ("--distributed-executor-backend", "ray_hetero", "--additional-config")
        config = json.dumps({"ray_hetero": bad.config})
        path = Path(bad.model) if bad.model else good
        log = logs / name.replace(" ", "-")
        started[name] = serve(scene, log, path, *bad.arguments, *more, config, extra=extra)
    return started


@pytest.mark.parametrize("name", CASES)
def test_the_last_line_says_it_all(name: str, servers: dict[str, Server]) -> None:
    child = servers[name].child
    status = child.wait(START_SECONDS)
    assert status != 0
    last = child.log.splitlines()[-1]
    assert re.match(rf"ray_hetero: {CASES[name].says}", last), child.tail(15)
    assert "Loading safetensors" not in child.log


def test_nothing_is_left(scene: Scene, servers: dict[str, Server]) -> None:
    for server in servers.values():
        server.child.wait(START_SECONDS)
    scene.assert_clean()

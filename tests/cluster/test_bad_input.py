"""Bad input gets one clear line before any weights are loaded, and leaves nothing behind.

The line says what was expected, what came and what to type.  What the plugin itself can refuse is
asked of it directly; the command line is run for one case of each way that a message can take.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import ray
from engines import START_SECONDS, VLLM, Model, backend, hetero, start
from leftovers import GONE_SECONDS, Scene, wait_until

from ray_hetero import plugin
from ray_hetero.errors import ConfigError, RayHeteroError, UnsupportedError

pytestmark = pytest.mark.timeout(900)

LOADING = "Starting to load model"
"""vLLM's own words before it reads weights."""


@pytest.mark.parametrize(
    ("arguments", "keys", "error", "said"),
    [
        ({}, {"cpu": {"thraeds": 2}}, ConfigError,
         r"cpu\.thraeds: unknown key; known here: .*\bcores\b"),
        ({}, {"sockets": 2}, ConfigError, r"sockets: unknown key; known here: layout, layers"),
        ({}, {"cpu": {"cores": "two"}}, ConfigError, r"cpu\.cores: .*integer.*got 'two'"),
        ({}, {"layers": [1, 1, 2]}, ConfigError, r"3 numbers \[1, 1, 2\] for 2 pipeline stages"),
        ({}, {"layout": [["cpu"]]}, ConfigError,
         r"1 stages of 1 ranks.*--pipeline-parallel-size 2.*type: --pipeline-parallel-size 1"),
        ({"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_both"}}, {}, UnsupportedError,
         r"--kv-transfer-config does not work with ray_hetero: .*Leave it out"),
        ({"speculative_config": {"method": "medusa", "num_speculative_tokens": 2}}, {},
         UnsupportedError, r"--speculative-config with the method medusa .*Leave it out"),
    ],
)  # fmt: skip
def test_the_plugin_refuses_before_anything_starts(
    arguments: dict[str, Any],
    keys: dict[str, Any],
    error: type[RayHeteroError],
    said: str,
    model: Model,
) -> None:
    from vllm.engine.arg_utils import EngineArgs

    plugin.register()
    given = {"pipeline_parallel_size": 2, **hetero(**keys), **arguments}
    with pytest.raises(error, match=said) as caught:
        EngineArgs(model=str(model()), **given).create_engine_config()
    assert "\n" not in str(caught.value)
    assert not ray.is_initialized()


@dataclass(frozen=True)
class Case:
    """A command that must fail, and what its last line must say."""

    command: tuple[str, ...]
    said: str
    path: str = ""
    """Put first on PYTHONPATH."""
    is_script: bool = False
    """Not the `vllm` command: vLLM's own traceback follows the line."""


SCRIPT = """
import os
os.environ["VLLM_PLUGINS"] = ""
from vllm import LLM
LLM({model!r}, distributed_executor_backend="ray_hetero.executor.HeteroExecutor",
    enforce_eager=True, max_model_len=128)
"""


def _cases(model: Path, old_ray: Path) -> dict[str, Case]:
    def command(*options: str, path: Path = model) -> tuple[str, ...]:
        return (VLLM, "serve", str(path), "--enforce-eager", *options)

    three = [*backend(3)]
    three[-1] = three[-1].replace('"ranks_per_socket": 3', '"ranks_per_socket": 1')
    return {
        "unknown key": Case(
            command(*backend(2, cpu={"thraeds": 1})),
            r"cpu\.thraeds: unknown key; known here: .*\bcores\b",
        ),
        "more ranks than sockets": Case(
            command(*three),
            r"3 pipeline stages × 1 tensor-parallel rank = 3 ranks.* 0 GPUs .* CPU sockets? .*"
            r'"ranks_per_socket": 3',
        ),
        "layers that do not add up": Case(
            command(*backend(2, layers=[2, 3])),
            r"layers: 2 \+ 3 = 5 in 2 stages, but the model has 4 layers.*add up to 4",
        ),
        "no such model": Case(command(*backend(2), path=model / "nowhere"), r"nowhere"),
        "Ray too old": Case(
            command(*backend(2)),
            r"Ray: 2\.40\.0, needed is 2\.55 or newer\. Type: pip install 'ray",
            path=str(old_ray),
        ),
        "plugin not loaded": Case(
            (sys.executable, "-c", SCRIPT.format(model=str(model))),
            r"the ray_hetero plugin was not loaded: VLLM_PLUGINS is ''; add ray_hetero to it",
            is_script=True,
        ),
    }  # fmt: skip


NAMES = ("unknown key", "Ray too old", "plugin not loaded")
MORE_NAMES = ("more ranks than sockets", "layers that do not add up", "no such model")
"""Of which each takes a way that another one takes, too."""


@dataclass(frozen=True)
class Outcome:
    case: Case
    status: int
    log: str


@pytest.fixture(scope="module")
def outcomes(
    scene: Scene,
    logs: Path,
    model: Model,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> dict[str, Outcome]:
    """Run the cases that are asked for, two at a time."""
    old_ray = tmp_path_factory.mktemp("site")
    info = old_ray / "ray-2.40.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ray\nVersion: 2.40.0\n")
    cases = _cases(model("llama"), old_ray)
    assert set(cases) == {*NAMES, *MORE_NAMES}
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and {"name", "outcomes"} <= {*item.fixturenames}
    ] or [*NAMES]

    def run(name: str) -> Outcome:
        case = cases[name]
        path = [case.path, os.environ.get("PYTHONPATH", "")]
        extra = {"PYTHONPATH": os.pathsep.join(filter(None, path))}
        child = start(scene, case.command, logs / name.replace(" ", "_"), extra)
        return Outcome(case, child.wait(START_SECONDS), child.log)

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(wanted, pool.map(run, wanted), strict=True))


def _lines(log: str) -> Sequence[str]:
    return [line for line in log.splitlines() if line.strip()]


@pytest.mark.parametrize(
    "name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE_NAMES)]
)
def test_one_clear_line_near_the_end(name: str, outcomes: dict[str, Outcome]) -> None:
    outcome = outcomes[name]
    assert outcome.status not in (0, -9, -11)
    lines = _lines(outcome.log)[0 if outcome.case.is_script else -15 :]
    assert [line for line in lines if re.search(outcome.case.said, line)], "\n".join(lines)
    assert LOADING not in outcome.log


def test_nothing_is_left(outcomes: dict[str, Outcome], scene: Scene) -> None:
    assert outcomes
    assert wait_until(lambda: not scene.leftovers(), GONE_SECONDS), scene.leftovers()

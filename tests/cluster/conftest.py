"""Real vLLM and real Ray on CPUs, each engine in a process of its own."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from unittest.mock import patch

import pytest
from engines import IN_THIS_PROCESS, Json, Model, Stock, batch, engine, prompts, run_engines, tokens
from filelock import FileLock
from leftovers import Scene, clean_scene
from other_models import MAKERS

from ray_hetero.cli.demo.model import ARCHITECTURES, DemoShape, Dtype, write_demo_model
from ray_hetero.supported import installed_vllm

pytest.register_assert_rewrite("server_checks")

USUAL = ("llama-f32", "opt-f32")
OTHERS = ("llama-bf16", "llama-bf16-compiled", "opt-f32-compiled", "opt-bf16")
"""Asked for by slow tests only."""


@pytest.fixture(scope="session", autouse=True)
def _keep_compiled_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """One cache for all engines, and for the next run: TMPDIR, where it would be, is swept."""
    with pytest.MonkeyPatch.context() as patched:
        directory = request.config.cache.mkdir("inductor")
        patched.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Make (once) a demo checkpoint of an architecture, its weights in bf16 or f32, or in a format
    that the linear layers are quantised to."""
    root = tmp_path_factory.mktemp("models")

    def make(
        architecture: str = "llama", dtype: Dtype = "bf16", *, stored: str | None = None,
        shape: DemoShape | None = None,
    ) -> Path:  # fmt: skip
        directory = root / f"{architecture}-{stored or dtype}"
        if not directory.exists():
            with patch.dict(ARCHITECTURES, MAKERS):
                write_demo_model(
                    directory, architecture, dtype=dtype, stored=stored, shape=shape
                )  # fmt: skip
        return directory

    return make


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Where this module's engines run; nothing of them may be left when the module is done."""
    with clean_scene() as made:
        yield made


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For requests, answers and output of this module's engines."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def stock(
    model: Model, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Stock:
    """Greedy tokens of stock vLLM in one process, by name: "llama-bf16", "opt-f32-compiled", ….

    Kept for the next run and for tests that run beside these: nothing of this project has a part
    in them.
    """
    known: dict[str, list[list[int]]] = {}
    kept = request.config.cache.mkdir("stock")

    def arguments(name: str) -> Json:
        architecture, dtype, *compiled = name.split("-")
        return engine(
            model(architecture, dtype),
            dtype="float32" if dtype == "f32" else "bfloat16",
            enforce_eager=not compiled,
        )

    def ask(names: tuple[str, ...]) -> list[list[list[int]]]:
        runs = [(arguments(name), [batch(prompts())]) for name in names]
        with clean_scene() as made:
            logs = tmp_path_factory.mktemp("stock")
            found = run_engines(made, logs / "run", runs, extra=IN_THIS_PROCESS)
            return [tokens(batches[0]) for batches in found]

    def answers(name: str) -> list[list[int]]:
        if name not in known:
            # All of a sort in one process: most of an engine's start is importing vLLM.
            names = USUAL if name in USUAL else OTHERS
            file = kept / f"{_fingerprint([arguments(one) for one in names])}.json"
            with FileLock(file.with_suffix(".lock")):
                if not file.exists():
                    whole = file.with_suffix(".part")
                    whole.write_text(json.dumps(ask(names)))
                    whole.rename(file)
                known.update(zip(names, json.loads(file.read_text()), strict=True))
        return known[name]

    return answers


def _fingerprint(runs: list[Json]) -> str:
    """Of all that stock vLLM's answers depend on."""
    parts = [version("torch"), installed_vllm(), str(os.cpu_count()), json.dumps(prompts())]
    parts += sorted(
        {line for line in Path("/proc/cpuinfo").read_text().splitlines() if "flags" in line}
    )
    digest = hashlib.sha256("\n".join(parts).encode())
    for run in runs:
        folder = Path(run["model"])
        digest.update(json.dumps({**run, "model": ""}, sort_keys=True).encode())
        for path in sorted(folder.iterdir()):
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()

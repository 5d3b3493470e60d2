"""Real vLLM and real Ray on CPUs, each engine in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import Model, Stock, batch, engine, prompts, run_engines, tokens
from leftovers import Scene, clean_scene

from ray_hetero.demo_model import write_demo_model

pytest.register_assert_rewrite("server_checks")

EAGER = ("llama-bf16", "opt-bf16", "llama-f32", "opt-f32")
COMPILED = ("llama-bf16-compiled", "opt-f32-compiled")


@pytest.fixture(scope="session", autouse=True)
def _keep_compiled_code(request: pytest.FixtureRequest) -> Iterator[None]:
    """One cache for all engines, and for the next run: TMPDIR, where it would be, is swept."""
    with pytest.MonkeyPatch.context() as patch:
        directory = request.config.cache.mkdir("inductor")
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(directory))
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Make (once) a demo checkpoint of an architecture, its weights in bf16 or f32."""
    root = tmp_path_factory.mktemp("models")

    def make(architecture: str = "llama", dtype: str = "bf16") -> Path:
        directory = root / f"{architecture}-{dtype}"
        if not directory.exists():
            write_demo_model(directory, architecture, dtype=dtype)  # type: ignore[arg-type]
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
def stock(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Stock:
    """Greedy tokens of stock vLLM in one process, by name: "llama-bf16", "opt-f32-compiled", …."""
    known: dict[str, list[list[int]]] = {}
    directory = tmp_path_factory.mktemp("stock")

    def arguments(name: str) -> dict[str, object]:
        architecture, dtype, *compiled = name.split("-")
        return engine(
            model(architecture, dtype),
            dtype="float32" if dtype == "f32" else "bfloat16",
            enforce_eager=not compiled,
        )

    def answers(name: str) -> list[list[int]]:
        if name not in known:
            # All of a sort in one process: most of an engine's start is importing vLLM.
            names = EAGER if name in EAGER else COMPILED
            runs = [(arguments(one), [batch(prompts())]) for one in names]
            with clean_scene() as made:
                found = run_engines(
                    made, directory / name, runs, extra={"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
                )
            known.update(zip(names, (tokens(batches[0]) for batches in found), strict=True))
        return known[name]

    return answers

"""Real vLLM and real Ray on CPUs, each engine in a process of its own."""

from __future__ import annotations

import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from leftovers import Scene, segments

from ray_hetero.demo_model import write_demo_model

Model = Callable[..., Path]


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
    # Short: the names of Ray's sockets must fit into 107 bytes.
    root = Path(tempfile.mkdtemp(prefix="rh", dir="/tmp"))
    made = Scene(uuid.uuid4().hex, segments(), root / "t", root / "c")
    made.temporary.mkdir()
    yield made
    try:
        made.assert_clean()
    finally:
        made.sweep()
        shutil.rmtree(root)


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For requests, answers and output of this module's engines."""
    return tmp_path_factory.mktemp("logs")

"""Engines on a host with a GPU; what they share with the tests on CPUs is in tests/cluster."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest

sys.path += [str(Path(__file__).parents[1] / "cluster"), str(Path(__file__).parents[1])]
pytest.register_assert_rewrite("server_checks", "token_checks")

from drafters import (  # noqa: E402
    write_draft_model,
    write_eagle3_head,
    write_eagle_head,
    write_mtp_model,
)
from families.checkpoints import write_checkpoint  # noqa: E402
from gpu_host import Checkpoint  # noqa: E402
from leftovers import Scene, clean_scene  # noqa: E402
from other_models import MAKERS  # noqa: E402
from token_checks import is_family  # noqa: E402

from ray_hetero.cli.demo.model import (  # noqa: E402
    ARCHITECTURES,
    DemoShape,
    write_demo_model,
)
from ray_hetero.cli.demo.stored import FORMATS  # noqa: E402

IN_GROUPS = DemoShape(hidden=768, heads=24)
"""All sizes are multiples of 128, so that groups and blocks are as large as in published models."""
CHANGED = {
    "Gemma4ForCausalLM": {
        "enable_moe_block": True, "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 64,
    },
}  # fmt: skip
"""Keys of small configurations of architectures that are mixtures by a key."""
SHAPES = {"wide": DemoShape(hidden=1024, heads=16), "fp8": IN_GROUPS, "w4a16": IN_GROUPS}
"""Of variants that are not as large as other demo models."""


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Make (once) a checkpoint: architecture, a format or `-wide` behind it, and dtype.

    Architectures of vLLM's registry get small random weights, in float32 for every dtype.

    Formats are those of `demo-model --stored`.  `draft_model`, `eagle` and `eagle3` are drafters
    for the one of Llama in float32, `mtp` is that one with a layer that drafts.
    """
    of_target = {"eagle": write_eagle_head, "eagle3": write_eagle3_head, "mtp": write_mtp_model}
    root = tmp_path_factory.mktemp("models")

    def make(name: str, dtype: str) -> Path:
        directory = root / f"{name}-{dtype}"
        if name == "draft_model" and not directory.exists():
            write_draft_model(directory)
        elif name in of_target and not directory.exists():
            of_target[name](directory, make("llama", "float32"))
        elif is_family(name):
            if not (directory / "model.safetensors").exists():
                write_checkpoint(directory, name, changed=CHANGED.get(name))
        elif not directory.exists():
            architecture, _, variant = name.partition("-")
            stored = "f32" if dtype == "float32" else "bf16"
            with patch.dict(ARCHITECTURES, MAKERS):
                write_demo_model(
                    directory,
                    architecture,
                    shape=SHAPES.get(variant),
                    dtype=stored,
                    stored=variant if variant in FORMATS else None,
                )
        return directory

    return make


@pytest.fixture(scope="module")
def scene() -> Iterator[Scene]:
    """Where a module's engines run; nothing of them may be left when the module is done."""
    with clean_scene() as made:
        yield made


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For requests, answers and output of a module's engines."""
    return tmp_path_factory.mktemp("logs")

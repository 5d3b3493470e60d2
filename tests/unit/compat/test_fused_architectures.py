"""The table of architectures says what structures know, by the names that vLLM has for models."""

from __future__ import annotations

import ast
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.models.registry import ModelRegistry

sys.path.append(str(Path(__file__).parents[2] / "cluster"))

import other_models

from ray_hetero.cli.demo import model as demo
from ray_hetero.compat.models import decoder_classes
from ray_hetero.compat.models.fused_architectures import (
    ARCHITECTURES,
    IN_TRANSFORMERS,
    Architecture,
)

NAMES = [(one, name) for one in ARCHITECTURES for name in one.names]


def module_of(name: str) -> str:
    """The module of vLLM's models that an architecture is run with, without its package."""
    return str(ModelRegistry.models[name].module_name).removeprefix(f"{decoder_classes.MODELS}.")


def modules_used(name: str) -> set[str]:
    """That module, and those of other models that it takes classes from."""
    # Read, not imported: some import torchvision, which is not everywhere.
    module = find_spec(f"{decoder_classes.MODELS}.{module_of(name)}")
    assert module is not None
    assert module.origin is not None
    source = Path(module.origin).read_text(encoding="utf-8")
    return {module_of(name)} | {
        str(node.module).removeprefix(f"{decoder_classes.MODELS}.")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ImportFrom) and (node.level or "models" in str(node.module))
    }


@pytest.mark.parametrize(("row", "name"), NAMES, ids=[name for _, name in NAMES])
def test_an_architecture_has_layers_that_are_known_or_a_reason(
    row: Architecture, name: str
) -> None:
    module = module_of(name)
    if row.why_not:
        assert module not in decoder_classes.CLASSES
        assert (module.split(".")[0] == "transformers") == (row.why_not == IN_TRANSFORMERS)
    else:
        assert modules_used(name) & decoder_classes.CLASSES.keys()


def test_every_module_of_known_classes_is_in_the_table() -> None:
    covered = {module for row, name in NAMES if not row.why_not for module in modules_used(name)}
    assert decoder_classes.CLASSES.keys() <= covered


def test_no_architecture_is_in_two_rows() -> None:
    names = [name for _, name in NAMES]
    types = [model_type for row in ARCHITECTURES for model_type in row.model_types]
    assert len(names) == len(set(names))
    assert len(types) == len(set(types))
    assert all(bool(row.model_types) != bool(row.why_not) for row in ARCHITECTURES)


ENGINES = Path(__file__).parents[2] / "cluster"
COMPARING = ("test_tokens.py", "test_expert_ranks.py")
"""Engine tests that compare tokens of several models with those of stock vLLM."""


def test_engines_are_compared_for_the_models_that_the_table_says() -> None:
    texts = {
        node.value
        for name in COMPARING
        for node in ast.walk(ast.parse((ENGINES / name).read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    }
    named = {text.partition("-")[0] for text in texts}
    shape = demo.DemoShape()
    common = {
        "vocab_size": 200_000, "hidden_size": shape.hidden, "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads, "max_position_embeddings": 64,
    }  # fmt: skip
    makers = {**demo.ARCHITECTURES, **other_models.MAKERS}
    compared = {makers[name](shape, common).model_type for name in makers if name in named}
    assert {one for row in ARCHITECTURES for one in row.in_engines} == compared

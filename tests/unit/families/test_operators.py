"""vLLM's operators that CPU ranks call are those that the page has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[2]
ROOT = TESTS.parent
sys.path.insert(0, str(TESTS))
sys.path.insert(0, str(ROOT / "tools"))

import write_operators_page as page  # noqa: E402
from families import operators  # noqa: E402

from ray_hetero.compat.models.custom_ops import rounds  # noqa: E402

CALL = """
import json, sys
from families.operators import called
print(json.dumps(called(sys.argv[1])))
"""
SAMPLE = "LlamaForCausalLM"


def kept() -> dict[str, operators.Operators]:
    found: dict[str, operators.Operators] = json.loads(operators.RESULTS.read_text())
    return found


def test_the_page_has_what_was_found() -> None:
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.written(text) == text, "type: python tools/write_operators_page.py"


def test_every_kind_of_model_was_run() -> None:
    assert sorted(kept()) == sorted(operators.architectures())
    assert all(set(row) == set(page.KINDS) for row in kept().values())


def test_families_are_named_by_the_shorter_list() -> None:
    everyone = ["AForCausalLM", "BForCausalLM", "CForCausalLM"]
    assert page.families(everyone, everyone) == "all"
    assert page.families(everyone[:2], everyone) == "all but C"
    assert page.families(everyone[:1], everyone) == "A"
    assert page.families([], everyone) == "–"


@pytest.mark.parametrize(
    "architecture",
    [
        pytest.param(name, marks=() if name == SAMPLE else pytest.mark.slow)
        for name in operators.architectures()
    ],
)
def test_a_rank_calls_no_other(architecture: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    answer = subprocess.run(
        [sys.executable, "-c", CALL, architecture],
        cwd=TESTS, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300,
    )  # fmt: skip
    found = json.loads(answer.stdout.splitlines()[-1])
    for kind, names in kept()[architecture].items():
        called = set(found.get(kind, ()))
        # Without AVX512-BF16 PyTorch computes norms and activations.
        assert called <= set(names) if not rounds() else called == set(names)

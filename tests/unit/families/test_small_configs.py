"""Small configurations of all text-generation architectures; nothing of them is built here."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from families.configurations import architectures, small_config
from families.own_classes import OWN_CLASSES
from families.small_sizes import NONE, ROWS
from write_families_page import PAGE, RESULTS, written

REASONS = {"DeciLMForCausalLM", "HCXVisionV2ForCausalLM"}


def test_every_architecture_has_one_or_a_reason() -> None:
    found = {name: small_config(name) for name in architectures()}
    assert {name for name, config in found.items() if isinstance(config, str)} == REASONS
    for name, config in found.items():
        if isinstance(config, dict):
            assert config["architectures"] == [name]
            assert config["model_type"]


@pytest.mark.parametrize("table", [OWN_CLASSES, ROWS, NONE])
def test_the_tables_name_architectures_of_the_registry(table: dict[str, object]) -> None:
    assert set(table) <= set(architectures())


def test_sizes_are_small() -> None:
    # Lengths of a context and factors aside, nothing is larger than a tenth of a real model's.
    for name in architectures():
        config = small_config(name)
        if isinstance(config, dict):
            text = config.get("text_config") or config
            sizes = {
                text.get(key)
                for key in ("vocab_size", "padded_vocab_size", "hidden_size", "d_model", "n_embd")
            }
            assert max(size for size in sizes if size is not None) <= 1024, name


def test_the_page_shows_the_results() -> None:
    page = PAGE.read_text()
    assert written(page) == page, "type: python tools/write_families_page.py"
    results = json.loads(RESULTS.read_text())
    assert set(results) <= set(architectures())
    rows = [one for row in results.values() for one in row.values() if isinstance(one, dict)]
    outcomes = [one["outcome"] for one in rows]
    assert "wrong" not in outcomes

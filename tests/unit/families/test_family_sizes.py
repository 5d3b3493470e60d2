"""Planned bytes beside those that vLLM allocates: of all architectures as kept, and of a sample."""

from __future__ import annotations

import datetime
import json
import random
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from families import compare_sizes
from families.configurations import architectures

SAMPLE = (
    "GptOssForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM",
    "FalconH1ForCausalLM", "NemotronHForCausalLM", "Ernie4_5_MoeForCausalLM", "GPT2LMHeadModel",
    "Qwen3MoeForCausalLM@modelopt", "MixtralForCausalLM@nvfp4",
)  # fmt: skip
WHOLE = ("Gemma3nForCausalLM",)
"""Those of them for which vLLM has no pipelines."""
WITH_VOCABULARY = (
    "GptOssForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Gemma4ForCausalLM",
    "NemotronHForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM@modelopt",
    "MixtralForCausalLM@nvfp4",
)  # fmt: skip
"""Those of which each stage holds the embedding or the head."""
AT_ONCE = 5
"""How many of them a date tests."""


def kept() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(compare_sizes.RESULTS.read_text(encoding="utf-8"))
    return found


def test_every_architecture_that_vllm_makes_has_the_bytes_that_it_allocates() -> None:
    rows = kept()
    assert sorted(rows) == architectures()
    made = {name: one for name, one in rows.items() if "allocated" in one}
    assert len(made) >= 114
    assert [name for name, one in made.items() if not compare_sizes.is_equal(one)] == []


def test_the_page_gives_the_numbers_of_the_kept_results() -> None:
    page = (compare_sizes.HERE.parents[1] / "docs" / "which-model.md").read_text(encoding="utf-8")
    rows = kept()
    equal = sum(map(compare_sizes.is_equal, rows.values()))
    assert f"{equal} of the {len(rows)} architectures" in page
    for name, one in rows.items():
        assert compare_sizes.is_equal(one) or name in page


def test_a_sample_is_planned_as_vllm_allocates_it() -> None:
    names = random.Random(datetime.date.today().isoformat()).sample(SAMPLE, AT_ONCE)
    planned, allocated = (compare_sizes.sizes_of_side(side, names) for side in compare_sizes.SIDES)
    rows = {name: compare_sizes.row(planned[name], allocated[name]) for name in names}
    assert {name: one for name, one in rows.items() if not compare_sizes.is_equal(one)} == {}
    for name in names:
        assert planned[name]["divides"] == (name not in WHOLE)
        assert planned[name]["vocabulary_everywhere"] == (name in WITH_VOCABULARY)

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
from families.configurations import DRAFTER, architectures

SAMPLE = (
    "GptOssForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "DeepseekV32ForCausalLM",
    "DeepseekV4ForCausalLM", "Glm4MoeForCausalLM", "Gemma3nForCausalLM", "Gemma4ForCausalLM",
    "FalconH1ForCausalLM", "NemotronHForCausalLM", "Ernie4_5_MoeForCausalLM", "GPT2LMHeadModel",
    "Qwen3MoeForCausalLM@modelopt", "MixtralForCausalLM@nvfp4", "DeepseekV3ForCausalLM+mtp",
    "Qwen3NextForCausalLM+mtp", "Glm4MoeForCausalLM+mtp", "Ernie4_5_MoeForCausalLM+mtp",
)  # fmt: skip
NOT_EQUAL = ("DeepseekV4", "LongcatFlash", "NemotronH")
"""Families whose layers that draft are planned with other bytes, or are not made on a CPU."""
WHOLE = ("Gemma3nForCausalLM",)
"""Those of them for which vLLM has no pipelines."""
WITH_VOCABULARY = (
    "GptOssForCausalLM", "Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM", "Gemma4ForCausalLM",
    "NemotronHForCausalLM", "GPT2LMHeadModel", "Qwen3MoeForCausalLM@modelopt",
    "MixtralForCausalLM@nvfp4", "Qwen3NextForCausalLM+mtp",
)  # fmt: skip
"""Those of which each stage holds the embedding or the head."""
AT_ONCE = 5
"""How many of them a date tests."""


def kept() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = json.loads(compare_sizes.RESULTS.read_text(encoding="utf-8"))
    return found


def test_every_architecture_that_vllm_makes_has_the_bytes_that_it_allocates() -> None:
    rows = {name: one for name, one in kept().items() if not name.endswith(DRAFTER)}
    assert sorted(rows) == architectures()
    made = {name: one for name, one in rows.items() if "allocated" in one}
    assert len(made) >= 114
    assert [name for name, one in made.items() if not compare_sizes.is_equal(one)] == []


def test_layers_that_draft_have_the_bytes_that_vllm_allocates() -> None:
    rows = {name: one for name, one in kept().items() if name.endswith(DRAFTER)}
    assert sorted(rows) == sorted(compare_sizes.DRAFTING)
    unequal = {name for name, one in rows.items() if not compare_sizes.is_equal(one)}
    assert unequal == {f"{name}ForCausalLM{DRAFTER}" for name in NOT_EQUAL}


def test_the_page_gives_the_numbers_of_the_kept_results() -> None:
    page = (compare_sizes.HERE.parents[1] / "docs" / "which-model.md").read_text(encoding="utf-8")
    drafting, rows = (
        {name: one for name, one in kept().items() if name.endswith(DRAFTER) is drafts}
        for drafts in (True, False)
    )
    equal = sum(map(compare_sizes.is_equal, rows.values()))
    assert f"{equal} of the {len(rows)} architectures" in page
    equal = sum(map(compare_sizes.is_equal, drafting.values()))
    assert f"{equal} of {len(drafting)} families" in page
    for name, one in (rows | drafting).items():
        assert compare_sizes.is_equal(one) or name.removesuffix(DRAFTER) in page


def test_a_sample_is_planned_as_vllm_allocates_it() -> None:
    names = random.Random(datetime.date.today().isoformat()).sample(SAMPLE, AT_ONCE)
    planned, allocated = (compare_sizes.sizes_of_side(side, names) for side in compare_sizes.SIDES)
    rows = {name: compare_sizes.row(planned[name], allocated[name]) for name in names}
    assert {name: one for name, one in rows.items() if not compare_sizes.is_equal(one)} == {}
    for name in names:
        assert planned[name]["divides"] == (name not in WHOLE)
        assert planned[name]["vocabulary_everywhere"] == (name in WITH_VOCABULARY)

"""Hybrids of one stage verify drafts on CPU ranks: their tokens are those without drafts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from drafters import add_mtp_layer, favour_successors, write_llama_eagle_head
from engines import (
    IN_THIS_PROCESS,
    Json,
    batch,
    compared_until_near_ties,
    engine,
    hetero,
    metrics,
    run_engines,
    tokens,
)
from known_drafts import CLASS, write_answers
from leftovers import Scene

sys.path.append(str(Path(__file__).parents[1]))

from families.checkpoints import write_checkpoint

pytestmark = pytest.mark.timeout(1800)

DRAFTED = {"num_speculative_tokens": 3}
COUNTS = "vllm:spec_decode"
LIMITS: Json = {"max_model_len": 1024, "max_num_batched_tokens": 128}
RAY: Json = {
    "num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
LENGTHS = (20, 43, 66, 89, 2, 135, 129, 490)
"""Tokens of the prompts.  The last chunk of one has a single token, and the answer of the longest
fills the block at the end of which states are kept."""
GRANITE, FALCON = "GraniteMoeHybridForCausalLM", "FalconH1ForCausalLM"
ENGINES: dict[str, tuple[str, list[list[str]], str]] = {
    "one rank": (GRANITE, [["cpu"]], "custom_class"),
    "n-grams": (GRANITE, [["cpu"]], "ngram"),
    "tensor parallel": (FALCON, [["cpu", "cpu"]], "custom_class"),
    "beside a GPU": (FALCON, [["gpu", "cpu"]], "custom_class"),
}
"""Model, stage, and what drafts."""


def prompts() -> list[list[int]]:
    """Tokens of the small vocabulary."""
    return [
        [(7919 * (place + 1) * (at + 1) + 31 * at) % 490 + 8 for at in range(length)]
        for place, length in enumerate(LENGTHS)
    ]


def without_drafts(
    scene: Scene, folder: Path, models: Sequence[Path], asked: Json, given: Json
) -> list[list[Json]]:
    """Answers of stock vLLM, of which the drafters of our engines are told.

    Stock vLLM keeps no prefixes of Mamba 2 on CPUs.
    """
    runs = [(engine(one, **given, enable_prefix_caching=False), [asked]) for one in models]
    answers = [one for (one,) in run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)]
    for model, found in zip(models, answers, strict=True):
        said = zip(asked["prompts"], tokens(found), strict=True)
        write_answers(model, [prompt + answer for prompt, answer in said])
    return answers


def drafting(model: Path, stage: list[str], drafts: Json, given: Json) -> Json:
    """An engine of ours with drafts, which keeps prefixes."""
    ours = hetero(
        layout=[stage], cpu={"ranks_per_socket": len(stage)}, warmup={"step_timeout_s": 120}
    )
    return engine(
        model, 1, len(stage), disable_log_stats=False, speculative_config=drafts,
        **{"enable_prefix_caching": True, **given, **ours},
    )  # fmt: skip


def with_drafts(
    scene: Scene, folder: Path, engines: Sequence[Json], asked: Json
) -> list[tuple[list[list[Json]], float]]:
    """Answers of each engine, asked twice, and the share of drafts that it accepts."""
    runs = [(one, [asked, asked, metrics(COUNTS)]) for one in engines]
    extra = {"RAY_HETERO_PRETEND_GPU": "1", **IN_THIS_PROCESS}
    made = []
    for *answers, counts in run_engines(scene, folder, runs, ray=RAY, extra=extra):
        counted = {name: value for count in counts for name, value in count.items()}
        drafted = counted[f"{COUNTS}_num_draft_tokens"]
        assert drafted > 100
        made.append((answers, counted[f"{COUNTS}_num_accepted_tokens"] / drafted))
    return made


@pytest.mark.slow
def test_mixers_of_mamba_2_verify_drafts(scene: Scene, tmp_path: Path) -> None:
    names = (GRANITE, FALCON)
    models = {name: write_checkpoint(tmp_path / name, name) for name in names}
    drafts: Json = {
        "custom_class": {"model": CLASS},
        "ngram": {"prompt_lookup_min": 1, "prompt_lookup_max": 3},
    }
    asked, given = batch(prompts(), max_tokens=48), LIMITS | {"dtype": "float32"}
    expected = without_drafts(scene, tmp_path / "stock", list(models.values()), asked, given)
    engines = [
        drafting(models[name], *layout, {"method": by, **DRAFTED, **drafts[by]}, given)
        for name, layout, by in ENGINES.values()
    ]
    found = with_drafts(scene, tmp_path / "ours", engines, asked)
    for (case, (name, _, by)), (answers, accepted) in zip(ENGINES.items(), found, strict=True):
        wanted = tokens(expected[names.index(name)])
        assert [tokens(one) for one in answers] == [wanted] * 2, case
        # Of what is drafted from the answers some is right.
        assert by != "custom_class" or 0.4 < accepted < 0.8


@pytest.mark.slow
def test_a_gated_delta_net_verifies_drafts(scene: Scene, tmp_path: Path) -> None:
    # vLLM's operators for CPUs compute one in bfloat16, and with heads of 128 elements.
    sizes = {
        "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts_per_tok": 8,
        "num_nextn_predict_layers": 1,
    }  # fmt: skip
    path = write_checkpoint(tmp_path / "model", "Qwen3NextForCausalLM", changed=sizes)
    favour_successors(path)
    add_mtp_layer(path, like="model.layers.1")
    asked = batch(prompts(), max_tokens=48, logprobs=2)
    given = LIMITS | {"dtype": "bfloat16"}
    (expected,) = without_drafts(scene, tmp_path / "stock", [path], asked, given)
    head = write_llama_eagle_head(tmp_path / "head", path)
    kinds: list[Json] = [
        {"method": "custom_class", "model": CLASS},
        {"method": "mtp"},
        {"method": "eagle", "model": str(head)},
    ]
    made = [drafting(path, ["cpu"], drafts | DRAFTED, given) for drafts in kinds]
    for found, accepted in with_drafts(scene, tmp_path / "ours", made, asked):
        for answers in found:
            pairs = zip(answers, expected, strict=True)
            # Rounding in steps of several tokens changes tokens that are nearly alike.
            assert all(compared_until_near_ties(theirs, ours) for ours, theirs in pairs)
        assert 0.2 < accepted < 0.95

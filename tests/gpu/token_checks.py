"""Greedy tokens of many layouts, each compared with stock vLLM on one GPU."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from engines import Child, start
from gpu_host import IS_PRETENDED, LANES, SHARES, Checkpoint, confined, environment
from leftovers import Scene, wait_until

SCRIPT = Path(__file__).with_name("greedy_tokens.py")
LOGPROB_TOLERANCE = {"float32": 0.02, "bfloat16": 0.2}
"""How far the logprob of a token may be from the reference's.  The reference itself is not exact
in float32: its attention kernel multiplies in TF32, and stock vLLM on the GPU differs from this
backend with a GPU alone, same kernels and another model runner, by up to 1e-3.  In bfloat16 up to
0.154 was seen, with two ranks a stage."""
ROUTED_TOLERANCE = {"float32": 0.3, "bfloat16": 0.8}
"""The same for a mixture of experts, where a rounding may send a token to another expert; up to
0.17 was seen in float32, where attention multiplies in TF32, and 0.69 in bfloat16."""
ROUTED = ("mixtral", "qwen3_moe", "glm4_moe", "gpt_oss", "deepseek_v2", "deepseek_v3")
"""Architectures that are mixtures of experts."""
LEAST_SAME = 0.5
"""Share of prompts of a mixture that are answered with the reference's tokens to the end."""
INT8_TOLERANCE = 0.5
"""The same where activations are rounded to eight bits; in a tensor-parallel group every rank
rounds its share of them with a scale of its own."""
FP8_TOLERANCE = 0.6
"""The same where GPUs round activations to E4M3 with a scale for 128 of them, and CPU ranks do not.
With weights multiplied in bfloat16 and such rounding in all layers or in the last half of them,
logprobs of this model were up to 0.53 apart, twice as much as with integers of eight bits; on an
H200, with a CPU stage before the GPU's, 0.58.  Formats that round weights only, such as w4a16, have
the tolerance of their dtype, and so has FP8 with Marlin's kernels."""

ENGINE_S = 90.0
"""Longest time of an engine of a lane, on average; 30 to 45 s were seen beside others, and 80 s of
a lane's first one, which imports vLLM."""
COMPILED_S = 60.0
"""More of one that is compiled; 45 s were seen."""
PRETENDED = 5
"""By how much a host without a GPU is slower."""

DRAFTED = 3
"""Draft tokens of a request in a step."""


def is_family(model: str) -> bool:
    """Whether a model is named by its architecture in vLLM's registry, as mixtures here are."""
    return model.endswith("ForCausalLM")


Layout = str | list[list[str]]
Answer = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One engine."""

    model: str
    """Architecture of `demo-model`, `-` and a format of `demo-model --stored` behind it if
    quantised; or one of vLLM's registry."""
    dtype: str = "float32"
    layout: str = ""
    """Kinds of the ranks, `g` and `c`, stage by stage: `c/g` is a CPU stage before a GPU stage,
    `gc` one stage of two ranks.  Empty is stock vLLM on one GPU, `auto` one rank that the backend
    seats."""
    is_compiled: bool = False
    has_prompt_gpu: bool = False
    """Whether CPU ranks have a GPU compute steps of 8 tokens and more."""
    is_long: bool = False
    """Whether prompts are long, come in chunks, share prefixes and are asked twice; CPU ranks then
    have a GPU compute steps of 64 tokens and more."""
    share: float = 0.0
    """Share of a CPU rank's layers that a GPU computes in decode steps too."""
    experts: int = 0
    """Expert ranks beside the stages."""
    is_linked: bool = False
    """Whether a GPU reads their experts over its link in steps of 64 tokens and more."""
    is_split: bool = False
    """Whether it reads some experts of a layer only, and the sockets compute the others."""
    slots: str = ""
    """Use of slots that a GPU has for experts, as `experts.slots` has it."""
    drafts: str = ""
    """Method of speculative decoding, as vLLM names it."""
    linear_backend: str = "auto"
    """Kernels of linear layers on the GPU, of the reference too, as vLLM names them."""
    gdn_prefill_backend: str = ""
    """Kernel of Gated DeltaNet for prompts, of the reference too, as vLLM names it."""

    def __str__(self) -> str:
        """Name of the test."""
        compiled = ["compiled"] if self.is_compiled else []
        prompt_gpu = ["prompt GPU"] if self.has_prompt_gpu else []
        long = ["long"] if self.is_long else []
        share = ["sharing"] if self.share else []
        experts = [f"experts{self.experts}"] if self.experts else []
        link = ["split" if self.is_split else "link"] if self.is_linked else []
        slots = [f"slots {self.slots}"] if self.slots else []
        drafts = [self.drafts] if self.drafts else []
        backend = [self.linear_backend] if self.linear_backend != "auto" else []
        parts = [
            self.model, self.dtype, self.layout, *compiled, *prompt_gpu, *long, *share, *experts,
            *link, *slots, *drafts, *backend,
        ]  # fmt: skip
        return "-".join(parts)

    @property
    def stages(self) -> Layout:
        """As the configuration has it."""
        if self.layout in ("", "auto"):
            return self.layout
        kinds = {"c": "cpu", "g": "gpu"}
        return [[kinds[letter] for letter in stage] for stage in self.layout.split("/")]

    @property
    def checkpoint(self) -> tuple[str, str]:
        """Name and dtype of its checkpoint, which has the layers that draft where these are the
        model's own."""
        return ("mtp" if self.drafts == "mtp" else self.model), self.dtype

    @property
    def reference(self) -> Case:
        """What it is compared with."""
        return Case(
            self.model, self.dtype, is_long=self.is_long, linear_backend=self.linear_backend,
            gdn_prefill_backend=self.gdn_prefill_backend,
        )  # fmt: skip

    @property
    def rounds_activations(self) -> bool:
        """Whether GPUs round activations to E4M3, which CPU ranks do not."""
        return self.model.endswith("-fp8") and self.linear_backend != "marlin"

    @property
    def tolerance(self) -> float:
        """How far a logprob may be from the reference's."""
        if self.model.endswith("-int8"):
            return INT8_TOLERANCE
        if self.rounds_activations:
            return FP8_TOLERANCE
        is_routed = self.model in ROUTED or is_family(self.model)
        found = ROUTED_TOLERANCE if is_routed else LOGPROB_TOLERANCE
        return found[self.dtype]

    @property
    def near_tie(self) -> float:
        """How far the reference's two likeliest tokens may be apart where an answer parts from it.

        Where every logprob may move by a tolerance, two of them may come closer by twice as much.
        Only FP8 needs that; other formats part where less than one tolerance lies between.
        """
        return (2 if self.rounds_activations else 1) * self.tolerance


def answers_of(cases: Sequence[Case], report: str) -> Any:
    """A fixture of a module: the answers of its cases, and of what they are compared with.

    Args:
        cases: of the module; those run that tests of this run want.
        report: name of the file with the answers, see `write_report`.

    """

    @pytest.fixture(scope="module", name="answers")
    def made(
        scene: Scene, logs: Path, checkpoint: Checkpoint, request: pytest.FixtureRequest
    ) -> dict[Case, Answer]:
        found = run_cases(scene, logs, checkpoint, asked_for(request, cases))
        write_report(found, report)
        return found

    return made


def asked_for(request: pytest.FixtureRequest, cases: Sequence[Case]) -> list[Case]:
    """Those cases of a module that tests of this run want, as `-k` chose them."""
    wanted = {
        item.callspec.params["case"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and item.module is request.module
        and "case" in item.fixturenames
    }
    return [case for case in cases if case in wanted]


def run_cases(
    scene: Scene, logs: Path, checkpoint: Checkpoint, cases: Sequence[Case]
) -> dict[Case, Answer]:
    """Run all cases and their references, a few at a time, each lane's in one process.

    An engine that does not start or finish has an answer with an `error`.
    """
    references = list(dict.fromkeys(case.reference for case in cases))
    lanes = [_lane(references, cases, number) for number in range(LANES)]
    for case in [*references, *cases]:
        checkpoint(*case.checkpoint)
    for case in cases:
        drafts(case.drafts, checkpoint)

    def run(number: int) -> dict[Case, Answer]:
        with confined(number, LANES):
            return _run(scene, logs / f"lane{number}", checkpoint, lanes[number])

    with ThreadPoolExecutor(LANES) as pool:
        answers = list(pool.map(run, range(LANES)))
    return {case: answer for found in answers for case, answer in found.items()}


def _lane(references: Sequence[Case], cases: Sequence[Case], number: int) -> list[Case]:
    # References first: an engine with CPU ranks chooses the model runner for its process.
    return [*references[number::LANES], *cases[number::LANES]]


def limit_of(cases: Sequence[Case]) -> float:
    """Longest wait for a lane's engines, which start one after the other."""
    seconds = sum(ENGINE_S + COMPILED_S * case.is_compiled for case in cases)
    return seconds * (PRETENDED if IS_PRETENDED else 1)


def _run(
    scene: Scene, log: Path, checkpoint: Checkpoint, cases: Sequence[Case]
) -> dict[Case, Answer]:
    runs = [
        {
            "model": str(checkpoint(*case.checkpoint)),
            "dtype": case.dtype,
            "layout": case.stages,
            "compiled": case.is_compiled,
            "prompt_gpu": case.has_prompt_gpu,
            "long": case.is_long,
            "share": case.share,
            "shares": SHARES,
            "experts": case.experts,
            "linked": case.is_linked,
            "split": case.is_split,
            "slots": case.slots,
            "drafts": drafts(case.drafts, checkpoint),
            "linear_backend": case.linear_backend,
            "additional": (
                {"gdn_prefill_backend": case.gdn_prefill_backend}
                if case.gdn_prefill_backend
                else {}
            ),
        }
        for case in cases
    ]
    child = start(scene, [sys.executable, str(SCRIPT), json.dumps(runs)], log, environment())
    limit_s = limit_of(cases)
    ended = wait_until(lambda: child.process.poll() is not None, limit_s)
    if not ended:
        child.process.kill()
    answers = _answers(child)
    why = f"no answer: {'ended' if ended else f'still running after {limit_s:g} s'}"
    missing = {"error": f"{why}\n{child.tail(80)}"}
    padded = [*answers, *[missing] * (len(cases) - len(answers))]
    return dict(zip(cases, padded, strict=True))


def drafts(method: str, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The speculative configuration of a method; None without one."""
    if not method:
        return None
    has_none = method in ("ngram", "mtp")
    from_model = {} if has_none else {"model": str(checkpoint(method, "float32"))}
    lookup = {"prompt_lookup_min": 1, "prompt_lookup_max": 3} if method == "ngram" else {}
    return {"method": method, "num_speculative_tokens": DRAFTED, **from_model, **lookup}


def _answers(child: Child) -> list[Answer]:
    lines = [line for line in child.log.splitlines() if line.startswith("ANSWER ")]
    return [json.loads(line.removeprefix("ANSWER ")) for line in lines]


def write_report(answers: dict[Case, Answer], name: str) -> None:
    """Keep the answers where RAY_HETERO_GPU_REPORT says, a folder."""
    if folder := os.environ.get("RAY_HETERO_GPU_REPORT"):
        rows = [{**vars(case), **summary(case, answers)} for case in answers]
        Path(folder, f"{name}.json").write_text(json.dumps(rows, indent=1))


def summary(case: Case, answers: dict[Case, Answer]) -> dict[str, Any]:
    """How a case compares with its reference, in numbers."""
    answer, reference = answers[case], answers[case.reference]
    if "error" in answer or "error" in reference:
        return {"error": answer.get("error", "no reference")}
    differences, gaps = compare(reference, answer)
    kept = ("is_v2_runner", "is_async", "start_s", "seconds")
    return {
        "prompts_with_the_same_tokens": len(answer["tokens"]) - len(gaps),
        "largest_logprob_difference": max(differences),
        "gaps_where_tokens_differ": gaps,
        **{name: answer[name] for name in kept},
    }


def compare(reference: Answer, answer: Answer) -> tuple[list[float], list[float]]:
    """Differences of the likeliest tokens' logprobs up to where an answer parts from the reference,
    and by how much the reference's two likeliest tokens are apart there."""
    differences, gaps = [0.0], []
    rows = zip(reference["tokens"], answer["tokens"], reference["top"], answer["top"], strict=True)
    for expected, got, expected_top, got_top in rows:
        for at, (left, right) in enumerate(zip(expected, got, strict=True)):
            (first, _), (second, _) = expected_top[at]
            if left != right:
                gaps.append(first - second)
                break
            differences.append(abs(first - got_top[at][0][0]))
    return differences, gaps


def check(case: Case, answers: dict[Case, Answer]) -> None:
    """The same tokens as the reference but for near-ties, their logprobs within the tolerance."""
    answer, reference = answers[case], answers[case.reference]
    assert "error" not in reference, reference["error"]
    assert "error" not in answer, answer["error"]
    # Not a test if every prompt ends in the same rut.
    assert len({tuple(tokens[-4:]) for tokens in reference["tokens"]}) > 8
    differences, gaps = compare(reference, answer)
    assert max(gaps, default=0.0) < case.near_tie, f"no near-ties: {gaps}"
    assert len(gaps) <= (1 - LEAST_SAME) * len(answer["tokens"])
    assert max(differences) < case.tolerance

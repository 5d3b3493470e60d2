"""Greedy tokens over several CPU ranks are those of stock vLLM in one process.

With vLLM's kernels pipelines compute the same numbers in the same order, so bf16 must agree
exactly.  Tensor parallelism adds partial sums up in another order, so it is compared in float32.
This project's own kernels round bf16 in other places; there tokens may differ where two are equally
likely.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dequantised import dequantised
from engines import (
    IN_THIS_PROCESS,
    REFUSED,
    TOTALS,
    Json,
    Model,
    Stock,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene

from ray_hetero.cli.demo.model import DemoShape
from ray_hetero.kernels.linear import streaming_linear

pytestmark = pytest.mark.timeout(1800)

UNCOMPILED = "uncompiled"
EAGER = [
    ("opt-f32", 2, 2),
    # Nothing is compiled, and yet the engine is not eager.
    (f"llama-f32-{UNCOMPILED}", 2, 1),
]
OTHERS = [
    ("llama-bf16", 2, 1),
    ("llama-f32", 1, 2),
    ("llama-bf16-compiled", 2, 1),
    ("opt-f32-compiled", 1, 2),
    ("opt-bf16", 2, 1),
]

NEARLY_EQUAL = 0.13
"""How far apart logprobs may be that bf16 cannot tell apart reliably: two of its steps between 8
and 16, where the largest logits of the demo models are."""
has_no_native = streaming_linear._native is None

Tokens = dict[str, list[list[int]]]


def _run(
    scene: Scene,
    directory: Path,
    model: Model,
    cases: list[tuple[str, int, int]],
    **environment: str,
) -> Tokens:
    """All engines of a list, one after the other in one process as in a notebook."""
    runs = []
    for name, pipeline, tensor in cases:
        architecture, dtype, *how = name.split("-")
        arguments = engine(
            model(architecture, dtype),
            pipeline,
            tensor,
            dtype="float32" if dtype == "f32" else "bfloat16",
            enforce_eager=not how,
            compilation_config={"mode": 0} if how == [UNCOMPILED] else {},
            **hetero(cpu={"ranks_per_socket": pipeline * tensor, "linear_kernel": "vllm"}),
        )
        runs.append((arguments, [REFUSED, batch(prompts()), batch(prompts(), logprobs=1)]))
    # Faster; the engines of the other modules have a process of their own.
    answers = run_engines(scene, directory, runs, extra={**IN_THIS_PROCESS, **environment})
    for refused, plain, with_logprobs in answers:
        assert refused == [{"requests": 0}] * 3
        assert tokens(with_logprobs) == tokens(plain)
        for answer in with_logprobs:
            for token, values in zip(answer["tokens"][0], answer["logprobs"][0], strict=True):
                assert max(values, key=values.__getitem__) == str(token)
    return {name: tokens(found[1]) for (name, _, _), found in zip(cases, answers, strict=True)}


@pytest.fixture(scope="module")
def eager(scene: Scene, logs: Path, model: Model) -> Tokens:
    # A node without a C++ compiler serves it, whatever a client asks for.
    kept = str(logs / "compiled")
    return _run(scene, logs / "eager", model, EAGER, CXX="/none/c++", TORCHINDUCTOR_CACHE_DIR=kept)


@pytest.fixture(scope="module")
def others(scene: Scene, logs: Path, model: Model) -> Tokens:
    return _run(scene, logs / "others", model, OTHERS)


def _same(ours: list[list[int]], theirs: list[list[int]]) -> None:
    given = prompts()
    assert len({len(prompt) for prompt in given}) == len(given) == len(ours) == 16
    # Not a test if every prompt ends in the same rut.
    assert len({tuple(answer[-4:]) for answer in theirs}) > 8
    different = {
        f"prompt {number} of {len(given[number])} tokens": (mine, wanted)
        for number, (mine, wanted) in enumerate(zip(ours, theirs, strict=True))
        if mine != wanted
    }
    assert different == {}


@pytest.mark.parametrize(("name", "pipeline", "tensor"), EAGER)
def test_eager(name: str, pipeline: int, tensor: int, eager: Tokens, stock: Stock) -> None:
    _same(eager[name], stock(name.removesuffix(f"-{UNCOMPILED}")))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "pipeline", "tensor"), OTHERS)
def test_others(name: str, pipeline: int, tensor: int, others: Tokens, stock: Stock) -> None:
    _same(others[name], stock(name))


# test_quality.py has these kernels in the default run.
@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize(
    ("architecture", "pipeline", "tensor"),
    [
        ("llama", 1, 2), ("llama", 2, 1), ("qwen3", 2, 1), ("qwen3", 2, 2), ("gemma2", 1, 2),
        *((other, 2, 1) for other in (
            "mistral", "gemma", "gemma2", "phi3", "granite", "glm4", "stablelm", "opt",
        )),
    ],
)  # fmt: skip
def test_kernels_of_this_project(
    architecture: str, pipeline: int, tensor: int, scene: Scene, logs: Path, model: Model
) -> None:
    path = model(architecture, "bf16")
    shares = pipeline * tensor
    cpu = {"ranks_per_socket": shares, "linear_kernel": "streaming", "compact_weights": True}
    compiled = {"dtype": "bfloat16", "enforce_eager": False}
    ours_made = engine(path, pipeline, tensor, **compiled, **hetero(cpu=cpu))
    runs = [
        (made, [batch(prompts(), logprobs=2)]) for made in (engine(path, **compiled), ours_made)
    ]
    folder = logs / f"kernels-{architecture}-{pipeline}-{tensor}"
    (theirs,), (ours,) = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
    # Ranks of one stage say the same.
    log = (folder / "log").read_text()
    layers = {1: 4, 2: 2}[pipeline]
    assert f"{layers} layers are computed as one operator" in log
    assert "(cpu.compact_weights)" in log
    assert ("add up their products in shared memory" in log) == (tensor > 1)
    found = [gap_where_different(*pair) for pair in zip(ours, theirs, strict=True)]
    gaps = [gap for gap in found if gap is not None]
    assert len(gaps) <= 3
    assert all(gap < NEARLY_EQUAL for gap in gaps)


@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize(
    ("architecture", "pipeline", "tensor"), [("llama", 2, 1), ("qwen3", 1, 2)]
)  # fmt: skip
def test_kernels_of_this_project_in_float16(
    architecture: str, pipeline: int, tensor: int, scene: Scene, tmp_path: Path, model: Model
) -> None:
    path, half = model(architecture, "f32"), {"dtype": "float16"}
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
    asked = batch(prompts(), logprobs=2)
    runs = [
        (engine(path, **half), [asked]),
        (engine(path, pipeline, tensor, **half, **hetero(cpu=cpu)), [asked, TOTALS]),
    ]
    (theirs,), (ours, totals) = run_engines(scene, tmp_path / "run", runs, extra=IN_THIS_PROCESS)
    log = (tmp_path / "run/log").read_text()
    assert f"{4 // pipeline} layers are computed as one operator" in log
    assert "linear layers stream their weights, in float16" in log
    assert "operator by operator" not in log
    native = [rank["native_layer_tokens"] for rank in totals]
    assert all(count >= 4 // pipeline * 16 * 20 for count in native)
    apart, gaps = apart_from(theirs, ours)
    print(f"{architecture}: {apart:.5f} from stock vLLM, answers part at {gaps}")
    # Neighbours are eight times nearer than in bfloat16.
    assert len(gaps) <= 1
    assert all(gap < NEARLY_EQUAL / 8 for gap in gaps)
    assert apart < NEARLY_EQUAL / 8


@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize(
    ("architecture", "pipeline", "tensor", "compact"),
    [("mixtral", 2, 1, True), ("qwen3_moe", 2, 1, False), ("qwen3_moe", 1, 2, True)],
)
def test_experts_of_this_project(
    architecture: str,
    pipeline: int,
    tensor: int,
    compact: bool,
    scene: Scene,
    logs: Path,
    model: Model,
) -> None:
    path = model(architecture, "bf16")
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming", "compact_weights": compact}
    compiled = {"dtype": "bfloat16", "enforce_eager": False}
    made = [
        engine(path, dtype="float32"),
        engine(path, **compiled),
        engine(path, pipeline, tensor, **compiled, **hetero(cpu=cpu)),
    ]
    folder = logs / f"experts-{architecture}-{pipeline}"
    runs = [(one, [batch(prompts(), logprobs=2)]) for one in made]
    (exact,), (theirs,), (ours,) = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
    # Ranks of one stage say the same; the first layer of qwen3_moe has no experts.
    log = (folder / "log").read_text()
    first = {"mixtral": 2, "qwen3_moe": 1}[architecture] if pipeline > 1 else 3
    assert f"experts of {first} layers stream their weights" in log
    assert "stay with vLLM's kernel" not in log
    assert "operator by operator" not in log
    # A router that sees two experts nearly equal may take either, and its token's logits move by
    # more than rounding does: stock vLLM, compiled and not, answers up to five of 16 prompts
    # otherwise than itself.  Answers count up to where they part, so that more counts of the engine
    # that is nearer to the exact ones.
    check_beside_stock(architecture, exact, theirs, ours, times=1.5, more=3)
    assert apart_from(theirs, ours)[0] < 0.1


# As published; without scaling stock vLLM's operator for CPUs does not rotate all heads.
YARN = {
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
        "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
    }
}  # fmt: skip
ALL_EXPERTS = {"num_experts_per_tok": 8, "n_group": 1, "topk_group": 1}
"""Every token takes all experts of a demo model: no rounding sends it to other ones."""


@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize(
    ("architecture", "stored", "pipeline", "tensor"),
    [
        ("deepseek_v2", None, 2, 1),
        ("deepseek_v3", None, 1, 2),
        ("deepseek_v3", "fp8", 2, 1),
    ],
)
def test_latent_attention_of_this_project(
    architecture: str, stored: str | None, pipeline: int, tensor: int, scene: Scene,
    tmp_path: Path, model: Model,
) -> None:  # fmt: skip
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
    kind = {"hf_overrides": {**YARN, **ALL_EXPERTS}}
    path = plain = model(architecture, "bf16")
    if stored is not None:
        # All sizes are multiples of 128, but for the latents', as published.
        path = model(architecture, stored=stored, shape=DemoShape(4, 768, 24))
        plain = dequantised(path, tmp_path / "plain", torch.float32)
    asked = batch(prompts(), logprobs=2)
    runs = [
        # vLLM's backend for AMX computes bfloat16 only.
        (engine(plain, dtype="float32", attention_backend="CPU_MLA", **kind), [asked]),
        (engine(plain, dtype="bfloat16", **kind), [asked]),
        (
            engine(path, pipeline, tensor, dtype="bfloat16", **kind, **hetero(cpu=cpu)),
            [asked, TOTALS],
        ),
    ]
    folder = tmp_path / "run"
    (exact,), (theirs,), (ours, totals) = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
    log = (folder / "log").read_text()
    layers = 4 // pipeline
    assert f"{layers} layers are computed as one operator" in log
    assert "operator by operator" not in log
    assert ("add up their products in shared memory" in log) == (tensor > 1)
    assert ("are the checkpoint's own fp8" in log) == (stored == "fp8")
    # 16 prompts have 23 tokens each that are no prompt's.
    native = [rank["native_layer_tokens"] for rank in totals]
    assert all(count >= layers * 16 * 20 for count in native), native
    # Stock vLLM in bfloat16 differs from float32 by as much as two bfloat16 differ, or more: what
    # heads attend to, and queries multiplied with what makes keys, are rounded too.
    check_beside_stock(f"{architecture}, {stored}", exact, theirs, ours, times=1.25, more=1)


@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize("architecture", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_of_this_project_with_routers(
    architecture: str, scene: Scene, logs: Path, model: Model
) -> None:
    path = model(architecture, "bf16")
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
    kind = {"hf_overrides": YARN}
    # vLLM's backend for AMX computes bfloat16 only.
    precise = engine(path, dtype="float32", attention_backend="CPU_MLA", **kind)
    made = [
        precise,
        engine(path, dtype="bfloat16", **kind),
        engine(path, 2, dtype="bfloat16", **kind, **hetero(cpu=cpu)),
    ]
    folder = logs / f"latent-{architecture}"
    runs = [(one, [batch(prompts(), logprobs=2)]) for one in made]
    (exact,), (theirs,), (ours,) = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
    log = (folder / "log").read_text()
    assert "2 layers are computed as one operator" in log
    assert "operator by operator" not in log
    # Routers of these models see experts nearly equal so often that stock vLLM in bfloat16 answers
    # a third of the prompts otherwise than in float32: this project must be no further from that.
    check_beside_stock(architecture, exact, theirs, ours, times=1.25, more=3, least=0.02)


@pytest.mark.slow
@pytest.mark.skipif(has_no_native, reason="needs the native module")
@pytest.mark.parametrize(("pipeline", "tensor"), [(2, 1), (1, 2)])
def test_linear_states_of_this_project(
    pipeline: int, tensor: int, scene: Scene, tmp_path: Path, model: Model
) -> None:
    cpu = {"ranks_per_socket": 2, "linear_kernel": "streaming"}
    # vLLM's operators for CPUs compute a Gated DeltaNet in bfloat16 only.
    kind = {"dtype": "bfloat16", "hf_overrides": {"num_experts_per_tok": 8}}
    path, asked = model("qwen3_next", "bf16"), batch(prompts(), logprobs=2)
    runs = [
        (engine(path, **kind), [asked]),
        (engine(path, pipeline, tensor, **kind, **hetero(cpu=cpu)), [asked, TOTALS]),
    ]
    folder = tmp_path / "run"
    (theirs,), (ours, totals) = run_engines(scene, folder, runs, extra=IN_THIS_PROCESS)
    log = (folder / "log").read_text()
    # The layers between them are vLLM's own, with a gate behind their attention.
    layers = 2 // pipeline
    assert f"{layers} layers are computed as one operator" in log
    assert ("add up their products in shared memory" in log) == (tensor > 1)
    native = [rank["native_layer_tokens"] for rank in totals]
    assert all(count >= layers * 16 * 20 for count in native), native
    # Rounding alone changes answers of such a model: stock vLLM's, too, part from each other with
    # PyTorch's operators in the place of its own.
    wanted, of_stock = from_float32(path, theirs)
    apart, same = from_float32(path, ours)
    print(f"{pipeline}, {tensor}: {apart:.4f} from float32, {same} likeliest tokens; "
          f"stock vLLM {wanted:.4f} and {of_stock}")  # fmt: skip
    assert apart < 1.25 * wanted
    assert same > of_stock - 12


def from_float32(path: Path, answers: list[Json]) -> tuple[float, int]:
    """How far logprobs of answers are from Transformers' in float32, and how often they agree.

    Args:
        path: checkpoint of Qwen3-Next, all of whose experts are chosen.
        answers: to `prompts()`.

    Returns:
        The median of the answers' tokens, and how many of these are likeliest in float32 too.

    """
    import torch
    from transformers import AutoModelForCausalLM

    exact = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, num_experts_per_tok=8
    )  # fmt: skip
    apart, same = [], 0
    for prompt, answer in zip(prompts(), answers, strict=True):
        tokens, likely = answer["tokens"][0], answer["logprobs"][0]
        with torch.no_grad():
            logits = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        logprobs = torch.log_softmax(logits.float(), -1)
        same += int((logprobs.argmax(-1) == torch.tensor(tokens)).sum())
        for at, token in enumerate(tokens):
            apart.append(abs(float(logprobs[at, token]) - likely[at][str(token)]))
    return statistics.median(apart), same


def check_beside_stock(
    name: str, exact: list[Json], theirs: list[Json], ours: list[Json], *,
    times: float, more: int, least: float = 0.0,
) -> None:  # fmt: skip
    """Check that this project is hardly further from float32 than stock vLLM in bfloat16.

    Logprobs may be so many `times` as far from it in the mean, or `least`, and so many `more`
    answers may part from its answers.
    """
    apart, gaps = apart_from(exact, ours)
    of_stock, of_stock_gaps = apart_from(exact, theirs)
    print(f"{name}: {apart:.4f} from float32, answers part at {gaps}; "
          f"stock vLLM {of_stock:.4f} and {of_stock_gaps}")  # fmt: skip
    assert apart < max(times * of_stock, least), f"{apart} from float32, stock vLLM {of_stock}"
    assert len(gaps) <= len(of_stock_gaps) + more


def apart_from(wanted: list[Json], answers: list[Json]) -> tuple[float, list[float]]:
    """How far logprobs are from wanted ones in the mean, and gaps where the answers part."""
    pairs = list(zip(answers, wanted, strict=True))
    gaps = [gap for pair in pairs if (gap := gap_where_different(*pair)) is not None]
    return statistics.fmean(itertools.chain(*(differences(*pair) for pair in pairs))), gaps


def differences(mine: Json, wanted: Json) -> Iterator[float]:
    """By how much logprobs of the same tokens differ, as long as the answers are the same."""
    rows = zip(
        mine["tokens"][0], wanted["tokens"][0], mine["logprobs"][0], wanted["logprobs"][0],
        strict=True,
    )  # fmt: skip
    for left, right, likely, expected in rows:
        for token in likely.keys() & expected.keys():
            yield abs(likely[token] - expected[token])
        if left != right:
            return


def gap_where_different(mine: Json, wanted: Json) -> float | None:
    """By how much stock vLLM's two likeliest tokens are apart where the answers part."""
    pairs = zip(mine["tokens"][0], wanted["tokens"][0], wanted["logprobs"][0], strict=True)
    for left, right, likely in pairs:
        if left != right:
            first, second = sorted(likely.values(), reverse=True)[:2]
            return float(first - second)
    return None


def test_a_second_engine_in_the_same_process_left_nothing_of_the_first(
    eager: Tokens, scene: Scene
) -> None:
    assert len(eager) == len(EAGER)
    scene.assert_clean()

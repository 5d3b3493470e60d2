"""What else works over ranks of two kinds, the GPU ranks pretended: the answers of stock vLLM.

The features of a running server are in server_checks; here are kinds of models and of engines.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from engines import Json, Model, batch, engine, hetero, prompts, run_engines, tokens
from leftovers import Scene
from lora_adapters import write_adapter

from ray_hetero.cli.demo.model import DemoShape, write_demo_model

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

PIPELINE, MIXED = [["cpu"], ["gpu"]], [["gpu", "cpu"]]
UNEVEN = [["cpu", "cpu"], ["gpu"]]
RANK = 8
"""Of the adapter's matrices."""


@dataclass(frozen=True)
class Feature:
    """An engine and what it is asked."""

    layout: list[list[str]]
    model: str
    arguments: Json = field(default_factory=dict)
    asked: Json = field(default_factory=dict)
    dtype: str = "float32"
    tolerance: float = 0.0
    """How far apart the two likeliest tokens may be where an answer parts from stock vLLM's.  In
    tensor parallelism every rank rounds its share of the activations with a scale of its own."""


FEATURES = {
    "an adapter in a pipeline": Feature(PIPELINE, "llama", {"enable_lora": True}, {"adapter": ""}),
    "an adapter in a mixed stage": Feature(MIXED, "llama", {"enable_lora": True}, {"adapter": ""}),
    "embeddings of a pipeline": Feature(
        PIPELINE,
        "llama",
        {"runner": "pooling", "convert": "embed", "skip_tokenizer_init": False},
        {"embeds": True},
    ),
    "eight bits in a pipeline": Feature(PIPELINE, "int8", dtype="bfloat16"),
    "eight bits in a mixed stage": Feature(
        MIXED, "int8", {}, {"sampling": {"logprobs": 2}}, "bfloat16", tolerance=0.5
    ),
    "an adapter in stages of different size": Feature(
        UNEVEN, "llama", {"enable_lora": True}, {"adapter": ""}
    ),
    "eight bits in stages of different size": Feature(
        UNEVEN, "int8", {}, {"sampling": {"logprobs": 2}}, "bfloat16", tolerance=0.5
    ),
    "chunks of prompts and their prefixes in stages of different size": Feature(
        UNEVEN,
        "llama",
        {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_prefix_caching": True},
        {"twice": True},
    ),
}
SHAPE = DemoShape()


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA adapter on the queries and values of the demo model."""
    folder = tmp_path_factory.mktemp("adapter")
    return write_adapter(folder, SHAPE, rank=RANK, modules=("q_proj", "v_proj"))


@pytest.fixture(scope="module")
def folder(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The checkpoint of a feature."""
    int8 = write_demo_model(tmp_path_factory.mktemp("int8") / "model", stored="int8")
    return lambda name: int8 if name == "int8" else model(name, "f32")


def _batches(feature: Feature, adapter: Path) -> list[Json]:
    asked = {**feature.asked}
    plain = batch(prompts(), **asked.pop("sampling", {}))
    if asked.pop("twice", False):
        return [plain, plain]
    if "adapter" not in asked:
        return [plain | asked]
    # With and without: the two must differ, and the second must not see the first.  An adapter that
    # fails on every rank is the caller's error, and no answer of the next step.
    missing = plain | {"missing_adapter": str(adapter / "missing")}
    return [plain | {"adapter": str(adapter)}, plain, missing]


def _arguments(path: Path, feature: Feature, *, is_ours: bool) -> Json:
    layout = feature.layout if is_ours else [["cpu"]]
    cpu: Json = {"ranks_per_socket": 2}
    if feature.model == "int8":
        # vLLM's kernel rounds activations to eight bits as well, which this project's kernels do
        # not: tests/cluster/test_formats.py compares those with the same weights in bf16.
        cpu["linear_kernel"] = "vllm"
    ours = hetero(layout=layout, cpu=cpu) if is_ours else {}
    sizes = (len(layout), max(map(len, layout)))
    return engine(path, *sizes, dtype=feature.dtype, **{**feature.arguments, **ours})


@pytest.fixture(scope="module")
def answers(
    scene: Scene, logs: Path, folder: Callable[[str], Path], adapter: Path,
    request: pytest.FixtureRequest,
) -> dict[str, tuple[Any, Any]]:  # fmt: skip
    """Ours and stock vLLM's, of every feature whose test runs."""
    names = [
        item.callspec.params["name"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.module is request.module
    ]
    features = [FEATURES[name] for name in names]
    ray: dict[str, Any] = {
        "num_cpus": 2, "num_gpus": 1, "object_store_memory": 100 << 20, "include_dashboard": False
    }  # fmt: skip
    both = []
    for is_ours in (True, False):
        runs = [
            (_arguments(folder(feature.model), feature, is_ours=is_ours),
             _batches(feature, adapter))
            for feature in features
        ]  # fmt: skip
        both.append(
            run_engines(
                scene,
                logs / ("ours" if is_ours else "stock"),
                runs,
                ray=ray if is_ours else None,
                extra={"RAY_HETERO_PRETEND_GPU": "1"},
            )
        )
    return dict(zip(names, zip(*both, strict=True), strict=True))


@pytest.mark.parametrize("name", FEATURES)
def test_the_answer_is_that_of_stock(name: str, answers: dict[str, tuple[Any, Any]]) -> None:
    ours, stock = answers[name]
    if FEATURES[name].asked.get("embeds"):
        for mine, theirs in zip(ours[0], stock[0], strict=True):
            assert mine["embedding"] == pytest.approx(theirs["embedding"], abs=1e-4)
        return
    if FEATURES[name].tolerance:
        assert max(_gaps(ours[0], stock[0]), default=0.0) < FEATURES[name].tolerance
        return
    assert [tokens(found) for found in ours] == [tokens(found) for found in stock]
    if FEATURES[name].arguments.get("enable_lora"):
        assert tokens(ours[0]) != tokens(ours[1])


def _gaps(ours: list[Json], stock: list[Json]) -> list[float]:
    """By how much stock vLLM's two likeliest tokens are apart where answers part."""
    gaps = []
    for mine, theirs in zip(ours, stock, strict=True):
        pairs = zip(mine["tokens"][0], theirs["tokens"][0], strict=True)
        at = next((at for at, (left, right) in enumerate(pairs) if left != right), None)
        if at is not None:
            first, second = sorted(theirs["logprobs"][0][at].values(), reverse=True)[:2]
            gaps.append(first - second)
    # With AVX2, 6 of 16 part where each rank of a group rounds with a scale of its own, all of them
    # at tokens that are less than 0.3 apart.
    assert len(gaps) <= len(ours) // 2
    return gaps

"""A model that reads images, in pipelines of sockets and pretended GPUs: stock vLLM's answers."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import (
    IN_THIS_PROCESS,
    Json,
    batch,
    engine,
    hetero,
    prompts,
    run_engines,
    tokens,
)
from image_model import write_blip2_model
from leftovers import Scene

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

RAY: Json = {
    "num_cpus": 2, "num_gpus": 2, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
COMMON: Json = {"dtype": "float32", "skip_tokenizer_init": False, "max_num_batched_tokens": 512}
ENCODED = "compute on {} of stage 0. Every stage holds them."
LAYOUTS = {
    "GPU first": ([["gpu"], ["cpu"]], "the GPU"),
    "sockets": ([["cpu"], ["cpu"]], "the socket"),
    "socket first": ([["cpu"], ["gpu"]], "the socket"),
}
"""Stages, and where the log says that images are encoded."""


def pipeline(model: Path, layout: list[list[str]], **given: object) -> Json:
    """An engine of these stages."""
    ours = hetero(layout=layout, cpu={"ranks_per_socket": 2}, warmup={"step_timeout_s": 120})
    return engine(model, len(layout), **COMMON, **ours, **given)


def test_answers_to_images_are_those_of_stock(scene: Scene, tmp_path: Path) -> None:
    path = write_blip2_model(tmp_path / "model")
    # Some with one image, which vLLM puts before them; others without.
    given = prompts(6)
    seeds = [place if place % 3 else None for place in range(len(given))]
    # The second time other images come with the same text.
    others = [None if seed is None else 100 + seed for seed in seeds]
    asked = [batch(given) | {"images": of_each} for of_each in (seeds, others)]
    text = [batch(given)]
    runs = [
        (engine(path, **COMMON), [*asked, *text]),
        *((pipeline(path, layout), asked) for layout, _ in LAYOUTS.values()),
        (pipeline(path, [["gpu"], ["cpu"]], language_model_only=True), text),
    ]
    extra = {"RAY_HETERO_PRETEND_GPU": "1", **IN_THIS_PROCESS}
    (*expected, read), *found = run_engines(scene, tmp_path / "run", runs, ray=RAY, extra=extra)
    *encoding, (alone,) = found
    for name, answers in zip(LAYOUTS, encoding, strict=True):
        assert [tokens(one) for one in answers] == [tokens(one) for one in expected], name
    assert tokens(alone) == tokens(read)
    first, second = (tokens(one) for one in expected)
    differing = [place for place in range(len(given)) if first[place] != second[place]]
    assert len(differing) >= 3
    assert all(seeds[place] is not None for place in differing)
    log = (tmp_path / "run" / "log").read_text()
    assert log.count(ENCODED.format("the GPU")) == 1
    assert log.count(ENCODED.format("the socket")) == 2
    assert log.count("A layout whose first stage is a GPU computes them sooner.") == 1

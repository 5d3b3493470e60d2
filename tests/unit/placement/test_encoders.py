"""Encoders of images: which stage computes them, and what a plan says of that."""

from __future__ import annotations

import pytest
from published_plans import MODELS, machine, shape_of

from placement.cluster.layout import Layout
from placement.model.shape import ModelShape
from placement.plan.encoders import are_on_gpu, encoder_line
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineOptions, facts_of_checkpoint
from ray_hetero.planning.model_plan import ModelPlan, plan_model
from ray_hetero.planning.plan_request import PlanRequest

GPU_FIRST = Layout((("gpu",), ("cpu",)))
DESKTOP = "unknown GPU of 16 GiB, desktop"


def shape(name: str) -> ModelShape:
    """Sizes of a published model."""
    found = shape_of(MODELS / f"{name}.json")
    assert found is not None
    return found


def planned(of: ModelShape, where: str = DESKTOP, stages: int = 1) -> ModelPlan:
    """Plan of a model for short sequences."""
    there = machine(where)
    facts = facts_of_checkpoint({}, of, there.nodes, EngineOptions(max_model_len=4096))
    return plan_model("model", PlanRequest(HeteroConfig(), there, facts, stages))


@pytest.mark.parametrize(
    ("layout", "on_gpu"),
    [
        ((("gpu",), ("cpu",)), True),
        ((("gpu", "cpu"),), True),
        ((("cpu",), ("gpu",)), False),
        ((("cpu",), ("cpu",)), True),
        ((("gpu",), ("gpu",)), True),
    ],
)
def test_the_first_stage_is_to_be_a_gpu_where_any_is(layout: tuple, on_gpu: bool) -> None:
    assert are_on_gpu(Layout(layout)) is on_gpu


def test_every_stage_holds_them() -> None:
    of = shape("gemma-3-27b")
    assert of.towers
    for first, last in ((True, False), (False, False), (False, True)):
        assert set(of.towers) <= set(of.around(first=first, last=last))
    assert of.without_encoders().towers == ()


@pytest.mark.parametrize(
    ("name", "size"),
    [
        # vLLM's class of it could not be built where its sizes were kept.
        ("gemma-4-31b-nvfp4", "of unknown size, for want of a library of images here"),
        ("gemma-3-27b", "0.8 GiB"),
        ("qwen3.5-397b-a17b", "0.8 GiB"),
        ("llama-4-scout", "0.8 GiB"),
        ("kimi-k2.5", "0.9 GiB"),
    ],
)
def test_a_plan_says_where_images_are_encoded(name: str, size: str) -> None:
    found = encoder_line(shape(name), GPU_FIRST)
    assert f"Encoders of images, video or sound ({size}) compute on the GPU of stage 0." in found
    assert "Every stage holds them." in found
    behind = encoder_line(shape(name), Layout((("cpu", "cpu"), ("gpu",))))
    assert "compute on the sockets of stage 0." in behind
    assert "A layout whose first stage is a GPU computes them sooner." in behind
    mixed = encoder_line(shape(name), Layout((("gpu", "cpu"),)))
    assert "compute on the GPU and the socket of stage 0. --language-model-only" in mixed


@pytest.mark.parametrize("name", ["qwen3-8b", "deepseek-v4-flash", "gemma-3n-e4b"])
def test_a_model_of_text_has_no_such_line(name: str) -> None:
    assert encoder_line(shape(name), GPU_FIRST) == ""


@pytest.mark.parametrize("stages", [1, 2])
def test_a_model_with_encoders_begins_on_the_gpu_and_one_of_text_where_steps_are_short(
    stages: int,
) -> None:
    # With one stage asked for, the layout is chosen; with two, the order of the stages.
    of = shape("gemma-3-27b")
    with_encoders = planned(of, stages=stages).layers.world.layout
    text = planned(of.without_encoders(), stages=stages)
    assert with_encoders.stages == (("gpu",), ("cpu",))
    assert text.layers.world.layout.stages == (("cpu",), ("gpu",))
    assert not any("Encoders" in note for note in text.plan.notes)
    notes = planned(of, stages=stages).plan.notes
    assert any("compute on the GPU of stage 0" in note for note in notes)


def test_a_choice_says_that_it_was_not_the_shortest_step() -> None:
    found = planned(shape("gemma-3-27b")).choice
    assert found is not None
    assert "of those whose first stage, which encodes images and sound, is a GPU" in str(found)

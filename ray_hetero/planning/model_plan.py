"""A model on a machine, planned as the engine plans it, to be shown before anything is started."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from placement.cluster.assignment import Node
from placement.cluster.layout import heads_problem
from placement.errors import DoesNotFitError, LayoutError
from placement.model.shape import ModelShape
from placement.plan.devices import DeviceFigures, RankDevice
from placement.plan.plan import Plan
from placement.plan.split import price_drafts
from placement.words import plural, size
from ray_hetero.config import ExpertsConfig, HeteroConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.layout_choice import Choice, choose_layout
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.quantise_first import Quantised, quantise_first
from ray_hetero.planning.split_search import Asked
from ray_hetero.preflight.refusals import MODELS_OF_CPU_RANKS, refuse_first
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus


@dataclass(frozen=True)
class ModelPlan:
    """What an engine would do with a model on a machine."""

    plan: Plan
    layers: LayerPlan
    choice: Choice | None
    """Choice by which the stages were made; None where they were asked for."""


def plan_model(
    name: str,
    machine: Machine,
    facts: EngineFacts,
    config: HeteroConfig,
    *,
    pipeline_parallel_size: int = 1,
    tensor_parallel_size: int = 1,
    partition: str | None = None,
    asked: Asked | None = None,
    acceptance: float | None = None,
    quantised: tuple[Quantised, ...] = (),
) -> ModelPlan:
    """Plan a model; without sizes and a layout, its stages are chosen too.

    Args:
        name: what to call the model.
        machine: what there is.
        facts: the model and the engine.
        config: the user's configuration.
        pipeline_parallel_size: stages.
        tensor_parallel_size: ranks of the largest stage.
        partition: VLLM_PP_LAYER_PARTITION, if set.
        asked: the step to price and the sequences to hold; None is the engine's own choice.
        acceptance: chance that a draft is accepted, to price what drafts bring.
        quantised: forms of the model in fewer bits, to say where these would be much faster.

    Raises:
        LayoutError: there are too few devices, or nothing is known to plan by.
        DoesNotFitError: no split fits.
        UnsupportedError: a stage's ranks do not divide the heads of the model.

    """
    assert facts.shape is not None
    how: dict[str, Any] = {
        "asked": asked, "described": machine.described, "links": machine.links,
        "measure_rows": machine.measure_rows,
    }  # fmt: skip
    sizes = (pipeline_parallel_size, tensor_parallel_size)

    def freely(shape: ModelShape) -> LayerPlan | None:
        experts = config.experts if config.experts.ranks == "auto" else ExpertsConfig(ranks=0)
        free = config.model_copy(update={"layout": "auto", "layers": "auto", "experts": experts})
        smaller = replace(facts, shape=shape)
        choice = choose_layout(free, machine.nodes, smaller, measure=machine.measure, **how)
        return None if choice is None else choice.chosen.plan

    try:
        found, choice = _planned(machine, facts, config, sizes, partition, how)
    except DoesNotFitError as error:
        if remark := quantise_first(quantised, None, freely):
            raise DoesNotFitError(f"{error}\n{remark}") from None
        raise
    shape = facts.shape
    assert found.split is not None
    remarks = tuple(_remarks(facts, found, choice))
    if remark := quantise_first(quantised, found, freely):
        remarks = (remark, *remarks)
    speculation = None
    if facts.drafter is not None and acceptance is not None:
        speculation = price_drafts(shape, found.split, facts.drafter, acceptance, machine.links)
    devices = tuple(_devices(machine, found))
    shown = Plan(name, shape, found.held_split, devices, remarks, speculation, found.experts)
    return ModelPlan(shown, found, choice)


def _planned(
    machine: Machine,
    facts: EngineFacts,
    config: HeteroConfig,
    sizes: tuple[int, int],
    partition: str | None,
    how: dict[str, Any],
) -> tuple[LayerPlan, Choice | None]:
    """The plan, and how its stages were chosen if they were."""
    choice = None
    if (*sizes, config.layout) == (1, 1, "auto"):
        choice = choose_layout(config, machine.nodes, facts, measure=machine.measure, **how)
    if choice is not None:
        assert choice.chosen.plan is not None
        found = choice.chosen.plan
    else:
        if config.layout != "auto":
            sizes = len(config.layout), max(map(len, config.layout))
        found = plan_layers(
            config,
            machine.nodes,
            facts,
            pipeline_parallel_size=sizes[0],
            tensor_parallel_size=sizes[1],
            partition=partition,
            measure=machine.measure,
            **how,
        )
    shape = facts.shape
    assert shape is not None
    if problem := heads_problem(found.world.layout, shape.num_heads, shape.num_kv_heads):
        raise UnsupportedError(problem)
    if found.split is None:
        wrong = DoesNotFitError if found.is_too_large else LayoutError
        raise wrong(found.unknown or found.warning)
    return found, choice


def _remarks(facts: EngineFacts, found: LayerPlan, choice: Choice | None) -> Iterator[str]:
    assert facts.shape is not None
    if choice is not None:
        yield f"Layout (automatic): {choice}."
    one = facts.shape.kv_bytes(facts.max_model_len, 1)
    yield (
        f"A sequence of {plural(facts.max_model_len, 'token')} (--max-model-len) takes "
        f"{size(one)} of KV cache, all ranks together."
    )
    if facts.shape.source == "vLLM":
        yield "Sizes of the model are those of vLLM's own class of it."


def _devices(machine: Machine, found: LayerPlan) -> Iterator[RankDevice]:
    """The devices with a rank, then those without."""
    assert found.split is not None
    used = [rank.device for rank in found.split.ranks + found.experts]
    yield from used
    labels = {(device.node, device.label) for device in used}
    for node in machine.nodes:
        yield from (one for one in _all(node) if (one.node, one.label) not in labels)


def _all(node: Node) -> Iterator[RankDevice]:
    for gpu in node.host.gpus:
        memory = gpu.memory_bytes or 0
        figures = DeviceFigures(gpu.name or "GPU", "gpu", 0, 0, memory)
        yield RankDevice(node.host.name, f"GPU {gpu.index}", figures, memory)
    for socket in node.sockets:
        memory = socket.memory_bytes or 0
        figures = DeviceFigures(node.host.cpu_model or "CPU", "cpu", 0, 0, memory)
        yield RankDevice(node.host.name, f"socket {socket.id}", figures, memory)


def refuse_model(config: Mapping[str, Any], linear_kernel: str, found: LayerPlan) -> None:
    """Refuse a checkpoint that the engine would refuse on these ranks.

    Args:
        config: `config.json` of the checkpoint.
        linear_kernel: setting `cpu.linear_kernel`.
        found: the ranks.

    Raises:
        UnsupportedError: its layers have no kernel on CPU ranks.

    """
    if found.world.has_cpu:
        refuse_first(MODELS_OF_CPU_RANKS, CheckpointOnCpus.of_config(config, linear_kernel))

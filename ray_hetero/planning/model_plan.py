"""A model on a machine, planned as the engine plans it, to be shown before anything is started."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from placement.cluster.assignment import Node
from placement.cluster.layout import heads_problem
from placement.errors import DoesNotFitError
from placement.model.shape import ModelShape
from placement.plan.devices import DeviceFigures, RankDevice
from placement.plan.drafts import Acceptance
from placement.plan.plan import Plan
from placement.plan.split import Split, price_drafts
from placement.plan.users import UserTimes, price_users
from placement.words import plural, size
from ray_hetero.config import ExpertsConfig, HeteroConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.planning.context_fit import shorter_context, with_fitting_length
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.layout_choice import Choice, choose_layout, refuse_planned
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.quantise_first import Quantised, quantise_first
from ray_hetero.planning.seat_devices import UnknownDeviceError
from ray_hetero.planning.slots import slots_remark

USUAL_USERS = (1, 4, 16, 64)
"""Users who are served at the same time, as a plan prices them where nobody asks for others."""


@dataclass(frozen=True)
class ModelPlan:
    """Plan of an engine for a model on a machine."""

    plan: Plan
    layers: LayerPlan
    choice: Choice | None
    """Choice by which the stages were made; None where they were asked for."""


def plan_model(
    name: str,
    request: PlanRequest,
    *,
    acceptance: Acceptance | None = None,
    quantised: tuple[Quantised, ...] = (),
    in_8_bits: ModelShape | None = None,
    is_length_auto: bool = False,
) -> ModelPlan:
    """Plan a model; without sizes and a layout, its stages are chosen too.

    Args:
        name: what to call the model.
        request: with the sizes of the model.
        acceptance: of drafts, to price what they bring.
        quantised: forms of the model in fewer bits, to say where these would be much faster.
        in_8_bits: the model with keys and values in 8 bits, to say where that would be; None where
            they are already.
        is_length_auto: whether the longest sequence is to be as long as fits, up to that of
            the request.

    Raises:
        LayoutError: there are too few devices, or nothing is known to plan by.
        DoesNotFitError: no split fits.
        UnsupportedError: a stage's ranks do not divide the heads of the model, or these ranks
            cannot compute it.
        UnknownDeviceError: speed or memory of a device is not known.

    """
    free = _without_stages(request)

    def freely(other: EngineFacts) -> LayerPlan:
        choice = choose_layout(replace(free, facts=other))
        assert choice.chosen.plan is not None
        return choice.chosen.plan

    def of_shape(shape: ModelShape) -> LayerPlan:
        return freely(replace(facts, shape=shape))

    facts = request.facts
    if is_length_auto:
        facts = with_fitting_length(facts, freely)
        request = replace(request, facts=facts)
    try:
        found, choice = _planned(request)
    except DoesNotFitError as error:
        remarks = [shorter_context(facts, None, in_8_bits, freely)]
        remarks.append(quantise_first(quantised, None, of_shape))
        raise DoesNotFitError("\n".join([str(error), *filter(None, remarks)])) from None
    remarks = [quantise_first(quantised, found, of_shape)]
    if choice is not None:
        remarks.append(shorter_context(facts, found, in_8_bits, freely))
    remarks += _remarks(facts, found, choice)
    shown = _shown(name, request, found, acceptance)
    return ModelPlan(replace(shown, remarks=tuple(filter(None, remarks))), found, choice)


def _shown(
    name: str, request: PlanRequest, found: LayerPlan, acceptance: Acceptance | None
) -> Plan:
    """The plan with prices of users, or of drafts."""
    facts, links, split = request.facts, request.machine.links, found.split
    assert split is not None
    assert facts.shape is not None
    shape = found.shape(facts.shape)
    speculation = None
    users: tuple[UserTimes, ...] = ()
    if facts.drafter is None:
        asked = _users(request.config, split)
        users = price_users(shape, split, asked, kv_tokens=found.kv_tokens, links=links)
    elif acceptance is not None:
        speculation = price_drafts(shape, split, facts.drafter, acceptance, links)
    devices = tuple(_devices(request.machine, found))
    return Plan(
        name, facts.shape, found.held_split, devices, (), speculation, found.experts, users=users
    )


def _without_stages(request: PlanRequest) -> PlanRequest:
    """The request as if no stages, layers or number of expert ranks were asked for."""
    config = request.config
    experts = config.experts if config.experts.ranks == "auto" else ExpertsConfig(ranks=0)
    free = config.model_copy(update={"layout": "auto", "layers": "auto", "experts": experts})
    return replace(request, config=free)


def _users(config: HeteroConfig, split: Split) -> tuple[int, ...]:
    """Numbers of users to price: the one that was asked for, or some."""
    if config.workload.users != "auto":
        return (config.workload.users,)
    return tuple(users for users in USUAL_USERS if users <= split.work.max_num_seqs)


def _planned(request: PlanRequest) -> tuple[LayerPlan, Choice | None]:
    """The plan, and how its stages were chosen if they were."""
    config, layout = request.config, request.config.layout
    if (request.world_size, layout, config.layers) == (1, "auto", "auto"):
        choice = choose_layout(request)
        assert choice.chosen.plan is not None
        return choice.chosen.plan, choice
    if layout != "auto":
        stages, ranks = len(layout), max(map(len, layout))
        request = replace(request, pipeline_parallel_size=stages, tensor_parallel_size=ranks)
    found = plan_layers(request)
    shape = request.facts.shape
    assert shape is not None
    for problem in (
        heads_problem(found.world.layout, shape.num_heads, shape.num_kv_heads),
        shape.why_not_divided(found.world.layers),
    ):
        if problem:
            raise UnsupportedError(problem)
    refuse_planned(request, found.world.layout, len(found.world.experts))
    if found.split is None:
        if found.unknown:
            raise UnknownDeviceError(found.unknown)
        raise DoesNotFitError(found.warning)
    return found, None


def _remarks(facts: EngineFacts, found: LayerPlan, choice: Choice | None) -> Iterator[str]:
    assert facts.shape is not None
    if choice is not None:
        yield f"Layout (automatic): {choice}."
    drafts = 0 if facts.drafter is None else facts.drafter.drafts
    one = facts.shape.kv_bytes(facts.max_model_len, 1, drafts)
    yield (
        f"A sequence of {plural(facts.max_model_len, 'token')} (--max-model-len) takes "
        f"{size(one)} of KV cache, all ranks together."
    )
    if found.split is not None:
        yield slots_remark(facts.shape, found.split, found.world.expert_layers) or ""
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

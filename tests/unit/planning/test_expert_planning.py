"""Expert ranks in the plan: what they cost, how many layers they hold, when they are chosen."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from plan_cases import LLAMA_70B, config_of, device, request_for
from typer.testing import CliRunner

from placement.errors import DoesNotFitError
from placement.model.reading import shape_from_config
from placement.model.shape import ModelShape
from placement.plan.cost import distinct_experts, layer_step
from placement.plan.described import described
from placement.plan.devices import Links, StageDevices
from placement.plan.expert_slots import (
    SlotCounts,
    SlotRates,
    least_hits,
    step_with_layers,
    step_with_slots,
)
from placement.plan.passes import decode_pass, prefill_pass
from placement.plan.step_time import PICO
from ray_hetero.cli.plan import plan as plan_command
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.expert_ranks import expert_sizes, fewest_layers, with_expert_buffer
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.layout_choice import Choice, choose_layout
from ray_hetero.planning.layout_choice import config_of as chosen_config
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.planning.prefill_memory import ExpertSizes
from ray_hetero.planning.slots import slots_remark

MIXTURES = {
    "Mixtral 8x7B": config_of(
        "mixtral", 32, 4096, 14336, (32, 8), 32000, num_local_experts=8, num_experts_per_tok=2
    ),
    "Qwen3 30B-A3B": config_of(
        "qwen3_moe", 48, 2048, 6144, (32, 4), 151936, head_dim=128, num_experts=128,
        num_experts_per_tok=8, moe_intermediate_size=768,
    ),
    "DeepSeek V3": config_of(
        "deepseek_v3", 61, 7168, 18432, (128, 128), 129280, n_routed_experts=256,
        n_shared_experts=1, num_experts_per_tok=8, moe_intermediate_size=2048,
        first_k_dense_replace=3, kv_lora_rank=512, q_lora_rank=1536, qk_rope_head_dim=64,
        qk_nope_head_dim=128, v_head_dim=128,
        quantization_config={"quant_method": "fp8", "weight_block_size": [128, 128]},
    ),
    "gpt-oss 120B": config_of(
        "gpt_oss", 36, 2880, 2880, (64, 8), 201088, head_dim=64, num_local_experts=128,
        num_experts_per_tok=4, quantization_config={"quant_method": "mxfp4"},
    ),
}  # fmt: skip
SHAPES = {name: shape_from_config(config) for name, config in MIXTURES.items()}
DENSE_LAYERS = {"DeepSeek V3": 3}
"""The first layers of a mixture that have no experts."""

XEON = {"part": "Xeon 8480+", "cores": 56, "memory_gib": 1024, "instruction_sets": ["amx_bf16"]}
FEW_CORES = {**XEON, "cores": 16}
SMALL_GPU = {"part": "L40S"}
H100 = {"part": "H100 SXM"}
AUTO: Any = {"ranks": "auto"}


def machine(
    gpu: dict[str, Any] = SMALL_GPU,
    sockets: int = 2,
    gpus: int = 1,
    socket: dict[str, Any] = XEON,
) -> Any:
    node: dict[str, Any] = {"name": "a", "gpus": {**gpu, "count": gpus}}
    if sockets:
        node["sockets"] = {**socket, "count": sockets}
    return described({"nodes": [node]})


def facts_of(shape: ModelShape, length: int = 8192) -> EngineFacts:
    return EngineFacts(shape, "", len(shape.layers), length, 256, 2048, 0.92, is_bf16=True)


def planned(
    name: str, experts: dict[str, Any], cluster: Any = None, *, tensor: int = 1, layout: Any = None
) -> LayerPlan:
    config = HeteroConfig.model_validate(
        {"layout": layout or [["gpu"] * tensor], "experts": experts}
    )
    nodes = (cluster or machine()).as_nodes()
    return plan_layers(request_for(config, nodes, facts_of(SHAPES[name])))


def chosen(shape: ModelShape, experts: dict[str, Any], cluster: Any = None) -> Choice:
    config = HeteroConfig.model_validate({"experts": experts})
    nodes = (cluster or machine()).as_nodes()
    found = choose_layout(request_for(config, nodes, facts_of(shape)))
    assert found is not None
    return found


@pytest.mark.parametrize("fits_from", [0, 1, 7, 12])
def test_the_fewest_layers_that_fit_are_found(fits_from: int) -> None:
    asked = []

    def fits(count: int) -> bool:
        asked.append(count)
        return count >= fits_from

    assert fewest_layers(12, fits) == fits_from
    assert len(asked) <= 5
    assert fewest_layers(12, lambda count: False) is None


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_of_as_few_layers_as_possible_leave_the_gpu(name: str) -> None:
    found = planned(name, {"ranks": 2})
    assert found.split is not None, found.warning
    assert found.warning == ""
    shape, remote = SHAPES[name], found.world.expert_layers
    assert 0 < remote <= len(shape.layers) - DENSE_LAYERS.get(name, 0)
    experts = [
        tensor.nbytes for layer in shape.layers[-remote:] for tensor in layer.tensors
        if tensor.role == "expert"
    ]  # fmt: skip
    assert found.expert_bytes == -(-sum(experts) // 2)
    (gpu,) = found.split.ranks
    assert gpu.memory.weights == shape.weight_bytes - sum(experts)
    assert gpu.kv_room >= gpu.memory.kv
    # One layer more does not fit with the KV cache that is wanted.
    more = planned(name, {"ranks": 2, "layers": remote - 1}) if remote > 1 else None
    if more is not None and more.split is not None:
        assert more.kv_tokens < 32768 <= found.kv_tokens
    assert [one.layers for one in found.experts] == [remote, remote]


@pytest.mark.parametrize("name", MIXTURES)
def test_a_step_is_that_of_the_gpu_the_handovers_and_the_experts_that_are_read(name: str) -> None:
    found = planned(name, {"ranks": 2})
    assert found.split is not None
    (stage,) = found.split.stages
    shape, remote = SHAPES[name], found.world.expert_layers
    decode, sockets = stage.decode, stage.devices.experts
    tokens = found.split.work.batch
    awake = distinct_experts(shape.experts, shape.active_experts, tokens) / shape.experts
    read = sum(
        tensor.rank_bytes(2) * (sockets[0].figures.read_share if tensor.is_16_bit_matrix else 1)
        for layer in shape.layers[-remote:] for tensor in layer.tensors if tensor.role == "expert"
    )  # fmt: skip
    expected = awake * read / sockets[0].figures.read_bandwidth
    expected += remote * sockets[0].figures.layer_latency_s
    assert decode.experts / PICO == pytest.approx(expected, rel=1e-3)
    link = Links().handover
    # Tokens to both sockets at once, and sums back from each.
    rows = 3 * tokens * shape.hidden_size * shape.dtype_bytes
    handed = link.latency_s + rows / link.bandwidth
    assert decode.handover / PICO == pytest.approx(remote * handed, rel=1e-3)
    alone = layer_step(
        shape, shape.layers[0], StageDevices(stage.devices.ranks), decode_pass(1, 4096), Links()
    )
    assert alone.experts == alone.handover == 0
    assert found.expert_step_s == decode.experts / PICO


def test_more_sockets_make_the_step_shorter() -> None:
    steps = [planned("Qwen3 30B-A3B", {"ranks": ranks, "layers": 24}).split for ranks in (1, 2)]
    assert steps[0] is not None
    assert steps[1] is not None
    assert steps[1].step_s < steps[0].step_s


def test_nothing_is_left_for_expert_ranks_where_all_fits() -> None:
    found = planned("Qwen3 30B-A3B", {"ranks": 2}, machine({"part": "H200"}))
    assert found.world.experts == ()
    assert found.world.expert_layers == 0
    assert set(found.threads) == set()
    assert "no expert rank is started" in found.warning
    assert found.split is not None
    # Who says how many layers gets them.
    asked = planned("Qwen3 30B-A3B", {"ranks": 2, "layers": 4}, machine({"part": "H200"}))
    assert (len(asked.world.experts), asked.world.expert_layers, asked.warning) == (2, 4, "")


@pytest.mark.parametrize(
    ("layout", "gpu", "ranks"),
    [
        ([["gpu"]], SMALL_GPU, 2),
        ([["gpu"]], {"part": "H200"}, 0),
        ([["gpu", "gpu"]], H100, 0),
        ([["cpu"], ["gpu"]], SMALL_GPU, 0),
    ],
)
def test_auto_takes_sockets_where_the_gpus_alone_do_not_suffice(
    layout: list[list[str]], gpu: dict[str, Any], ranks: int
) -> None:
    size = max(map(len, layout))
    found = planned("Qwen3 30B-A3B", AUTO, machine(gpu, gpus=2), tensor=size, layout=layout)
    assert len(found.world.experts) == ranks
    assert found.split is not None
    assert bool(found.world.expert_layers) == bool(ranks)


def test_without_sockets_auto_is_none() -> None:
    found = planned("Qwen3 30B-A3B", AUTO, machine(SMALL_GPU, sockets=0))
    assert not found.world.experts
    assert found.is_too_large


def test_what_expert_ranks_have_no_use_for_is_refused() -> None:
    config = HeteroConfig.model_validate({"layout": [["gpu"]], "experts": {"ranks": 1}})
    with pytest.raises(ConfigError, match="a model of the type llama has none"):
        plan_layers(request_for(config, machine().as_nodes(), facts_of(LLAMA_70B)))
    with pytest.raises(
        ConfigError, match=r"the layout is \[cpu\] → \[gpu\]. Write a layout of GPU"
    ):
        planned("Mixtral 8x7B", {"ranks": 1}, layout=[["cpu"], ["gpu"]])


@pytest.mark.parametrize(
    ("name", "parts"),
    # Inner sizes, of DeepSeek V3 in blocks of 128, of gpt-oss in groups of 32.
    [("Mixtral 8x7B", 14336), ("Qwen3 30B-A3B", 768), ("DeepSeek V3", 16), ("gpt-oss 120B", 90)],
)
def test_experts_are_cut_where_their_format_allows_it(name: str, parts: int) -> None:
    assert SHAPES[name].expert_parts == parts


def test_experts_that_so_many_ranks_cannot_share_are_told_with_the_arithmetic() -> None:
    three = machine(sockets=3)
    said = r"16 indivisible parts, and 16 / 3 is no whole .* one of 1, 2, 4, 8, 16"
    with pytest.raises(ConfigError, match=said):
        planned("DeepSeek V3", {"ranks": 3}, three)
    # What is chosen can be divided.
    assert len(planned("DeepSeek V3", AUTO, three).world.experts) == 2
    assert len(planned("Qwen3 30B-A3B", AUTO, three).world.experts) == 3


def test_sockets_that_have_no_room_are_told() -> None:
    small = described({"nodes": [
        {"name": "a", "gpus": H100, "sockets": {**XEON, "memory_gib": 64, "count": 2}}
    ]})  # fmt: skip
    with pytest.raises(DoesNotFitError, match=r"1 / 2 of the experts of \d+ layers, .* are free"):
        planned("DeepSeek V3", {"ranks": 2}, small)


@pytest.mark.parametrize("name", MIXTURES)
def test_expert_ranks_are_chosen_where_they_are_faster_and_asked_for(name: str) -> None:
    shape = SHAPES[name]
    without, asked = chosen(shape, {"ranks": 0}), chosen(shape, AUTO)
    assert not without.chosen.experts
    assert not any(one.experts for one in without.others)
    best = without.shorter_with_experts
    if best is None:
        assert not asked.chosen.experts
        return
    assert asked.chosen.name == best.name
    assert asked.chosen.step_s < without.chosen.step_s
    assert f'Predicted for "experts": {{"ranks": "auto"}}: {best}' in str(without)
    config = chosen_config(asked, HeteroConfig.model_validate({"experts": AUTO}))
    assert config.layout == [["gpu"]]
    assert config.experts.ranks == asked.chosen.experts
    # What was chosen is what the engine plans.
    assert asked.chosen.plan is not None
    again = plan_layers(request_for(config, machine().as_nodes(), facts_of(shape)))
    assert again == asked.chosen.plan


def test_a_mixture_that_outgrows_its_gpu_is_faster_with_expert_ranks() -> None:
    found = chosen(SHAPES["Qwen3 30B-A3B"], {"ranks": 0}, machine(SMALL_GPU))
    assert found.chosen.layout.count("cpu")
    assert found.shorter_with_experts is not None
    unasked = chosen(SHAPES["Qwen3 30B-A3B"], {}, machine(SMALL_GPU))
    assert unasked.chosen.name == found.shorter_with_experts.name


def test_two_gpus_that_are_too_small_are_tried_with_expert_ranks() -> None:
    two = machine(SMALL_GPU, gpus=2)
    found = chosen(SHAPES["Mixtral 8x7B"], AUTO, two)
    tried = {one.name: one for one in (found.chosen, *found.others)}
    assert {"[gpu] + 2 expert ranks", "[gpu, gpu] + 2 expert ranks"} <= tried.keys()
    # The model needs both; with experts elsewhere, two GPUs read the rest faster than one.
    assert tried["[gpu, gpu]"].plan is None
    assert found.chosen.name == "[gpu, gpu] + 2 expert ranks"
    assert found.chosen.step_s < tried["[gpu] + 2 expert ranks"].step_s
    # Who says no experts is told of them; who says a number has them beside each number of GPUs.
    unasked = chosen(SHAPES["Mixtral 8x7B"], {"ranks": 0}, two)
    assert unasked.shorter_with_experts is not None
    assert unasked.shorter_with_experts.name == found.chosen.name
    one_each = chosen(SHAPES["Mixtral 8x7B"], {"ranks": 1}, two)
    names = {one.name for one in (one_each.chosen, *one_each.others)}
    assert names == {"[gpu] + 1 expert rank", "[gpu, gpu] + 1 expert rank"}


def test_gpus_of_several_nodes_are_not_tried_with_expert_ranks() -> None:
    nodes = [
        {"name": name, "gpus": SMALL_GPU, "sockets": {**XEON, "count": 2}} for name in ("a", "b")
    ]
    there = described({"nodes": nodes})
    found = chosen(SHAPES["Mixtral 8x7B"], {"ranks": 2}, there)
    names = {one.name for one in (found.chosen, *found.others)}
    assert names == {"[gpu] + 2 expert ranks"}


def test_a_dense_model_has_no_such_candidates() -> None:
    found = chosen(LLAMA_70B, AUTO)
    assert not found.unasked
    assert not any(one.experts for one in (found.chosen, *found.others))


def test_a_number_of_expert_ranks_is_taken_beside_gpus_only() -> None:
    found = chosen(SHAPES["Mixtral 8x7B"], {"ranks": 1}, machine(SMALL_GPU))
    assert found.chosen.name == "[gpu] + 1 expert rank"
    assert not any(one.layout.count("cpu") for one in (found.chosen, *found.others))


def test_a_model_that_fits_takes_no_socket() -> None:
    found = chosen(SHAPES["Qwen3 30B-A3B"], AUTO, machine({"part": "H200"}))
    assert (found.chosen.name, found.why) == ("[gpu]", "the model fits on one GPU alone")
    names = [one.name for one in (found.chosen, *found.others)]
    assert len(set(names)) == len(names)
    assert not chosen(SHAPES["Qwen3 30B-A3B"], {"ranks": 0}, machine({"part": "H200"})).unasked


def test_prompts_read_experts_over_the_link_where_that_is_faster() -> None:
    name, keys = "Qwen3 30B-A3B", {"ranks": 1, "layers": 16}
    there = machine(H100, sockets=1, socket=FEW_CORES)
    cores = planned(name, {**keys, "prefill_on_gpu": False}, there)
    linked = planned(name, keys, there)
    assert cores.split is not None
    assert linked.split is not None
    # A decode step is what it was.
    assert linked.split.step_s == cores.split.step_s
    assert linked.split.prefill_s < 0.85 * cores.split.prefill_s
    (stage,) = linked.split.stages
    # Sixteen layers' experts, in 12 bits, once for each chunk of the prompt.
    assert (linked.split.work.context, linked.split.work.max_batched_tokens) == (4096, 2048)
    figures = stage.devices.ranks[0].figures
    stored = sum(
        tensor.nbytes for layer in SHAPES[name].layers[-16:] for tensor in layer.tensors
        if tensor.role == "expert"
    )  # fmt: skip
    assert figures.host_link is not None
    # Some of them: the socket computes the others meanwhile, and both end about together.
    whole = 2 * 0.75 * stored / figures.host_link
    (before,) = cores.split.stages
    sockets, handed = before.prefill.experts / PICO, before.prefill.handover / PICO
    expected = whole * (sockets + handed) / (sockets + whole)
    found = (stage.prefill.experts + stage.prefill.handover) / PICO
    assert found == pytest.approx(expected, rel=0.05)
    assert found < 0.9 * min(whole, sockets + handed)
    assert stage.prefill.handover == before.prefill.handover
    # What is kept on the GPU is no room for the KV cache.
    buffer = stage.ranks[0].memory.runtime - cores.split.ranks[0].memory.runtime
    assert buffer == 1 << 30
    assert linked.split.kv_tokens < cores.split.kv_tokens


def test_the_buffer_holds_an_expert_at_least() -> None:
    """Of Mixtral, 3 · 4096 · 14336 weights: two slots of 12 bits, one in bf16, one expansion."""
    asked = {"ranks": 2, "layers": "all", "prefill_on_gpu": True}
    found = planned("Mixtral 8x7B", asked)
    assert found.split is not None
    weights = 3 * 4096 * 14336
    buffer = found.split.stages[0].devices.expert_buffer_bytes
    # The larger part of it, of one of two slices.
    assert buffer == max(1 << 30, 2 * weights * 12 // 8 + 2 * weights + 2 * weights * 2 // 3 // 2)
    found = planned("Mixtral 8x7B", {**asked, "prefill_gpu_gib": 2.0})
    assert found.split is not None
    assert found.split.stages[0].devices.expert_buffer_bytes == 2 << 30


@pytest.mark.parametrize("has_gate", [True, False])
def test_experts_without_a_gate_have_two_matrices(has_gate: bool) -> None:
    config = config_of(
        "mixtral", 4, 8192, 28672, (64, 8), 32000, num_local_experts=8, num_experts_per_tok=2
    )
    shape = shape_from_config(config)
    if not has_gate:
        # The names are gate, down and up; Nemotron 3's experts have the last two.
        layers = (
            replace(layer, tensors=tuple(one for one in layer.tensors if ".w1" not in one.name))
            for layer in shape.layers
        )
        shape = replace(shape, layers=tuple(layers))
    socket = device("Xeon 8480+")
    one_matrix = 2 * 8192 * 28672
    expanded = (3 if has_gate else 2) * one_matrix
    # Several experts expanded beside one as it is stored, and the largest weight of a slice.
    largest = (2 if has_gate else 1) * one_matrix
    for ranks in (1, 2):
        sizes = ExpertSizes(
            8, int(socket.figures.read_share * expanded), expanded, largest // ranks, 0
        )
        found = expert_sizes(shape, [socket] * ranks).budget(HeteroConfig().experts.prefill_gpu_gib)
        assert found == sizes.budget("auto") > 1 << 30


def test_short_prompts_and_processors_without_kernels_leave_experts_to_the_sockets() -> None:
    shape = SHAPES["Qwen3 30B-A3B"].with_remote_experts(16)
    few = machine(H100, sockets=1, socket=FEW_CORES)
    found = planned("Qwen3 30B-A3B", {"ranks": 1, "layers": 16}, few)
    assert found.split is not None
    devices, layer = found.split.stages[0].devices, shape.layers[-1]
    alone = replace(devices, expert_buffer_bytes=0)
    for tokens, is_linked in ((8, False), (64, True), (4096, True)):
        given = (prefill_pass(tokens), Links())
        step, sockets = (layer_step(shape, layer, one, *given) for one in (devices, alone))
        assert (step.total < sockets.total) == is_linked
        assert step.total <= sockets.total
    # Where the link is much faster, it has all.
    assert (
        layer_step(shape, layer, over_link(devices, 1e12), prefill_pass(4096), Links()).handover
        == 0
    )
    # Sockets that are faster in every step take nothing from the GPU.
    config, slow = HeteroConfig().experts, over_link(alone, 1e9)
    assert with_expert_buffer(slow, config, shape, 2048, None) == slow
    assert with_expert_buffer(alone, config, shape, 2048, None).expert_buffer_bytes
    there = machine(H100, socket={**FEW_CORES, "instruction_sets": []})
    found = planned("Qwen3 30B-A3B", {"ranks": 2, "layers": 16}, there)
    assert found.split is not None
    assert found.split.stages[0].devices.expert_buffer_bytes == 0


def remark(name: str, found: LayerPlan) -> str:
    assert found.split is not None
    return slots_remark(SHAPES[name], found.split, found.world.expert_layers) or ""


def test_slots_take_memory_and_are_compared_with_whole_layers() -> None:
    """Of Qwen3 30B-A3B: an expert has 9 MiB in bf16, so that a GiB beside 64 MiB has 6.6 for each
    of 16 layers."""
    name, asked = "Qwen3 30B-A3B", {"ranks": 1, "layers": 16, "prefill_on_gpu": False}
    without = planned(name, asked, machine(H100, sockets=1))
    found = planned(name, {**asked, "slots_gib": 1.0}, machine(H100, sockets=1))
    assert found.split is not None
    assert without.split is not None
    (stage,) = found.split.stages
    assert stage.devices.slot_bytes == 1 << 30
    taken = stage.ranks[0].memory.runtime - without.split.ranks[0].memory.runtime
    assert taken == 1 << 30
    assert found.split.kv_tokens < without.split.kv_tokens
    assert remark(name, without) == ""
    said = remark(name, found)
    assert said.startswith(
        "Slots (experts.slots_gib) hold 6 of 128 experts of each of 16 layers. In as much memory, "
        "the GPU would hold the experts of 0.8 layers, which is predicted to be faster unless a "
        "step finds at least "
    )
    least = int(said.split(" % of its experts")[0].rsplit(" ", 1)[1])
    assert 5 <= least < 20
    # Too few for one each.
    few = planned(name, {**asked, "slots_gib": 0.2}, machine(H100, sockets=1))
    assert "no room for one slot of each of 16 layers" in remark(name, few)


def test_slots_of_codes_are_compared_with_more_layers() -> None:
    name, asked = "gpt-oss 120B", {"ranks": 1, "layers": 8, "slots_gib": 12.0}
    said = remark(name, planned(name, asked, machine(H100, sockets=1)))
    # In 16 bits an expert takes 3.76 times what it takes in four and a scale of eight for 32.
    held, layers = re.findall(r"hold (\d+) of 128|experts of ([\d.]+) layers", said)
    assert float(layers[1]) == pytest.approx(8 * int(held[0]) / 128 * 16 / 4.25, rel=0.05)
    # In the memory of a quarter and a bit of each layer's experts, all of them have room.
    most = remark(name, planned(name, {**asked, "slots_gib": 14.5}, machine(H100, sockets=1)))
    assert "the experts of 8.0 layers" in most
    assert most.endswith("faster whatever a step finds in slots.")


def test_the_least_hits_are_where_both_take_as_long() -> None:
    counts = SlotCounts(computing_s=8e-3, others_s=4e-3, layers=20, read=160, hits=0, copies=0)
    rates = SlotRates(10e6, 10e6, 10e6, 3e12, 50e9, 13e-6)
    hits = least_hits(counts, rates, 0.25)
    assert hits is not None
    for share, is_less in ((hits, True), (hits - 0.01, False)):
        with_slots = step_with_slots(replace(counts, hits=share * 160), rates)
        assert (with_slots < step_with_layers(counts, rates, 0.25)) == is_less
    assert least_hits(counts, replace(rates, own_bytes=2.5e6), 0.25) is None


def over_link(stage: StageDevices, host_link: float) -> StageDevices:
    """A stage whose GPU has such a link, in bytes a second."""
    (rank,) = stage.ranks
    figures = replace(rank.figures, host_link=host_link)
    return replace(stage, ranks=(replace(rank, figures=figures),))


def command(tmp_path: Path, *arguments: object) -> Any:
    (tmp_path / "config.json").write_text(json.dumps(MIXTURES["Qwen3 30B-A3B"]))
    topology = tmp_path / "cluster.yaml"
    # JSON is YAML.
    node = {"name": "a", "gpus": SMALL_GPU, "sockets": {**XEON, "count": 2}}
    topology.write_text(json.dumps({"nodes": [node]}))
    app = typer.Typer()
    app.command()(plan_command)
    given = (tmp_path, "--topology", topology, "--max-model-len", 8192, *arguments)
    return CliRunner().invoke(app, [str(argument) for argument in given])


def test_the_command_compares_expert_ranks_and_says_what_to_type(tmp_path: Path) -> None:
    shown = command(tmp_path, "--compare", "--experts", 0)
    assert shown.exit_code == 0, shown.output
    assert "GPU, experts of 20 layers on 2 sockets" in " ".join(shown.stdout.split())
    assert '"experts": {"ranks": "auto"}' in shown.stdout
    content = json.loads(command(tmp_path, "--compare", "--experts", 0, "--json").stdout)
    (candidate,) = [one for one in content["candidates"] if one["expert_ranks"]]
    assert candidate["layout"] == [["gpu"]]
    assert candidate["decode_step_s"] < content["decode_step_s"]
    assert 0 < candidate["expert_layers"] < 48


def test_the_command_shows_what_expert_ranks_hold(tmp_path: Path) -> None:
    picture = tmp_path / "plan.svg"
    shown = command(tmp_path, "--experts", "auto", "--svg", picture)
    assert shown.exit_code == 0, shown.output
    assert "experts of" in shown.stdout
    assert "are on 2 expert ranks" in shown.stdout
    assert "slices of" in picture.read_text()
    content = json.loads(command(tmp_path, "--experts", 1, "--json").stdout)
    (expert,) = content["experts"]
    assert expert["rank"] == 1
    assert f"a {expert['device']}" not in content["idle"]
    parts = content["stages"][0]["decode_parts_s"]
    assert parts["experts"] > parts["handover"] > 0
    wrong = command(tmp_path, "--experts", "many")
    assert wrong.exit_code == 1
    assert "--experts: expected a number or auto, got 'many'" in wrong.stderr


def test_a_description_says_what_a_handover_costs() -> None:
    cluster = described({
        "links": {"handover": {"bandwidth_gb_s": 50, "latency_us": 100}},
        "nodes": [{"name": "a", "gpus": SMALL_GPU, "sockets": {**XEON, "count": 2}}],
    })  # fmt: skip
    config = HeteroConfig.model_validate({"layout": [["gpu"]], "experts": {"ranks": 2}})
    facts = facts_of(SHAPES["Qwen3 30B-A3B"])
    found = plan_layers(request_for(config, cluster.as_nodes(), facts, links=cluster.links))
    assert found.split is not None
    each = found.split.stages[0].decode.handover / PICO / found.world.expert_layers
    assert each == pytest.approx(100e-6, rel=0.02)


def test_with_unknown_sizes_all_experts_are_remote() -> None:
    facts = replace(facts_of(SHAPES["Mixtral 8x7B"]), shape=None, why_no_shape="why")
    config = HeteroConfig.model_validate({"layout": [["gpu"]], "experts": {"ranks": 2}})
    found = plan_layers(request_for(config, machine().as_nodes(), facts))
    assert found.world.expert_layers == 32

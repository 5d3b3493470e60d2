"""Layers of each stage: who decides them, on which figures, in which order of the stages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import LLAMA_8B, LLAMA_70B, MIXTRAL_8X22B, config_of, request_for, unmeasured

from placement.cluster.assignment import Node, Seat
from placement.errors import DoesNotFitError
from placement.host.topology import Gpu
from placement.model.reading import shape_from_config
from placement.model.tensors import Layer
from placement.plan.described import described
from placement.units import GB, GIB
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.planning.engine_facts import EngineFacts, facts_of
from ray_hetero.planning.layer_plan import plan_layers
from ray_hetero.planning.planned_layers import LayerPlan, describe_split
from ray_hetero.planning.prefill_memory import attention_bytes, gpu_bytes, output_bytes
from ray_hetero.planning.sizes import model_probe

AUTO = HeteroConfig()
FACTS = EngineFacts(LLAMA_70B, "", 80, 8192, 256, 2048, 0.9)
SMALL = replace(FACTS, shape=LLAMA_8B, hidden_layers=32)


def server(gpus: int = 1, sockets: int = 1, memory_gib: int = 512) -> tuple[Node, ...]:
    node: dict[str, Any] = {"name": "a"}
    if gpus:
        node["gpus"] = {"part": "H100 SXM", "count": gpus}
    if sockets:
        node["sockets"] = {
            "part": "Xeon 8480+", "count": sockets, "cores": 56, "memory_gib": memory_gib
        }  # fmt: skip
    return described({"nodes": [node]}).as_nodes()


def plan(
    config: HeteroConfig = AUTO,
    nodes: Sequence[Node] | None = None,
    facts: EngineFacts = FACTS,
    *,
    pipeline: int = 2,
    tensor: int = 1,
    partition: str | None = None,
    measure: Any = unmeasured,
) -> LayerPlan:
    there = server() if nodes is None else nodes
    return plan_layers(
        request_for(config, there, facts, pipeline, tensor, partition=partition, measure=measure)
    )


def stage_of(found: LayerPlan, kind: str) -> int:
    return found.world.layout.stages.index((kind,))  # type: ignore[arg-type]


def test_both_kinds_get_planned_layers() -> None:
    found = plan()
    # 71.1 GiB less runtime, output matrix and activations = 67.6; a layer with its share of
    # 32768 tokens of KV takes 1.594 + 0.125 GiB.
    assert found.world.layers == (41, 39)
    assert found.world.layout.kinds == ("cpu", "gpu")
    assert found.split is not None
    assert found.world.layers == found.split.layers
    assert found.warning == ""


MIXTURE = replace(FACTS, shape=MIXTRAL_8X22B, hidden_layers=56)
EXPERTS = 3 * 8 * 6144 * 16384 * 2
"""Bytes of a layer's experts."""


def with_experts(**experts: Any) -> HeteroConfig:
    return HeteroConfig.model_validate({"layout": [["gpu"]], "experts": {"ranks": 2, **experts}})


@pytest.mark.parametrize(("layers", "remote"), [("all", 56), (40, 40)])
def test_stages_hold_what_expert_ranks_do_not(layers: Any, remote: int) -> None:
    found = plan(with_experts(layers=layers), server(1, 2), MIXTURE, pipeline=1)
    assert found.world.layout.kinds == ("gpu",)
    assert [seat.rank for seat in found.world.experts] == [1, 2]
    assert set(found.threads) == {1, 2}
    assert found.expert_bytes == remote * EXPERTS // 2
    assert found.forecast(1) is None
    fits = remote == 56
    # 16 layers of experts are 77 GB more than a GPU of 80 GB has room for beside the rest.
    assert (found.split is not None) == fits
    assert found.is_too_large != fits
    if fits:
        assert found.memory_bytes() == {1: found.expert_bytes, 2: found.expert_bytes}


def test_experts_that_do_not_fit_into_their_sockets_are_told_with_the_arithmetic() -> None:
    said = r"rank 1 \(experts, socket 0 .*is to hold 1 / 2 of the experts of 56 layers, 126.0 GiB"
    with pytest.raises(DoesNotFitError, match=said):
        plan(with_experts(layers="all"), server(1, 2, memory_gib=64), MIXTURE, pipeline=1)


@pytest.mark.parametrize(("gpus", "sockets"), [(0, 2), (2, 0)])
def test_one_kind_keeps_equal_shares(gpus: int, sockets: int) -> None:
    found = plan(nodes=server(gpus, sockets), facts=SMALL)
    assert found.world.layers == (16, 16)
    assert found.split is not None
    assert found.split.layers == (16, 16)
    assert found.warning == ""


@pytest.mark.parametrize(
    ("config", "partition"),
    [(HeteroConfig(layers=[60, 20]), None), (AUTO, "60,20")],
)
def test_the_users_layers_win_and_are_priced(config: HeteroConfig, partition: str | None) -> None:
    found = plan(config, partition=partition)
    assert found.world.layers == (60, 20)
    assert found.split is not None
    assert found.split.step_s > plan().split.step_s  # type: ignore[union-attr]


def test_the_users_layers_that_seem_too_many_are_a_warning() -> None:
    found = plan(HeteroConfig(layers=[10, 70]))
    assert found.world.layers == (10, 70)
    assert found.split is None
    assert found.forecast(0) is None
    assert describe_split(found) == ()
    assert found.warning.startswith("layers [10, 70]: llama does not fit: ")
    assert "GiB short" in found.warning


def test_what_does_not_fit_is_an_error_with_the_arithmetic() -> None:
    with pytest.raises(DoesNotFitError, match=r"rank \d \(a GPU 0\): weights .* short"):
        plan(nodes=server(memory_gib=32))


@pytest.mark.parametrize(("sockets", "ranks"), [(1, 1), (2, 2)])
def test_what_prompts_take_of_a_gpu_is_left_free_on_it(sockets: int, ranks: int) -> None:
    def usable(**cpu: Any) -> int:
        config = HeteroConfig(cpu=CpuConfig(**cpu))
        found = plan(config, server(1, sockets), facts=SMALL, pipeline=1 + sockets)
        assert found.split is not None
        (gpu,) = (rank.device for rank in found.split.ranks if rank.device.kind == "gpu")
        return gpu.usable_bytes

    # Gate and up are 28672 outputs of 4096 inputs, down has 14336 inputs; 2048 tokens.
    beside = attention_bytes(32, 8, 128, 2048) + output_bytes(4096, 2048)
    share = gpu_bytes(28672, 14336, 2048) + beside
    assert usable() - usable(linear_kernel="streaming") == ranks * share
    assert usable(linear_kernel="streaming", prefill_on_gpu=False) == usable()


def test_a_group_of_cpu_ranks_takes_memory_of_its_prompt_gpu_once() -> None:
    def usable(layout: list[list[str]], **cpu: Any) -> int:
        config = HeteroConfig(layout=layout, cpu=CpuConfig(**cpu))
        found = plan(config, server(1, 2), facts=SMALL, pipeline=2, tensor=2)
        assert found.split is not None
        (gpu,) = (rank.device for rank in found.split.ranks if rank.device.kind == "gpu")
        return gpu.usable_bytes

    group = [["cpu", "cpu"], ["gpu"]]
    whole = gpu_bytes(28672, 14336, 2048) + attention_bytes(32, 8, 128, 2048)
    whole += output_bytes(4096, 2048)
    assert usable(group) - usable(group, linear_kernel="streaming") == whole
    # Each of them has its part of the linear layers computed.
    parts = 2 * gpu_bytes(14336, 7168, 2048)
    unfused = {"linear_kernel": "streaming", "fuse_layers": False}
    assert usable(group) - usable(group, **unfused) == parts


def test_a_given_layout_keeps_its_order_and_auto_takes_the_cheaper() -> None:
    given = {
        first: plan(HeteroConfig(layout=[[first], [second]]), facts=SMALL)
        for first, second in (("cpu", "gpu"), ("gpu", "cpu"))
    }
    for first, found in given.items():
        assert found.world.layout.kinds[0] == first
    steps = {first: found.split.step_s for first, found in given.items() if found.split}
    cheaper = min(steps, key=lambda first: steps[first])
    auto = plan(facts=SMALL)
    assert auto.world.layout.kinds[0] == cheaper
    assert auto.split is not None
    assert auto.split.step_s == steps[cheaper]


def test_seats_move_with_their_stages() -> None:
    """A stage on another node goes to the end where that crosses the network less often."""
    nodes = described(
        {
            "nodes": [
                {"name": "a", "sockets": {"part": "Xeon 8480+", "count": 1, "cores": 56}},
                {"name": "b", "gpus": {"part": "L40S"},
                 "sockets": {"part": "Xeon 8480+", "count": 1, "cores": 56}},
            ]
        }
    ).as_nodes()  # fmt: skip
    found = plan(nodes=nodes, pipeline=3)
    seats = found.world.seats
    assert found.split is not None
    assert [seat.rank for seat in seats] == [0, 1, 2]
    assert [seat.stage for seat in seats] == [0, 1, 2]
    assert tuple(seat.kind for seat in seats) == found.world.layout.kinds
    for seat, rank in zip(seats, found.split.ranks, strict=True):
        assert rank.device.node == seat.node_name
        assert rank.device.kind == seat.kind
        assert seat.local_rank == 0
    assert {(s.node_name, s.kind) for s in seats} == {("a", "cpu"), ("b", "cpu"), ("b", "gpu")}


def test_figures_configured_before_measured_before_known() -> None:
    def source(found: LayerPlan, kind: str) -> tuple[str, float]:
        assert found.split is not None
        figures = found.split.stages[stage_of(found, kind)].ranks[0].device.figures
        return figures.source, figures.read_bandwidth

    def measure(seats: Sequence[Seat], threads: Mapping[int, Sequence[int]]) -> dict[int, float]:
        return {rank: 1 * GB * len(cpus) for rank, cpus in threads.items()}

    def refuse(seats: Sequence[Seat], threads: Mapping[int, Sequence[int]]) -> dict[int, float]:
        raise AssertionError("measured what the user has configured")

    both = HeteroConfig.model_validate(
        {"cpu": {"bandwidth_gb_s": 200.0}, "gpu": {"bandwidth_gb_s": 3000.0}}
    )
    assert source(plan(both, measure=refuse), "cpu") == ("configured", 200e9)
    assert source(plan(both, measure=refuse), "gpu") == ("configured", 3000e9)
    # 56 cores less 2 on the driver's node.
    assert source(plan(measure=measure), "cpu") == ("measured", 54e9)
    assert source(plan(), "cpu") == ("table", pytest.approx(0.75 * 307.2e9))
    assert source(plan(), "gpu") == ("table", pytest.approx(0.85 * 3350e9))


def replaced(node: Node, **changes: Any) -> Node:
    return replace(node, host=replace(node.host, **changes))


def test_what_is_not_known_gives_equal_shares_and_one_line() -> None:
    (node,) = server()
    cases = {
        "NVIDIA Z9 (GPU 0 of node a): its memory bandwidth is not known": replaced(
            node, gpus=(Gpu(0, name="NVIDIA Z9", memory_bytes=80 * GIB),)
        ),
        "GPU 0 of node a does not tell its memory": replaced(node, gpus=()),
        "Some CPU (socket 0 of node a): its memory bandwidth is not known": replaced(
            node, cpu_model="Some CPU"
        ),
        "free memory of socket 0 of node a is not known": replace(
            node, sockets=tuple(replace(one, free_bytes=None) for one in node.sockets)
        ),
    }
    for said, changed in cases.items():
        found = plan(nodes=[changed])
        assert found.world.layers == (40, 40)
        assert found.split is None
        assert found.warning.startswith("layers: auto takes equal shares")
        assert said in found.warning
        assert "\n" not in found.warning
    nameless = plan(facts=replace(FACTS, shape=None, why_no_shape="model_type 'x' is not known"))
    assert nameless.world.layers == (40, 40)
    assert "equal shares, because nothing better is known: model_type 'x'" in nameless.warning
    # What the user gave, and worlds of one kind, need no figures.
    assert plan(HeteroConfig(layers=[1, 79]), [replaced(node, gpus=())]).warning == ""
    (cpus,) = server(0, 2)
    assert plan(nodes=[replaced(cpus, cpu_model="Some CPU")]).warning == ""


def test_a_gpu_that_is_not_in_the_table_is_planned_with_its_bandwidth() -> None:
    (node,) = server()
    strange = replaced(node, gpus=(Gpu(0, name="NVIDIA Z9", memory_bytes=80 * GIB),))
    found = plan(HeteroConfig.model_validate({"gpu": {"bandwidth_gb_s": 1000.0}}), [strange])
    assert found.warning == ""
    assert found.world.layers != (40, 40)


def test_memory_limits() -> None:
    def usable(found: LayerPlan, kind: str) -> float:
        assert found.split is not None
        return found.split.stages[stage_of(found, kind)].ranks[0].device.usable_bytes / GIB

    assert usable(plan(), "cpu") == pytest.approx(512 * 0.95)
    assert usable(plan(), "gpu") == pytest.approx(79 * 0.9)
    half = HeteroConfig.model_validate({"gpu": {"memory_utilization": 0.5}})
    assert usable(plan(half), "gpu") == pytest.approx(79 * 0.5)
    (node,) = server()
    limited = plan(nodes=[replaced(node, memory_limit_bytes=300 * GIB)])
    assert usable(limited, "cpu") == pytest.approx(300 * 0.95)
    (taken,) = (replace(one, free_bytes=200 * GIB) for one in node.sockets)
    assert usable(plan(nodes=[replace(node, sockets=(taken,))]), "cpu") == pytest.approx(
        200 - 0.05 * 512
    )


def test_kv_cache_of_cpu_ranks() -> None:
    """Half of what is free, no more than is of use, what the user says, one sequence at least."""
    sockets = server(0, 2)
    found = plan(nodes=sockets, facts=SMALL)
    assert found.split is not None
    # 16 layers of 4096 bytes a token; 486.4 GiB less 7.5 of weights (6.5 + embedding) and runtime.
    room = min(rank.kv_room for rank in found.split.ranks)
    assert room / GIB == pytest.approx(486.4 - 6.5 - 1 - 0.98 - 0.3, abs=0.5)
    assert found.kv_tokens == pytest.approx(room / 2 / (16 * 4096), rel=1e-3)
    few = plan(nodes=sockets, facts=replace(SMALL, max_num_seqs=4, max_model_len=1000))
    assert few.kv_tokens == 2 * 4 * 1024  # whole blocks of 128
    asked = HeteroConfig.model_validate({"cpu": {"kv_cache_gib": 2.0}})
    assert plan(asked, sockets, SMALL).kv_tokens == 2 * GIB // (16 * 4096)
    tight = plan(nodes=server(0, 2, memory_gib=11), facts=SMALL)
    assert tight.split is not None
    assert tight.kv_tokens >= 8192


def test_forecast_is_of_the_ranks_own_stage() -> None:
    found = plan()
    assert found.split is not None
    for seat in found.world.seats:
        forecast = found.forecast(seat.rank)
        assert forecast is not None
        assert forecast.step_s == found.split.stages[seat.stage].decode.seconds
        assert (forecast.batch, forecast.context) == (1, 4096)
        assert forecast.kv_tokens == found.kv_tokens
    short = plan(facts=replace(FACTS, max_model_len=512)).forecast(0)
    assert short is not None
    assert short.context == 512


def with_amx(nodes: Sequence[Node]) -> list[Node]:
    sets = frozenset({"amx_bf16", "avx512_bf16"})
    return [replace(node, host=replace(node.host, instruction_sets=sets)) for node in nodes]


BF16 = replace(SMALL, is_bf16=True)
QWEN_2 = shape_from_config(config_of("qwen2", 32, 4096, 14336, (32, 8), 128256))


def stored(dtype_bytes: int) -> Layer:
    """A layer of the 8B shape whose matrices have elements of so many bytes."""
    layer = LLAMA_8B.layers[0]
    return replace(
        layer,
        tensors=tuple(
            replace(tensor, dtype_bytes=dtype_bytes) if tensor.values else tensor
            for tensor in layer.tensors
        ),
    )


@pytest.mark.parametrize(
    ("cpu", "facts", "has_amx", "read_share", "layer_ms"),
    [
        ({}, BF16, True, 0.75, 0.08),
        ({"compact_weights": False}, BF16, True, 1, 0.08),
        ({"fuse_layers": False}, BF16, True, 0.75, 0.7),
        ({"linear_kernel": "vllm"}, BF16, True, 1, 0.7),
        ({}, BF16, False, 1, 0.7),
        ({"linear_kernel": "streaming"}, BF16, False, 1, 0.08),
        ({"linear_kernel": "streaming", "compact_weights": True}, BF16, False, 0.75, 0.08),
        ({}, replace(BF16, is_bf16=False), True, 1, 0.7),
        ({}, replace(BF16, shape=replace(LLAMA_8B, model_type="gpt_neox")), True, 0.75, 0.7),
        # What is stored in fewer bits, and biases, are one operator too; float32 is not.
        ({}, replace(BF16, shape=replace(LLAMA_8B, layers=(stored(1),) * 32)), True, 0.75, 0.08),
        ({}, replace(BF16, shape=replace(LLAMA_8B, layers=(stored(4),) * 32)), True, 0.75, 0.7),
        ({}, replace(BF16, shape=QWEN_2), True, 0.75, 0.08),
    ],
)
def test_what_makes_a_sockets_step_short_is_priced(
    cpu: dict[str, Any], facts: EngineFacts, has_amx: bool, read_share: float, layer_ms: float
) -> None:
    nodes = with_amx(server()) if has_amx else server()
    given = HeteroConfig(layers=[24, 8], cpu=CpuConfig(**cpu))
    found = plan(given, nodes, facts)
    assert found.split is not None
    number = stage_of(found, "cpu")
    (figures,) = (r.device.figures for r in found.split.ranks if r.device.kind == "cpu")
    assert (figures.read_share, figures.layer_latency_s) == (read_share, layer_ms / 1000)
    step = found.split.stages[number].decode.parts()
    assert facts.shape is not None
    layers = facts.shape.layers[: found.world.layers[number]]
    held = sum(t.nbytes for layer in layers for t in layer.tensors if t.is_16_bit_matrix)
    others = sum(t.nbytes for layer in layers for t in layer.tensors) - held
    assert figures.reached_share == (0.87 if layer_ms == 0.08 else 1)
    # Of compact weights and of 4 bits, what limits cores with AMX; other kernels are vLLM's.
    streams = has_amx and facts.is_bf16 and cpu != {"linear_kernel": "vllm"}
    assert (figures.expanded.get(4, 0) > 0) == streams
    expected = (held * read_share + others) / (figures.read_bandwidth * figures.reached_share)
    assert step["weights"] == pytest.approx(expected, rel=1e-6)


def test_throughput_balances_the_stages() -> None:
    balanced = plan(HeteroConfig(objective="throughput"), facts=SMALL)
    assert balanced.split is not None
    assert balanced.split.objective == "throughput"
    assert balanced.split.work.batch == 8
    one = replace(SMALL, max_num_seqs=1)
    slowest = {
        objective: found.split.slowest_s
        for objective in ("latency", "throughput")
        for found in [plan(HeteroConfig(objective=objective), server(1, 2), one, pipeline=3)]
        if found.split
    }
    assert slowest["throughput"] <= slowest["latency"]
    # Of 80 layers the GPU holds 39 and the socket 39 with room for 32768 tokens, 41 each with
    # room for 8192.
    tight = plan(
        HeteroConfig(objective="throughput", layout=[["cpu"], ["gpu"]]),
        server(memory_gib=75),
        replace(FACTS, max_num_seqs=64),
    )
    assert tight.split is not None
    assert tight.split.work.batch == 1


def test_the_log_has_one_line_and_tells_when_the_gpus_are_enough() -> None:
    (line,) = describe_split(plan())
    assert line.startswith("predicted decode step ")
    for part in ("batch 1 and context 4096", "stage 0: ", "stage 1: ", ", weights ", ", send ",
                 ", output ", "KV cache ", "bandwidths: cpu table, gpu table"):  # fmt: skip
        assert part in line
    assert "fits on the GPUs alone: with --pipeline-parallel-size 1" in "\n".join(
        describe_split(plan(facts=SMALL))
    )


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(16, 1024), st.sampled_from([8, 70]))
def test_planned_worlds_are_whole(gpus: int, sockets: int, memory_gib: int, size: int) -> None:
    nodes, stages = server(gpus, sockets, memory_gib), gpus + sockets
    facts = SMALL if size == 8 else FACTS
    try:
        found = plan(nodes=nodes, facts=facts, pipeline=stages)
    except DoesNotFitError:
        return
    world = found.world
    assert sum(world.layers) == facts.hidden_layers
    assert min(world.layers) >= 1
    assert sorted(world.layout.kinds) == ["cpu"] * sockets + ["gpu"] * gpus
    devices = {(s.kind, s.socket.id if s.socket else s.local_rank) for s in world.seats}
    assert len(devices) == stages
    assert found.split is not None
    assert all(rank.free_bytes >= 0 for rank in found.split.ranks)
    assert plan(nodes=nodes, facts=facts, pipeline=stages) == found


class FakeConfig(SimpleNamespace):
    def to_dict(self) -> dict[str, Any]:
        return dict(self.values)


def vllm_config(model: str, hf: dict[str, Any], layers: int) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model=model,
            revision=None,
            hf_config=FakeConfig(values=hf),
            dtype="torch.bfloat16",
            max_model_len=2048,
            enforce_eager=True,
            trust_remote_code=False,
            get_total_num_hidden_layers=lambda: layers,
        ),
        scheduler_config=SimpleNamespace(max_num_seqs=16, max_num_batched_tokens=2048),
        cache_config=SimpleNamespace(cache_dtype="auto", gpu_memory_utilization=0.8),
        speculative_config=None,
    )


KNOWN = config_of("llama", 4, 64, 128, (4, 2), 1000)


def test_facts_from_the_configuration() -> None:
    facts = facts_of(vllm_config("org/name", KNOWN, 4))
    assert facts.shape is not None
    assert facts.shape.source == "config"
    assert (facts.hidden_layers, facts.max_num_seqs, facts.is_eager) == (4, 16, True)
    assert facts.is_bf16
    assert (facts.gpu_memory_utilization, facts.max_model_len) == (0.8, 2048)


def test_facts_from_a_checkpoint_unless_its_layers_were_changed(tmp_path: Any) -> None:
    write_demo_model(tmp_path / "m", "llama", shape=DemoShape(layers=3, hidden=64, heads=2))
    here = str(tmp_path / "m")
    local = facts_of(vllm_config(here, KNOWN, 3))
    assert local.shape is not None
    assert local.shape.source == "safetensors"
    overridden = facts_of(vllm_config(here, KNOWN, 4))
    assert overridden.shape is not None
    assert overridden.shape.source == "config"


def test_facts_of_what_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_probe, "find_spec", lambda name: None)
    facts = facts_of(vllm_config("org/name", {**KNOWN, "model_type": "zebra"}, 4))
    assert facts.shape is None
    assert "'zebra' is not known" in facts.why_no_shape
    other = facts_of(vllm_config("org/name", KNOWN, 5))
    assert other.why_no_shape.startswith("config has 4 layers, vLLM counts 5. ")

"""What the choice of a layout looks at beside its decode step: first tokens, and refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from plan_cases import config_of

from placement.cluster.layout import Layout
from placement.model.reading import shape_from_config
from placement.model.tensors import KvCache
from placement.plan.described import described
from placement.plan.drafts import Drafter
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.planning.engine_facts import EngineFacts
from ray_hetero.planning.layout_choice import Choice, choose_layout
from ray_hetero.planning.machine import described_machine
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.preflight.refused_models import refuse_ranks
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus

AIR = config_of(
    "glm4_moe", 46, 4096, 10944, (96, 8), 151552, n_routed_experts=128, num_experts_per_tok=8,
    moe_intermediate_size=1408, n_shared_experts=1, first_k_dense_replace=1, head_dim=128,
)  # fmt: skip
SLOW: dict[str, Any] = {
    "name": "a",
    "gpus": {"part": "L40S"},
    "sockets": {"cores": 32, "memory_gib": 512, "read_gb_s": 460, "bf16_tflop_s": 2.9},
}


def chosen(
    config: dict[str, Any], node: dict[str, Any], length: int, drafter: Drafter | None = None,
    cache: KvCache | None = None, **settings: Any,
) -> Choice:  # fmt: skip
    cluster = described({"nodes": [node]})
    shape = shape_from_config(config)
    if cache is not None:
        shape = replace(shape, layers=tuple(replace(one, kv=cache) for one in shape.layers))
    facts = EngineFacts(
        shape, "", len(shape.layers), length, 256, 2048, 0.92, drafter=drafter
    )  # fmt: skip
    return choose_layout(
        PlanRequest(
            HeteroConfig.model_validate(settings),
            described_machine(cluster),
            facts,
            checkpoint=CheckpointOnCpus.of_config(config, "auto"),
        )
    )


def test_a_first_token_that_takes_too_long_loses_to_one_in_time() -> None:
    patient = chosen(AIR, SLOW, 32768, workload={"first_token_s": 3600})
    looked_at = (patient.chosen, *patient.others)
    fitting = [one for one in looked_at if one.plan is not None]
    soonest = min(fitting, key=lambda one: one.first_token_s)
    slower = [one for one in fitting if one.first_token_s > 1.2 * soonest.first_token_s]
    assert slower
    assert all(0.99 * patient.chosen.step_s <= one.step_s for one in fitting)
    limit = 1.15 * soonest.first_token_s
    hurried = chosen(AIR, SLOW, 32768, workload={"first_token_s": limit})
    assert hurried.chosen.first_token_s <= limit
    if patient.chosen.first_token_s > limit:
        assert "workload.first_token_s" in str(hurried)
    # Nothing comes in time: what comes soonest, and not what decodes fastest.
    never = chosen(AIR, SLOW, 32768, workload={"first_token_s": 0.001})
    assert never.chosen.first_token_s <= 1.1 * soonest.first_token_s


SPARSE = AIR | {"index_topk": 2048}


def test_layouts_that_cannot_compute_the_model_do_not_win() -> None:
    choice = chosen(SPARSE, SLOW, 32768)
    assert choice.chosen.experts
    assert not choice.chosen.layout.count("cpu")
    refused = [one for one in choice.others if one.is_refused]
    assert refused
    assert all(one.plan is None and one.layout.count("cpu") for one in refused)
    assert "sparse attention (an indexer keeps 2048 tokens)" in refused[0].problem


def test_what_no_rank_can_compute_is_refused_and_not_planned() -> None:
    sockets = {**SLOW["sockets"], "count": 2}
    with pytest.raises(UnsupportedError, match="sparse attention"):
        chosen(SPARSE, {"name": "a", "sockets": sockets}, 32768)


DENSE = config_of("llama", 32, 4096, 14336, (32, 8), 128256)
STATE = KvCache(0, 1, state_bytes=2 << 20)


def test_pipelines_that_cannot_verify_drafts_do_not_win() -> None:
    node = {"name": "a", "sockets": {**SLOW["sockets"], "count": 2}}
    for drafter, are_refused in ((Drafter(3), True), (None, False)):
        choice = chosen(DENSE, node, 4096, drafter, STATE)
        looked_at = (choice.chosen, *choice.others)
        pipelines = [one for one in looked_at if len(one.layout.stages) > 1]
        assert pipelines
        assert all(one.is_refused == are_refused for one in pipelines)
        assert not (are_refused and "Write a layout of one stage" not in pipelines[0].problem)


def test_experts_in_a_format_without_kernels_are_left_to_the_gpus() -> None:
    scheme = {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4"}
    checkpoint = CheckpointOnCpus.of_config(AIR | {"quantization_config": scheme}, "auto")
    with pytest.raises(
        UnsupportedError, match=r"in NVFP4 weight-only .* leave the experts on the GPUs"
    ):
        refuse_ranks(checkpoint, Layout((("gpu",),)), experts=1)
    refuse_ranks(checkpoint, Layout((("gpu",),)))


def test_the_reason_tells_weights_from_the_cache() -> None:
    small = config_of("llama", 32, 4096, 14336, (32, 8), 128256)
    gpu = {"part": "L40S", "memory_gib": 24}
    node = {"name": "a", "gpus": gpu, "sockets": {"part": "EPYC 9654"}}
    assert "the weights fit on the GPUs alone, but not with the KV cache" in str(
        chosen(small, node, 131072)
    )
    assert "the model fits on one GPU alone" in str(chosen(small, node, 4096))
    large = config_of("llama", 80, 8192, 28672, (64, 8), 128256)
    node = {"name": "a", "gpus": gpu, "sockets": {"part": "EPYC 9654", "memory_gib": 512}}
    assert "the model does not fit on the GPUs alone" in str(chosen(large, node, 8192))

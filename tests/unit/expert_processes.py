"""Processes of the test of remote experts: a model's layers of experts, computed by themselves.

    python expert_processes.py {stock,stage,expert,files,bare} WORK NUMBER

WORK holds `request.json`: by name the model, its dtype, the expert ranks and their kernel.
"""

from __future__ import annotations

import contextlib
import json
import sys
from pathlib import Path
from typing import Any

if "bare" in sys.argv:
    # As the build for CUDA, which has none; before vLLM loads them.
    sys.modules.update(dict.fromkeys(("vllm._C", "vllm._C_AVX512", "vllm._C_AVX2")))

# isort: split
import torch
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed.parallel_state import (
    ensure_model_parallel_initialized,
    init_distributed_environment,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import (
    initialize_model,
    process_weights_after_loading,
)
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype

from placement.cluster.assignment import Seat
from placement.cluster.layout import Layout
from ray_hetero.compat.models.custom_ops import has_cpu_kernels
from ray_hetero.config import HeteroConfig
from ray_hetero.distributed import stage_experts
from ray_hetero.distributed.expert_meeting import is_ready, reach
from ray_hetero.distributed.expert_offers import give
from ray_hetero.distributed.expert_service import ExpertService
from ray_hetero.distributed.stage_experts import RemoteExperts, are_remote
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts import expert_layers
from ray_hetero.kernels.layers import layer_tokens
from ray_hetero.kernels.linear import streaming_linear
from ray_hetero.offload.linear_layers import LinearLayers
from ray_hetero.planning.expert_ranks import asked_layers
from ray_hetero.planning.expert_source import expert_source
from ray_hetero.worker import vllm_experts
from ray_hetero.worker.expert_files import load_from_files
from ray_hetero.worker.expert_model import shared_pages
from ray_hetero.worker.expert_rows import Share
from ray_hetero.worker.vllm_experts import load_experts
from ray_hetero.world import EngineSpec, RankSpec, SharedSettings, World

TOKENS = 70


def configured(case: dict[str, Any], role: str) -> tuple[Any, HeteroConfig]:
    # What a quantised checkpoint is to be compared with is unquantised.
    model = case.get("reference", case["model"]) if role == "stock" else case["model"]
    args = EngineArgs(
        model=model, dtype=case["dtype"], skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=128, kv_cache_memory_bytes=1 << 30,
        # vLLM's backend of latent attention for AMX computes no float32.
        attention_backend="CPU_MLA" if case["dtype"] == "float32" and case["latent"] else None,
    )  # fmt: skip
    config = HeteroConfig.model_validate(
        {"cpu": {"linear_kernel": case["kernel"]}, "experts": case["experts"]}
    )
    return args.create_engine_config(), config


def rank_of(meeting: str, config: HeteroConfig, model: str, dtype: str, remote: int) -> RankSpec:
    """The one rank of a stage, beside expert ranks."""
    where = {"node_id": "n", "address": "a", "node_name": "n", "is_driver_node": True}
    seat = Seat(0, 0, 0, "gpu", local_rank=0, **where)  # type: ignore[arg-type]
    experts = [
        Seat(1 + n, 1, n, "cpu", local_rank=n, serves_experts=True, **where)  # type: ignore[arg-type]
        for n in range(int(config.experts.ranks))
    ]
    world = World(Layout((("gpu",),)), (seat,), (4,), tuple(experts), remote)
    # Fewer tokens at once than there are, so that they are handed over in pieces.
    shared = SharedSettings("e", dtype, 128, 16, 0, 32, 8, False, False, False, (), ())
    engine = EngineSpec(EngineArgs(model=model), config, None)
    return RankSpec(world, seat, engine, shared, (), (), meeting=meeting)


def main() -> None:
    torch.set_num_threads(1)
    role, work, number = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    current_platform.import_kernels()
    for name, case in json.loads((work / "request.json").read_text()).items():
        vllm_config, config = configured(case, role)
        with set_current_vllm_config(vllm_config):
            init_distributed_environment(1, 0, "env://", 0, "gloo")
            ensure_model_parallel_initialized(1, 1)
            meeting = f"{work.name}-{name}"
            if role == "bare":
                torch.save(bare(vllm_config, config), work / "bare.pt")
                break
            if role in ("expert", "files"):
                serve(meeting, vllm_config, config, number, by_vllm=role == "expert")
            else:
                found = stage(meeting, vllm_config, config, has_experts=role == "stock")
                torch.save(found, work / f"{name}-{role}.pt")


def bare(vllm_config: Any, config: HeteroConfig) -> dict[str, Any]:
    """What a rank without vLLM's kernels makes of tokens, and says of layers that need them."""
    assert not has_cpu_kernels()
    held = load_experts(vllm_config, config, are_remote(4, 4), 0, 1)
    name, layer = next(iter(held.items()))
    torch.manual_seed(0)
    x = torch.randn(TOKENS, layer.hidden).bfloat16()
    weights, ids = torch.rand(TOKENS, layer.chosen).topk(layer.chosen)
    ids = ids.int()
    ours = layer.compute(x, weights, ids)
    prefix = name.removesuffix(".routed_experts")
    expected = torch.zeros(TOKENS, layer.hidden)
    tensors = {}
    for path in Path(vllm_config.model_config.model).glob("*.safetensors"):
        tensors |= load_file(path)
    for token in range(TOKENS):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = (
                tensors[f"{prefix}.{expert}.{part}_proj.weight"].float()
                for part in ("gate", "up", "down")
            )
            row = x[token].float()
            expected[token] += weight * (down @ (torch.nn.functional.silu(gate @ row) * (up @ row)))
    refusal = ""
    expert_layers.held_by = lambda layer: None
    try:
        # A layer that has none of this project's kernels.
        vllm_experts._check_kernels({name: torch.nn.Identity()})
    except UnsupportedError as error:
        refusal = str(error)
    atol = float(expected.abs().max()) * 2**-6
    return {"ours": ours.float(), "expected": expected, "atol": atol, "refusal": refusal}


def serve(
    meeting: str, vllm_config: Any, config: HeteroConfig, number: int, *, by_vllm: bool
) -> None:
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    ranks, remote = config.experts.ranks, asked_layers(config.experts, layers)
    assert ranks != "auto"
    assert remote is not None
    source = None if by_vllm else expert_source(vllm_config)
    if source is None:
        held = load_experts(vllm_config, config, are_remote(remote, layers), number, ranks)
    else:
        kernel = streaming_linear.at_hand()
        assert kernel is not None
        held = load_from_files(source, config, kernel, remote, Share(number, ranks))
    service = ExpertService(held, number)
    reached = reach(meeting, 0, number, (), 200)
    service.add(reached)
    is_ready(reached)
    pages = shared_pages(held)
    give(reached.connection, reached.layers, pages, None, 200)
    with contextlib.suppress(torch.distributed.DistNetworkError):
        service.serve()


def stage(
    meeting: str, vllm_config: Any, config: HeteroConfig, *, has_experts: bool
) -> dict[str, Any]:
    model_config = vllm_config.model_config
    remote = None
    if not has_experts:
        dtype = str(model_config.dtype).removeprefix("torch.")
        layers = model_config.get_total_num_hidden_layers()
        remote_layers = asked_layers(config.experts, layers)
        assert remote_layers is not None
        if model_config.quantization:
            # A GPU has kernels for these; this process is given those of a CPU rank.
            LinearLayers(config.cpu, None, TOKENS)
        rank = rank_of(meeting, config, model_config.model, dtype, remote_layers)
        remote = RemoteExperts(rank, layers, model_config.dtype)
    with set_default_torch_dtype(model_config.dtype):
        model = initialize_model(vllm_config=vllm_config)
    get_model_loader(vllm_config.load_config).load_weights(model, model_config)
    process_weights_after_loading(model, model_config, torch.device("cpu"))
    if remote is not None:
        remote.connect()
    held = sum(p.nbytes for n, p in model.named_parameters() if ".routed_experts." in n)
    layer_tokens.take()
    found = {"held": held, "sums": computed(model, vllm_config)}
    found["linked"] = layer_tokens.take().experts_on_gpu
    found["in_slots"] = sum(slots.slots for slots in stage_experts._slots)
    if remote is not None:
        assert remote.problem is None
        remote.close()
    return found


@torch.inference_mode()
def computed(model: Any, vllm_config: Any) -> dict[str, torch.Tensor]:
    """What each block of experts makes of the same tokens, shared experts included."""
    torch.manual_seed(0)
    found = {}
    with set_forward_context(None, vllm_config, num_tokens=TOKENS):
        for name, module in model.named_modules():
            if hasattr(module, "experts"):
                x = torch.randn(TOKENS, vllm_config.model_config.get_hidden_size())
                found[name] = module(x.to(vllm_config.model_config.dtype))
                found[f"{name} of one"] = module(x[:1].to(vllm_config.model_config.dtype))
    return found


if __name__ == "__main__":
    main()

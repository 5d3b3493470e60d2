"""Time of a decode step of layers with a linear state on a CPU rank: vLLM's own layers with
streamed linear layers, one operator for each layer, and the floor of their bytes.

    python benchmarks/hybrid_layers.py --shape qwen3_5 --tokens 1,8

Milliseconds a layer, the least of some steps, the ways in turns.  The floor is what a layer has to
read and write at the bandwidth that the same threads read with, measured before each number of
tokens and after it: weights once, the states of each request twice, once to read and once to write.
Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD, GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
import torch
from random_model import random_model
from vllm.config import set_current_vllm_config
from vllm.config.mamba import MambaBackendEnum, MambaConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.model_executor.layers.mamba.ops import ssu_dispatch
from vllm.platforms import current_platform
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata

from placement.host import native
from ray_hetero.compat.models.model_registry import (
    inspect_here,
    load_models_without_torchvision,
)
from ray_hetero.config import CpuConfig
from ray_hetero.offload.linear_layers import LinearLayers

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3_5": {
        "hidden_size": 5120, "intermediate_size": 17408, "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
    },
    "qwen3_5-state": {
        "hidden_size": 2048, "intermediate_size": 64, "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
    },
}  # fmt: skip
"""Qwen3.5 27B with its MLP; and the state of Qwen3.5 35B-A3B and of Qwen3-Next, hardly an MLP
behind it."""
MAMBA_2 = {
    "granite4": {
        "hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_expand": 2, "mamba_d_conv": 4, "mamba_conv_bias": True,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 64,
        "shared_intermediate_size": 64, "num_local_experts": 0, "num_experts_per_tok": 0,
        "position_embedding_type": "nope", "vocab_size": 64, "max_position_embeddings": 32768,
    },
}  # fmt: skip
"""The mixer of Granite 4 Small, hardly an MLP behind it."""
COMMON = {
    "vocab_size": 64, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
    "max_position_embeddings": 32768, "rms_norm_eps": 1e-6,
}  # fmt: skip


def written(folder: Path, shape: str, layers: int) -> Path:
    """A checkpoint's configuration, without weights: linear states, and one attention behind."""
    from transformers import GraniteMoeHybridConfig, Qwen3_5TextConfig

    kinds = ["linear_attention"] * layers + ["full_attention"]
    if shape in MAMBA_2:
        config = GraniteMoeHybridConfig(
            **MAMBA_2[shape], num_hidden_layers=layers + 1, layer_types=kinds
        )
        config.architectures = ["GraniteMoeHybridForCausalLM"]
        config.torch_dtype = "bfloat16"
        config.save_pretrained(folder)
        return folder
    config = Qwen3_5TextConfig(
        **(COMMON | SHAPES[shape]), num_hidden_layers=layers + 1, layer_types=kinds
    )
    config.architectures = ["Qwen3_5ForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


def of_gated_delta(numbers: torch.Tensor) -> GDNAttentionMetadata:
    """Metadata of a step of layers with a Gated DeltaNet; `numbers` [tokens] are its states."""
    tokens = len(numbers)
    return GDNAttentionMetadata(
        num_prefills=0, num_prefill_tokens=0, num_decodes=tokens, num_decode_tokens=tokens,
        num_spec_decodes=0, num_spec_decode_tokens=0, num_actual_tokens=tokens,
        non_spec_query_start_loc=torch.arange(tokens + 1, dtype=torch.int32),
        non_spec_state_indices_tensor=numbers,
    )  # fmt: skip


def of_mamba_2(numbers: torch.Tensor) -> Mamba2AttentionMetadata:
    """Metadata of a step of mixers of Mamba 2; `numbers` [tokens] are its states."""
    ssu_dispatch._mamba_ssu_backend = ssu_dispatch._BACKEND_REGISTRY[MambaBackendEnum.CPU](
        MambaConfig()
    )
    tokens = len(numbers)
    given = dict.fromkeys(Mamba2AttentionMetadata.__dataclass_fields__) | {
        "num_prefills": 0, "num_prefill_tokens": 0, "num_decodes": tokens,
        "num_decode_tokens": tokens, "num_reqs": tokens, "state_indices_tensor_d": numbers[:, None],
    }  # fmt: skip
    return Mamba2AttentionMetadata(**given)


class Step:
    """A step of requests of one token each, with their states.

    Args:
        vllm_config: the engine's.
        tokens: of the step.

    """

    def __init__(self, vllm_config: Any, tokens: int) -> None:
        self.config = vllm_config
        layers = vllm_config.compilation_config.static_forward_context
        own = {name: one for name, one in layers.items() if hasattr(one, "conv1d")}
        self.states = []
        for one in own.values():
            one.kv_cache = tuple(
                torch.randn(tokens + 1, *shape).to(dtype)
                for shape, dtype in zip(one.get_state_shape(), one.get_state_dtype(), strict=True)
            )
            self.states += one.kv_cache
        numbers = torch.randperm(tokens).int() + 1
        is_mamba = any(hasattr(one, "ssm_state_size") for one in own.values())
        metadata = (of_mamba_2 if is_mamba else of_gated_delta)(numbers)
        self.metadata = dict.fromkeys(own, metadata)
        self.positions = torch.full((tokens,), 100)
        self.hidden = torch.randn(tokens, vllm_config.model_config.get_hidden_size()).bfloat16()
        self.bytes = sum(2 * state[1:].nbytes for state in self.states) // len(own)
        """Bytes of states that a layer reads and writes."""

    @torch.inference_mode()
    def run(self, layers: list[Any]) -> torch.Tensor:
        """Run layers one after the other; returns the last one's sum of output and residual."""
        hidden, residual = self.hidden, None
        with set_forward_context(self.metadata, self.config, num_tokens=len(self.hidden),
                                 slot_mapping={}):  # fmt: skip
            for layer in layers:
                hidden, residual = layer(
                    positions=self.positions, hidden_states=hidden, residual=residual
                )
        return hidden + residual


def kept(layer: Any) -> Any:
    """A layer with its modules as they are now, whatever is put into their places."""
    made = copy.copy(layer)
    made._modules = dict(layer._modules)
    return made


def bandwidth() -> float:
    """Bytes/s that this process's threads read."""
    cpus = sorted(os.sched_getaffinity(0))[: torch.get_num_threads()]
    return float(native.read_bandwidth(cpus, nbytes_per_thread=256 << 20, seconds=0.5))


def main() -> None:
    """Measure and print one line for each number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=[*SHAPES, *MAMBA_2], default="qwen3_5")
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--tokens", default="1,2,4,8,16,32")
    parser.add_argument("--state", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    current_platform.import_kernels()
    inspect_here()
    load_models_without_torchvision()
    with tempfile.TemporaryDirectory() as folder:
        args = EngineArgs(
            model=str(written(Path(folder), options.shape, options.layers)), dtype="bfloat16",
            skip_tokenizer_init=True, enforce_eager=True, load_format="dummy",
            kv_cache_memory_bytes=1 << 30, max_model_len=4096,
            mamba_ssm_cache_dtype=options.state,
        )  # fmt: skip
        vllm_config = args.create_engine_config()
    with set_current_vllm_config(vllm_config):
        linear = LinearLayers(CpuConfig(), None, 1024)
        model = random_model(vllm_config)
        own = [kept(one) for one in list(model.model.layers)[: options.layers]]
        linear.loaded(model)
        ways = {"vllm": own, "native": list(model.model.layers)[: options.layers]}
        weights = sum(
            2 * one.output_size_per_partition * one.input_size_per_partition
            for one in own[0].modules() if hasattr(one, "cpu_linear")
        )  # fmt: skip
        for tokens in map(int, options.tokens.split(",")):
            measure(ways, Step(vllm_config, tokens), weights, options)


def measure(ways: dict[str, list[Any]], step: Step, weights: int, options: Any) -> None:
    """Measure a step in each way and print it."""
    before = [state.clone() for state in step.states]
    results = {}
    for name, layers in ways.items():
        for state, old in zip(step.states, before, strict=True):
            state.copy_(old)
        results[name] = step.run(layers).float()
    apart = (results["native"] - results["vllm"]).norm() / results["vllm"].norm()
    rates = [bandwidth()]
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, layers in ways.items():
            begin = time.perf_counter()
            step.run(layers)
            found[name].append((time.perf_counter() - begin) * 1e3 / options.layers)
    rates.append(bandwidth())
    floor = (weights + step.bytes) / max(rates) * 1e3
    least = {name: round(min(times), 3) for name, times in found.items()}
    line = {
        "shape": options.shape, "state": options.state, "tokens": len(step.hidden),
        "threads": torch.get_num_threads(), "weight_mb": round(weights / 1e6, 1),
        "state_mb": round(step.bytes / 1e6, 1), "gb_s": [round(rate / 1e9, 1) for rate in rates],
        "floor_ms": round(floor, 3), "ms_a_layer": least,
        "median_ms": {name: round(statistics.median(times), 3) for name, times in found.items()},
        "of_the_floor": {name: round(ms / floor, 3) for name, ms in least.items()},
        "apart": float(f"{float(apart):.2g}"),
    }  # fmt: skip
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

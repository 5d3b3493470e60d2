"""Time of a decode step of layers with multi-head latent attention on a CPU rank: vLLM's own
layers with streamed linear layers, and the same layers as one operator each.

    python benchmarks/latent_attention.py --shape v2-lite --tokens 1,8 --context 512,4096

Milliseconds a layer, the least of some steps, the ways in turns; with --profile, operators of
vLLM's layers by their time.  Each layer has a small MLP, so that attention is what is
measured.  Start it with the environment of a CPU rank (OMP_NUM_THREADS, LD_PRELOAD,
GOMP_CPU_AFFINITY).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
import torch
from random_model import random_model
from vllm.config import set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.forward_context import set_forward_context
from vllm.platforms import current_platform
from vllm.v1.attention.backend import CommonAttentionMetadata

from ray_hetero.config import CpuConfig
from ray_hetero.offload.linear_layers import LinearLayers

SHAPES: dict[str, dict[str, Any]] = {
    "v2-lite": {"hidden_size": 2048, "num_attention_heads": 16, "q_lora_rank": None},
    "v3": {"hidden_size": 7168, "num_attention_heads": 128, "q_lora_rank": 1536},
}
"""Values in which models differ; latents and heads are those of both."""
COMMON = {
    "vocab_size": 64, "intermediate_size": 64, "max_position_embeddings": 163840,
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128,
    "n_routed_experts": 8, "first_k_dense_replace": 1 << 20, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 40, "beta_fast": 32, "beta_slow": 1,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
    },
}  # fmt: skip


def written(folder: Path, shape: str, layers: int) -> Path:
    """A checkpoint's configuration, without weights."""
    from transformers import DeepseekV3Config

    sizes = COMMON | SHAPES[shape]
    heads = {"num_key_value_heads": sizes["num_attention_heads"]}
    config = DeepseekV3Config(**sizes, **heads, num_hidden_layers=layers)
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.torch_dtype = "bfloat16"
    config.save_pretrained(folder)
    return folder


class Step:
    """A step of requests of one token each over caches of one length.

    Args:
        vllm_config: the engine's.
        tokens: of the step.
        context: tokens of each request, with the one that comes.

    """

    def __init__(self, vllm_config: Any, tokens: int, context: int) -> None:
        self.config = vllm_config
        layers = vllm_config.compilation_config.static_forward_context
        names = [name for name, one in layers.items() if hasattr(one, "kv_lora_rank")]
        block = vllm_config.cache_config.block_size
        most = -(-context // block)
        blocks = torch.randperm(tokens * most).int().view(tokens, most)
        shape = (tokens * most, 1, block, layers[names[0]].head_size)
        for name in names:
            layers[name].bind_kv_cache(torch.randn(shape).bfloat16())
        positions = torch.full((tokens,), context - 1)
        slots = blocks[:, (context - 1) // block].long() * block + (context - 1) % block
        starts = torch.arange(tokens + 1, dtype=torch.int32)
        lengths = torch.full((tokens,), context, dtype=torch.int32)
        spec = layers[names[0]].get_kv_cache_spec(vllm_config)
        builder = layers[names[0]].attn_backend.get_builder_cls()(
            spec, names, vllm_config, torch.device("cpu")
        )
        described = CommonAttentionMetadata(
            query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=lengths,
            num_reqs=tokens, num_actual_tokens=tokens, max_query_len=1, max_seq_len=context,
            block_table_tensor=blocks, slot_mapping=slots, seq_lens_cpu_upper_bound=lengths,
        )  # fmt: skip
        metadata = builder.build(0, described)
        self.metadata = dict.fromkeys(names, metadata)
        self.slots = dict.fromkeys(names, slots)
        self.positions = positions
        self.hidden = torch.randn(tokens, vllm_config.model_config.get_hidden_size()).bfloat16()

    @torch.inference_mode()
    def run(self, layers: list[Any]) -> torch.Tensor:
        """Run layers one after the other; returns the last one's sum of output and residual."""
        hidden, residual = self.hidden, None
        with set_forward_context(self.metadata, self.config, num_tokens=len(self.positions),
                                 slot_mapping=self.slots):  # fmt: skip
            for layer in layers:
                hidden, residual = layer(self.positions, hidden, residual, None)
        return hidden + residual


def timed(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds of a call."""
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        found.append((time.perf_counter() - begin) * 1e3)
    return statistics.median(found)


def main() -> None:
    """Measure and print one line for each number of tokens and context."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="v2-lite")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--context", default="512,4096")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--backend", help="vLLM's attention backend, CPU_MLA or AMX_MLA")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    current_platform.import_kernels()
    with tempfile.TemporaryDirectory() as folder:
        model_path = written(Path(folder), options.shape, options.layers)
        args = EngineArgs(
            model=str(model_path), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
            load_format="dummy", kv_cache_memory_bytes=1 << 30, max_model_len=65536,
            **({"attention_backend": options.backend} if options.backend else {}),
        )  # fmt: skip
        vllm_config = args.create_engine_config()
    with set_current_vllm_config(vllm_config):
        linear = LinearLayers(CpuConfig(), None, 1024)
        model = random_model(vllm_config)
        own = list(model.model.layers)
        linear.loaded(model)
        ways = {"vllm": own, "native": list(model.model.layers)}
        for tokens in map(int, options.tokens.split(",")):
            for context in map(int, options.context.split(",")):
                measure(ways, Step(vllm_config, tokens, context), tokens, context, options)


def measure(
    ways: dict[str, list[Any]], step: Step, tokens: int, context: int, options: Any
) -> None:
    """Measure a step in each way and print it."""
    results = {name: step.run(layers) for name, layers in ways.items()}
    expected = results["vllm"].float()
    apart = (results["native"].float() - expected).norm() / expected.norm()
    if options.profile:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(options.repeats):
                step.run(ways["vllm"])
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=18))
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(options.repeats):
        for name, layers in ways.items():
            found[name].append(timed(lambda layers=layers: step.run(layers), 1) / options.layers)
    least = {name: round(min(times), 4) for name, times in found.items()}
    line = {"shape": options.shape, "tokens": tokens, "context": context,
            "threads": torch.get_num_threads(), "ms_a_layer": least,
            "apart": float(f"{float(apart):.2g}")}  # fmt: skip
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

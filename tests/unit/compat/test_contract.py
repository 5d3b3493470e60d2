"""What this package touches of the installed vLLM is there, with signatures that fit.

When a new vLLM breaks one of these, the module named in the test is the one to change.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from vllm import _custom_ops, envs
from vllm.compilation import decorators
from vllm.config import (
    CacheConfig,
    CompilationConfig,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
)
from vllm.distributed import parallel_state
from vllm.distributed import utils as distributed_utils
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import (
    MessageQueue,
    ShmRingBuffer,
    SpinCondition,
)
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.forward_context import ForwardContext
from vllm.lora import layers as lora_layers
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import PunicaWrapperBase, punica_cpu
from vllm.model_executor import layers
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
    Fp8BlockScaledMMLinearKernel,
)
from vllm.model_executor.layers.attention import Attention, mla_attention
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.model_executor.layers.fused_moe import activation as fused_moe_activation
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig, FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
from vllm.model_executor.layers.fused_moe.oracle.nvfp4 import NvFp4MoeBackend
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.router import zero_expert_router
from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.layernorm import RMSNormGated
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.mamba import mamba_mixer2
from vllm.model_executor.layers.mamba.gdn.base import GatedDeltaNetAttention
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention
from vllm.model_executor.layers.mamba.short_conv import ShortConv
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.quantization import modelopt
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe import (
    compressed_tensors_moe_w4a4_nvfp4,
    compressed_tensors_moe_w8a8_mxfp8,
)
from vllm.model_executor.layers.quantization.utils import w8a8_utils
from vllm.model_executor.layers.rotary_embedding import RotaryEmbedding
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models import gemma4
from vllm.model_executor.models import registry as model_registry
from vllm.model_executor.models import utils as model_utils
from vllm.model_executor.models.interfaces import EagleModelMixin
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import Platform
from vllm.sampling_params import SamplingParams
from vllm.triton_utils import allocation
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackendImpl,
    CPUAttentionMetadata,
    CPUAttentionMetadataBuilder,
)
from vllm.v1.attention.backends.flash_attn import FlashAttentionImpl, FlashAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadata
from vllm.v1.attention.backends.mamba2_attn import Mamba2AttentionMetadata
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.attention.backends.triton_attn import TritonAttentionMetadata
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient, InprocClient, MPClient
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.kv_cache_interface import AttentionSpec, MambaSpec
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.sample import rejection_sampler, sampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker import gpu_model_runner, mamba_utils
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import block_table, buffer_utils, pp_utils
from vllm.v1.worker.gpu import model_runner as v2_model_runner
from vllm.v1.worker.gpu import states as v2_states
from vllm.v1.worker.gpu_input_batch import InputBatch
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from vllm.v1.worker.gpu_worker import Worker

from ray_hetero import plugin
from ray_hetero.compat import patching
from ray_hetero.compat.models import (
    decoder_classes,
    lora,
    meta_model,
    quantised_experts,
    remote_experts,
)
from ray_hetero.compat.worker import kv_cache, v2_kernels
from ray_hetero.distributed.groups import HeteroGroup, HostCommunicator
from ray_hetero.errors import UnsupportedError
from ray_hetero.executor.hetero_executor import HeteroExecutor
from ray_hetero.executor.rank_queues import RequestQueue
from ray_hetero.executor.recovery import RankRecovery
from ray_hetero.executor.rpc import GuardedExecutor
from ray_hetero.kernels.linear import quantised_linear
from ray_hetero.worker.rank_actor import RankActor

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

import write_upgrading_page as upgrading

PACKAGE = Path(plugin.__file__).parent
COMPAT = PACKAGE / "compat"

OVERRIDES: dict[type, set[str]] = {
    HeteroExecutor: {
        "_init_executor", "_get_output_rank", "get_supported_kv_cache_layouts",
        "get_kv_cache_specs", "determine_available_memory", "initialize_from_config",
        "compile_or_warm_up_model", "shutdown",
    },
    GuardedExecutor: {"collective_rpc"},
    RankActor: {"run", "worker_busy_loop"},
    RankRecovery: {"on_fault"},
    RequestQueue: {"enqueue"},
    quantised_linear.StreamedIntegers: {"process_weights_after_loading", "apply_weights"},
    quantised_linear.StreamedBlockFloats: {
        "process_weights_after_loading", "apply_weights", "apply_block_scaled_mm",
    },
    quantised_linear.StreamedFloats: {
        "process_weights_after_loading", "apply_weights", "apply_scaled_mm",
    },
    quantised_linear.StreamedBytes: {"process_weights_after_loading"},
    quantised_linear.StreamedMxFloats: {"process_weights_after_loading", "apply_weights"},
    quantised_linear.StreamedNvFloats: {"process_weights_after_loading", "apply_weights"},
    HeteroGroup: {"__init__", "broadcast", "isend_tensor_dict", "irecv_tensor_dict"},
    HostCommunicator: {
        "__init__", "all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "send",
        "recv",
    },
    remote_experts._remote_method(): {
        "create_weights", "maybe_roundup_sizes", "uses_weight_scale_2_pattern",
        "process_weights_after_loading", "get_fused_moe_quant_config", "apply",
    },
}  # fmt: skip
"""Methods that stand for one of vLLM's; a renamed one would silently never be called."""
REPLACED = {RankActor: {"__init__"}, remote_experts._remote_method(): {"__init__"}}
"""Methods of our own that only share the name."""


def _is_part(base: type) -> bool:
    """Whether a base holds what classes of this project have in common."""
    return base.__module__.split(".")[0] == "ray_hetero" and base.__name__.startswith("_")


def _own_methods(cls: type) -> dict[str, Any]:
    return {
        name: member
        for own in reversed([cls, *filter(_is_part, cls.__mro__[1:])])
        for name, member in vars(own).items()
        if inspect.isfunction(member) or isinstance(member, staticmethod)
    }


def _inherited(cls: type, name: str) -> Any:
    bases = (base for base in cls.__mro__[1:-1] if not _is_part(base))
    return next((vars(base)[name] for base in bases if name in vars(base)), None)


@pytest.mark.parametrize("cls", OVERRIDES, ids=lambda cls: cls.__name__)
def test_exactly_the_listed_methods_override_one_of_vllms(cls: type) -> None:
    overriding = {name for name in _own_methods(cls) if _inherited(cls, name) is not None}
    assert overriding - REPLACED.get(cls, set()) == OVERRIDES[cls]


@pytest.mark.parametrize(
    ("cls", "name"),
    [(cls, name) for cls, names in OVERRIDES.items() for name in sorted(names)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_overrides_take_every_call_that_vllm_makes(cls: type, name: str) -> None:
    theirs = inspect.signature(_inherited(cls, name)).parameters
    ours = inspect.signature(_own_methods(cls)[name]).parameters
    if any(p.kind is p.VAR_KEYWORD for p in ours.values()):
        return
    optional = {n: p.default is not p.empty for n, p in theirs.items()}
    assert list(ours)[: len(theirs)] == list(theirs)
    for parameter, was_optional in optional.items():
        assert (ours[parameter].default is not inspect.Parameter.empty) >= was_optional, parameter
    extra = [*ours.values()][len(theirs) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in extra)


def _imports_of_vllm() -> Iterator[tuple[str, str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(found, ast.ImportFrom) and str(found.module).split(".")[0] == "vllm":
                yield from ((path.stem, str(found.module), alias.name) for alias in found.names)


@pytest.mark.parametrize(("where", "module", "name"), sorted(set(_imports_of_vllm())))
def test_every_name_that_is_imported_exists(where: str, module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"{where}.py imports it"


def _class(file: str, name: str) -> Any:
    return getattr(importlib.import_module(f"{decoder_classes.MODELS}.{file}"), name)


PRIVATE: list[tuple[str, Any, str]] = [
    ("compat/models/cpu_linear", GPUModelRunner, "reload_weights"),
    ("compat/models/compilation", decorators, "support_torch_compile"),
    ("compat/models/meta_model", CpuPlatform, "get_attn_backend_cls"),
    ("compat/models/meta_model", fused_moe_config.FusedMoEConfig, "__post_init__"),
    ("compat/models/meta_model", CPUAttentionBackendImpl, "__init__"),
    ("compat/models/meta_model", AttentionBackend, "supports_alibi_sqrt"),
    ("compat/models/meta_model", allocation, "set_triton_allocator"),
    ("compat/models/meta_model", parallel_state, "_PP"),
    *(("compat/models/meta_model", linear_kernels, name) for name in meta_model.KERNEL_MAKERS),
    ("compat/models/meta_model", linear_kernels, meta_model.KERNEL_CHOICE),
    *(
        (
            "compat/models/meta_model",
            importlib.import_module(f"{meta_model.ORACLES}.{module}"),
            name,
        )
        for module, (names, backends) in meta_model.BACKENDS.items()
        for name in (*names, backends)
    ),
    ("compat/models/model_parts", AttentionLayerBase, "get_kv_cache_spec"),
    ("compat/models/model_parts", AttentionSpec, "num_heads"),
    ("compat/models/model_parts", AttentionSpec, "unpadded_page_size_bytes"),
    ("compat/models/model_parts", AttentionSpec, "block_size"),
    ("compat/models/model_parts", MambaSpec, "shapes"),
    ("compat/models/model_parts", MambaSpec, "dtypes"),
    ("compat/models/model_parts", MambaSpec, "tp_replicated"),
    ("compat/models/model_parts", CompilationConfig, "static_forward_context"),
    ("compat/models/mamba2", MambaMixer2, "get_kv_cache_spec"),
    ("compat/models/mamba2", MambaMixer2, "conv_ssm_forward"),
    ("compat/models/mamba2", mamba_mixer2, "causal_conv1d_update"),
    ("compat/models/mamba2", mamba_mixer2, "selective_state_update"),
    ("compat/models/gated_delta", gdn_attention, "_spec_forward"),
    (
        "compat/models/gated_delta",
        _custom_ops,
        "fused_sigmoid_gating_delta_rule_update_spec_cpu",
    ),
    *(
        ("compat/worker/aligned_states", mamba_utils, name)
        for name in (
            "_resolve_fused_precopy",
            "postprocess_mamba_align_gpu",
            "collect_mamba_copy_meta",
            "do_mamba_copy_block",
        )
    ),
    *(
        ("compat/models/mamba2", Mamba2AttentionMetadata, name)
        for name in (
            "num_prefills",
            "num_decodes",
            "num_decode_tokens",
            "num_accepted_tokens",
            "state_indices_tensor_d",
        )
    ),
    ("compat/models/mamba2", MambaSpec, "num_prefill_checkpoint_blocks"),
    ("compat/models/mamba2", MambaSpec, "prefill_checkpoint_alignment"),
    ("compat/worker/warmup", CPUModelRunner, "profile_run"),
    ("compat/worker/warmup", CPUModelRunner, "warming_up_model"),
    ("compat/worker/received_tensors", GPUModelRunner, "_dummy_run"),
    ("compat/worker/received_tensors", ForwardContext, "skip_compiled"),
    ("compat/worker/received_tensors", EagleModelMixin, "AUX_HIDDEN_STATE_KEY"),
    ("compat/worker/warmup", GPUModelRunner, "_dummy_run"),
    ("compat/worker/warmup", Worker, "_scoped_allocator_max_split"),
    ("compat/worker/warmup", Worker, "randomize_dummy_inputs"),
    ("compat/worker/warmup", GPUModelRunner, "_dummy_sampler_run"),
    ("compat/worker/warmup", GPUModelRunner, "_dummy_pooler_run"),
    ("compat/worker/warmup", GPUModelRunner, "_warmup_and_capture"),
    ("compat/worker/warmup", CudagraphDispatcher, "get_capture_descs"),
    ("worker/warmup_actions", CPUWorker, "compile_or_warm_up_model"),
    ("worker/warmup_actions", CPUWorker, "determine_available_memory"),
    ("worker/warmup_actions", CPUWorker, "get_kv_cache_spec"),
    ("compat/worker/cpu_worker", CPUWorker, "init_device"),
    ("compat/worker/model_runner", GPUModelRunner, "_sample"),
    ("compat/engine/input_processor", InputProcessor, "_validate_model_input"),
    ("compat/worker/model_runner", GPUModelRunner, "sample_tokens"),
    ("compat/worker/model_runner", sampler, "batched_count_greater_than"),
    ("compat/worker/model_runner", InputBatch, "num_reqs"),
    ("compat/worker/late_tokens", GPUModelRunner, "_preprocess"),
    ("compat/worker/model_runner", GPUModelRunner, "profile_cudagraph_memory"),
    ("compat/models/model_registry", model_registry, "_LazyRegisteredModel"),
    ("compat/models/model_registry", model_registry._LazyRegisteredModel, "load_model_cls"),
    ("compat/models/pipeline_models", DefaultModelLoader, "get_all_weights"),
    ("compat/models/pipeline_models", ParallelLMHead, "tie_weights"),
    ("compat/models/pipeline_models", model_utils.PPMissingLayer, "forward"),
    ("compat/stage_layers", model_utils, "PPMissingLayer"),
    ("compat/models/pipeline_models", model_utils, "is_pp_missing_parameter"),
    ("compat/models/pipeline_models", model_utils.WeightsMapper, "map_name"),
    ("compat/models/pipeline_models", gemma4.Gemma4Model, "__call__"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "_get_model"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "propose"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "dummy_run"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "_create_draft_vllm_config"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "_maybe_share_embeddings"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "_maybe_share_lm_head"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "_sample_draft_tokens"),
    ("compat/worker/spec_decode", DraftModelProposer, "_get_model"),
    ("compat/worker/spec_decode", rejection_sampler, "expand_batch_to_tokens"),
    ("compat/worker/spec_decode", GPUModelRunner, "_update_states"),
    ("compat/worker/spec_decode", GPUModelRunner, "_model_forward"),
    ("compat/worker/spec_decode", GPUModelRunner, "_preprocess"),
    ("compat/worker/spec_decode", GPUModelRunner, "_get_eagle3_aux_layers_from_config"),
    ("compat/worker/read_rows", ModelConfig, "is_diffusion"),
    ("compat/worker/read_rows", ParallelConfig, "use_ubatching"),
    ("compat/worker/read_rows", ParallelConfig, "decode_context_parallel_size"),
    ("compat/worker/read_rows", ParallelConfig, "prefill_context_parallel_size"),
    ("compat/worker/read_rows", CacheConfig, "kv_sharing_fast_prefill"),
    ("compat/worker/kv_cache", CacheConfig, "DEFAULT_BLOCK_SIZE"),
    ("compat/worker/read_rows", CompilationConfig, "max_cudagraph_capture_size"),
    ("compat/worker/read_rows", SamplingParams, "prompt_logprobs"),
    ("compat/worker/read_rows", SamplingParams, "prompt_logprob_token_ids"),
    ("compat/worker/read_rows", ForwardContext, "attn_metadata"),
    *(
        ("compat/worker/read_rows", metadata, name)
        for metadata in (CPUAttentionMetadata, FlashAttentionMetadata)
        for name in (
            "num_actual_tokens",
            "max_query_len",
            "seq_lens",
            "scheduler_metadata",
            "causal",
        )
    ),
    *(
        ("compat/worker/read_rows", FlashAttentionMetadata, name)
        for name in ("mm_prefix_query_range_tensor", "rswa_window")
    ),
    ("compat/worker/read_rows", CPUAttentionMetadata, "encoder_cache"),
    ("compat/worker/read_rows", FlashAttentionImpl, "forward"),
    ("compat/worker/read_rows", CPUAttentionBackendImpl, "forward"),
    ("compat/worker/read_rows", _custom_ops, "cpu_attn_get_scheduler_metadata"),
    ("compat/worker/read_rows", envs, "VLLM_BATCH_INVARIANT"),
    ("compat/worker/read_rows", envs, "VLLM_CPU_ATTN_SPLIT_KV"),
    *(
        ("compat/worker/read_rows", metadata, "query_start_loc")
        for metadata in (CPUAttentionMetadata, FlashAttentionMetadata, TritonAttentionMetadata)
    ),
    ("compat/engine/engine_args", EngineArgs, "create_engine_config"),
    ("compat/engine/engine_args", EngineArgs, "create_model_config"),
    ("compat/engine/engine_args", VllmConfig, "max_concurrent_batches"),
    ("compat/engine/engine_args", VllmConfig, "use_v2_model_runner"),
    ("compat/worker/v2_runner", VllmConfig, "_validate_v2_model_runner"),
    ("compat/worker/v2_runner", VllmConfig, "_get_v2_model_runner_unsupported_features"),
    ("compat/worker/v2_runner", v2_model_runner, "PPHandler"),
    *(
        ("compat/worker/v2_runner", pp_utils.PPHandler, name)
        for name in (
            "get_prev_sampled_outputs",
            "receive",
            "broadcast",
            "broadcast_drafts",
            "on_req_idx_freed",
            "relay_aux_hidden_states",
            "configure_aux_hidden_state_relay",
        )
    ),
    *(("compat/worker/v2_kernels", owner, name) for owner, name, _ in v2_kernels.forms()),
    ("compat/engine/engine_environment", envs, "disable_envs_cache"),
    ("compat/engine/engine_environment", envs, "enable_envs_cache"),
    ("compat/engine/engine_environment", envs, "_is_envs_cache_enabled"),
    ("compat/worker/parallel_config", ParallelConfig, "_coord_store_port"),
    ("compat/worker/parallel_state", parallel_state, "GroupCoordinator"),
    ("compat/worker/parallel_state", Platform, "dist_backend"),
    ("compat/models/cpu_linear", layers.utils, "dispatch_cpu_unquantized_gemm"),
    ("compat/engine/engine_processes", EngineCoreClient, "make_client"),
    ("compat/engine/engine_processes", EngineCoreClient, "make_async_mp_client"),
    ("compat/engine/engine_processes", MPClient, "shutdown"),
    ("compat/engine/engine_processes", InprocClient, "shutdown"),
    ("compat/engine/engine_processes", CoreEngineProcManager, "shutdown"),
    ("compat/models/cpu_linear", UnquantizedEmbeddingMethod, "process_weights_after_loading"),
    ("compat/models/cpu_linear", UnquantizedEmbeddingMethod, "embedding"),
    ("compat/models/cpu_linear", VocabParallelEmbedding, "__init__"),
    *(
        ("compat/models/cpu_experts", CPUUnquantizedExperts, name)
        for name in (
            "process_weights_after_loading",
            "apply",
            "_supports_activation",
            "_supports_no_act_and_mul",
            "_supports_grouped_gemm",
        )
    ),
    ("compat/models/cpu_experts", FusedMoEConfig, "__post_init__"),
    *(
        ("compat/models/routed_experts", FusedMoEConfig, name)
        for name in (
            "swiglu_limit",
            "swiglu_alpha",
            "swiglu_beta",
            "activation_situ_beta",
            "activation_situ_linear_beta",
        )
    ),
    ("compat/models/expert_router", CPURouter, "_compute_routing"),
    ("compat/models/expert_router", zero_expert_router, "fused_topk_bias"),
    ("compat/models/expert_router", zero_expert_router, "zero_experts_compute_triton"),
    ("compat/models/routed_experts", FusedMoEKernel, "fused_experts"),
    *(
        ("compat/models/quantised_experts", getattr(cpu_moe, name), attribute)
        for name in quantised_experts.CLASSES
        for attribute in (
            "_supports_current_device",
            "_supports_quant_scheme",
            "_supports_routing_method",
            "_supports_activation",
            "_supports_no_act_and_mul",
            "apply",
        )
    ),
    ("compat/models/quantised_experts", cpu_moe, "prepare_fp8_moe_layer_for_cpu"),
    *(
        ("compat/models/quantised_experts", module, name)
        for module in (modelopt, compressed_tensors_moe_w4a4_nvfp4)
        for name in ("select_nvfp4_moe_backend", "convert_to_nvfp4_moe_kernel_format")
    ),
    *(
        ("compat/models/quantised_experts", module, "select_mxfp8_moe_backend")
        for module in (modelopt, compressed_tensors_moe_w8a8_mxfp8)
    ),
    ("compat/models/quantised_experts", NvFp4MoeBackend, "EMULATION"),
    ("compat/models/quantised_experts", Fp8MoeBackend, "CPU"),
    ("compat/models/quantised_experts", cpu_moe.CPUExpertsInt8, "process_weights_after_loading"),
    ("compat/models/quantised_experts", cpu_moe, "prepare_mxfp4_moe_layer_for_cpu"),
    ("compat/models/quantised_experts", int_wna16, "_process_weights_cpu"),
    ("compat/models/quantised_kernels", w8a8_utils, "requantize_with_max_scale"),
    ("compat/models/quantised_kernels", w8a8_utils, "convert_to_channelwise"),
    ("compat/models/fused_experts", fused_moe, "fused_experts"),
    ("compat/models/fused_experts", fused_moe, "try_get_optimal_moe_config"),
    ("compat/models/fused_experts", fused_moe, "apply_moe_activation"),
    ("compat/models/fused_experts", fused_moe_activation, "ApplyMoEActivationConfig"),
    ("compat/models/fused_experts", fused_moe_activation, "MoEActivation"),
    ("compat/models/fused_experts", fused_moe_config, "biased_moe_quant_config"),
    ("compat/models/remote_experts", RoutedExperts, "_get_quant_method"),
    ("compat/models/remote_experts", RoutedExperts, "__init__"),
    ("compat/models/remote_experts", RoutedExperts, "forward_modular"),
    ("compat/models/remote_experts", RoutedExperts, "_ensure_moe_quant_config_init"),
    ("compat/models/remote_experts", FusedMoEExperts, "_supports_current_device"),
    ("compat/models/remote_experts", FusedMoEParallelConfig, "flatten_tp_across_dp_and_pcp"),
    ("compat/models/remote_experts", SharedExpertsOrder, "MK_INTERNAL_OVERLAPPED"),
    ("compat/worker/message_queues", AsyncModelRunnerOutput, "get_output"),
    ("compat/models/quantised_kernels", Fp8BlockScaledMMLinearKernel, "_get_layer_params"),
    ("compat/engine/api_server", AsyncLLM, "check_admission"),
    ("compat/engine/api_server", AsyncLLM, "check_health"),
    ("compat/engine/api_server", GenerateBaseServing, "_raise_if_error"),
    ("compat/engine/engine_core", EngineCoreProc, "_process_input_queue"),
    ("compat/engine/engine_core", EngineCoreProc, "_process_engine_step"),
    ("compat/engine/engine_core", EngineCoreProc, "_handle_client_request"),
    ("compat/engine/engine_core", EngineCoreProc, "is_running"),
    ("compat/engine/engine_core", EngineCoreProc, "_send_error_outputs_to_client"),
    ("compat/engine/engine_core", Scheduler, "has_unfinished_requests"),
    ("compat/engine/engine_core", Scheduler, "finish_requests"),
    ("compat/engine/engine_core", Request, "num_tokens"),
    ("compat/engine/engine_core", Scheduler, "reset_prefix_cache"),
    ("compat/engine/engine_core", Scheduler, "reset_encoder_cache"),
    ("compat/worker/message_queues", SpinCondition, "wait"),
    ("compat/worker/message_queues", SpinCondition, "record_read"),
    ("compat/worker/message_queues", WorkerProc, "_execute_worker_rpc"),
    ("compat/worker/message_queues", WorkerProc, "handle_output"),
    ("compat/worker/message_queues", WorkerProc, "enqueue_output"),
    ("worker/rank_actor", RankActor, "worker_busy_loop"),
    ("worker/rank_actor", RankActor, "create_dist_init_method"),
    ("worker/rank_actor", RankActor, "get_node_and_physical_gpu_ids"),
    ("worker/rank_actor", RankActor, "wait_for_init"),
    ("compat/engine/engine_processes", engine_utils, "wait_for_engine_startup"),
    ("compat/engine/engine_processes", engine_utils, "zmq_socket_ctx"),
    ("compat/worker/kv_cache", kv_cache.planning(), "get_kv_cache_config_from_groups"),
    ("compat/worker/kv_cache", kv_cache.planning(), "_pool_bytes_per_block"),
    ("compat/worker/kv_cache", gpu_model_runner, "allocate_kv_cache"),
    ("compat/worker/layer_partition", ModelConfig, "get_layers_start_end_indices"),
    ("compat/models/model_registry", model_registry, "_run_in_subprocess"),
    ("compat/worker/layer_partition", distributed_utils, "get_pp_indices"),
    ("compat/worker/parallel_state", parallel_state, "initialize_model_parallel"),
    ("compat/worker/parallel_state", parallel_state, "init_model_parallel_group"),
    *(
        ("compat/worker/parallel_state", parallel_state, f"_{name}")
        for name in ("TP", "ETP", "DCP", "PCP", "PP", "DP", "EP")
    ),
    ("compat/worker/parallel_config", MultiprocExecutor, "_get_parallel_sizes"),
    *(
        ("compat/models/decoder_classes", _class(module, name), "forward")
        for module, names in decoder_classes.CLASSES.items()
        for name in names
    ),
    ("compat/models/gated_delta", gdn_attention, "_unpacked_conv_weight"),
    ("compat/models/gated_delta", QwenGatedDeltaNetAttention, "forward_cpu"),
    *(
        ("compat/models/gated_delta", GDNAttentionMetadata, name)
        for name in (
            "num_actual_tokens",
            "num_prefills",
            "num_decodes",
            "num_decode_tokens",
            "num_spec_decodes",
            "num_accepted_tokens",
            "non_spec_state_indices_tensor",
        )
    ),
    ("compat/models/latent_attention", mla_attention, "MLAAttention"),
    ("compat/models/latent_attention", mla_attention.MLACommonDecodeMetadata, "block_table"),
    *(
        ("compat/models/latent_attention", mla_attention.MLACommonMetadata, name)
        for name in (
            "num_actual_tokens",
            "max_query_len",
            "max_seq_len",
            "query_start_loc",
            "causal",
            "decode",
            "prefill",
        )
    ),
    ("compat/models/latent_attention", mla_attention.MLACommonPrefillMetadata, "block_table"),
    *(
        ("compat/models/latent_attention", backend, "forward_mqa")
        for backend in (AMXMLAImpl, CPUMLAImpl)
    ),
    ("compat/models/latent_attention", MultiHeadLatentAttentionWrapper, "forward"),
    ("compat/models/latent_attention", RotaryEmbedding, "forward_cpu"),
    ("compat/models/lora", lora_ops, "bgmv_shrink"),
    ("compat/models/lora", punica_cpu, "bgmv_shrink"),
    ("compat/models/lora", PunicaWrapperBase, "token_lora_indices"),
    *(("compat/models/lora", lora_layers, name) for name in lora.KNOWN),
]
"""Names of vLLM's that are not meant for others: where they are touched, of what they are."""


@pytest.mark.parametrize(("where", "owner", "name"), PRIVATE)
def test_private_names_exist(where: str, owner: Any, name: str) -> None:
    fields = getattr(owner, "__dataclass_fields__", {})
    annotated = (vars(base).get("__annotations__", {}) for base in getattr(owner, "__mro__", ()))
    is_there = hasattr(owner, name) or name in fields or any(name in one for one in annotated)
    assert is_there, f"{where}.py uses it"


ASSIGNED: list[tuple[str, type, str]] = [
    ("compat/models/model_parts", Attention, "kv_sharing_target_layer_name"),
    *(
        ("compat/models/model_parts", one, "num_spec")
        for one in (MambaMixer2, GatedDeltaNetAttention, ShortConv)
    ),
    ("compat/models/latent_attention", AMXMLAImpl, "_w_uk_packed"),
    ("compat/models/latent_attention", AMXMLAImpl, "_w_uv_packed"),
    *(
        ("compat/models/latent_attention", mla_attention.MLAAttention, name)
        for name in (
            "use_pcp",
            "q_pad_num_heads",
            "non_causal_multi_token_decode",
            "sliding_window",
            "kv_cache_dtype",
        )
    ),
    *(
        ("compat/models/gated_delta", QwenGatedDeltaNetAttention, name)
        for name in (
            "num_k_heads",
            "num_v_heads",
            "head_k_dim",
            "head_v_dim",
            "gqa_interleaved_layout",
            "disable_tp_for_ba_proj",
            "conv1d",
            "in_proj_qkvz",
            "in_proj_ba",
            "A_log",
            "dt_bias",
            "norm",
            "out_proj",
        )
    ),
    *(
        ("compat/models/mamba2", MambaMixer2, name)
        for name in (
            "num_heads",
            "n_groups",
            "head_dim",
            "ssm_state_size",
            "activation",
            "use_replayssm",
            "in_proj",
            "conv1d",
            "A",
            "D",
            "dt_bias",
            "norm",
            "out_proj",
        )
    ),
    *(
        ("compat/models/mamba2", Mixer2RMSNormGated, name)
        for name in ("n_groups", "use_rms_norm", "variance_epsilon", "weight")
    ),
    *(
        ("compat/models/gated_delta", RMSNormGated, name)
        for name in ("eps", "activation", "group_size", "norm_before_gate")
    ),
    *(
        ("compat/models/latent_attention", MultiHeadLatentAttentionWrapper, name)
        for name in ("indexer", "is_sparse", "g_proj", "dcp_q_replicate", "mla_attn")
    ),
    ("compat/worker/warmup", GPUModelRunner, "max_num_tokens"),
    ("compat/worker/warmup", GPUModelRunner, "is_pooling_model"),
    ("compat/worker/warmup", GPUModelRunner, "cudagraph_dispatcher"),
    ("compat/worker/read_rows", ModelConfig, "runner_type"),
    *(
        ("compat/worker/read_rows", LinearBase, name)
        for name in ("output_size", "return_bias", "skip_bias_add")
    ),
    ("compat/worker/read_rows", CPUAttentionBackendImpl, "sliding_window"),
    ("compat/worker/read_rows", CPUAttentionMetadataBuilder, "isa"),
    *(
        ("compat/worker/read_rows", Attention, name)
        for name in ("impl", "dtype", "head_size", "num_heads", "num_kv_heads", "kv_cache_dtype")
    ),
    ("worker/warmup_actions", GPUModelRunner, "model_config"),
    ("worker/warmup_actions", GPUModelRunner, "device"),
    ("compat/worker/message_queues", MessageQueue, "buffer"),
    ("compat/worker/message_queues", MessageQueue, "handle"),
    ("compat/worker/message_queues", MessageQueue, "_spin_condition"),
    ("compat/worker/message_queues", SpinCondition, "last_read"),
    ("compat/worker/message_queues", SpinCondition, "busy_loop_s"),
    ("compat/worker/message_queues", ShmRingBuffer, "is_creator"),
    ("compat/worker/message_queues", ShmRingBuffer, "shared_memory"),
    ("compat/worker/message_queues", CpuCommunicator, "dist_module"),
    ("compat/engine/api_server", AsyncMPClient, "_engine_status"),
    ("compat/engine/engine_processes", MPClient, "resources"),
    ("compat/worker/spec_decode", GPUModelRunner, "drafter"),
    ("compat/worker/spec_decode", SpecDecodeBaseProposer, "model"),
    ("compat/engine/engine_core", EngineCoreProc, "enable_fault_tolerance"),
    ("compat/engine/engine_core", EngineCoreProc, "ft_sentinel"),
    ("compat/engine/engine_core", EngineCoreProc, "engines_running"),
    ("compat/engine/engine_core", EngineCoreProc, "input_queue"),
    ("compat/engine/engine_core", EngineCoreProc, "output_queue"),
    ("compat/engine/engine_core", EngineCoreProc, "addresses"),
    ("compat/engine/engine_core", EngineCore, "batch_queue"),
    ("compat/engine/engine_core", Scheduler, "waiting"),
    ("compat/engine/engine_core", Scheduler, "max_num_scheduled_tokens"),
    ("compat/engine/long_prompts", Scheduler, "running"),
    ("compat/engine/engine_core", Scheduler, "max_num_running_reqs"),
    ("compat/engine/long_prompts", Request, "is_prefill_chunk"),
    ("compat/engine/long_prompts", Request, "mm_features"),
    ("compat/engine/long_prompts", Request, "num_computed_tokens"),
    ("compat/engine/long_prompts", Request, "sampling_params"),
    ("compat/worker/spec_decode", GPUModelRunner, "speculative_config"),
    ("compat/worker/received_tensors", GPUModelRunner, "speculative_config"),
    ("compat/worker/spec_decode", GPUModelRunner, "input_batch"),
    ("compat/worker/spec_decode", GPUModelRunner, "input_ids"),
    ("compat/worker/spec_decode", GPUModelRunner, "requests"),
    *(
        ("compat/worker/late_tokens", GPUModelRunner, name)
        for name in ("requests", "input_batch", "input_ids", "query_start_loc")
    ),
    *(
        ("compat/worker/v2_kernels", buffer_utils.StagedWriteTensor, f"_staged_write_{name}")
        for name in ("indices", "starts", "contents", "cu_lens")
    ),
    *(
        ("compat/worker/v2_kernels", block_table.BlockTables, name)
        for name in (
            "block_tables",
            "input_block_tables",
            "block_sizes",
            "slot_mappings",
            "_slot_mapping_enabled",
        )
    ),
    ("compat/worker/v2_runner", v2_model_runner.GPUModelRunner, "req_states"),
    ("compat/worker/v2_runner", v2_model_runner.GPUModelRunner, "pp_handler"),
    ("compat/worker/v2_runner", v2_states.RequestState, "req_id_to_index"),
    ("compat/worker/v2_runner", v2_states.RequestState, "prefill_len"),
    ("compat/engine/input_processor", InputProcessor, "model_config"),
    ("compat/worker/model_runner", GPUModelRunner, "discard_request_mask"),
    ("compat/worker/model_runner", InputBatch, "generators"),
    ("compat/models/lora", BaseLinearLayerWithLoRA, "base_layer"),
    ("compat/models/lora", BaseLinearLayerWithLoRA, "lora_a_stacked"),
    ("compat/models/lora", BaseLinearLayerWithLoRA, "lora_b_stacked"),
    ("compat/models/lora", BaseLayerWithLoRA, "punica_wrapper"),
    ("compat/models/expert_router", BaseRouter, "top_k"),
    *(
        ("compat/models/expert_router", CPURouter, name)
        for name in (
            "scoring_func",
            "renormalize",
            "routed_scaling_factor",
            "use_grouped_topk",
            "num_expert_group",
            "topk_group",
            "e_score_correction_bias",
            "_hash_indices_table",
            "custom_routing_function",
        )
    ),
]


@pytest.mark.parametrize(("where", "owner", "name"), ASSIGNED)
def test_private_attributes_are_assigned(where: str, owner: type, name: str) -> None:
    """They are there once an engine has made such an object, which takes a model and its devices.

    Without one, the only evidence is vLLM's source.
    """
    assigned = {
        ast.unparse(target)
        for found in ast.walk(ast.parse(inspect.getsource(owner)))
        for target in (
            found.targets if isinstance(found, ast.Assign)
            else [found.target] if isinstance(found, ast.AnnAssign) else []
        )
    }  # fmt: skip
    assert f"self.{name}" in assigned, f"{where}.py reads it"


MOVED = {"kv_cache_planning": "kv_cache_utils"}
"""Modules of later releases, and where their names are in the oldest that is supported."""


def _first_name(owner: Any) -> str:
    name = owner.__name__.split(".")[-1]
    return MOVED.get(name, name)


def test_everything_that_the_patches_name_is_held_here() -> None:
    held = {f"{_first_name(owner)}.{name}" for _, owner, name in (*PRIVATE, *ASSIGNED)}
    named = {
        found.removeprefix("layers.")
        for touched in upgrading.touched()
        for text in (touched.replaces, touched.uses)
        for found in re.findall(r"`((?:\w+\.)+\w+)`", text)
        if not found.startswith("vllm.")
    }
    assert len(named) > 30
    assert named - held == set()


KNOWN = {name for _, _, name in (*PRIVATE, *ASSIGNED) if name.startswith("_")}
PLAIN = {"torch", "os"}
"""Modules whose names with an underscore are documented."""
OF_TENSORS = {"_version"}
"""Attributes of torch's tensors; this one counts changes in place."""


def _private_uses(path: Path, own: set[str]) -> Iterator[str]:
    """Where a module touches a name with an underscore that this package has not made."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            is_torch = node.attr in OF_TENSORS
            if ast.unparse(node.value).split(".")[0] not in PLAIN and not is_torch:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in KNOWN - own:
            # For getattr and the like.
            yield node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "setattr"):
            name = node.args[1]
            if isinstance(name, ast.Constant) and _is_private(name.value) and name.value not in own:
                yield name.value


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def _made_here(paths: list[Path]) -> set[str]:
    made = set()
    for path in paths:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                made.add(node.name)
            elif isinstance(node, ast.AnnAssign):
                made.add(ast.unparse(node.target).split(".")[-1])
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                made.add(node.attr if isinstance(node, ast.Attribute) else node.id)
            elif isinstance(node, ast.alias):
                made.add(node.asname or node.name)
    return made


def test_only_compat_touches_private_names_of_vllm() -> None:
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if COMPAT not in path.parents]
    own = _made_here(paths)
    found = {
        f"{path.relative_to(PACKAGE)}: {use}" for path in paths for use in _private_uses(path, own)
    }
    assert found == set()


def test_the_page_names_the_private_methods_that_subclasses_elsewhere_give() -> None:
    given = {
        f"`{cls.__name__}.{name}`"
        for cls, names in OVERRIDES.items()
        for name in names
        if _is_private(name)
    }
    page = upgrading.PAGE.read_text(encoding="utf-8")
    said = page.partition("No other subpackage of `ray_hetero` calls or reads")[2].partition(
        "\n\n"
    )[0]
    assert set(re.findall(r"`\w+\._\w+`", said)) == given


def test_the_search_for_private_names_finds_them(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "from vllm import _custom_ops\n"
        "def run(runner, name='_coord_store_port', other='_suffix'):\n"
        "    runner._dummy_run(getattr(runner, '_read', 1))\n"
        "    return torch.ops._C, self._own, runner.public\n"
    )
    found = set(_private_uses(module, own={"_own"}))
    assert found == {"_custom_ops", "runner._dummy_run", "_coord_store_port", "_read"}


def test_a_name_that_upstream_renamed_is_told() -> None:
    with pytest.raises(UnsupportedError, match=r"does not work with this vLLM: MessageQueue.gone"):
        patching.original(MessageQueue, "gone")

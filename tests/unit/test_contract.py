"""What this package touches of the installed vLLM is there, with signatures that fit.

When a new vLLM breaks one of these, the module named in the test is the one to change.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import pickle
import re
import signal
import sys
from collections import deque
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cloudpickle
import pytest
import torch
from ray.util.tracing.tracing_helper import _inject_tracing_into_class
from vllm import envs
from vllm.compilation import decorators
from vllm.config import (
    CompilationMode,
    ModelConfig,
    ParallelConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.config import vllm as vllm_config_module
from vllm.distributed import parallel_state
from vllm.distributed import utils as distributed_utils
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, ShmRingBuffer
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.lora import layers as lora_layers
from vllm.lora.layers.base import BaseLayerWithLoRA
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import PunicaWrapperBase, punica_cpu
from vllm.model_executor import layers
from vllm.model_executor.custom_op import CustomOp
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.fused_moe import activation as fused_moe_activation
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.fused_moe.config import FusedMoEParallelConfig
from vllm.model_executor.layers.fused_moe.experts import cpu_moe
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEExperts, FusedMoEKernel
from vllm.model_executor.layers.fused_moe.oracle import int_wna16
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExpertsOrder
from vllm.model_executor.layers.mla import MultiHeadLatentAttentionWrapper
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.models import registry as model_registry
from vllm.platforms.interface import Platform, PlatformEnum
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.attention.backends.mla.amx_mla import AMXMLAImpl
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import CachedRequestData
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient, InprocClient, MPClient
from vllm.v1.engine.utils import CoreEngineProcManager
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.outputs import AsyncModelRunnerOutput, SamplerOutput
from vllm.v1.sample import rejection_sampler
from vllm.v1.spec_decode.draft_model import DraftModelProposer
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.worker import gpu_model_runner
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_input_batch import CachedRequestState
from vllm.v1.worker.gpu_model_runner import GPUModelRunner
from worlds import layout, world

from ray_hetero import plugin
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat import (
    compilation,
    decoder_classes,
    engine_args,
    engine_clients,
    engine_environment,
    engine_processes,
    lora,
    message_queues,
    patching,
    quantised_experts,
    quantised_kernels,
    remote_experts,
    spec_decode,
)
from ray_hetero.config import HeteroConfig
from ray_hetero.distributed.groups import HeteroGroup, HostCommunicator
from ray_hetero.errors import RankError, UnsupportedError
from ray_hetero.executor.hetero_executor import HeteroExecutor
from ray_hetero.executor.rank_queues import RequestQueue
from ray_hetero.executor.recovery import RankRecovery
from ray_hetero.executor.rpc import GuardedExecutor
from ray_hetero.kernels import quantised_linear
from ray_hetero.kernels.linked_experts import ACTIVATIONS
from ray_hetero.worker.rank_actor import RankActor
from ray_hetero.worker.rank_config import (
    SHARED_FIELDS,
    build_rank_config,
    fingerprint,
    shared_settings,
)
from ray_hetero.world import SharedSettings

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import write_upgrading_page as upgrading

PACKAGE = Path(plugin.__file__).parent

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
    ("compat/cpu_linear", GPUModelRunner, "reload_weights"),
    ("compat/compilation", decorators, "support_torch_compile"),
    ("compat/warmup", CPUModelRunner, "profile_run"),
    ("compat/warmup", CPUModelRunner, "warming_up_model"),
    ("compat/warmup", GPUModelRunner, "_dummy_run"),
    ("compat/warmup", GPUModelRunner, "_dummy_sampler_run"),
    ("compat/warmup", GPUModelRunner, "_dummy_pooler_run"),
    ("compat/warmup", GPUModelRunner, "_warmup_and_capture"),
    ("compat/warmup", CudagraphDispatcher, "get_capture_descs"),
    ("worker/warmup_actions", CPUWorker, "compile_or_warm_up_model"),
    ("worker/warmup_actions", CPUWorker, "determine_available_memory"),
    ("worker/warmup_actions", CPUWorker, "get_kv_cache_spec"),
    ("compat/cpu_worker", CPUWorker, "init_device"),
    ("compat/model_runner", GPUModelRunner, "_sample"),
    ("compat/model_runner", GPUModelRunner, "profile_cudagraph_memory"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "_get_model"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "propose"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "dummy_run"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "_create_draft_vllm_config"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "_maybe_share_embeddings"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "_maybe_share_lm_head"),
    ("compat/spec_decode", SpecDecodeBaseProposer, "_sample_draft_tokens"),
    ("compat/spec_decode", DraftModelProposer, "_get_model"),
    ("compat/spec_decode", rejection_sampler, "expand_batch_to_tokens"),
    ("compat/spec_decode", GPUModelRunner, "_update_states"),
    ("compat/spec_decode", GPUModelRunner, "_model_forward"),
    ("compat/spec_decode", GPUModelRunner, "_preprocess"),
    ("compat/spec_decode", GPUModelRunner, "_get_eagle3_aux_layers_from_config"),
    ("compat/engine_args", EngineArgs, "create_engine_config"),
    ("compat/model_dtype", EngineArgs, "create_model_config"),
    ("compat/engine_args", VllmConfig, "max_concurrent_batches"),
    ("compat/engine_args", VllmConfig, "use_v2_model_runner"),
    ("compat/engine_environment", envs, "disable_envs_cache"),
    ("compat/engine_environment", envs, "enable_envs_cache"),
    ("compat/engine_environment", envs, "_is_envs_cache_enabled"),
    ("compat/parallel_config", ParallelConfig, "_coord_store_port"),
    ("compat/parallel_state", parallel_state, "GroupCoordinator"),
    ("compat/parallel_state", Platform, "dist_backend"),
    ("compat/cpu_linear", layers.utils, "dispatch_cpu_unquantized_gemm"),
    ("compat/engine_clients", EngineCoreClient, "make_client"),
    ("compat/engine_clients", EngineCoreClient, "make_async_mp_client"),
    ("compat/engine_clients", MPClient, "shutdown"),
    ("compat/engine_clients", InprocClient, "shutdown"),
    ("compat/engine_processes", CoreEngineProcManager, "shutdown"),
    ("compat/cpu_linear", UnquantizedEmbeddingMethod, "process_weights_after_loading"),
    ("compat/cpu_experts", CPUUnquantizedExperts, "process_weights_after_loading"),
    ("compat/cpu_experts", CPUUnquantizedExperts, "apply"),
    ("compat/routed_experts", FusedMoEKernel, "fused_experts"),
    *(
        ("compat/quantised_experts", getattr(cpu_moe, name), attribute)
        for name in quantised_experts.CLASSES
        for attribute in (
            "_supports_current_device",
            "_supports_quant_scheme",
            "_supports_routing_method",
            "apply",
        )
    ),
    ("compat/quantised_experts", cpu_moe, "prepare_fp8_moe_layer_for_cpu"),
    ("compat/quantised_experts", cpu_moe, "prepare_mxfp4_moe_layer_for_cpu"),
    ("compat/quantised_experts", int_wna16, "_process_weights_cpu"),
    ("compat/fused_experts", fused_moe, "fused_experts"),
    ("compat/fused_experts", fused_moe_activation, "MoEActivation"),
    ("compat/fused_experts", fused_moe_config, "biased_moe_quant_config"),
    ("compat/remote_experts", RoutedExperts, "_get_quant_method"),
    ("compat/remote_experts", RoutedExperts, "__init__"),
    ("compat/remote_experts", RoutedExperts, "forward_modular"),
    ("compat/remote_experts", RoutedExperts, "_ensure_moe_quant_config_init"),
    ("compat/remote_experts", FusedMoEExperts, "_supports_current_device"),
    ("compat/remote_experts", FusedMoEParallelConfig, "flatten_tp_across_dp_and_pcp"),
    ("compat/remote_experts", SharedExpertsOrder, "MK_INTERNAL_OVERLAPPED"),
    ("compat/message_queues", AsyncModelRunnerOutput, "get_output"),
    ("kernels/quantised_linear", quantised_linear.StreamedBlockFloats, "_get_layer_params"),
    ("compat/api_server", AsyncLLM, "check_admission"),
    ("compat/api_server", AsyncLLM, "check_health"),
    ("compat/api_server", GenerateBaseServing, "_raise_if_error"),
    ("compat/engine_core", EngineCoreProc, "_send_error_outputs_to_client"),
    ("compat/engine_core", Scheduler, "finish_requests"),
    ("compat/engine_core", Scheduler, "reset_prefix_cache"),
    ("compat/engine_core", Scheduler, "reset_encoder_cache"),
    ("compat/message_queues", WorkerProc, "_execute_worker_rpc"),
    ("compat/message_queues", WorkerProc, "handle_output"),
    ("compat/message_queues", WorkerProc, "enqueue_output"),
    ("worker/rank_actor", RankActor, "worker_busy_loop"),
    ("worker/rank_actor", RankActor, "create_dist_init_method"),
    ("worker/rank_actor", RankActor, "get_node_and_physical_gpu_ids"),
    ("worker/rank_actor", RankActor, "wait_for_init"),
    ("compat/engine_processes", engine_utils, "wait_for_engine_startup"),
    ("compat/kv_cache", kv_cache_utils, "get_kv_cache_config_from_groups"),
    ("compat/kv_cache", kv_cache_utils, "_pool_bytes_per_block"),
    ("compat/kv_cache", gpu_model_runner, "allocate_kv_cache"),
    ("compat/model_config", ModelConfig, "get_layers_start_end_indices"),
    ("compat/model_inspection", model_registry, "_run_in_subprocess"),
    ("compat/model_config", distributed_utils, "get_pp_indices"),
    ("compat/parallel_state", parallel_state, "initialize_model_parallel"),
    ("compat/parallel_state", parallel_state, "init_model_parallel_group"),
    *(
        ("compat/parallel_state", parallel_state, f"_{name}")
        for name in ("TP", "ETP", "DCP", "PCP", "PP", "DP", "EP")
    ),
    ("executor/hetero_executor", HeteroExecutor, "_get_parallel_sizes"),
    *(
        ("compat/decoder_classes", _class(module, name), "forward")
        for module, names in decoder_classes.CLASSES.items()
        for name in names
    ),
    ("compat/latent_attention", mla_attention, "MLAAttention"),
    ("compat/latent_attention", mla_attention.MLACommonDecodeMetadata, "block_table"),
    *(
        ("compat/latent_attention", mla_attention.MLACommonMetadata, name)
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
    ("compat/latent_attention", mla_attention.MLACommonPrefillMetadata, "block_table"),
    *(("compat/latent_attention", backend, "forward_mqa") for backend in (AMXMLAImpl, CPUMLAImpl)),
    ("compat/latent_attention", MultiHeadLatentAttentionWrapper, "forward"),
    ("compat/lora", lora_ops, "bgmv_shrink"),
    ("compat/lora", punica_cpu, "bgmv_shrink"),
    ("compat/lora", PunicaWrapperBase, "token_lora_indices"),
    *(("compat/lora", lora_layers, name) for name in lora.KNOWN),
]
"""Names of vLLM's that are not meant for others: where they are touched, of what they are."""


@pytest.mark.parametrize("name", quantised_linear.KERNELS)
def test_lists_of_linear_kernels_are_asked(name: str) -> None:
    asked = [
        function
        for function in vars(linear_kernels).values()
        if inspect.isfunction(function) and name in inspect.getsource(function)
        and function is not linear_kernels.register_linear_kernel
    ]  # fmt: skip
    assert asked, "compat/quantised_kernels.py adds to it"


@pytest.mark.parametrize(("name", "operator"), quantised_kernels.OPERATORS.items())
def test_an_operator_that_a_build_may_lack_is_what_vllms_kernel_calls(
    name: str, operator: str
) -> None:
    theirs = getattr(linear_kernels, name)[PlatformEnum.CPU]
    assert any(f"ops.{operator}(" in inspect.getsource(one) for one in theirs)


def test_multi_head_latent_attention_marks_the_layer_whose_tensors_it_reads() -> None:
    marked = "kv_b_proj._cpu_skip_gemm_dispatch = True"
    assert marked in inspect.getsource(mla_attention), "quantised_linear.py looks at it"


@pytest.mark.parametrize("name", ["W_UK_T", "W_UV"])
def test_multi_head_latent_attention_keeps_the_matrices_of_its_heads(name: str) -> None:
    replaced = f'replace_parameter(self, "{name}"'
    assert replaced in inspect.getsource(mla_attention.MLAAttention), "compat/latent_attention.py"


@pytest.mark.parametrize(("where", "owner", "name"), PRIVATE)
def test_private_names_exist(where: str, owner: Any, name: str) -> None:
    fields = getattr(owner, "__dataclass_fields__", {})
    annotated = (vars(base).get("__annotations__", {}) for base in getattr(owner, "__mro__", ()))
    is_there = hasattr(owner, name) or name in fields or any(name in one for one in annotated)
    assert is_there, f"{where}.py uses it"


ASSIGNED: list[tuple[str, type, str]] = [
    ("compat/latent_attention", AMXMLAImpl, "_w_uk_packed"),
    ("compat/latent_attention", AMXMLAImpl, "_w_uv_packed"),
    ("compat/latent_attention", CustomOp, "_forward_method"),
    *(
        ("compat/latent_attention", mla_attention.MLAAttention, name)
        for name in (
            "use_pcp",
            "q_pad_num_heads",
            "non_causal_multi_token_decode",
            "sliding_window",
            "kv_cache_dtype",
        )
    ),
    *(
        ("compat/latent_attention", MultiHeadLatentAttentionWrapper, name)
        for name in ("indexer", "is_sparse", "g_proj", "dcp_q_replicate", "mla_attn")
    ),
    ("compat/warmup", GPUModelRunner, "max_num_tokens"),
    ("compat/warmup", GPUModelRunner, "is_pooling_model"),
    ("compat/warmup", GPUModelRunner, "cudagraph_dispatcher"),
    ("worker/warmup_actions", GPUModelRunner, "model_config"),
    ("worker/warmup_actions", GPUModelRunner, "device"),
    ("compat/message_queues", MessageQueue, "buffer"),
    ("compat/message_queues", MessageQueue, "handle"),
    ("compat/message_queues", ShmRingBuffer, "is_creator"),
    ("compat/message_queues", ShmRingBuffer, "shared_memory"),
    ("compat/message_queues", CpuCommunicator, "dist_module"),
    ("compat/api_server", AsyncMPClient, "_engine_status"),
    ("compat/engine_clients", MPClient, "resources"),
    ("compat/engine_core", EngineCoreProc, "enable_fault_tolerance"),
    ("compat/engine_core", EngineCoreProc, "ft_sentinel"),
    ("compat/engine_core", EngineCoreProc, "input_queue"),
    ("compat/engine_core", EngineCoreProc, "output_queue"),
    ("compat/engine_core", EngineCoreProc, "addresses"),
    ("compat/engine_core", EngineCore, "batch_queue"),
    ("compat/spec_decode", GPUModelRunner, "speculative_config"),
    ("compat/spec_decode", GPUModelRunner, "input_batch"),
    ("compat/spec_decode", GPUModelRunner, "input_ids"),
    ("compat/spec_decode", GPUModelRunner, "requests"),
    ("compat/lora", BaseLinearLayerWithLoRA, "base_layer"),
    ("compat/lora", BaseLinearLayerWithLoRA, "lora_a_stacked"),
    ("compat/lora", BaseLinearLayerWithLoRA, "lora_b_stacked"),
    ("compat/lora", BaseLayerWithLoRA, "punica_wrapper"),
]


@pytest.mark.parametrize(("where", "owner", "name"), ASSIGNED)
def test_private_attributes_are_assigned(where: str, owner: type, name: str) -> None:
    assigned = {
        ast.unparse(target)
        for found in ast.walk(ast.parse(inspect.getsource(owner)))
        for target in (
            found.targets if isinstance(found, ast.Assign)
            else [found.target] if isinstance(found, ast.AnnAssign) else []
        )
    }  # fmt: skip
    assert f"self.{name}" in assigned, f"{where}.py reads it"


def test_a_module_that_vllm_compiles_can_be_left_as_it_is() -> None:
    class Decorated(torch.nn.Module):
        def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
            super().__init__()

        def forward(self, hidden: torch.Tensor) -> bool:
            return torch.compiler.is_compiling()

    config = VllmConfig(compilation_config={"mode": CompilationMode.VLLM_COMPILE})
    with set_current_vllm_config(config):
        module = decorators.support_torch_compile(dynamic_arg_dims={"hidden": 0})(Decorated)(
            vllm_config=config
        )
    assert compilation.is_compiled(module)
    compilation.leave_uncompiled(module)
    assert not compilation.is_compiled(module)
    assert module(torch.zeros(2, 2)) is False
    assert not compilation.is_compiled(torch.nn.Linear(2, 2))


def test_everything_that_the_patches_name_is_held_here() -> None:
    held = {f"{owner.__name__.split('.')[-1]}.{name}" for _, owner, name in (*PRIVATE, *ASSIGNED)}
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


def _private_uses(path: Path, own: set[str]) -> Iterator[str]:
    """Where a module touches a name with an underscore that this package has not made."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vllm":
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))
        elif isinstance(node, ast.Attribute) and _is_private(node.attr) and node.attr not in own:
            if ast.unparse(node.value).split(".")[0] not in PLAIN:
                yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and node.value in KNOWN - own:
            # For getattr and the like.
            yield node.value


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
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path.parent.name != "compat"]
    own = _made_here(paths)
    # What a class inherits from vLLM is held by name above.
    inherited = {f"self.{name}" for _, owner, name in PRIVATE if owner in OVERRIDES}
    found = {
        f"{path.relative_to(PACKAGE)}: {use}"
        for path in paths
        for use in _private_uses(path, own)
        if use not in inherited
    }
    assert found == set()


def test_the_search_for_private_names_finds_them(tmp_path: Path) -> None:
    module = tmp_path / "module.py"
    module.write_text(
        "from vllm import _custom_ops\n"
        "def run(runner, name='_coord_store_port', other='_suffix'):\n"
        "    runner._dummy_run(1)\n"
        "    return torch.ops._C, self._own, runner.public\n"
    )
    found = set(_private_uses(module, own={"_own"}))
    assert found == {"_custom_ops", "runner._dummy_run", "_coord_store_port"}


def test_a_call_of_the_ranks_says_the_same_as_vllms() -> None:
    """What `rpc.py` sends and takes itself is what vLLM's executor sends and takes."""
    asked: list[Any] = []
    success = WorkerProc.ResponseStatus.SUCCESS
    theirs: Any = MultiprocExecutor.__new__(MultiprocExecutor)
    theirs.is_failed, theirs.futures_queue = False, deque()
    theirs.rpc_broadcast_mq = SimpleNamespace(enqueue=asked.append)
    theirs.response_mqs = [
        SimpleNamespace(dequeue=lambda timeout, rank=rank: (success, rank)) for rank in range(2)
    ]
    assert theirs.collective_rpc("check", args=(1,), kwargs={"two": 2}) == [0, 1]
    assert theirs.collective_rpc("check", unique_reply_rank=1) == 1
    assert asked == [("check", (1,), {"two": 2}, None), ("check", (), {}, 1)]
    adding = SimpleNamespace(aggregate=lambda outputs, output_rank: (sum(outputs), output_rank))
    found = theirs.collective_rpc("check", unique_reply_rank=1, kv_output_aggregator=adding)
    assert found == (1, 1)
    theirs.collective_rpc(len)
    assert cloudpickle.loads(asked[-1][0]) is len
    theirs.response_mqs[0].dequeue = lambda timeout: (WorkerProc.ResponseStatus.FAILURE, "why")
    with pytest.raises(RuntimeError, match="why"):
        theirs.collective_rpc("check")


def test_a_rank_takes_a_call_as_it_is_sent() -> None:
    rank: Any = WorkerProc.__new__(WorkerProc)
    answers: list[Any] = []
    rank.rank, rank.worker = 1, SimpleNamespace(double=lambda number, more=0: 2 * number + more)
    rank.handle_output = answers.append
    message_queues.answer(rank, ("double", (3,), {"more": 1}, None))
    message_queues.answer(rank, ("double", (3,), {}, 0))
    message_queues.answer(rank, (cloudpickle.dumps(lambda worker: worker.double(5)), (), {}, 1))
    assert answers == [7, 10]


def test_a_seed_takes_the_number_of_the_engine() -> None:
    assert list(inspect.signature(set_random_seed).parameters) == ["seed", "data_parallel_index"]


def test_sampled_tokens_can_be_shared() -> None:
    names = [field.name for field in dataclasses.fields(SamplerOutput)]
    assert "sampled_token_ids" in names


def test_an_earlier_stage_is_sent_what_it_learns_accepted_tokens_from() -> None:
    names = {field.name for field in dataclasses.fields(CachedRequestData)}
    assert names >= {"req_ids", "new_token_ids", "num_computed_tokens", "all_token_ids"}
    request = {field.name for field in dataclasses.fields(CachedRequestState)}
    assert "output_token_ids" in request
    assert isinstance(CachedRequestState.num_tokens, property)
    sent = inspect.getsource(Scheduler._make_cached_request_data)
    assert "req_id not in self.prev_step_scheduled_req_ids" in sent
    assert "all_token_ids[req_id] = req.all_token_ids.copy()" in sent


def test_a_pipeline_group_can_be_shown_in_place_of_another() -> None:
    assert "_PP" in vars(parallel_state)
    with spec_decode._one_stage():
        assert parallel_state.get_pp_group().is_last_rank
    assert parallel_state._PP is None


def test_the_creator_of_a_ring_buffer_unlinks_it_once() -> None:
    import torch  # noqa: F401  (the ring buffer maps its memory as a tensor)

    queue = MessageQueue(n_reader=1, n_local_reader=1)
    path = Path("/dev/shm") / queue.buffer.shared_memory.name
    assert path.exists()
    message_queues.unlink_once_attached(queue)
    assert not path.exists()
    sockets = [
        Path(address.removeprefix("ipc://"))
        for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr)
    ]
    assert all(socket.is_socket() for socket in sockets)
    message_queues.unlink_sockets(queue)
    message_queues.unlink_sockets(queue)
    assert not any(socket.exists() for socket in sockets)
    # The second call, and the collection of the queue, find nothing to do and say nothing.
    queue.buffer.is_creator = False
    queue.shutdown()


def test_answers_do_not_pass_through_rays_tracing() -> None:
    class Actor(RayWorkerProc):  # type: ignore[misc]
        pass

    _inject_tracing_into_class(Actor)
    process, frames = Actor.__new__(Actor), []

    def enqueue(answer: Any) -> None:
        assert answer == (WorkerProc.ResponseStatus.SUCCESS, "well")
        frames.append([frame.function for frame in inspect.stack()])

    process.rank, process.use_async_scheduling = 0, False
    process.worker = SimpleNamespace(check_health=lambda: "well")
    process.worker_response_mq = SimpleNamespace(enqueue=enqueue)
    message_queues.answer(process, ("check_health", (), {}, None))
    message_queues.answer_untraced(process)
    message_queues.answer(process, ("check_health", (), {}, None))
    traced, untraced = frames
    assert traced.count("_resume_span") == 3
    assert "_resume_span" not in untraced


def test_what_was_computed_while_there_was_a_problem_is_no_answer() -> None:
    class Async(AsyncModelRunnerOutput):  # type: ignore[misc]
        def get_output(self) -> str:
            return "tokens"

    process, problems, answers = RankActor.__new__(RankActor), list[Exception](), list[Any]()
    process.worker_response_mq = SimpleNamespace(enqueue=answers.append)
    message_queues.answer_untraced(process)
    message_queues.answer_if_well(process, lambda: problems[0] if problems else None)
    for output in ("tokens", Async()):
        process.enqueue_output(output)
    problems.append(RankError("rank 2 has ended"))
    for output in ("tokens", Async()):
        process.enqueue_output(output)
    done, failed = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
    assert answers == [(done, "tokens")] * 2 + [(failed, "rank 2 has ended")] * 2


def test_a_name_that_upstream_renamed_is_told() -> None:
    with pytest.raises(UnsupportedError, match=r"does not work with this vLLM: MessageQueue.gone"):
        patching.original(MessageQueue, "gone")


def test_the_patch_of_the_engine_arguments_is_made_once() -> None:
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    once = EngineArgs.create_engine_config
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    assert EngineArgs.create_engine_config is once
    assert once.__wrapped__ is not once
    assert inspect.signature(once) == inspect.signature(once.__wrapped__)


def test_engines_that_are_left_are_shut_down_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(name: str, exitcode: int | None) -> SimpleNamespace:
        return SimpleNamespace(name=name, pid=40, exitcode=exitcode)

    class Client:
        is_running = True

        def __init__(self) -> None:
            processes = [process("well", None), process("ill", -signal.SIGBUS)]
            manager = SimpleNamespace(failed_proc_name="ill", processes=processes)
            self.resources = SimpleNamespace(engine_manager=manager)

        def shutdown(self) -> None:
            self.is_running = False

    at_exit: list[tuple[Any, ...]] = []
    for name in ("make_client", "make_async_mp_client"):
        monkeypatch.setattr(EngineCoreClient, name, staticmethod(lambda vllm_config: Client()))
    monkeypatch.setattr(engine_clients.atexit, "register", lambda *call: at_exit.append(call))
    killed: list[tuple[int, int]] = []
    for _ in range(2):
        engine_clients.end_engines_at_exit(lambda pid, number: killed.append((pid, number)))
    left, dropped = EngineCoreClient.make_client(1), EngineCoreClient.make_async_mp_client(2)
    (function, clients), (tell, managers, what) = at_exit
    managers[1].failed_proc_name = None
    tell(managers, what)
    assert killed == [(40, signal.SIGBUS)]
    assert len(clients) == 2
    del dropped
    function(clients)
    assert not left.is_running
    assert list(clients) == [left]


def test_an_engine_of_ours_that_is_up_gets_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    asked = ["handshake_socket", "core_engines", "parallel_config", "coordinated_dp",
             "cache_config", "launch"]  # fmt: skip
    wait_for_startup = engine_utils.wait_for_engine_startup
    assert list(inspect.signature(inspect.unwrap(wait_for_startup)).parameters) == asked

    class Manager:
        def shutdown(self, timeout: float | None = None) -> None:
            limits.append(timeout)

    monkeypatch.setattr(engine_utils, "CoreEngineProcManager", Manager)
    monkeypatch.setattr(engine_utils, "wait_for_engine_startup", lambda *args: "up")
    for _ in range(2):
        engine_processes.wait_for_engines_to_end(30)
    for backend in (HeteroExecutor, "mp"):
        manager = Manager()
        manager.shutdown()
        config = SimpleNamespace(distributed_executor_backend=backend)
        launch = SimpleNamespace(engine_manager=manager)
        answer = engine_utils.wait_for_engine_startup(None, [], config, False, None, launch)
        assert answer == "up"
        for given in (None, 0, 5):
            manager.shutdown(timeout=given)
    assert limits == [None, 30, 30, 5, None, None, 0, 5]


@pytest.fixture
def from_a_launcher(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that a launcher has chosen, for which ours stands in."""
    monkeypatch.setenv(plugin.INSTEAD_OF, "mp")
    return "mp"


def test_a_launchers_backend_can_stand_for_ours(
    arguments: EngineArgs, from_a_launcher: str
) -> None:
    assert not plugin.is_ours("ray")
    assert not plugin.is_ours(None)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = from_a_launcher
    config = arguments.create_engine_config()
    assert config.parallel_config.distributed_executor_backend is HeteroExecutor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    return write_demo_model(directory, shape=DemoShape(layers=2, hidden=64, heads=2))


@pytest.fixture
def arguments(model: Path) -> EngineArgs:
    return EngineArgs(model=str(model), pipeline_parallel_size=2, max_model_len=128)


def test_the_backends_name_becomes_a_class_and_the_arguments_travel(arguments: EngineArgs) -> None:
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.additional_config = {"ray_hetero": {"layers": [1, 1]}}
    config = arguments.create_engine_config()
    assert config.parallel_config.distributed_executor_backend is HeteroExecutor
    spec = engine_args.spec_of(config)
    assert spec.config.layers == [1, 1]
    assert spec.ray_address is None
    # What the ranks build theirs from is what the user wrote.
    assert spec.engine_args.distributed_executor_backend == "ray_hetero"


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture
def has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which vLLM takes its second model runner where nobody says otherwise."""
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)


def test_an_engine_after_one_of_ours_has_the_model_runner_that_it_would_have_had(
    arguments: EngineArgs, has_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    stock = EngineArgs(model=arguments.model, max_model_len=128)
    assert stock.create_engine_config().use_v2_model_runner
    arguments.distributed_executor_backend = "ray_hetero"
    ours = arguments.create_engine_config()
    # Until the engine's processes have inherited it.
    assert os.environ[RUNNER] == "0"

    class Client:
        def __init__(self, vllm_config: VllmConfig) -> None:
            self.inherited = os.environ.get(RUNNER)

    for make in ("make_client", "make_async_mp_client"):
        monkeypatch.setattr(EngineCoreClient, make, staticmethod(Client))
    monkeypatch.setattr(engine_clients.atexit, "register", lambda *call: None)
    engine_clients.end_engines_at_exit(lambda pid, number: None)
    assert EngineCoreClient.make_client(ours).inherited == "0"
    assert RUNNER not in os.environ
    # The front end of the first engine still asks, and must hear the same.
    assert not ours.use_v2_model_runner
    assert not pickle.loads(pickle.dumps(ours)).use_v2_model_runner  # noqa: S301
    assert stock.create_engine_config().use_v2_model_runner


@pytest.mark.parametrize("make", ["make_client", "make_async_mp_client"])
def test_clients_are_made_with_the_configuration_of_their_engine(make: str) -> None:
    # By this name an engine's own Ray is started beside its process.
    made = inspect.unwrap(getattr(EngineCoreClient, make))
    assert "vllm_config" in inspect.signature(made).parameters


def test_an_engine_that_was_configured_only_leaves_nothing(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.create_engine_config()
    assert os.environ[RUNNER] == "0"
    EngineArgs(model=arguments.model, max_model_len=128).create_engine_config()
    assert RUNNER not in os.environ


def test_a_variable_of_the_users_gets_its_value_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv(RUNNER, raising=False)
    for value in ("spawn", "forkserver"):
        engine_environment.put("VLLM_WORKER_MULTIPROC_METHOD", value)
    engine_environment.put(RUNNER, "0")
    engine_environment.take_back()
    engine_environment.take_back()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert RUNNER not in os.environ


def test_a_preparation_that_fails_leaves_nothing(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.max_model_len = 1 << 30
    with pytest.raises(ValueError, match="max_model_len"):
        arguments.create_engine_config()
    assert RUNNER not in os.environ


def test_what_vllm_remembers_of_the_environment_is_taken_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_environment.put(RUNNER, "0")
    envs.enable_envs_cache()
    try:
        assert envs.VLLM_USE_V2_MODEL_RUNNER is False
        engine_environment.take_back()
        assert envs.VLLM_USE_V2_MODEL_RUNNER is None
    finally:
        envs.disable_envs_cache()


def test_other_backends_are_left_alone(model: Path) -> None:
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    config = EngineArgs(model=str(model), max_model_len=128).create_engine_config()
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS"):
        engine_args.spec_of(config)


def test_every_shared_field_exists(arguments: EngineArgs) -> None:
    arguments.distributed_executor_backend = "mp"
    config = arguments.create_engine_config()
    assert set(fingerprint(0, config, ()).fields) == set(SHARED_FIELDS)
    for path in SHARED_FIELDS:
        reduce(getattr, path.split("."), config)
    shared = shared_settings(config, layout("c", "c"))
    assert shared.max_model_len == 128
    assert {name for name, _ in shared.data_parallel} >= {"data_parallel_size"}


def test_a_rank_takes_over_what_is_shared(arguments: EngineArgs) -> None:
    from ray_hetero.world import EngineSpec, RankSpec

    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.max_num_seqs = 7
    driver = arguments.create_engine_config()
    shared: SharedSettings = shared_settings(driver, layout("c", "c"))
    there = world("c", "c", layers=1)
    spec: EngineSpec = engine_args.spec_of(driver)
    ranks = [
        build_rank_config(RankSpec(there, seat, spec, shared, (0,), ())) for seat in there.seats
    ]
    prints = [fingerprint(rank, config, ()) for rank, config in enumerate(ranks)]
    assert prints[0].fields == prints[1].fields == fingerprint(9, driver, ()).fields
    assert prints[0].fields["scheduler_config.max_num_seqs"] == "7"


def test_all_ranks_know_the_engine_by_one_name_of_its_connector(model: Path) -> None:
    from ray_hetero.world import EngineSpec, RankSpec

    # For such a connector vLLM makes a name up wherever it builds a configuration.
    arguments = EngineArgs(
        model=str(model), max_model_len=128, kv_offloading_size=1.0, max_num_seqs=2
    )
    driver = arguments.create_engine_config()
    assert driver.kv_transfer_config is not None
    shared = shared_settings(driver, layout("c", "c"))
    there = world("c", "c", layers=1)
    spec = EngineSpec(arguments, HeteroConfig(), None)
    found = [
        build_rank_config(RankSpec(there, seat, spec, shared, (0,), ())) for seat in there.seats
    ]
    names = {one.kv_transfer_config and one.kv_transfer_config.engine_id for one in found}
    assert names == {driver.kv_transfer_config.engine_id}


def test_fused_experts_take_what_is_given() -> None:
    given = inspect.signature(fused_moe.fused_experts).parameters
    places = ["hidden_states", "w1", "w2", "topk_weights", "topk_ids"]
    assert list(given)[:5] == places
    assert given.keys() >= {"activation", "global_num_experts", "expert_map", "quant_config"}
    for value in ACTIVATIONS.values():
        assert fused_moe_activation.MoEActivation(value).value == value
    config = fused_moe_config.biased_moe_quant_config(object(), object())
    assert config.w1_bias is not None
    assert config.w2_bias is not None

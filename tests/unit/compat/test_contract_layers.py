"""What this package takes from vLLM's layers, kernels and steps is there when they run."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm import _custom_ops
from vllm.compilation import decorators
from vllm.config import (
    CompilationMode,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed import parallel_state
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearLayerConfig
from vllm.model_executor.layers.attention import mla_attention
from vllm.model_executor.layers.fused_moe import activation as fused_moe_activation
from vllm.model_executor.layers.fused_moe import config as fused_moe_config
from vllm.model_executor.layers.fused_moe import fused_moe
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.utils import quant_utils
from vllm.platforms import current_platform
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import PlatformEnum
from vllm.scalar_type import scalar_types
from vllm.utils.torch_utils import set_default_torch_dtype, set_random_seed
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.attention.selector import AttentionSelectorConfig
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from ray_hetero.compat.models import compilation, meta_model, quantised_kernels
from ray_hetero.compat.worker import spec_decode
from ray_hetero.kernels.experts.activations import ROWS
from ray_hetero.kernels.linear import quantised_linear


class Chosen:
    """A kernel that suits every layer."""

    def __init__(self, *config: Any, **names: Any) -> None:
        """Take what vLLM's kernels take."""

    @classmethod
    def is_supported(cls, capability: int | None = None) -> tuple[bool, None]:
        return True, None

    @classmethod
    def can_implement(cls, config: Any) -> tuple[bool, None]:
        return True, None

    @classmethod
    def get_min_capability(cls) -> int:
        return -1

    @classmethod
    def _supports_quant_scheme(cls, weights: Any, activations: Any) -> bool:
        return True


FP8 = {"input_dtype": torch.bfloat16, "out_dtype": torch.bfloat16, "weight_shape": (64, 64)}
INTEGERS = MPLinearLayerConfig(
    full_weight_shape=(64, 64),
    partition_weight_shape=(64, 64),
    weight_type=scalar_types.uint4b8,
    act_type=torch.bfloat16,
    group_size=32,
    zero_points=False,
)
CHOICES: dict[str, Callable[[], Any]] = {
    "_POSSIBLE_KERNELS": lambda: linear_kernels.choose_mp_linear_kernel(INTEGERS)(),
    "_POSSIBLE_FP8_BLOCK_KERNELS": lambda: linear_kernels.init_fp8_linear_kernel(
        quant_utils.kFp8Dynamic128Sym, quant_utils.kFp8Static128BlockSym, **FP8
    ),
    "_POSSIBLE_FP8_KERNELS": lambda: linear_kernels.init_fp8_linear_kernel(
        quant_utils.kFp8DynamicTokenSym, quant_utils.kFp8StaticTensorSym, **FP8
    ),
    "_POSSIBLE_WFP8A16_KERNELS": lambda: linear_kernels.init_wfp8_a16_linear_kernel(
        quant_utils.kFp8StaticTensorSym, quant_utils.kFp8DynamicTokenSym, **FP8
    ),
    "_POSSIBLE_INT8_KERNELS": lambda: linear_kernels.init_int8_linear_kernel(
        is_channelwise=True, is_static_input_scheme=False, input_symmetric=True, module_name="x"
    ),
    "_POSSIBLE_MXFP4_KERNELS": linear_kernels.init_mxfp4_linear_kernel,
    "_POSSIBLE_NVFP4_KERNELS": linear_kernels.init_nvfp4_linear_kernel,
    "_POSSIBLE_MXFP8_KERNELS": lambda: linear_kernels.init_mxfp8_linear_kernel(
        weight_shape=(32, 32)
    ),
}
"""How vLLM makes a kernel, by the list of those that are asked."""


@pytest.mark.parametrize("name", quantised_linear.KERNELS)
def test_the_first_kernel_of_a_list_that_suits_is_taken(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # compat/models/quantised_kernels.py puts one in front.
    monkeypatch.setitem(getattr(linear_kernels, name), current_platform._enum, [Chosen])
    assert type(CHOICES[name]()) is Chosen
    monkeypatch.setitem(getattr(linear_kernels, name), current_platform._enum, [])
    with pytest.raises(ValueError, match="Failed to find a kernel"):
        CHOICES[name]()


@pytest.mark.parametrize(("name", "operator"), quantised_kernels.OPERATORS.items())
def test_an_operator_that_a_build_may_lack_is_what_vllms_kernel_calls(
    name: str, operator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class CalledError(Exception):
        pass

    def called(*arguments: Any) -> None:
        raise CalledError

    kernels = getattr(linear_kernels, name)[PlatformEnum.CPU]
    theirs = next(
        one
        for one in kernels
        if one.__module__.startswith("vllm.") and one.can_implement(INTEGERS)[0]
    )
    kernel = theirs(INTEGERS, "codes", "scales")
    layer = SimpleNamespace(
        codes=torch.zeros(64, 8, dtype=torch.int32), scales=torch.zeros(2, 64),
        use_w4a8=False, isa_hint="vec",
    )  # fmt: skip
    monkeypatch.setattr(torch.ops._C, operator, called, raising=False)
    with pytest.raises(CalledError):
        kernel.apply_weights(layer, torch.zeros(1, 64, dtype=torch.bfloat16))


def test_the_operator_by_which_cpu_kernels_are_known_is_vllms() -> None:
    # compat/models/custom_ops.py looks for it.
    assert "torch.ops._C.cpu_fused_moe(" in inspect.getsource(_custom_ops)


@pytest.fixture
def latent_attention() -> Any:
    """vLLM's multi-head latent attention, as its models make it on a CPU."""
    heads, plain, value, latent = 2, 32, 64, 64
    weight = torch.randn(heads * (plain + value), latent, dtype=torch.bfloat16)
    down = torch.nn.Linear(latent, len(weight), bias=False, dtype=torch.bfloat16)
    down.weight = torch.nn.Parameter(weight, requires_grad=False)
    down.quant_method = UnquantizedLinearMethod()
    with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(torch.bfloat16):
        return mla_attention.MLAAttention(
            num_heads=heads, scale=0.1, qk_nope_head_dim=plain, qk_rope_head_dim=32,
            v_head_dim=value, q_lora_rank=None, kv_lora_rank=latent, kv_b_proj=down,
            attn_backend=CPUMLABackend,
        )  # fmt: skip


def test_latent_attention_marks_the_layer_whose_tensors_it_reads(latent_attention: Any) -> None:
    # compat/models/quantised_kernels.py looks at it.
    assert latent_attention.kv_b_proj._cpu_skip_gemm_dispatch


def test_latent_attention_keeps_the_matrices_of_its_heads(latent_attention: Any) -> None:
    # compat/models/latent_attention.py reads them.
    weight = latent_attention.kv_b_proj.weight.view(2, 32 + 64, 64)
    latent_attention.process_weights_after_loading(torch.bfloat16)
    assert torch.equal(latent_attention.W_UK_T, weight[:, :32])
    assert torch.equal(latent_attention.W_UV, weight[:, 32:].transpose(1, 2))


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


def test_a_seed_takes_the_number_of_the_engine() -> None:
    assert list(inspect.signature(set_random_seed).parameters) == ["seed", "data_parallel_index"]


def test_sampled_tokens_can_be_shared() -> None:
    names = [field.name for field in dataclasses.fields(SamplerOutput)]
    assert "sampled_token_ids" in names


def test_an_earlier_stage_is_sent_what_it_learns_accepted_tokens_from() -> None:
    def request(name: str, *tokens: int) -> SimpleNamespace:
        return SimpleNamespace(
            request_id=name, all_token_ids=list(tokens), num_computed_tokens=2,
            num_output_tokens=1, num_output_placeholders=0,
        )  # fmt: skip

    scheduler: Any = Scheduler.__new__(Scheduler)
    scheduler.use_pp, scheduler.use_v2_model_runner = True, False
    scheduler.scheduler_config = SimpleNamespace(async_scheduling=False)
    scheduler.prev_step_scheduled_req_ids = {"goes on"}
    requests = [request("goes on", 1, 2, 3), request("has paused", 4, 5, 6)]
    names = [one.request_id for one in requests]
    blocks = SimpleNamespace(get_block_ids=lambda allow_none: None)
    sent = scheduler._make_cached_request_data(
        requests, [], dict.fromkeys(names, 2), {"goes on": [8]}, dict.fromkeys(names, blocks)
    )
    # Without its draft; what is not there yet is not sent.
    assert sent.new_token_ids == [[3], [6]]
    assert (sent.req_ids, sent.num_computed_tokens) == (names, [2, 2])
    # Only of those that the step before did not have.
    assert sent.all_token_ids == {"has paused": [4, 5, 6]}
    scheduler.scheduler_config = SimpleNamespace(async_scheduling=True)
    ahead = scheduler._make_cached_request_data(
        requests, [], dict.fromkeys(names, 1), {}, dict.fromkeys(names, blocks)
    )
    # compat/worker/late_tokens.py makes up for these.
    assert (ahead.new_token_ids, ahead.all_token_ids) == ([], sent.all_token_ids)
    known = {field.name for field in dataclasses.fields(CachedRequestState)}
    assert "output_token_ids" in known
    assert isinstance(CachedRequestState.num_tokens, property)


def test_a_pipeline_group_can_be_shown_in_place_of_another() -> None:
    assert "_PP" in vars(parallel_state)
    with spec_decode._one_stage():
        assert parallel_state.get_pp_group().is_last_rank
    assert parallel_state._PP is None


def test_fused_experts_take_what_is_given() -> None:
    given = inspect.signature(fused_moe.fused_experts).parameters
    places = ["hidden_states", "w1", "w2", "topk_weights", "topk_ids"]
    assert list(given)[:5] == places
    assert given.keys() >= {"activation", "global_num_experts", "expert_map", "quant_config"}
    for value in ROWS:
        assert fused_moe_activation.MoEActivation(value).value == value
    figures = fused_moe_activation.ApplyMoEActivationConfig.__dataclass_fields__
    assert set(figures) == {
        "clamp_limit", "alpha", "beta", "activation_situ_beta", "activation_situ_linear_beta",
    }  # fmt: skip
    called = inspect.signature(fused_moe.apply_moe_activation).parameters
    assert list(called)[:3] == ["activation", "output", "input"]
    assert "activation_config" in called
    config = fused_moe_config.biased_moe_quant_config(object(), object())
    assert config.w1_bias is not None
    assert config.w2_bias is not None


def test_experts_without_a_gate_are_refused_on_cpus_behind_all_else() -> None:
    """compat/models/cpu_experts.py goes on where vLLM raises: nothing may come behind it."""
    source = inspect.getsource(fused_moe_config.FusedMoEConfig.__post_init__)
    *_, last = source.split("raise NotImplementedError(")
    assert source.count("raise NotImplementedError(") == 1
    assert last.split() == [
        '"is_act_and_mul=False',
        "is",
        "supported",
        "only",
        "for",
        "CUDA,",
        "XPU",
        "and",
        "ROCm",
        "for",
        'now"',
        ")",
    ]


def test_sizes_can_be_asked_for_whatever_the_cache_holds() -> None:
    choose = meta_model._without_sparse(CpuPlatform.get_attn_backend_cls).__func__
    asked = AttentionSelectorConfig(
        head_size=576, dtype=torch.bfloat16, kv_cache_dtype="fp8_ds_mla", block_size=None,
        use_mla=True, use_sparse=True,
    )  # fmt: skip
    assert "MLA" in choose(None, asked, num_heads=8)

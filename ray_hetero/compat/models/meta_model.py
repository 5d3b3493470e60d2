"""vLLM's class of a model made without memory, whoever has a kernel for its layers."""

from __future__ import annotations

import importlib
import sys
from contextlib import suppress
from typing import Any

from ray_hetero.compat.patching import original, replace

KERNELS = "vllm.model_executor.kernels.linear"
KERNEL_MAKERS = (
    "init_fp8_linear_kernel", "init_int8_linear_kernel", "init_mxfp4_linear_kernel",
    "init_mxfp6_linear_kernel", "init_mxfp8_linear_kernel", "init_nvfp4_linear_kernel",
    "init_wfp8_a16_linear_kernel",
)  # fmt: skip
"""Functions of `KERNELS` that return a kernel for a linear layer."""
KERNEL_CHOICE = "choose_mp_linear_kernel"
"""Function of `KERNELS` that returns the class of one."""
ORACLES = "vllm.model_executor.layers.fused_moe.oracle"
BACKENDS = {
    "fp8": (("select_fp8_moe_backend",), "Fp8MoeBackend"),
    "int8": (("select_int8_moe_backend",), "Int8MoeBackend"),
    "int_wna16": (("select_wna16_moe_backend",), "WNA16MoEBackend"),
    "mxfp4": (
        ("select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend"), "Mxfp4MoeBackend",
    ),
    "mxfp8": (("select_mxfp8_moe_backend",), "Fp8MoeBackend"),
    "nvfp4": (("select_nvfp4_moe_backend",), "NvFp4MoeBackend"),
    "unquantized": (("select_unquantized_moe_backend",), "UnquantizedMoeBackend"),
    "w4a8": (("select_w4a8_moe_backend",), "W4A8MoeBackend"),
}  # fmt: skip
"""Module of `ORACLES` → functions that choose what computes routed experts, and their enumeration
of backends."""
PREFERRED = ("EMULATION", "TRITON", "CPU")
"""Backends that leave the sizes of experts as they are, the first that an enumeration has."""


class _Anything:
    """Stands for a kernel that nobody calls: every attribute of it is there, and false."""

    def __getattr__(self, name: str) -> _Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Anything()

    def __call__(self, *args: Any, **named: Any) -> _Anything:
        return _Anything()

    def __bool__(self) -> bool:
        return False


def make_without_kernels() -> None:
    """In a process that only looks at sizes: have layers made that nothing here could compute.

    Replaces: `KERNEL_MAKERS` and `KERNEL_CHOICE` of vllm.model_executor.kernels.linear; the
    functions in `BACKENDS` of vllm.model_executor.layers.fused_moe.oracle;
    `CpuPlatform.get_attn_backend_cls`, `CPUAttentionBackendImpl.__init__`,
    `AttentionBackend.supports_alibi_sqrt`, `FusedMoEConfig.__post_init__`,
    `allocation.set_triton_allocator` of vllm.triton_utils; and torch's events and
    streams of CUDA, how it moves modules, and how it reads tensors.
    Why: a layer chooses its kernel when it is made, and refuses to be made without one, though
    its parameters follow from the format alone.
    Can go when: a model can be made without kernels.
    """
    import torch
    from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig
    from vllm.platforms.cpu import CpuPlatform
    from vllm.triton_utils import allocation
    from vllm.v1.attention.backend import AttentionBackend
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

    linear = importlib.import_module(KERNELS)
    for name in (*KERNEL_MAKERS, KERNEL_CHOICE):
        _replace_everywhere(linear, name, lambda *args, **named: _Anything())
    for module, (names, backends) in BACKENDS.items():
        oracle = importlib.import_module(f"{ORACLES}.{module}")
        for name in names:
            _replace_everywhere(oracle, name, _choosing(oracle, name, backends))
    replace(CpuPlatform, "get_attn_backend_cls", _without_sparse)
    replace(CPUAttentionBackendImpl, "__init__", _whatever_the_layer)
    replace(AttentionBackend, "supports_alibi_sqrt", lambda _stock: classmethod(lambda _cls: True))
    _replace_everywhere(allocation, "set_triton_allocator", lambda *args, **named: None)
    replace(FusedMoEConfig, "__post_init__", _whatever_the_platform)
    # Nothing runs: there are neither streams to wait for nor tensors to copy.
    setattr(torch.cuda, "Event", _Anything)  # noqa: B010
    setattr(torch.cuda, "Stream", _Anything)  # noqa: B010
    replace(torch.nn.Module, "to", _in_place)
    for name in ("cpu", "item", "tolist"):
        replace(torch.Tensor, name, _zero_without_memory)


def _without_sparse(stock: Any) -> Any:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    def get_attn_backend_cls(selected: Any, attn_selector_config: Any, **named: Any) -> Any:
        # Sparse attention, which CPUs do not compute, caches latents all the same.  Types of the
        # cache that they do not compute are in its specification whatever the backend.
        asked = attn_selector_config._replace(use_sparse=False, kv_cache_dtype="auto")
        if asked.use_mla:
            # The one for AMX does not take the arguments of sparse attention.
            selected = AttentionBackendEnum.CPU_MLA
        return stock(selected, asked, **named)

    return staticmethod(get_attn_backend_cls)


def _whatever_the_layer(stock: Any) -> Any:
    def __init__(self: Any, *args: Any, **named: Any) -> None:  # noqa: N807
        # It refuses what CPUs do not compute, and is not called.
        with suppress(NotImplementedError, TypeError, ValueError):
            stock(self, *args, **named)

    return __init__


def _whatever_the_platform(stock: Any) -> Any:
    def __post_init__(self: Any) -> None:  # noqa: N807
        # Its last line refuses experts without a gate where this is no GPU.
        with suppress(NotImplementedError):
            stock(self)

    return __post_init__


def _zero_without_memory(stock: Any) -> Any:
    def values(self: Any) -> Any:
        import torch

        return stock(torch.zeros(self.shape, device="cpu") if self.is_meta else self)

    return values


def _in_place(stock: Any) -> Any:
    def to(self: Any, *args: Any, **named: Any) -> Any:
        import torch

        given = [*args, *named.values()]
        dtype = next((one for one in given if isinstance(one, torch.dtype)), None)
        return self if dtype is None else stock(self, dtype)

    return to


def made(vllm_config: Any) -> Any:
    """The model of a configuration, in torch's device `meta`, of the only rank there is.

    Args:
        vllm_config: of vLLM, for one rank.

    Raises:
        Whatever vLLM raises for a model that it cannot build.

    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = vllm_config.model_config
    with set_current_vllm_config(vllm_config):
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
        # Which groups there are depends on the model.
        parallel_state.destroy_model_parallel()
        parallel_state.ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
            return initialize_model(vllm_config=vllm_config, model_config=model_config)


class _MiddleStage:
    """A pipeline group as a rank of the second of three stages sees it."""

    world_size = 3
    rank_in_group = 1
    is_first_rank = False
    is_last_rank = False


def made_between(vllm_config: Any) -> Any:
    """The model as the second of three stages has it, in torch's device `meta`.

    Replaces: `parallel_state._PP`, while the model is made.
    Why: whether a class keeps its embedding and its head out of stages without them is known to
    its own code alone.
    Can go when: a class of vLLM says what its stages hold.

    Args:
        vllm_config: with which `made` has made the whole model; its layers are forgotten.

    Raises:
        Whatever vLLM raises for a model that it cannot build.

    """
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    model_config = vllm_config.model_config
    # Layers of the whole model have the same names.
    original(vllm_config.compilation_config, "static_forward_context").clear()
    whole = original(parallel_state, "_PP")
    parallel_state._PP = _MiddleStage()
    try:
        with (
            set_current_vllm_config(vllm_config),
            set_default_torch_dtype(model_config.dtype),
            torch.device("meta"),
        ):
            return initialize_model(vllm_config=vllm_config, model_config=model_config)
    finally:
        parallel_state._PP = whole


def _choosing(oracle: Any, name: str, backends: str) -> Any:
    stock, members = original(oracle, name), original(oracle, backends).__members__
    backend = next((members[one] for one in PREFERRED if one in members), next(iter(members)))

    def choose(*args: Any, **named: Any) -> tuple[Any, Any]:
        try:
            found: tuple[Any, Any] = stock(*args, **named)
        except (NotImplementedError, ValueError):
            return backend, _Anything()
        return found

    return choose


def _replace_everywhere(owner: Any, name: str, patch: Any) -> None:
    """Put a function in the place of another, also where modules have imported it by name."""
    stock = original(owner, name)
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get(name) is stock:
            setattr(module, name, patch)

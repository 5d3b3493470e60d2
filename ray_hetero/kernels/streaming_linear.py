"""Linear layers of a CPU rank that read their weights at the bandwidth of the socket.

vLLM's kernels for CPUs divide a layer by its outputs, each thread a fixed share, and a decode step,
which reads every weight for a handful of tokens, waits in every layer for the slowest thread.  Here
threads that have finished take over from others (csrc/kernels/linear.h).  The weights are in the
layout of vLLM's own packed kernel, which computes many tokens where there is no AMX, so they are
held once.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from types import ModuleType
from typing import Literal

import torch
from vllm.utils.torch_utils import direct_register_custom_op

from ray_hetero.compat.custom_ops import vllm_ops
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.gpu_prefill import BorrowedGpu
from ray_hetero.kernels.packed_weights import PackedWeight

try:
    _native: ModuleType | None = importlib.import_module("ray_hetero._streaming_linear")
except ImportError:
    _native = None

Choice = Literal["auto", "streaming", "vllm"]

MULTIPLE = 32
"""Of inputs and outputs, as the packed layout has them."""
MOST_TOKENS_WITHOUT_AMX = 4
"""Above, vLLM's packed kernel is faster where there is no AMX; measured, see docs/tuning.md."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")


@dataclass(frozen=True)
class Prompts:
    """What computes steps of many tokens."""

    gpu: BorrowedGpu
    from_tokens: int
    cores: tuple[int, ...] = ()
    """Logical CPUs of the thread that orders the GPU's work; none leaves it where it starts."""


class StreamingLinear:
    """What this process computes linear layers with."""

    def __init__(self, native: ModuleType) -> None:
        self.native = native
        self.has_amx = bool(native.has_amx())
        self.few_tokens = native.FEW_TOKENS if self.has_amx else MOST_TOKENS_WITHOUT_AMX
        """Up to which a step does nothing but read weights."""
        self.prompts: Prompts | None = None
        """Set once the weights are loaded."""
        self.compact: dict[int, PackedWeight] = {}
        """Compact weights by their address, which is all that an operator is given."""

    def add(self, weight: PackedWeight) -> None:
        """Know a weight that may be compact."""
        if weight.compact is not None:
            self.compact[weight.data.data_ptr()] = weight

    def __call__(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias.

        Args:
            x: […, K], bf16.
            packed: `PackedWeight.data` of W [N, K]; a compact one has to be known.
            bias: [N], float32.

        Returns:
            […, N], bf16.

        """
        return self.compute(x, self.compact.get(packed.data_ptr()) or PackedWeight(packed), bias)

    def compute(
        self, x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The same with a weight that need not be known."""
        packed = weight.data
        outputs, inputs = weight.shape
        tokens = x.numel() // inputs
        many = self.prompts
        if many is not None and tokens >= many.from_tokens and many.gpu.suits(packed, tokens):
            y = many.gpu.linear(x.reshape(tokens, inputs), packed, bias)
            return y.view(*x.shape[:-1], outputs)
        if not self.has_amx and tokens > MOST_TOKENS_WITHOUT_AMX:
            return vllm_ops.weight_packed_linear_cpu(x, weight.packed(), outputs, bias)
        rows = x.reshape(tokens, inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
        self.native.linear(
            rows.data_ptr(),
            rows.stride(0),
            packed.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            tokens,
            outputs,
            inputs,
            self.has_amx,
            weight.compact,
        )
        return y


@functools.cache
def _registered() -> StreamingLinear:
    """The kernel behind the operator, of which there is one a process."""
    assert _native is not None
    kernel = StreamingLinear(_native)

    def streaming_linear(
        x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        return kernel(x, packed, bias)

    def shape_of(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x.new_empty((*x.shape[:-1], packed.shape[0]))

    direct_register_custom_op(
        "streaming_linear",
        streaming_linear,
        fake_impl=shape_of,
        target_lib=_library,
        dispatch_key="CPU",
    )
    return kernel


def choose(choice: Choice) -> StreamingLinear | None:
    """What this process's linear layers are to stream with; None for vLLM's kernels.

    `auto` streams where there is AMX, the processors it was measured on.

    Raises:
        UnsupportedError: streaming was asked for and cannot be had here.

    """
    if choice == "vllm":
        return None
    missing = _missing()
    if choice == "streaming" and missing:
        raise UnsupportedError(
            f"cpu.linear_kernel is 'streaming', but {missing}. "
            "Leave the setting out for vLLM's kernels."
        )
    if missing or _native is None or (choice == "auto" and not _native.has_amx()):
        return None
    return _registered()


def _missing() -> str:
    if _native is None:
        return "ray-hetero was installed without a C++ compiler (see `ray-hetero doctor`)"
    if not _native.has_bf16():
        return "this processor has no AVX-512-BF16"
    if not hasattr(torch.ops._C, "convert_weight_packed"):
        return "this build of vLLM has no packed kernels"
    return ""


def suits(weight: torch.Tensor) -> bool:
    """Whether a layer's weight [N, K] can be computed here."""
    return (
        weight.ndim == 2
        and not weight.is_meta
        and weight.dtype == torch.bfloat16
        and all(size % MULTIPLE == 0 for size in weight.shape)
    )

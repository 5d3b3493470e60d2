"""Linear layers of a CPU rank that read their weights at the bandwidth of the socket.

vLLM's kernels for CPUs divide a layer by its outputs, each thread a fixed share, and a decode step,
which reads every weight for a handful of tokens, waits in every layer for the slowest thread.  Here
threads that have finished take over from others (csrc/kernels/few_tokens.h).  The weights are in
the layout of vLLM's own packed kernel, which computes many tokens where there is no AMX and that
kernel is there, so they are held once.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from types import ModuleType
from typing import Any, Protocol

import torch

from ray_hetero.config import CpuConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.custom_ops import register_op
from ray_hetero.kernels.formats import HostWeight, PackedWeight
from ray_hetero.kernels.linear.rank_sums import RankSums
from ray_hetero.kernels.step_route import StepLimits, StepRoute
from ray_hetero.log import logger

try:
    _native: ModuleType | None = importlib.import_module("ray_hetero._streaming_linear")
except ImportError:
    _native = None

MISSING = "ray-hetero was installed without a C++ compiler (see `ray-hetero doctor`)"
"""Reason for which there is no native code."""
MULTIPLE = 32
"""Divisor of the inputs and outputs that the packed layout has."""

_library = torch.library.Library("ray_hetero", "FRAGMENT")


class ManyTokens(Protocol):
    """A GPU that computes linear layers of many tokens from weights in host memory."""

    @property
    def tokens(self) -> int:
        """Most tokens of a step."""

    def suits(self, packed: torch.Tensor, tokens: int) -> bool:
        """Whether a weight was given to the GPU, and there is room for so many tokens."""

    def linear(
        self, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias.

        Args:
            x: [M, K], bf16, in host memory.
            packed: `HostWeight.data` of W [N, K], one that `suits`.
            bias: [N], float32.

        Returns:
            [M, N], bf16, in host memory.

        """


class StreamingLinear:
    """Kernel of this process's linear layers.

    Args:
        native: the module of the kernels.
        level: which of its instruction sets; the best that this processor has unless it is given.

    """

    def __init__(self, native: ModuleType, level: Any = None) -> None:
        self.native = native
        self.level = native.levels()[-1] if level is None else level
        self.dtype = torch.bfloat16
        """Data type of weights and activations at this level."""
        self.few_tokens: int = native.FEW_TOKENS
        """Most tokens of a step that is to do nothing but read weights."""
        self.limits = StepLimits(native.STEP_TOKENS)
        """Numbers of tokens that decide where a step is computed; final once weights are loaded."""
        self.route: StepRoute | None = None
        """Route of the step that this rank computes; None between steps, and in dummy runs."""
        self.gpu: Any = None
        """GPU of `ManyTokens` for single linear layers; set once the weights are loaded."""
        self.sums: RankSums | None = None
        """Sums of a tensor-parallel group in native calls; set once weights are loaded."""
        self.weights: dict[int, HostWeight] = {}
        """Known weights by their address, which is all that an operator is given."""

    def use(self, dtype: torch.dtype) -> None:
        """Compute a model in bfloat16 or float16, with the best instructions for it."""
        self.dtype = dtype
        levels = self.native.half_levels() if dtype == torch.float16 else self.native.levels()
        self.level = levels[-1]

    def route_of(self, tokens: int, longest: int | None = None) -> StepRoute:
        """The running step's route if a call is of that step, else the route of such a call.

        Args:
            tokens: of the call.
            longest: most tokens of a request of the call; None if the caller does not know it.

        """
        route = self.route
        if route is not None and route.tokens == tokens and longest in (None, route.longest):
            return route
        return StepRoute.of_rows(tokens, tokens if longest is None else longest, self.limits)

    def add(self, weight: HostWeight) -> None:
        """Know a weight."""
        self.weights[weight.data.data_ptr()] = weight

    def __call__(
        self, x: torch.Tensor, data: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """y = x · Wᵀ + bias.

        Args:
            x: […, K], of this kernel's dtype.
            data: `HostWeight.data` of W [N, K]; where W is not known, it is packed.
            bias: [N], float32.

        Returns:
            […, N], as x.

        """
        known = self.weights.get(data.data_ptr())
        return self.compute(x, known or PackedWeight.made(data, self.native), bias)

    def compute(
        self, x: torch.Tensor, weight: HostWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The same with a weight that need not be known."""
        outputs, inputs = weight.shape
        tokens = x.numel() // inputs
        gpu = self.gpu
        if gpu is not None and self.limits.is_for_gpu(tokens) and gpu.suits(weight.data, tokens):
            try:
                y = gpu.linear(x.reshape(tokens, inputs), weight.data, bias)
                return y.view(*x.shape[:-1], outputs)
            except torch.OutOfMemoryError as error:
                logger.warning(
                    "the GPU that computes linear layers of this rank's prompts has run out of "
                    "memory (%s): from now on the cores compute them, several times as long. Lower "
                    "gpu.memory_utilization or --max-num-batched-tokens.",
                    str(error).splitlines()[0],
                )
                self.gpu, self.limits = None, replace(self.limits, has_products=False)
        return self.on_cores(x, weight, bias)

    def on_cores(
        self, x: torch.Tensor, weight: HostWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """The same on this process's cores, whatever the number of tokens."""
        outputs, inputs = weight.shape
        tokens = x.numel() // inputs
        rows = x.reshape(tokens, inputs)
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        y = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
        self.native.linear(
            x=rows.data_ptr(),
            stride=rows.stride(0),
            w=weight.data.data_ptr(),
            encoding=weight.encoding,
            bias=0 if bias is None else bias.data_ptr(),
            y=y.data_ptr(),
            m=tokens,
            level=self.level,
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

    register_op(_library, "streaming_linear", streaming_linear, shape_of)
    return kernel


def choose(config: CpuConfig) -> StreamingLinear | None:
    """Kernel that this process's linear layers are to stream with; None for vLLM's kernels.

    Raises:
        UnsupportedError: streaming was asked for and cannot be had here.

    """
    missing = "" if _native is not None else MISSING
    if missing and config.linear_kernel == "streaming":
        raise UnsupportedError(
            f"cpu.linear_kernel is 'streaming', but {missing}. "
            "Leave the setting out for vLLM's kernels."
        )
    if missing and config.linear_kernel == "auto":
        logger.warning(
            "%s: this rank computes with vLLM's kernels, which take several times as long for a "
            "decode step. Install a C++17 compiler (Debian: apt install g++) and install "
            "ray-hetero again, or set cpu.linear_kernel to 'vllm'",
            missing,
        )
    if _native is None or not config.streams(_native.levels()[-1].name):
        return None
    return _registered()


def at_hand() -> StreamingLinear | None:
    """Kernel for layers that vLLM has none for; None without native code."""
    return None if _native is None else _registered()


def for_experts(config: CpuConfig, *, is_quantised: bool) -> StreamingLinear | None:
    """Kernel that an expert rank computes with; None for vLLM's.

    Raises:
        UnsupportedError: see `choose`.

    """
    kernel = choose(config)
    if config.linear_kernel == "auto" and is_quantised:
        # As for linear layers: vLLM's own kernels of most formats need AMX.
        kernel = kernel or at_hand()
    return kernel


def suits(weight: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> bool:
    """Whether a layer's weight [N, K] can be computed here, in a model of some dtype."""
    return (
        weight.ndim == 2
        and not weight.is_meta
        and weight.dtype == dtype
        and all(size % MULTIPLE == 0 for size in weight.shape)
    )

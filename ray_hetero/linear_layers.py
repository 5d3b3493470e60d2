"""What a CPU rank computes its linear layers with.

Chosen before the weights are loaded, complete once they are: few tokens a step are computed by the
socket, many by a GPU of the node where the rank may borrow one.
"""

from __future__ import annotations

from collections import Counter

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from placement.devices import GIB
from ray_hetero import streaming_linear, vllm_private
from ray_hetero.between_attentions import Linear
from ray_hetero.borrowed_gpu import BorrowedGpu
from ray_hetero.config import CpuConfig
from ray_hetero.decoder_layers import fuse
from ray_hetero.errors import UnsupportedError
from ray_hetero.progress import logger
from ray_hetero.streaming_linear import Prompts, StreamingLinear
from ray_hetero.weight_formats import FORMATS, PackedWeight

RELOAD = (
    "a CPU rank cannot load weights anew: its layers compute with packed copies of those that they "
    "had at first (linear layers stream). Start a new engine, or set cpu.linear_kernel to vllm."
)
"""What a rank answers to `reload_weights`."""


class LinearLayers:
    """The linear layers of this process.

    Args:
        config: which kernels, and whether to borrow a GPU.
        gpu: the one that could be borrowed, if any.
        tokens: most tokens of a step.

    Raises:
        UnsupportedError: what was asked for cannot be had here.

    """

    def __init__(self, config: CpuConfig, gpu: torch.device | None, tokens: int) -> None:
        self._config = config
        self._gpu: BorrowedGpu | None = None
        self._linears: dict[torch.nn.Module, Linear] = {}
        self._bytes = self._bytes_before = 0
        self._is_loaded = False
        self._kernel = streaming_linear.choose(config.linear_kernel)
        if config.borrow_gpu is True:
            self._check_borrowing(gpu)
        if self._kernel is None:
            return
        self._kernel.prompts = None
        self._kernel.weights.clear()
        if gpu is not None and config.borrow_gpu:
            self._gpu = BorrowedGpu(gpu, tokens)
        vllm_private.use_linear(
            torch.ops.ray_hetero.streaming_linear, streaming_linear.suits, self._packed
        )
        logger.info("linear layers stream their weights (cpu.linear_kernel)")

    def _check_borrowing(self, gpu: torch.device | None) -> None:
        if gpu is None:
            raise UnsupportedError(
                "cpu.borrow_gpu is true, but no GPU rank of this engine is on the node of this "
                "CPU rank. Leave the setting out, or give the layout a GPU there."
            )
        if self._kernel is None:
            raise UnsupportedError(
                "cpu.borrow_gpu is true, but linear layers are vLLM's own here: this processor has "
                "no AMX, or cpu.linear_kernel says so. Type: cpu.linear_kernel: streaming"
            )

    def _packed(self, layer: torch.nn.Module, packed: torch.Tensor) -> torch.Tensor:
        """What the kernel reads in the place of a layer's weight, which was packed."""
        assert self._kernel is not None
        if self._is_loaded:
            raise UnsupportedError(RELOAD)
        kind = FORMATS[self._config.weight_format(has_amx=self._kernel.has_amx)]
        native = self._kernel.native
        weight = kind.made(packed, native) or PackedWeight.made(packed, native)
        self._kernel.add(weight)
        self._bytes += weight.data.nbytes
        self._bytes_before += packed.nbytes
        bias = getattr(layer, "bias", None)
        self._linears[layer] = Linear(weight, None if bias is None else bias.data)
        # An output matrix multiplies one token a request, and its products would be the largest.
        if self._gpu is not None and not isinstance(layer, VocabParallelEmbedding):
            self._gpu.add(weight)
        return weight.data

    def loaded(self, model: torch.nn.Module) -> str:
        """Fuse layers and take the GPU, now that all weights are there.

        Returns:
            What the model's code depends on besides its configuration.

        Raises:
            UnsupportedError: the GPU was asked for, and has no memory left or cannot read the
                host's.

        """
        if self._kernel is None:
            return "vllm"
        if self._bytes < self._bytes_before:
            logger.info(
                "linear layers are held in %.1f GiB in place of %.1f, without loss "
                "(cpu.compact_weights)",
                self._bytes / GIB,
                self._bytes_before / GIB,
            )
        self._take_gpu(self._kernel)
        fused = 0
        if self._config.fuse_layers:
            fused = fuse(model, self._linears, self._kernel)
            logger.info("%d layers are computed as one operator (cpu.fuse_layers)", fused)
        self._linears.clear()
        self._is_loaded = True
        vllm_private.refuse_reload(RELOAD)
        formats = Counter(weight.name for weight in self._kernel.weights.values())
        held = ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))
        return f"streaming, {fused} decoder_layers, {held}"

    def _take_gpu(self, kernel: StreamingLinear) -> None:
        if self._gpu is None:
            return
        try:
            taken = self._gpu.take()
        except UnsupportedError as error:
            if self._config.borrow_gpu is True:
                raise
            logger.warning("%s", error)
            return
        kernel.prompts = Prompts(self._gpu, self._config.borrow_gpu_tokens)
        logger.info(
            "steps of %d tokens and more are computed by the GPU: %.1f GiB of weights can be read "
            "over its link, %.1f GiB of its memory are taken (cpu.borrow_gpu)",
            self._config.borrow_gpu_tokens,
            taken.weight_bytes / GIB,
            taken.gpu_bytes / GIB,
        )

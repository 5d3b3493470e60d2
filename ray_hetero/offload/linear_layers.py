"""Kernels and GPU of a CPU rank, put together: before its weights are loaded, and once they are.

Before, vLLM is given this project's kernels, which hand each weight here in the format that the
cores read (kernels/formats/).  Once all are there, layers are fused (layer_fusion.py), and a GPU
takes what it needs for prompts and decode steps, where the node has one.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType

import torch
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from placement.units import GIB
from placement.words import size
from ray_hetero.compat.models import cpu_linear, quantised_kernels
from ray_hetero.config import CpuConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.experts.expert_layers import ExpertLayers
from ray_hetero.kernels.formats import FORMATS, HostWeight, PackedWeight, ScaledWeight
from ray_hetero.kernels.formats.base import pack
from ray_hetero.kernels.formats.scaled import Codes
from ray_hetero.kernels.layers.fusible_layers import Fusible, find
from ray_hetero.kernels.layers.layer_parts import Linear
from ray_hetero.kernels.linear import quantised_linear, streaming_linear
from ray_hetero.kernels.linear.rank_sums import RankSums, SumTerms
from ray_hetero.kernels.linear.streaming_linear import StreamingLinear
from ray_hetero.kernels.step_route import StepLimits
from ray_hetero.log import logger
from ray_hetero.offload.group.group_layers import GroupLayers, PromptOffer
from ray_hetero.offload.layer_fusion import Fused, install, install_drafter
from ray_hetero.offload.prefetch import Prefetcher
from ray_hetero.offload.prefill import threshold
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu, with_own_pages
from ray_hetero.offload.prefill.stage_output import StageOutput
from ray_hetero.offload.weights.shared_weights import SharedWeights

Join = Callable[[PromptOffer | None], Sequence[GroupLayers] | None]
"""Function by which ranks share a GPU for prompts, see offload/group/joining.py."""
RELOAD = (
    "a CPU rank cannot load weights anew: its layers compute with packed copies of those that they "
    "had at first (linear layers stream). Start a new engine, or set cpu.linear_kernel to vllm."
)
"""Message of a CPU rank that is asked to reload weights."""


class LinearLayers:
    """The linear layers of this process, with the kernel and the GPU that compute them.

    Args:
        config: which kernels, and whether a GPU computes prompts.
        gpu: the one that could compute prompts, if any.
        tokens: most tokens of a step.
        spare: logical CPUs of this rank that compute nothing.
        is_shared: whether weights go into memory that other ranks of this one's tensor-parallel
            group can map, for one GPU to compute the prompts of all.
        sends_alone: whether no other rank of this one's stage sends results to the next one.
        dtype: that the model is computed in.
        place: of this rank, see `RankSpec.place`; empty where measured times are not kept.

    Raises:
        UnsupportedError: what was asked for cannot be had here.

    """

    def __init__(
        self, config: CpuConfig, gpu: torch.device | None, tokens: int,
        spare: Sequence[int] = (), *, is_shared: bool = False, sends_alone: bool = False,
        dtype: torch.dtype = torch.bfloat16, place: str = "",
    ) -> None:  # fmt: skip
        self._config = config
        self._place = place
        self._is_half = dtype == torch.float16
        self._device, self._tokens = gpu, tokens
        self._shared: SharedWeights | None = None
        self._spare = tuple(spare)
        self._sends_alone = sends_alone
        self._gpu: OffloadGpu | None = None
        self._linears: dict[torch.nn.Module, Linear] = {}
        self._bytes = self._bytes_before = 0
        self._is_loaded = False
        self.prefetcher: Prefetcher | None = None
        """Prefetcher of weights for a GPU; None until the weights are loaded."""
        self.output: StageOutput | None = None
        """Memory of a GPU in which the last layers leave results for the next stage."""
        self.has_group_prompts = False
        """Whether one GPU computes the prompts of all ranks of this one's group."""
        self._experts: ExpertLayers | None = None
        self._kernel = streaming_linear.choose(config)
        self._streams = self._kernel is not None
        if config.prefill_on_gpu is True:
            self._check_prompt_gpu(gpu)
        if config.linear_kernel == "auto":
            self._kernel = self._kernel or streaming_linear.at_hand()
        if self._kernel is None:
            return
        self._kernel.use(torch.float16 if self._is_half else torch.bfloat16)
        if self._is_half:
            gpu = None
        self._kernel.gpu = self._kernel.route = None
        self._kernel.limits = StepLimits(self._kernel.native.STEP_TOKENS)
        self._kernel.sums = None
        self._kernel.weights.clear()
        if gpu is not None and config.prefill_on_gpu:
            self._gpu = OffloadGpu(gpu, tokens, spare)
            if is_shared and config.fuse_layers:
                self._shared = SharedWeights()
        quantised_linear.use_holder(self._stored)
        quantised_kernels.offer_kernels(quantised_linear.KERNELS, is_first=self._streams)
        quantised_kernels.keep_scales_of_parts()
        if self._streams:
            cpu_linear.use_linear(
                torch.ops.ray_hetero.streaming_linear,
                functools.partial(streaming_linear.suits, dtype=self._kernel.dtype),
                self._packed,
            )
            # Experts are computed in bfloat16 only.
            of_experts = StreamingLinear(self._kernel.native) if self._is_half else self._kernel
            self._experts = ExpertLayers(config, of_experts)
            logger.info(
                "linear layers stream their weights%s (cpu.linear_kernel)",
                ", in float16" if self._is_half else "",
            )

    def _check_prompt_gpu(self, gpu: torch.device | None) -> None:
        if gpu is None:
            raise UnsupportedError(
                "cpu.prefill_on_gpu is true, but no GPU rank of this engine is on the node of this "
                "CPU rank. Leave the setting out, or give the layout a GPU there."
            )
        if self._is_half:
            raise UnsupportedError(
                "cpu.prefill_on_gpu is true, but a GPU computes prompts of CPU ranks in bfloat16 "
                "only, and the model is computed in float16. Leave the setting out, or type "
                "--dtype bfloat16"
            )
        if not self._streams:
            raise UnsupportedError(
                "cpu.prefill_on_gpu is true, but linear layers are vLLM's own here: this processor "
                "has no AVX2, or cpu.linear_kernel says so. Type: cpu.linear_kernel: streaming"
            )

    def _packed(self, layer: torch.nn.Module) -> torch.Tensor:
        """Weight that the kernel reads in the place of a layer's own."""
        assert self._kernel is not None
        if self._is_loaded:
            raise UnsupportedError(RELOAD)
        packed = pack(layer.weight.data)
        native = self._kernel.native
        weight: HostWeight | None = None
        if not self._is_half:
            kind = FORMATS[self._config.weight_format(self._kernel.level.name)]
            weight = kind.made(packed, native)
        weight = weight or PackedWeight.made(packed, native)
        self._bytes += weight.data.nbytes
        self._bytes_before += packed.nbytes
        return self._added(layer, weight).data

    def _stored(
        self, layer: torch.nn.Module, kind: type[ScaledWeight], codes: Codes
    ) -> torch.Tensor:
        """Weight that the kernel reads in the place of a quantised layer's own."""
        assert self._kernel is not None
        if self._is_loaded:
            raise UnsupportedError(RELOAD)
        name = getattr(layer, "prefix", type(layer).__name__)
        if self._is_half:
            raise UnsupportedError(
                f"{name}: its weights are {kind.name}, which CPU ranks multiply with bfloat16 "
                "only, and --dtype is float16. Leave it out, or type --dtype bfloat16"
            )
        try:
            weight = kind.stored(codes, self._kernel.native)
        except UnsupportedError as error:
            raise UnsupportedError(f"{name}: {error}") from None
        return self._added(layer, weight).data

    def _added(self, layer: torch.nn.Module, weight: HostWeight) -> HostWeight:
        """Know a layer's weight, which may be moved."""
        assert self._kernel is not None
        is_output = isinstance(layer, VocabParallelEmbedding)
        if self._shared is not None and not is_output:
            try:
                weight = self._shared.moved(weight)
            except OSError as error:
                logger.warning("no weights can be shared with other ranks: %s", error)
                self._shared = None
        elif self._gpu is not None and not is_output:
            weight = with_own_pages(weight)
        self._kernel.add(weight)
        bias = getattr(layer, "bias", None)
        self._linears[layer] = Linear(weight, None if bias is None else bias.data)
        # An output matrix multiplies one token a request, and its products would be the largest.
        if self._gpu is not None and not is_output:
            self._gpu.add(weight)
        return weight

    def sum_terms(self, hidden: int) -> SumTerms | None:
        """Sums that this rank can compute with the others of its group, once all weights are there.

        Args:
            hidden: elements of a token's hidden state.

        Returns:
            None where layers are not fused.

        """
        kernel = self._kernel
        if kernel is None or not (self._config.fuse_layers and self._linears):
            return None
        tokens = kernel.limits.native_tokens
        return SumTerms(kernel.level.name, tokens, tokens * hidden, len(self._linears))

    @property
    def kernel(self) -> StreamingLinear | None:
        """Kernel of the linear layers; None where vLLM's own compute them."""
        return self._kernel

    @property
    def native(self) -> ModuleType | None:
        """The module of the kernels; None where vLLM's own compute all layers."""
        return None if self._kernel is None else self._kernel.native

    def loaded(
        self, model: torch.nn.Module, sums: RankSums | None = None, join: Join | None = None,
        drafter: torch.nn.Module | None = None,
    ) -> str:  # fmt: skip
        """Fuse layers and take the GPU, now that all weights are there.

        Args:
            model: vLLM's.
            sums: with the other ranks of the tensor-parallel group, if it has some.
            join: has one GPU compute the prompts of all these ranks; all of them call it.
            drafter: vLLM's model that drafts, if this rank has one.

        Returns:
            What the model's code depends on besides its configuration.

        Raises:
            UnsupportedError: the GPU was asked for, and has no memory left or cannot read the
                host's.

        """
        if self._kernel is None or not (self._streams or self._kernel.weights):
            self._kernel = None
            return "vllm"
        self._say_formats(self._kernel)
        self._kernel.sums = sums
        found, fused = Fusible.none(), Fused(0, is_shared=False)
        if self._config.fuse_layers:
            found = find(model, self._linears, self._kernel)
        group = None if sums is None or join is None else join(self._offer(found))
        self.has_group_prompts = group is not None
        if group is None:
            if self._shared is not None:
                logger.info(
                    "in prompts, each rank of this tensor-parallel group lets a GPU compute its "
                    "linear layers, and its cores compute the attention (cpu.prefill_on_gpu)"
                )
            self._take_gpu(self._kernel, found)
        else:
            self._kernel.limits = replace(
                self._kernel.limits, gpu_from=group[0].from_tokens, gpu_room=group[0].tokens
            )
        if self._config.fuse_layers:
            fused = install(
                found, self._kernel, group, sends_alone=self._sends_alone,
                share=self._config.decode_gpu_share, seat=self._place,
            )  # fmt: skip
            logger.info("%d layers are computed as one operator (cpu.fuse_layers)", fused.layers)
        if group is None:
            self._settle(self._kernel, found, is_shared=fused.is_shared)
        if not fused.layers and not fused.mixers:
            self._kernel.limits = replace(self._kernel.limits, native_tokens=0)
        drafting = self._fuse_drafter(self._kernel, drafter)
        gpu = group[0].gpu if group else self._kernel.gpu
        self.prefetcher, self.output = Prefetcher(gpu, fused.first), fused.output
        self._linears.clear()
        self._is_loaded = True
        cpu_linear.refuse_reload(RELOAD)
        experts = self._experts.loaded(model) if self._experts is not None else "vllm's experts"
        held = self._formats(self._kernel)
        return f"streaming, {fused.layers} + {drafting} decoder_layers, {held}, {experts}"

    @staticmethod
    def _formats(kernel: StreamingLinear) -> str:
        """Formats of the kernel's weights, each with their number."""
        formats = Counter(weight.name for weight in kernel.weights.values())
        return ", ".join(f"{count} {name}" for name, count in sorted(formats.items()))

    def _fuse_drafter(self, kernel: StreamingLinear, drafter: torch.nn.Module | None) -> int:
        """Fuse the layers of a draft model, which the cores alone compute; returns how many."""
        if drafter is None or not self._config.fuse_layers:
            return 0
        if kernel.sums is not None:
            logger.info("the draft model's layers are computed operator by operator: its ranks "
                        "are a tensor-parallel group")  # fmt: skip
            return 0
        found = find(drafter, self._linears, kernel)
        fused = install_drafter(found, kernel)
        logger.info("%d layers of the draft model are computed as one operator", fused)
        return fused

    def _say_formats(self, kernel: StreamingLinear) -> None:
        """Log which weights are stored in other formats than bfloat16."""
        weights = kernel.weights.values()
        stored = Counter(weight.name for weight in weights if isinstance(weight, ScaledWeight))
        for name, count in sorted(stored.items()):
            logger.info("%d linear layers are computed from the checkpoint's own %s", count, name)
        if self._bytes < self._bytes_before:
            logger.info(
                "linear layers are stored in %s instead of %s, without loss (cpu.compact_weights)",
                size(self._bytes),
                size(self._bytes_before),
            )

    def _offer(self, found: Fusible) -> PromptOffer | None:
        """Offer of this rank for one GPU to compute the prompts of its group."""
        if self._shared is None or self._device is None or found.left or not found.runs:
            return None
        if any(layer.mlp is not None for run in found.runs for layer in run.layers):
            return None  # the GPU does not compute their experts
        return PromptOffer(
            [run.layers for run in found.runs], self._shared, self._device, self._tokens,
            self._config.prompt_tokens, self._spare, self._config.decode_gpu_share,
            self._kernel, self._place, is_auto=self._config.prefill_on_gpu_tokens == "auto",
        )  # fmt: skip

    def _take_gpu(self, kernel: StreamingLinear, found: Fusible) -> None:
        if self._gpu is None:
            return
        first = found.runs[0].layers[0] if found.runs else None
        self._gpu.add_beside(
            linear.weight for run in found.runs for layer in run.layers
            for linear in (layer.input.qkv, *layer.parts.linears)
        )  # fmt: skip
        try:
            taken = self._gpu.take(None if first is None else first.parts.output.weight.shape[0])
        except UnsupportedError as error:
            if self._config.prefill_on_gpu is True:
                raise
            logger.warning("%s", error)
            return
        if not taken.weight_bytes:
            logger.info("prompts stay on the cores: all weights of this rank are small")
            return
        kernel.gpu = self._gpu
        kernel.limits = replace(
            kernel.limits, gpu_from=self._config.prompt_tokens, gpu_room=self._gpu.tokens,
            has_products=True,
        )  # fmt: skip
        logger.info(
            "steps of %d tokens and more are computed by the GPU: it can read %.1f GiB of weights "
            "over its link, and uses %.1f GiB of its own memory (cpu.prefill_on_gpu)",
            self._config.prompt_tokens,
            taken.weight_bytes / GIB,
            taken.gpu_bytes / GIB,
        )

    def _settle(self, kernel: StreamingLinear, found: Fusible, *, is_shared: bool) -> None:
        """Choose who computes prompts, and the largest decode steps where they are not shared."""
        if kernel.gpu is None:
            return
        layers = [[layer.input.qkv, *layer.parts.linears] for run in found.runs
                  for layer in run.layers]  # fmt: skip
        # Decode steps of layers that are not one operator are no native call.  Ranks that add up
        # their products in a native call must all make it: none of them lowers its limit alone.
        threshold.settle(
            kernel, kernel.gpu, layers or [[linear] for linear in self._linears.values()],
            is_auto=self._config.prefill_on_gpu_tokens == "auto",
            has_steps=bool(layers) and not is_shared and kernel.sums is None,
        )  # fmt: skip

"""How a GPU rank runs in a tensor-parallel group with CPU ranks.

A CUDA graph cannot hold the copies to the host that such a group's collectives make.  So the model
runs eagerly there, or what is compiled, and captured, ends before each collective and begins anew
behind it.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Literal

from vllm.config import CompilationMode, CUDAGraphMode
from vllm.config.vllm import OptimizationLevel

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import EngineArgs

Mode = Literal["eager", "compiled", "graphs"]

MOST_TOKENS = 256
"""Most tokens of a step that graphs are captured of, unless the user names sizes."""
COLLECTIVE = "vllm::all_reduce"
"""The operator behind which a group's sums are, wherever a model adds them up."""


def graph_tokens(
    args: EngineArgs, mode: Mode, *, max_num_seqs: int, max_num_batched_tokens: int
) -> tuple[int, ...]:
    """Tokens of the steps that graphs are captured of, all ranks together.

    Args:
        args: the user's.
        mode: of GPU ranks in mixed groups.
        max_num_seqs: most sequences of a step.
        max_num_batched_tokens: most tokens of one.

    """
    config = args.compilation_config
    if mode != "graphs" or not _compiles(args) or config.cudagraph_mode == CUDAGraphMode.NONE:
        return ()
    if asked := args.cudagraph_capture_sizes or config.cudagraph_capture_sizes:
        return tuple(sorted({tokens for tokens in asked if tokens <= max_num_batched_tokens}))
    # Each costs two passes through the CPU ranks, whose time hides what a GPU computes too much.
    largest = args.max_cudagraph_capture_size or config.max_cudagraph_capture_size or MOST_TOKENS
    most = min(max_num_seqs, max_num_batched_tokens, largest)
    return tuple(1 << power for power in range(most.bit_length()))


def _compiles(args: EngineArgs) -> bool:
    return not (
        args.enforce_eager
        or args.optimization_level == OptimizationLevel.O0
        or args.compilation_config.mode not in (None, CompilationMode.VLLM_COMPILE)
    )


def before_configuring(args: EngineArgs, mode: Mode, tokens: tuple[int, ...]) -> None:
    """Set what a GPU rank of a mixed group compiles and captures, in its own engine arguments."""
    if args.speculative_config is not None or args.spec_method or args.spec_model:
        # A drafter's steps would be padded to its graphs on GPU ranks only.
        args.speculative_config = {**(args.speculative_config or {}), "enforce_eager": True}
    if mode == "eager" or not _compiles(args):
        args.enforce_eager = True
        return
    config = copy.deepcopy(args.compilation_config)
    config.cudagraph_mode = CUDAGraphMode.PIECEWISE if tokens else CUDAGraphMode.NONE
    config.cudagraph_capture_sizes = list(tokens)
    config.max_cudagraph_capture_size = None
    args.cudagraph_capture_sizes = args.max_cudagraph_capture_size = None
    # One graph for a number of tokens, with and without adapters: CPU ranks make as many passes.
    config.cudagraph_specialize_lora = False
    # It puts kernels over NVLink into the collectives' place.
    config.pass_config.fuse_allreduce_rms = False
    args.compilation_config = config


def split_at_collectives(vllm_config: VllmConfig) -> None:
    """Split what is compiled at the collectives."""
    config = vllm_config.compilation_config
    if config.mode == CompilationMode.VLLM_COMPILE:
        config.splitting_ops.append(COLLECTIVE)

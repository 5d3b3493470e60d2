"""vLLM's model runner: seeded requests and logprobs on CPU ranks, and ranks of a mixed group."""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch

from ray_hetero.compat.patching import original, replace


def draw_for_kept_tokens_only(model_runner: Any) -> None:
    """Let a CPU rank draw no number of a seeded request for a token that is not kept.

    A step that computes a chunk of a prompt samples a token behind it, and drops it.  While the
    runner samples, the generators of such requests are away.

    Replaces: `GPUModelRunner.sample_tokens`.
    Uses: `GPUModelRunner.discard_request_mask`, `GPUModelRunner.input_batch`,
    `InputBatch.generators`, `InputBatch.num_reqs`.
    Why: GPUModelRunner._bookkeeping_sync takes such a draw back by the generator's offset, which
    torch's CPU generators do not have: their RuntimeError ends the engine, and with it the requests
    of all other clients.
    Can go when: vLLM's CPU runner computes a seeded prompt in chunks, with the tokens of one chunk.
    """
    for name in ("discard_request_mask", "input_batch"):
        original(model_runner, name)

    def make(sample_tokens: Any) -> Any:
        @wraps(sample_tokens)
        def sample_with_kept_generators(*args: Any, **kwargs: Any) -> Any:
            batch = model_runner.input_batch
            generators, dropped = batch.generators, model_runner.discard_request_mask.np
            away = {
                index: generators.pop(index)
                for index in tuple(generators)
                if index < batch.num_reqs and dropped[index]
            }
            try:
                return sample_tokens(*args, **kwargs)
            finally:
                generators.update(away)

        return sample_with_kept_generators

    replace(model_runner, "sample_tokens", make)


def count_without_compiler() -> None:
    """Let PyTorch's operators of a CPU rank count how many tokens are as likely as one.

    Replaces: `sampler.batched_count_greater_than` of vllm.v1.sample.
    Why: torch compiles it at the first request for logprobs, with --enforce-eager too.  All
    requests wait for that, some 20 s; and where the node has no C++ compiler, or no room for what
    the compiler writes, the error ends the engine.
    Can go when: vLLM leaves it to PyTorch's operators on CPUs.
    """
    from vllm.v1.sample import sampler

    replace(sampler, "batched_count_greater_than", lambda stock: _as_likely)


def _as_likely(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Number of elements of each row of x [M, N] that are not below the row's value [M, 1]."""
    return (x >= values).sum(-1)


def share_samples(model_runner: Any) -> None:
    """Let tensor-parallel rank 0 decide what the ranks of a mixed group have sampled.

    Replaces: `GPUModelRunner._sample`.
    Why: every rank samples for itself (GPUModelRunner._sample) from the same logits, and feeds
    itself what it sampled; the random generators of a GPU and a CPU differ.
    Can go when: vLLM broadcasts sampled tokens inside a tensor-parallel group.
    """
    from vllm.distributed.parallel_state import get_tp_group

    def make(sample: Any) -> Any:
        def sample_and_share(*args: Any, **kwargs: Any) -> Any:
            output = sample(*args, **kwargs)
            output.sampled_token_ids = get_tp_group().broadcast(output.sampled_token_ids)
            return output

        return sample_and_share

    replace(model_runner, "_sample", make)


def leave_graphs_out_of_profile(model_runner: Any) -> None:
    """Keep a rank of a mixed group from capturing CUDA graphs while it measures its memory.

    Replaces: `GPUModelRunner.profile_cudagraph_memory`.
    Why: GPUModelRunner.profile_cudagraph_memory captures some for an estimate, each with
    collectives that CPU ranks know nothing of.
    Can go when: the estimate can be switched off; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 only
    leaves its result out.
    """
    original(model_runner, "profile_cudagraph_memory")
    model_runner.profile_cudagraph_memory = lambda: 0

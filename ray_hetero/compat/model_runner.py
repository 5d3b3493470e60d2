"""vLLM's model runner on the ranks of a mixed tensor-parallel group."""

from __future__ import annotations

from typing import Any

from ray_hetero.compat.patching import original, replace


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

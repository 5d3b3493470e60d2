"""vLLM's model runners in warm-up: the dummy runs that the executor's schedule is made of."""

from __future__ import annotations

import gc
from typing import Any

import torch


def measure_on_cpu(worker: Any) -> None:
    """Make a CPU rank's passes beside GPU ranks that measure their memory.

    Uses: `CPUModelRunner.profile_run`, `CPUModelRunner.warming_up_model`.
    """
    from vllm.config import CompilationMode

    if worker.vllm_config.compilation_config.mode == CompilationMode.NONE:
        worker.model_runner.profile_run()
    else:
        worker.model_runner.warming_up_model()


def run_ahead(worker: Any) -> None:
    """Make a rank's largest forward pass before its memory is measured, and keep nothing cached.

    It needs no other stage: a stage behind another one makes its own input.

    Uses: `GPUModelRunner._dummy_run`, `GPUModelRunner.max_num_tokens`,
    `Worker._scoped_allocator_max_split`, `Worker.randomize_dummy_inputs`,
    `CPUModelRunner.warming_up_model`.
    """
    from vllm.platforms import current_platform

    runner = worker.model_runner
    if not current_platform.is_cuda():
        runner.warming_up_model()
        return
    # As the measurement: workspaces grow in this pass, and must not pin what they leave.
    with worker._scoped_allocator_max_split(max_split_size_mb=20):
        runner._dummy_run(
            runner.max_num_tokens,
            is_profile=True,
            randomize_inputs=worker.randomize_dummy_inputs,
        )
    torch.accelerator.synchronize()
    gc.collect()
    torch.accelerator.empty_cache()


def run_forward(runner: Any, tokens: int) -> None:
    """Make one forward pass without attention metadata; the largest one compiles too, unless eager.

    Uses: `CPUModelRunner.warming_up_model`, `GPUModelRunner._dummy_run`,
    `GPUModelRunner.max_num_tokens`.
    """
    if tokens == runner.max_num_tokens:
        runner.warming_up_model()
    else:
        runner._dummy_run(tokens, is_profile=True, **without_attention(runner))


def without_attention(runner: Any) -> dict[str, bool]:
    """Options of `_dummy_run` for a pass without attention metadata.

    The V2 runner makes metadata unless told not to, of a KV cache that is not there yet.
    """
    return {"skip_attn": True} if runner.vllm_config.use_v2_model_runner else {}


def run_and_sample(runner: Any, requests: int) -> None:
    """Make one pass of so many one-token requests, and sample from it.

    Uses: `GPUModelRunner._dummy_run`, `GPUModelRunner._dummy_sampler_run`,
    `GPUModelRunner._dummy_pooler_run`, `GPUModelRunner.is_pooling_model`.
    """
    from vllm.config import CUDAGraphMode

    hidden, last_hidden = runner._dummy_run(
        num_tokens=requests, skip_eplb=True, cudagraph_runtime_mode=CUDAGraphMode.NONE
    )
    if runner.is_pooling_model:
        runner._dummy_pooler_run(hidden)
    else:
        runner._dummy_sampler_run(hidden_states=last_hidden)


def run_beside_capture(runner: Any, tokens: int) -> None:
    """Make the passes of a rank without graphs beside ranks that capture one.

    Uses: `GPUModelRunner._dummy_run`.
    """
    # A GPU rank makes a pass in which its kernels are compiled before the one it captures.
    # While it captures, a drafter makes one pass in the place of one for each draft token.
    for is_capturing in (False, True):
        runner._dummy_run(tokens, skip_eplb=True, is_graph_capturing=is_capturing)


def capture_graph(runner: Any, tokens: int) -> None:
    """Capture the CUDA graph of a step of so many tokens, on the current stream.

    Uses: `GPUModelRunner._warmup_and_capture`, `GPUModelRunner.cudagraph_dispatcher`,
    `CudagraphDispatcher.get_capture_descs`.
    """
    from vllm.config import CUDAGraphMode

    (graph,) = (
        graph
        for mode, graphs in runner.cudagraph_dispatcher.get_capture_descs()
        for graph in graphs
        if mode is CUDAGraphMode.PIECEWISE and graph.num_tokens == tokens
    )
    runner._warmup_and_capture(graph, cudagraph_runtime_mode=CUDAGraphMode.PIECEWISE, num_warmups=1)

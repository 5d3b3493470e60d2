"""vLLM's process groups: which class they have, and the backend of the world."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray_hetero.compat.patching import original


def use_groups(group_class: type) -> None:
    """Replace the group class of vllm.distributed.parallel_state, in a rank's process.

    Replaces: `parallel_state.GroupCoordinator`.
    Why: its groups all use the backend of the world, and NCCL cannot span a CPU rank.
    Can go when: init_model_parallel_group takes a backend per group.
    """
    from vllm.distributed import parallel_state

    original(parallel_state, "GroupCoordinator")
    parallel_state.GroupCoordinator = group_class


def use_gloo_world() -> str:
    """Make Gloo the backend of the world group on a GPU rank; answers the platform's own.

    Replaces: `Platform.dist_backend` of the process.
    Why: GPUWorker.init_device takes it from the platform, where it is NCCL.
    Can go when: the world's backend is an option.
    """
    from vllm.platforms import current_platform

    # Of the class: this may be asked twice.
    backend = str(original(type(current_platform), "dist_backend"))
    current_platform.dist_backend = "gloo"
    return backend


def use_stages(stages: Sequence[list[int]], pipelines: Sequence[list[int]]) -> None:
    """In a rank's process: make the model-parallel groups of stages of several sizes.

    Replaces: `parallel_state.initialize_model_parallel`, and the groups that it makes.
    Uses: `parallel_state.init_model_parallel_group`.
    Why: initialize_model_parallel folds the ranks into stages of one size.
    Can go when: it takes the ranks of each stage.

    Args:
        stages: ranks of each stage, in tensor-parallel order.
        pipelines: one rank of each stage, for each rank of the largest stage; of several that a
            rank is in, the last is its own.

    """
    from vllm.config import get_current_vllm_config
    from vllm.distributed import parallel_state

    original(parallel_state, "initialize_model_parallel")
    for name in ("_TP", "_ETP", "_DCP", "_PCP", "_PP", "_DP", "_EP"):
        original(parallel_state, name)
    make = original(parallel_state, "init_model_parallel_group")
    alone = [[rank] for ranks in stages for rank in ranks]

    def initialize_model_parallel(
        tensor_model_parallel_size: int = 1,
        pipeline_model_parallel_size: int = 1,
        prefill_context_model_parallel_size: int = 1,
        decode_context_model_parallel_size: int | None = 1,
        backend: str | None = None,
    ) -> None:
        assert prefill_context_model_parallel_size == 1
        assert decode_context_model_parallel_size in (None, 1)
        config = get_current_vllm_config()
        local_rank = parallel_state.get_world_group().local_rank

        def group(name: str, ranks: Sequence[list[int]], **options: Any) -> Any:
            return make(list(ranks), local_rank, backend or "gloo", group_name=name, **options)

        parallel_state._TP = group("tp", stages, use_message_queue_broadcaster=True)
        parallel_state._ETP = parallel_state._TP
        parallel_state._DCP = group("dcp", alone, use_message_queue_broadcaster=True)
        parallel_state._PCP = group("pcp", alone)
        parallel_state._PP = group("pp", pipelines)
        parallel_state._DP = group("dp", alone)
        if config.model_config is None or config.model_config.is_moe:
            use_all2all = config.parallel_config.use_all2all
            parallel_state._EP = group("ep", stages, use_all2all=use_all2all)

    parallel_state.initialize_model_parallel = initialize_model_parallel

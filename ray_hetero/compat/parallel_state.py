"""vLLM's process groups: which class they have, and the backend of the world."""

from __future__ import annotations

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

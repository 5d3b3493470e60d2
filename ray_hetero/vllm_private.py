"""Everything of vLLM that is not meant to be touched from outside, touched in one place.

Each patch stands alone: what is replaced, why, and when it can go.  A name that upstream has
renamed is an error when the patch is made, never a silent no-op.
"""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ray_hetero.errors import UnsupportedError

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from ray_hetero.world import Launch

LAUNCH_ATTRIBUTE = "_ray_hetero_launch"
BATCHES_ATTRIBUTE = "_ray_hetero_batches_in_flight"


def original(owner: Any, name: str) -> Any:
    """The object that a patch replaces.

    Raises:
        UnsupportedError: upstream renamed it.

    """
    try:
        return getattr(owner, name)
    except AttributeError:
        where = getattr(owner, "__qualname__", getattr(owner, "__name__", owner))
        raise UnsupportedError(
            f"ray_hetero does not work with this vLLM: {where}.{name} is gone. "
            "Install a supported version (`ray-hetero doctor` names them)."
        ) from None


def teach_backend_name(is_ours: Callable[[object], bool], prepare: Callable[[Any], Launch]) -> None:
    """Patch EngineArgs.create_engine_config to understand the name `ray_hetero`.

    Why: vLLM takes unknown backend names for dotted paths and refuses pipeline parallelism for
    them (EngineArgs._check_feature_supported), and an executor is handed the driver's finished
    VllmConfig, while ranks of the other kind need one built on their own platform.
    Can go when: executors can be registered by name, with their EngineArgs.

    Args:
        is_ours: whether a value of --distributed-executor-backend names this backend.
        prepare: called with the EngineArgs first; what it answers goes to the executor.

    """
    from vllm.engine.arg_utils import EngineArgs

    create = original(EngineArgs, "create_engine_config")
    if hasattr(create, "__ray_hetero__"):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self.distributed_executor_backend):
            return create(self, *args, **kwargs)
        launch = prepare(self)
        vllm_config = create(self, *args, **kwargs)
        setattr(vllm_config, LAUNCH_ATTRIBUTE, launch)
        return vllm_config

    create_engine_config.__ray_hetero__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def launch_of(vllm_config: VllmConfig) -> Launch:
    """What `teach_backend_name` attached to the driver's configuration.

    Raises:
        UnsupportedError: the plugin did not run in the process that built the configuration.

    """
    launch = getattr(vllm_config, LAUNCH_ATTRIBUTE, None)
    if launch is None:
        raise UnsupportedError(
            "the ray_hetero plugin was not loaded: VLLM_PLUGINS is "
            f"{os.environ.get('VLLM_PLUGINS')!r}; add ray_hetero to it or unset it"
        )
    return launch  # type: ignore[no-any-return]


def limit_batches_in_flight(vllm_config: VllmConfig, batches: int) -> None:
    """Set how many batches this engine keeps in the pipeline at once.

    Why: VllmConfig.max_concurrent_batches is one per stage.  Every batch in flight has a stage
    read all of its weights again; where one stage is slow and bound by memory, two half-full
    batches take twice as long as one full batch, and the other stage's time is not worth hiding.
    Can go when: the number is an option.
    """
    own_class = type(vllm_config)
    stock = original(own_class, "max_concurrent_batches")
    if not hasattr(stock.fget, "__ray_hetero__"):

        def max_concurrent_batches(self: Any) -> int:
            return getattr(self, BATCHES_ATTRIBUTE, None) or int(stock.fget(self))

        max_concurrent_batches.__ray_hetero__ = True  # type: ignore[attr-defined]
        own_class.max_concurrent_batches = property(max_concurrent_batches)
    setattr(vllm_config, BATCHES_ATTRIBUTE, batches)


def unlink_once_attached(queue: Any) -> None:
    """Remove a message queue's name from /dev/shm once every reader has mapped it.

    Why: ShmRingBuffer removes it when its creator is collected, which a killed process never
    does; mapped memory without a name goes away with the last process, however that one ends.
    Can go when: vLLM unlinks at attach time itself.
    """
    buffer = original(queue, "buffer")
    if buffer is not None and original(buffer, "is_creator"):
        buffer.is_creator = False
        original(buffer, "shared_memory").unlink()


def unlink_cpu_shared_memory(communicator: Any) -> None:
    """Remove a CPU group's shared-memory names once all its ranks have mapped them.

    Why: as for the message queues; _CPUSHMDistributed leaves them to a destructor.
    Can go when: vLLM unlinks at attach time itself.
    """
    shared = original(communicator, "dist_module")
    if name := getattr(shared, "group_name", None):
        # The barrier at the end of _init_cpu_shm has passed: every rank has its mapping.
        for path in Path("/dev/shm").glob(f"{glob.escape(name)}*"):  # noqa: S108
            path.unlink(missing_ok=True)


def bind_memory_to(numa_nodes: Sequence[int]) -> None:
    """Spread what a CPU rank allocates from its weights on over all NUMA nodes of its socket.

    Why: CPUWorker binds to the node of its first core only, which with sub-NUMA clustering is a
    part of the socket's memory and of its memory controllers.
    Can go when: CPUWorker binds to all nodes that its cores are on.
    """
    from vllm.v1.worker.cpu_worker import CPUWorker

    from placement.native import set_membind

    init_device = original(CPUWorker, "init_device")

    def init_device_and_bind(self: Any) -> None:
        init_device(self)
        set_membind(numa_nodes)

    CPUWorker.init_device = init_device_and_bind


def use_groups(group_class: type) -> None:
    """Replace the group class of vllm.distributed.parallel_state, in a rank's process.

    Why: its groups all use the backend of the world, and NCCL cannot span a CPU rank.
    Can go when: init_model_parallel_group takes a backend per group.
    """
    from vllm.distributed import parallel_state

    original(parallel_state, "GroupCoordinator")
    parallel_state.GroupCoordinator = group_class


def use_gloo_world() -> str:
    """Make Gloo the backend of the world group on a GPU rank; answers the platform's own.

    Why: GPUWorker.init_device takes it from the platform, where it is NCCL.
    Can go when: the world's backend is an option.
    """
    from vllm.platforms import current_platform

    backend = str(original(current_platform, "dist_backend"))
    current_platform.dist_backend = "gloo"
    return backend


def share_samples(model_runner: Any) -> None:
    """Let tensor-parallel rank 0 decide what the ranks of a mixed group have sampled.

    Why: every rank samples for itself (GPUModelRunner._sample) from the same logits, and feeds
    itself what it sampled; the random generators of a GPU and a CPU differ.
    Can go when: vLLM broadcasts sampled tokens inside a tensor-parallel group.
    """
    from vllm.distributed.parallel_state import get_tp_group

    sample = original(model_runner, "_sample")

    def sample_and_share(*args: Any, **kwargs: Any) -> Any:
        output = sample(*args, **kwargs)
        output.sampled_token_ids = get_tp_group().broadcast(output.sampled_token_ids)
        return output

    model_runner._sample = sample_and_share

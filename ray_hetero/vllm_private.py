"""Everything of vLLM that is not meant to be touched from outside, touched in one place.

Each patch stands alone: what is replaced, why, and when it can go.  A name that upstream has
renamed is an error when the patch is made, never a silent no-op.
"""

from __future__ import annotations

import atexit
import functools
import glob
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from types import MethodType
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

    from ray_hetero.stand_in import check_own_device

    create = original(EngineArgs, "create_engine_config")
    if hasattr(create, "__ray_hetero__"):
        return

    @functools.wraps(create)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not is_ours(self.distributed_executor_backend):
            check_own_device()
            return create(self, *args, **kwargs)
        launch = prepare(self)
        vllm_config = create(self, *args, **kwargs)
        setattr(vllm_config, LAUNCH_ATTRIBUTE, launch)
        return vllm_config

    create_engine_config.__ray_hetero__ = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def ask_when_a_step_fails(vllm_config: VllmConfig, sentinel: type) -> None:
    """In the engine's process: let its loop ask our sentinel what to do about an error.

    Why: fault_tolerant_wrapper asks one, but only under --enable-fault-tolerance, which is for
    data parallelism behind an external load balancer; and vLLM's own gives up once an executor
    has failed.
    Can go when: an executor can bring its own sentinel.
    """
    from vllm.v1.engine import core

    original(core, "EngineCoreSentinel")
    core.EngineCoreSentinel = sentinel
    original(vllm_config.parallel_config, "enable_fault_tolerance")
    vllm_config.parallel_config.enable_fault_tolerance = True


def turn_away_while_unhealthy() -> None:
    """In the API server: answer 503 while the engine has told it that it is not healthy.

    Why: AsyncLLM keeps the status that an engine's sentinel pushes, and shows it on
    /fault_tolerance/status only; requests would wait, and those in flight end as internal errors.
    Can go when: check_admission and check_health look at the status.
    """
    from http import HTTPStatus

    from vllm.entrypoints.generate.base.serving import GenerateBaseServing
    from vllm.exceptions import GracefulHTTPError, RetryableRequestError
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.exceptions import EngineDeadError

    admit = original(AsyncLLM, "check_admission")
    check = original(AsyncLLM, "check_health")
    raise_if_error = original(GenerateBaseServing, "_raise_if_error")
    if hasattr(admit, "__ray_hetero__"):
        return

    @functools.wraps(admit)
    def check_admission(self: Any, *args: Any, **kwargs: Any) -> None:
        if fault := _fault_of(self):
            raise GracefulHTTPError(fault, HTTPStatus.SERVICE_UNAVAILABLE)
        admit(self, *args, **kwargs)

    @functools.wraps(check)
    async def check_health(self: Any) -> None:
        if _fault_of(self):
            # What /health turns into a 503.
            raise EngineDeadError
        await check(self)

    @functools.wraps(raise_if_error)
    def _raise_if_error(self: Any, finish_reason: str | None, request_id: str) -> None:
        if finish_reason == "error" and (fault := _fault_of(self.engine_client)):
            raise RetryableRequestError(fault)
        raise_if_error(self, finish_reason, request_id)

    check_admission.__ray_hetero__ = True  # type: ignore[attr-defined]
    AsyncLLM.check_admission = check_admission
    AsyncLLM.check_health = check_health
    GenerateBaseServing._raise_if_error = _raise_if_error


def _fault_of(engine: Any) -> str | None:
    """What the engine has told to be wrong with it."""
    statuses: dict[int, dict[str, str]] = getattr(engine.engine_core, "_engine_status", {})
    return next((s["fault_info"] for s in statuses.values() if "fault_info" in s), None)


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


def end_engines_at_exit(killed: Callable[[int, int], None]) -> None:
    """Shut this process's engines down when the interpreter ends, while Ray is still there.

    Why: vLLM leaves that to finalizers.  They run after Ray's own exit handler, which stops a
    cluster that this process has started; the engine then reports that its ranks have died.  And
    to vLLM's API server an engine process that was killed is an ordinary end.
    Can go when: vLLM's clients have an exit handler of their own, and say what an engine died of.

    Args:
        killed: called before, for each engine process that a signal has ended: its id, the signal.

    """
    from vllm.v1.engine.core_client import EngineCoreClient

    clients: weakref.WeakSet[Any] = weakref.WeakSet()
    managers: list[Any] = []
    for name in ("make_client", "make_async_mp_client"):
        make = original(EngineCoreClient, name)
        if hasattr(make, "__ray_hetero__"):
            return
        setattr(EngineCoreClient, name, staticmethod(_remembering(make, clients, managers)))
    # Handlers run in the reverse order of their registration, and Ray is imported already.
    atexit.register(_shut_down, clients)
    atexit.register(_tell_killed, managers, killed)


def _remembering(
    make: Callable[..., Any], clients: weakref.WeakSet[Any], managers: list[Any]
) -> Callable[..., Any]:
    @functools.wraps(make)
    def make_and_remember(*args: Any, **kwargs: Any) -> Any:
        client = make(*args, **kwargs)
        clients.add(client)
        # An engine in this process has none.
        resources = getattr(client, "resources", None)
        if manager := getattr(resources, "engine_manager", None):
            managers.append(manager)
        return client

    make_and_remember.__ray_hetero__ = True  # type: ignore[attr-defined]
    return make_and_remember


def _tell_killed(managers: Sequence[Any], killed: Callable[[int, int], None]) -> None:
    for manager in managers:
        # The name of a process that has ended without being asked to.
        failed = original(manager, "failed_proc_name")
        for process in getattr(manager, "processes", ()):
            if process.name == failed and process.pid and (process.exitcode or 0) < 0:
                killed(process.pid, -process.exitcode)


def _shut_down(clients: weakref.WeakSet[Any]) -> None:
    for client in list(clients):
        client.shutdown()


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


def answer_untraced(process: Any) -> None:
    """In a rank's process: call what each answer passes through without Ray's wrapping.

    Why: Ray wraps every method of an actor's class, inherited ones too, to resume traces of remote
    calls; these are called here, three for each call of the driver, and mp has no such wrapping.
    Can go when: Ray wraps only what is called from outside.

    Args:
        process: an actor of a class below WorkerProc.

    """
    from vllm.v1.executor.multiproc_executor import WorkerProc

    for name in ("_execute_worker_rpc", "handle_output", "enqueue_output"):
        setattr(process, name, MethodType(original(WorkerProc, name), process))


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


def unlink_sockets(queue: Any) -> None:
    """Remove the names of a message queue's ZeroMQ sockets; to be called by its writer once every
    reader has connected to both.

    Why: as for the ring buffer: ZeroMQ removes them when they are closed, which in a killed process
    they never are.  Readers connect to the second one in the background, so only a message that a
    reader has sent since tells that it has.
    Can go when: vLLM removes them at attach time itself.
    """
    handle = original(queue, "handle")
    for name in ("local_subscribe_addr", "local_notify_addr"):
        if address := original(handle, name):
            Path(address.removeprefix("ipc://")).unlink(missing_ok=True)


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


def leave_graphs_out_of_profile(model_runner: Any) -> None:
    """Keep a rank of a mixed group from capturing CUDA graphs while it measures its memory.

    Why: GPUModelRunner.profile_cudagraph_memory captures some for an estimate, each with
    collectives that CPU ranks know nothing of.
    Can go when: the estimate can be switched off; VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0 only
    leaves its result out.
    """
    original(model_runner, "profile_cudagraph_memory")
    model_runner.profile_cudagraph_memory = lambda: 0


def use_linear(
    kernel: Callable[..., Any],
    suits: Callable[[Any], bool],
    packed_layer: Callable[[Any, Any], Any] = lambda layer, packed: packed,
) -> None:
    """Compute a CPU rank's unquantised linear layers with another kernel.

    Why: dispatch_cpu_unquantized_gemm, called once a layer when its weights are loaded, chooses
    among vLLM's kernels only.
    Can go when: CPU linear kernels can be registered, as quantised ones can.

    Args:
        kernel: (x [..., K], packed weight [N, K], bias [N] in float32 or None) -> [..., N].
        suits: whether the kernel takes a weight; vLLM's choice is left for the others.
        packed_layer: given each layer with its packed weight, its bias being float32 by then; gives
            the weight that the kernel is to be called with.

    """
    import torch
    from vllm.model_executor.layers import utils

    from ray_hetero.weight_formats.base import pack

    choose = original(utils, "dispatch_cpu_unquantized_gemm")

    def dispatch(layer: Any, remove_weight: bool) -> None:
        if not suits(layer.weight):
            choose(layer, remove_weight)
            return
        packed = pack(layer.weight.data)
        if getattr(layer, "bias", None) is not None:
            layer.bias.data = layer.bias.to(torch.float32)
        packed = packed_layer(layer, packed)
        layer.cpu_linear = lambda x, weight, bias: kernel(x, packed, bias)
        if remove_weight:
            layer.weight = torch.nn.Parameter(layer.weight.new_empty(0), requires_grad=False)

    utils.dispatch_cpu_unquantized_gemm = dispatch


def refuse_reload(reason: str) -> None:
    """Have a rank refuse to load weights anew, before it has touched any.

    Why: reload_weights loads into a model's parameters, of which the layers of this rank have made
    copies of their own: old and new weights would be mixed.
    Can go when: layers are told that their weights were loaded anew.

    Args:
        reason: why not, and what to do.

    """
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from ray_hetero.errors import UnsupportedError

    original(GPUModelRunner, "reload_weights")

    def reload_weights(self: Any, *args: Any, **kwargs: Any) -> None:
        raise UnsupportedError(reason)

    GPUModelRunner.reload_weights = reload_weights


def keep_embeddings_once(*, has_tied_output: bool) -> None:
    """Let a CPU rank hold one copy of an embedding, and one of an output matrix.

    Why: UnquantizedEmbeddingMethod packs every embedding for multiplication and keeps the weights
    as they were too; an embedding is only looked up in, an output matrix only multiplied with.
    Can go when: it packs output matrices only, and keeps what is shared.

    Args:
        has_tied_output: whether this rank multiplies with the matrix that it looks up in.

    """
    import torch
    from vllm.model_executor.layers import utils
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        UnquantizedEmbeddingMethod,
    )

    stock = original(UnquantizedEmbeddingMethod, "process_weights_after_loading")
    original(utils, "dispatch_cpu_unquantized_gemm")

    def process_weights_after_loading(self: Any, layer: Any) -> None:
        if has_tied_output:
            stock(self, layer)
        elif isinstance(layer, ParallelLMHead):
            utils.dispatch_cpu_unquantized_gemm(layer, remove_weight=True)
        else:
            layer.cpu_linear = torch.nn.functional.linear

    UnquantizedEmbeddingMethod.process_weights_after_loading = process_weights_after_loading

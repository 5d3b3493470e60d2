"""What this package touches of the installed vLLM is there, with signatures that fit.

When a new vLLM breaks one of these, the module named in the test is the one to change.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import signal
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.tracing.tracing_helper import _inject_tracing_into_class
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, ShmRingBuffer
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.engine.core_client import AsyncMPClient, EngineCoreClient, InprocClient, MPClient
from vllm.v1.executor.multiproc_executor import FutureWrapper, MultiprocExecutor, WorkerProc
from vllm.v1.executor.ray_executor_v2 import RayWorkerProc
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_model_runner import CPUModelRunner
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ray_hetero import plugin, vllm_private
from ray_hetero.demo_model import DemoShape, write_demo_model
from ray_hetero.errors import UnsupportedError
from ray_hetero.executor import HeteroExecutor
from ray_hetero.groups import HeteroGroup, HostCommunicator
from ray_hetero.guarded_executor import GuardedExecutor
from ray_hetero.rank_config import SHARED_FIELDS, build_rank_config, fingerprint, shared_settings
from ray_hetero.rank_process import RankProcess
from ray_hetero.rank_queues import RequestQueue
from ray_hetero.recovery import RankRecovery
from ray_hetero.world import SharedSettings

PACKAGE = Path(vllm_private.__file__).parent

OVERRIDES: dict[type, set[str]] = {
    HeteroExecutor: {
        "_init_executor", "get_supported_kv_cache_layouts", "determine_available_memory",
        "compile_or_warm_up_model", "shutdown",
    },
    GuardedExecutor: {"collective_rpc"},
    RankProcess: {"run", "worker_busy_loop"},
    RankRecovery: {"on_fault"},
    RequestQueue: {"enqueue"},
    HeteroGroup: {"__init__", "broadcast", "isend_tensor_dict", "irecv_tensor_dict"},
    HostCommunicator: {
        "__init__", "all_reduce", "all_gather", "gather", "reduce_scatter", "broadcast", "send",
        "recv",
    },
}  # fmt: skip
"""Methods that stand for one of vLLM's; a renamed one would silently never be called."""
REPLACED = {RankProcess: {"__init__"}}
"""Methods of our own that only share the name."""


def _own_methods(cls: type) -> dict[str, Any]:
    return {
        name: member
        for name, member in vars(cls).items()
        if inspect.isfunction(member) or isinstance(member, staticmethod)
    }


def _inherited(cls: type, name: str) -> Any:
    return next((vars(base)[name] for base in cls.__mro__[1:-1] if name in vars(base)), None)


@pytest.mark.parametrize("cls", OVERRIDES, ids=lambda cls: cls.__name__)
def test_exactly_the_listed_methods_override_one_of_vllms(cls: type) -> None:
    overriding = {name for name in _own_methods(cls) if _inherited(cls, name) is not None}
    assert overriding - REPLACED.get(cls, set()) == OVERRIDES[cls]


@pytest.mark.parametrize(
    ("cls", "name"),
    [(cls, name) for cls, names in OVERRIDES.items() for name in sorted(names)],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_overrides_take_every_call_that_vllm_makes(cls: type, name: str) -> None:
    theirs = inspect.signature(_inherited(cls, name)).parameters
    ours = inspect.signature(vars(cls)[name]).parameters
    if any(p.kind is p.VAR_KEYWORD for p in ours.values()):
        return
    optional = {n: p.default is not p.empty for n, p in theirs.items()}
    assert list(ours)[: len(theirs)] == list(theirs)
    for parameter, was_optional in optional.items():
        assert (ours[parameter].default is not inspect.Parameter.empty) >= was_optional, parameter
    extra = [*ours.values()][len(theirs) :]
    assert all(parameter.default is not inspect.Parameter.empty for parameter in extra)


def _imports_of_vllm() -> Iterator[tuple[str, str, str]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        for found in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(found, ast.ImportFrom) and str(found.module).split(".")[0] == "vllm":
                yield from ((path.stem, str(found.module), alias.name) for alias in found.names)


@pytest.mark.parametrize(("where", "module", "name"), sorted(set(_imports_of_vllm())))
def test_every_name_that_is_imported_exists(where: str, module: str, name: str) -> None:
    assert hasattr(importlib.import_module(module), name), f"{where}.py imports it"


PRIVATE: list[tuple[str, type, str]] = [
    ("warmup_actions", CPUModelRunner, "profile_run"),
    ("warmup_actions", CPUModelRunner, "warming_up_model"),
    ("warmup_actions", GPUModelRunner, "_dummy_run"),
    ("warmup_actions", GPUModelRunner, "_dummy_sampler_run"),
    ("warmup_actions", GPUModelRunner, "_dummy_pooler_run"),
    ("warmup_actions", CPUWorker, "compile_or_warm_up_model"),
    ("warmup_actions", CPUWorker, "determine_available_memory"),
    ("warmup_actions", CPUWorker, "get_kv_cache_spec"),
    ("vllm_private", CPUWorker, "init_device"),
    ("vllm_private", GPUModelRunner, "_sample"),
    ("vllm_private", GPUModelRunner, "reload_weights"),
    ("vllm_private", EngineArgs, "create_engine_config"),
    ("vllm_private", EngineCoreClient, "make_client"),
    ("vllm_private", EngineCoreClient, "make_async_mp_client"),
    ("vllm_private", MPClient, "shutdown"),
    ("vllm_private", InprocClient, "shutdown"),
    ("vllm_private", UnquantizedEmbeddingMethod, "process_weights_after_loading"),
    ("vllm_private", AsyncLLM, "check_admission"),
    ("vllm_private", AsyncLLM, "check_health"),
    ("vllm_private", GenerateBaseServing, "_raise_if_error"),
    ("recovery", EngineCoreProc, "_send_error_outputs_to_client"),
    ("recovery", Scheduler, "finish_requests"),
    ("recovery", Scheduler, "reset_prefix_cache"),
    ("recovery", Scheduler, "reset_encoder_cache"),
    ("rank_process", RankProcess, "worker_busy_loop"),
    ("rank_process", RankProcess, "_execute_worker_rpc"),
    ("rank_process", RankProcess, "create_dist_init_method"),
    ("rank_process", RankProcess, "get_node_and_physical_gpu_ids"),
    ("rank_process", RankProcess, "wait_for_init"),
    ("executor", HeteroExecutor, "_get_output_rank"),
    ("executor", HeteroExecutor, "_get_parallel_sizes"),
]


@pytest.mark.parametrize(("where", "owner", "name"), PRIVATE)
def test_private_methods_exist(where: str, owner: type, name: str) -> None:
    assert callable(getattr(owner, name, None)), f"{where}.py calls it"


ASSIGNED: list[tuple[str, type, str]] = [
    ("warmup_actions", GPUModelRunner, "self.max_num_tokens = "),
    ("warmup_actions", GPUModelRunner, "self.is_pooling_model = "),
    ("warmup_actions", GPUModelRunner, "self.model_config = "),
    ("warmup_actions", GPUModelRunner, "self.device = "),
    ("vllm_private", MessageQueue, "self.buffer = "),
    ("vllm_private", ShmRingBuffer, "self.is_creator = "),
    ("vllm_private", ShmRingBuffer, "self.shared_memory = "),
    ("vllm_private", CpuCommunicator, "self.dist_module = "),
    ("vllm_private", AsyncMPClient, "self._engine_status = "),
    ("vllm_private", EngineCoreProc, "self.enable_fault_tolerance = "),
    ("vllm_private", EngineCoreProc, "self.ft_sentinel = "),
    ("recovery", EngineCoreProc, "self.input_queue = "),
    ("recovery", EngineCoreProc, "self.output_queue = "),
    ("recovery", EngineCoreProc, "self.addresses = "),
    ("recovery", EngineCore, "self.batch_queue = "),
]


@pytest.mark.parametrize(("where", "owner", "text"), ASSIGNED)
def test_private_attributes_are_assigned(where: str, owner: type, text: str) -> None:
    named = text.removesuffix(" = ")
    assigned = {
        ast.unparse(target)
        for found in ast.walk(ast.parse(inspect.getsource(owner)))
        for target in (
            found.targets if isinstance(found, ast.Assign)
            else [found.target] if isinstance(found, ast.AnnAssign) else []
        )
    }  # fmt: skip
    assert named in assigned, f"{where}.py reads it"


def test_a_call_of_the_ranks_says_the_same_as_vllms() -> None:
    asked = inspect.getsource(MultiprocExecutor.collective_rpc)
    assert "rpc_broadcast_mq.enqueue((send_method, args, kwargs, output_rank))" in asked
    assert "status, result = mq.dequeue(" in asked
    assert "aggregate(outputs, output_rank=rank)" in asked
    assert list(inspect.signature(FutureWrapper).parameters)[:2] == [
        "futures_queue",
        "get_response",
    ]
    taken = inspect.getsource(WorkerProc._execute_worker_rpc)
    assert "method, args, kwargs, output_rank = rpc_request" in taken
    assert "cloudpickle.loads(method)" in taken


def test_a_seed_takes_the_number_of_the_engine() -> None:
    assert list(inspect.signature(set_random_seed).parameters) == ["seed", "data_parallel_index"]


def test_sampled_tokens_can_be_shared() -> None:
    names = [field.name for field in dataclasses.fields(SamplerOutput)]
    assert "sampled_token_ids" in names


def test_the_creator_of_a_ring_buffer_unlinks_it_once() -> None:
    import torch  # noqa: F401  (the ring buffer maps its memory as a tensor)

    queue = MessageQueue(n_reader=1, n_local_reader=1)
    path = Path("/dev/shm") / queue.buffer.shared_memory.name
    assert path.exists()
    vllm_private.unlink_once_attached(queue)
    assert not path.exists()
    sockets = [
        Path(address.removeprefix("ipc://"))
        for address in (queue.handle.local_subscribe_addr, queue.handle.local_notify_addr)
    ]
    assert all(socket.is_socket() for socket in sockets)
    vllm_private.unlink_sockets(queue)
    vllm_private.unlink_sockets(queue)
    assert not any(socket.exists() for socket in sockets)
    # The second call, and the collection of the queue, find nothing to do and say nothing.
    queue.buffer.is_creator = False
    queue.shutdown()


def test_answers_do_not_pass_through_rays_tracing() -> None:
    class Actor(RayWorkerProc):  # type: ignore[misc]
        pass

    _inject_tracing_into_class(Actor)
    process, frames = Actor.__new__(Actor), []

    def enqueue(answer: Any) -> None:
        assert answer == (WorkerProc.ResponseStatus.SUCCESS, "well")
        frames.append([frame.function for frame in inspect.stack()])

    process.rank, process.use_async_scheduling = 0, False
    process.worker = SimpleNamespace(check_health=lambda: "well")
    process.worker_response_mq = SimpleNamespace(enqueue=enqueue)
    process._execute_worker_rpc(("check_health", (), {}, None))
    vllm_private.answer_untraced(process)
    process._execute_worker_rpc(("check_health", (), {}, None))
    traced, untraced = frames
    assert traced.count("_resume_span") == 3
    assert "_resume_span" not in untraced


def test_a_name_that_upstream_renamed_is_told() -> None:
    with pytest.raises(UnsupportedError, match=r"does not work with this vLLM: MessageQueue.gone"):
        vllm_private.original(MessageQueue, "gone")


def test_the_patch_of_the_engine_arguments_is_made_once() -> None:
    vllm_private.teach_backend_name(plugin.is_ours, plugin.prepare)
    once = EngineArgs.create_engine_config
    vllm_private.teach_backend_name(plugin.is_ours, plugin.prepare)
    assert EngineArgs.create_engine_config is once
    assert once.__wrapped__ is not once
    assert inspect.signature(once) == inspect.signature(once.__wrapped__)


def test_engines_that_are_left_are_shut_down_at_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    def process(name: str, exitcode: int | None) -> SimpleNamespace:
        return SimpleNamespace(name=name, pid=40, exitcode=exitcode)

    class Client:
        is_running = True

        def __init__(self) -> None:
            processes = [process("well", None), process("ill", -signal.SIGBUS)]
            manager = SimpleNamespace(failed_proc_name="ill", processes=processes)
            self.resources = SimpleNamespace(engine_manager=manager)

        def shutdown(self) -> None:
            self.is_running = False

    at_exit: list[tuple[Any, ...]] = []
    for name in ("make_client", "make_async_mp_client"):
        monkeypatch.setattr(EngineCoreClient, name, staticmethod(lambda number: Client()))
    monkeypatch.setattr(vllm_private.atexit, "register", lambda *call: at_exit.append(call))
    killed: list[tuple[int, int]] = []
    for _ in range(2):
        vllm_private.end_engines_at_exit(lambda pid, number: killed.append((pid, number)))
    left, dropped = EngineCoreClient.make_client(1), EngineCoreClient.make_async_mp_client(2)
    (function, clients), (tell, managers, what) = at_exit
    managers[1].failed_proc_name = None
    tell(managers, what)
    assert killed == [(40, signal.SIGBUS)]
    assert len(clients) == 2
    del dropped
    function(clients)
    assert not left.is_running
    assert list(clients) == [left]


@pytest.fixture
def from_a_launcher(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend that a launcher has chosen, for which ours stands in."""
    monkeypatch.setenv(plugin.INSTEAD_OF, "mp")
    return "mp"


def test_a_launchers_backend_can_stand_for_ours(
    arguments: EngineArgs, from_a_launcher: str
) -> None:
    assert not plugin.is_ours("ray")
    assert not plugin.is_ours(None)
    vllm_private.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = from_a_launcher
    config = arguments.create_engine_config()
    assert config.parallel_config.distributed_executor_backend is HeteroExecutor


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama")
    return write_demo_model(directory, shape=DemoShape(layers=2, hidden=64, heads=2))


@pytest.fixture
def arguments(model: Path) -> EngineArgs:
    return EngineArgs(model=str(model), pipeline_parallel_size=2, max_model_len=128)


def test_the_backends_name_becomes_a_class_and_the_arguments_travel(arguments: EngineArgs) -> None:
    vllm_private.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.additional_config = {"ray_hetero": {"layers": [1, 1]}}
    config = arguments.create_engine_config()
    assert config.parallel_config.distributed_executor_backend is HeteroExecutor
    launch = vllm_private.launch_of(config)
    assert launch.config.layers == [1, 1]
    assert launch.ray_address is None
    # What the ranks build theirs from is what the user wrote.
    assert launch.engine_args.distributed_executor_backend == "ray_hetero"


def test_other_backends_are_left_alone(model: Path) -> None:
    vllm_private.teach_backend_name(plugin.is_ours, plugin.prepare)
    config = EngineArgs(model=str(model), max_model_len=128).create_engine_config()
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS"):
        vllm_private.launch_of(config)


def test_every_shared_field_exists(arguments: EngineArgs) -> None:
    arguments.distributed_executor_backend = "mp"
    config = arguments.create_engine_config()
    assert set(fingerprint(0, config, ()).fields) == set(SHARED_FIELDS)
    for path in SHARED_FIELDS:
        reduce(getattr, path.split("."), config)
    shared = shared_settings(config, has_cpu=True)
    assert shared.max_model_len == 128
    assert {name for name, _ in shared.data_parallel} >= {"data_parallel_size"}


def test_a_rank_takes_over_what_is_shared(arguments: EngineArgs) -> None:
    from worlds import world

    from ray_hetero.world import Launch, RankLaunch

    vllm_private.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.max_num_seqs = 7
    driver = arguments.create_engine_config()
    shared: SharedSettings = shared_settings(driver, has_cpu=True)
    there = world("c", "c", layers=1)
    launch: Launch = vllm_private.launch_of(driver)
    ranks = [
        build_rank_config(RankLaunch(there, seat, launch, shared, (0,), (), "1,1"))
        for seat in there.seats
    ]
    prints = [fingerprint(rank, config, ()) for rank, config in enumerate(ranks)]
    assert prints[0].fields == prints[1].fields == fingerprint(9, driver, ()).fields
    assert prints[0].fields["scheduler_config.max_num_seqs"] == "7"

"""What this package changes of vLLM's engines fits: arguments, configuration, processes."""

from __future__ import annotations

import inspect
import os
import pickle
import signal
import weakref
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zmq
from vllm import envs
from vllm.config import ModelConfig, VllmConfig
from vllm.config import vllm as vllm_config_module
from vllm.engine.arg_utils import EngineArgs
from vllm.entrypoints.launchers.api_server import entry as api_server
from vllm.v1.engine import utils as engine_utils
from vllm.v1.engine.core_client import EngineCoreClient
from worlds import layout, world

from ray_hetero import plugin
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat import patching
from ray_hetero.compat.engine import engine_args, engine_environment, engine_processes
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import UnsupportedError
from ray_hetero.executor.hetero_executor import HeteroExecutor
from ray_hetero.worker.rank_config import (
    SHARED_FIELDS,
    build_rank_config,
    fingerprint,
    shared_settings,
)
from ray_hetero.world import SharedSettings


def test_the_patch_of_the_engine_arguments_is_made_once() -> None:
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    once = EngineArgs.create_engine_config
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
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
        monkeypatch.setattr(EngineCoreClient, name, staticmethod(lambda vllm_config: Client()))
    monkeypatch.setattr(engine_processes.atexit, "register", lambda *call: at_exit.append(call))
    ended: list[tuple[int, int]] = []
    for _ in range(2):
        engine_processes.end_engines_at_exit(lambda pid, status: ended.append((pid, status)))
    left, dropped = EngineCoreClient.make_client(1), EngineCoreClient.make_async_mp_client(2)
    (function, clients), (tell, managers, what) = at_exit
    managers[1].failed_proc_name = None
    tell(managers, what)
    assert ended == [(40, -signal.SIGBUS)]
    # As Ray ends a process whose cluster has lost its head.
    managers[0].processes[1].exitcode = 1
    tell(managers, what)
    assert ended[1:] == [(40, 1)]
    assert len(clients) == 2
    del dropped
    function(clients)
    assert not left.is_running
    assert list(clients) == [left]


def test_an_engine_of_ours_that_is_up_gets_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float | None] = []
    asked = ["handshake_socket", "core_engines", "parallel_config", "coordinated_dp",
             "cache_config", "launch"]  # fmt: skip
    wait_for_startup = engine_utils.wait_for_engine_startup
    assert list(inspect.signature(inspect.unwrap(wait_for_startup)).parameters) == asked

    finalised: list[dict[str, float]] = []
    upstream = inspect.getsource(engine_utils.CoreEngineProcManager.__init__)
    assert "self._finalizer = weakref.finalize(self, shutdown, self.processes)" in upstream
    assert list(inspect.signature(engine_utils.shutdown).parameters) == ["procs", "timeout"]

    class Manager:
        def __init__(self) -> None:
            self._finalizer = weakref.finalize(
                self, lambda processes, **given: finalised.append(given), ["process"]
            )

        def shutdown(self, timeout: float | None = None) -> None:
            limits.append(timeout)

    monkeypatch.setattr(engine_utils, "CoreEngineProcManager", Manager)
    monkeypatch.setattr(engine_utils, "wait_for_engine_startup", lambda *args: "up")
    for _ in range(2):
        engine_processes.wait_for_engines_to_end(30)
    for backend in (HeteroExecutor, "mp"):
        manager = Manager()
        manager.shutdown()
        config = SimpleNamespace(distributed_executor_backend=backend)
        launch = SimpleNamespace(engine_manager=manager)
        answer = engine_utils.wait_for_engine_startup(None, [], config, False, None, launch)
        assert answer == "up"
        for given in (None, 0, 5):
            manager.shutdown(timeout=given)
    assert limits == [None, 30, 30, 5, None, None, 0, 5]
    del manager, launch
    assert finalised == [{"timeout": 30}, {}]


def test_who_waits_for_an_engine_that_starts_can_be_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Another test of this process may have prepared an engine.
    found = engine_utils.zmq_socket_ctx
    monkeypatch.setattr(engine_utils, "zmq_socket_ctx", getattr(found, patching.STOCK, found))

    def wait(*said: str) -> str:
        with engine_utils.zmq_socket_ctx("inproc://here", zmq.PULL, bind=True) as socket:
            assert socket.poll(0) == 0
            raise KeyboardInterrupt(*said)
        return "nobody has heard"

    assert wait() == "nobody has heard", "vLLM lets it through: the patch can go"
    for _ in range(2):
        engine_processes.end_when_asked_during_start()
        with pytest.raises(KeyboardInterrupt):
            wait()
        with pytest.raises(SystemExit) as ended:
            wait("terminated")
        assert ended.value.code == 0
    assert 'raise KeyboardInterrupt("terminated")' in inspect.getsource(api_server.run_server)
    assert "with zmq_socket_ctx(" in inspect.getsource(engine_utils.launch_core_engines)
    with engine_utils.zmq_socket_ctx("inproc://here", zmq.PULL, bind=True) as socket:
        assert not socket.closed
    assert socket.closed


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
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
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
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.additional_config = {"ray_hetero": {"layers": [1, 1]}}
    config = arguments.create_engine_config()
    assert config.parallel_config.distributed_executor_backend is HeteroExecutor
    spec = engine_args.spec_of(config)
    assert spec.config.layers == [1, 1]
    assert spec.ray_address is None
    # What the ranks build theirs from is what the user wrote.
    assert spec.engine_args.distributed_executor_backend == "ray_hetero"


RUNNER = "VLLM_USE_V2_MODEL_RUNNER"


@pytest.fixture
def has_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which vLLM takes its second model runner where nobody says otherwise."""
    monkeypatch.setattr(vllm_config_module, "HAS_TRITON", True)


def test_an_engine_after_one_of_ours_has_the_model_runner_that_it_would_have_had(
    arguments: EngineArgs, has_triton: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    stock = EngineArgs(model=arguments.model, max_model_len=128)
    assert stock.create_engine_config().use_v2_model_runner
    arguments.distributed_executor_backend = "ray_hetero"
    ours = arguments.create_engine_config()
    # Until the engine's processes have inherited it.
    assert os.environ[RUNNER] == "0"

    class Client:
        def __init__(self, vllm_config: VllmConfig) -> None:
            self.inherited = os.environ.get(RUNNER)

    for make in ("make_client", "make_async_mp_client"):
        monkeypatch.setattr(EngineCoreClient, make, staticmethod(Client))
    monkeypatch.setattr(engine_processes.atexit, "register", lambda *call: None)
    engine_processes.end_engines_at_exit(lambda pid, number: None)
    assert EngineCoreClient.make_client(ours).inherited == "0"
    assert RUNNER not in os.environ
    # The front end of the first engine still asks, and must hear the same.
    assert not ours.use_v2_model_runner
    assert not pickle.loads(pickle.dumps(ours)).use_v2_model_runner  # noqa: S301
    assert stock.create_engine_config().use_v2_model_runner


@pytest.mark.parametrize("make", ["make_client", "make_async_mp_client"])
def test_clients_are_made_with_the_configuration_of_their_engine(make: str) -> None:
    # By this name an engine's own Ray is started beside its process.
    made = inspect.unwrap(getattr(EngineCoreClient, make))
    assert "vllm_config" in inspect.signature(made).parameters


def test_an_engine_that_was_configured_only_leaves_nothing(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.create_engine_config()
    assert os.environ[RUNNER] == "0"
    EngineArgs(model=arguments.model, max_model_len=128).create_engine_config()
    assert RUNNER not in os.environ


def test_a_variable_of_the_users_gets_its_value_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "fork")
    monkeypatch.delenv(RUNNER, raising=False)
    for value in ("spawn", "forkserver"):
        engine_environment.put("VLLM_WORKER_MULTIPROC_METHOD", value)
    engine_environment.put(RUNNER, "0")
    engine_environment.take_back()
    engine_environment.take_back()
    assert os.environ["VLLM_WORKER_MULTIPROC_METHOD"] == "fork"
    assert RUNNER not in os.environ


def test_a_preparation_that_fails_leaves_nothing(
    arguments: EngineArgs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.max_model_len = 1 << 30
    with pytest.raises(ValueError, match="max_model_len"):
        arguments.create_engine_config()
    assert RUNNER not in os.environ


def test_what_vllm_remembers_of_the_environment_is_taken_back_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv(RUNNER, raising=False)
    engine_environment.put(RUNNER, "0")
    envs.enable_envs_cache()
    try:
        assert envs.VLLM_USE_V2_MODEL_RUNNER is False
        engine_environment.take_back()
        assert envs.VLLM_USE_V2_MODEL_RUNNER is None
    finally:
        envs.disable_envs_cache()


def test_other_backends_are_left_alone(model: Path) -> None:
    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    config = EngineArgs(model=str(model), max_model_len=128).create_engine_config()
    with pytest.raises(UnsupportedError, match="VLLM_PLUGINS"):
        engine_args.spec_of(config)


def test_every_shared_field_exists(arguments: EngineArgs) -> None:
    arguments.distributed_executor_backend = "mp"
    config = arguments.create_engine_config()
    assert set(fingerprint(0, config, ()).fields) == set(SHARED_FIELDS)
    for path in SHARED_FIELDS:
        reduce(getattr, path.split("."), config)
    shared = shared_settings(config, layout("c", "c"))
    assert shared.max_model_len == 128
    assert {name for name, _ in shared.data_parallel} >= {"data_parallel_size"}


def test_a_rank_takes_over_what_is_shared(arguments: EngineArgs) -> None:
    from ray_hetero.world import EngineSpec, RankSpec

    engine_args.teach_backend_name(plugin.is_ours, plugin.prepare)
    arguments.distributed_executor_backend = "ray_hetero"
    arguments.max_num_seqs = 7
    driver = arguments.create_engine_config()
    shared: SharedSettings = shared_settings(driver, layout("c", "c"))
    there = world("c", "c", layers=1)
    spec: EngineSpec = engine_args.spec_of(driver)
    ranks = [
        build_rank_config(RankSpec(there, seat, spec, shared, (0,), ())) for seat in there.seats
    ]
    prints = [fingerprint(rank, config, ()) for rank, config in enumerate(ranks)]
    assert prints[0].fields == prints[1].fields == fingerprint(9, driver, ()).fields
    assert prints[0].fields["scheduler_config.max_num_seqs"] == "7"


@pytest.mark.parametrize(
    ("latents", "size", "asked"), [(False, 128, None), (True, 16, None), (True, 16, "CPU_MLA")]
)
def test_blocks_have_the_size_that_attention_on_cpus_takes(
    arguments: EngineArgs, latents: bool, size: int, asked: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    # With AMX too, that attention to latents takes blocks of its own size if it is asked for.
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: asked is not None)
    monkeypatch.setattr(ModelConfig, "use_mla", latents)
    arguments.attention_backend = asked
    arguments.distributed_executor_backend = "mp"
    # GPUs are pretended where the driver is on CPUs.
    for stages in (("c", "c"), ("g",)):
        driver = arguments.create_engine_config()
        shared = shared_settings(driver, layout(*stages))
        assert (shared.block_size, driver.cache_config.block_size) == (size, size)


def test_all_ranks_know_the_engine_by_one_name_of_its_connector(model: Path) -> None:
    from ray_hetero.world import EngineSpec, RankSpec

    # For such a connector vLLM makes a name up wherever it builds a configuration.
    arguments = EngineArgs(
        model=str(model), max_model_len=128, kv_offloading_size=1.0, max_num_seqs=2
    )
    driver = arguments.create_engine_config()
    assert driver.kv_transfer_config is not None
    shared = shared_settings(driver, layout("c", "c"))
    there = world("c", "c", layers=1)
    spec = EngineSpec(arguments, HeteroConfig(), None)
    found = [
        build_rank_config(RankSpec(there, seat, spec, shared, (0,), ())) for seat in there.seats
    ]
    names = {one.kv_transfer_config and one.kv_transfer_config.engine_id for one in found}
    assert names == {driver.kv_transfer_config.engine_id}

"""GPU ranks in a group with CPU ranks: what is captured, and what a padded step's sums are."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode  # noqa: E402
from vllm.config.vllm import OptimizationLevel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402

from ray_hetero.distributed import groups  # noqa: E402
from ray_hetero.distributed.groups import HostCommunicator  # noqa: E402
from ray_hetero.worker import mixed_groups  # noqa: E402
from ray_hetero.worker.mixed_groups import before_configuring, split_at_collectives  # noqa: E402


def arguments(**given: Any) -> EngineArgs:
    return EngineArgs(model="never/read", **given)


def graph_tokens(args: EngineArgs, mode: Any, sequences: int) -> tuple[int, ...]:
    return mixed_groups.graph_tokens(args, mode, max_num_seqs=sequences, max_num_batched_tokens=512)


@pytest.mark.parametrize(("sequences", "largest"), [(1, 1), (2, 2), (7, 4), (64, 64), (999, 256)])
def test_graphs_are_of_powers_of_two_up_to_a_full_batch(sequences: int, largest: int) -> None:
    found = graph_tokens(arguments(), "graphs", sequences)
    assert found[0] == 1
    assert found[-1] == largest
    assert all(b == 2 * a for a, b in pairwise(found))


def test_sizes_of_the_user_are_taken() -> None:
    assert graph_tokens(arguments(cudagraph_capture_sizes=[8, 1]), "graphs", 64) == (1, 8)
    # vLLM leaves those out that no step can have.
    assert graph_tokens(arguments(cudagraph_capture_sizes=[513, 8]), "graphs", 64) == (8,)
    assert graph_tokens(arguments(max_cudagraph_capture_size=4), "graphs", 64) == (1, 2, 4)
    config = {"cudagraph_capture_sizes": [3]}
    assert graph_tokens(arguments(compilation_config=config), "graphs", 64) == (3,)


@pytest.mark.parametrize(
    "given",
    [
        {"enforce_eager": True},
        {"optimization_level": OptimizationLevel.O0},
        {"compilation_config": {"mode": CompilationMode.NONE}},
        {"compilation_config": {"mode": CompilationMode.DYNAMO_TRACE_ONCE}},
        {"compilation_config": {"cudagraph_mode": "NONE"}},
    ],
)
def test_nothing_is_captured_that_the_user_has_turned_off(given: dict[str, Any]) -> None:
    assert graph_tokens(arguments(**given), "graphs", 64) == ()


@pytest.mark.parametrize("mode", ["eager", "compiled"])
def test_nothing_is_captured_in_other_modes(mode: Any) -> None:
    assert graph_tokens(arguments(), mode, 64) == ()


def test_a_rank_compiles_what_its_mode_says() -> None:
    eager, compiled, captured = (arguments(cudagraph_capture_sizes=[1, 8]) for _ in range(3))
    before_configuring(eager, "eager", ())
    assert eager.enforce_eager
    before_configuring(compiled, "compiled", ())
    assert compiled.compilation_config.cudagraph_mode == CUDAGraphMode.NONE
    before_configuring(captured, "graphs", (1, 8))
    config = captured.compilation_config
    assert config.cudagraph_mode == CUDAGraphMode.PIECEWISE
    assert config.cudagraph_capture_sizes == [1, 8]
    assert captured.cudagraph_capture_sizes is None
    assert not captured.enforce_eager
    unwilling = arguments(enforce_eager=True)
    before_configuring(unwilling, "graphs", ())
    assert unwilling.enforce_eager


def test_the_users_own_configuration_is_left_as_it_was() -> None:
    given = CompilationConfig()
    args = arguments(compilation_config=given)
    before_configuring(args, "graphs", (1,))
    assert args.compilation_config is not given
    assert given.cudagraph_mode is None


def test_what_is_compiled_is_split_at_the_collectives() -> None:
    config = CompilationConfig(mode=CompilationMode.VLLM_COMPILE, splitting_ops=["some::attention"])
    split_at_collectives(SimpleNamespace(compilation_config=config))
    assert config.splitting_ops == ["some::attention", "vllm::all_reduce"]
    assert torch.ops.vllm.all_reduce.default.name() == "vllm::all_reduce"


class Doubling(HostCommunicator):
    """A group of two whose other member always has the same; keeps what went over the wire."""

    def __init__(self) -> None:
        self.device_group = None
        self.seen: list[tuple[int, ...]] = []
        self._tokens = None
        self._pinned = {}

    def _to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()


class OnGpu(torch.Tensor):
    """A tensor that says it is a GPU's."""

    @property
    def device(self) -> Any:
        return SimpleNamespace(type="cuda")


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Doubling:
    made = Doubling()

    def all_reduce(tensor: torch.Tensor, group: object) -> None:
        made.seen.append(tuple(tensor.shape))
        tensor.mul_(2)

    monkeypatch.setattr(groups.dist, "all_reduce", all_reduce)
    return made


def in_graph_of(tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "is_forward_context_available", lambda: tokens is not None)
    graph = SimpleNamespace(num_tokens=tokens)
    context = SimpleNamespace(batch_descriptor=graph)
    monkeypatch.setattr(groups, "get_forward_context", lambda: context)


def test_only_the_tokens_of_a_step_are_summed_in_place(
    group: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_graph_of(8, monkeypatch)
    group.begin_step(5)
    x = torch.ones(8, 3).as_subclass(OnGpu)
    assert group.all_reduce(x) is x
    assert group.seen == [(5, 3)]
    assert x.sum(1).tolist() == [6.0] * 5 + [3.0] * 3


@pytest.mark.parametrize("graph", [None, 8])
def test_other_sums_are_whole(
    graph: int | None, group: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Those of an encoder, for example, which has other numbers of rows.
    in_graph_of(graph, monkeypatch)
    group.begin_step(5)
    group.all_reduce(torch.ones(11, 3).as_subclass(OnGpu))
    assert group.seen == [(11, 3)]


def test_a_cpus_sum_is_a_tensor_of_its_own(
    group: Doubling, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_graph_of(None, monkeypatch)
    x = torch.ones(2, 3)
    found = group.all_reduce(x)
    assert x.sum() == 6
    assert found.sum() == 12

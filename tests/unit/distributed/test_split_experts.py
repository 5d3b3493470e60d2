"""A stage's device computes some experts of a layer while expert ranks compute the others."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

import torch.distributed as dist  # noqa: E402
from linked_layers import CHOSEN, EXPERTS, HIDDEN, Layer, assert_close, routed  # noqa: E402
from native_module import native  # noqa: E402

from ray_hetero.distributed import expert_memory, stage_experts  # noqa: E402
from ray_hetero.distributed.expert_channel import ExpertChannel  # noqa: E402
from ray_hetero.distributed.expert_meeting import Reached  # noqa: E402
from ray_hetero.distributed.expert_memory import (  # noqa: E402
    Geometry,
    HandoverMemory,
    RemoteLayer,
)
from ray_hetero.distributed.expert_prompts import ExpertLink  # noqa: E402
from ray_hetero.distributed.expert_service import ExpertService, HeldLayer  # noqa: E402
from ray_hetero.distributed.split_experts import OtherExperts  # noqa: E402
from ray_hetero.errors import RankError  # noqa: E402
from ray_hetero.kernels.layers import layer_tokens  # noqa: E402
from ray_hetero.offload.experts.expert_pieces import Part  # noqa: E402
from ray_hetero.offload.experts.expert_shares import ExpertShares  # noqa: E402
from ray_hetero.offload.experts.gpu_experts import GpuExperts  # noqa: E402

if native is None or expert_memory._native is None:
    pytest.skip("needs the native modules", allow_module_level=True)

CPU = torch.device("cpu")
LIMIT_S = 20.0
CAPACITY = 40


class Stage:
    """A stage's end, beside expert ranks that are threads of this process."""

    def __init__(self, layers: list[Layer], limit_s: float) -> None:
        ranks = len(layers[0].ranks)
        asked = [RemoteLayer(str(number), HIDDEN, CHOSEN) for number in range(len(layers))]
        geometry = Geometry.of(asked, ranks=ranks, tokens=CAPACITY, dtype=torch.bfloat16)
        descriptor = HandoverMemory.made(geometry)
        memory = HandoverMemory(descriptor, geometry)
        os.close(descriptor)
        self.mine, self.theirs = [], []
        self.services, self._threads = [], []
        for rank in range(ranks):
            mine, other = socket.socketpair()
            held = {
                str(number): HeldLayer(
                    HIDDEN,
                    torch.bfloat16,
                    layer.ranks[rank],
                    layer.ranks[rank].call,
                    chosen=CHOSEN,
                    count=EXPERTS,
                )
                for number, layer in enumerate(layers)
            }
            service = ExpertService(held, rank)
            service.add(Reached(memory, tuple(asked), other))
            self.mine.append(mine)
            self.theirs.append(other)
            self.services.append(service)
            self._threads.append(threading.Thread(target=self._serve, args=(service,), daemon=True))
        names = [f"expert rank {rank}" for rank in range(ranks)]
        self.channel = ExpertChannel(memory, asked, self.mine, names, limit_s)
        self.experts = GpuExperts(CPU, [layer.slices for layer in layers], CHOSEN, "auto")

    def _serve(self, service: ExpertService) -> None:
        with pytest.raises(dist.DistNetworkError):
            service.serve()

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def link(self, *points: tuple[int, int]) -> ExpertLink:
        return ExpertLink(self.experts, ExpertShares(EXPERTS, points), self.channel)

    def totals(self, name: str) -> list[float]:
        return [service.totals[name] for service in self.services]

    def close(self) -> None:
        self.channel.close()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(LIMIT_S)
                assert not thread.is_alive()


@contextmanager
def stage_of(layers: list[Layer], limit_s: float = LIMIT_S) -> Iterator[Stage]:
    made = Stage(layers, limit_s)
    try:
        yield made
    finally:
        made.close()


def computed(link: ExpertLink, given: Any, layer: int = 0) -> torch.Tensor:
    link.begin(*given, layer)
    return link.sums(*given, layer)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_split_step_is_the_whole_one_however_many_handovers_it_takes(ranks: int) -> None:
    torch.manual_seed(0)
    layers = [Layer("compact", ranks, inner=64 * ranks), Layer("packed", ranks, inner=64 * ranks)]
    with stage_of(layers) as stage:
        stage.start()
        link = stage.link((8, 2), (60, 5), (100, EXPERTS))
        for tokens, experts in [(8, 2), (40, 2), (41, 2), (90, 5), (100, EXPERTS)]:
            given = routed(tokens)
            given[2][1] = -1
            before = stage.totals("layer_tokens")
            layer_tokens.take()
            for number, layer in enumerate(layers):
                assert link.experts_here(tokens, number) == experts
                found = computed(link, given, number)
                assert_close(found, layer.expected(*given))
                assert not found[1].any()
            # A token of a split layer counts in both.
            assert layer_tokens.take().experts_on_gpu == len(layers) * tokens
            handed = 0 if experts == EXPERTS else len(layers) * tokens
            assert stage.totals("layer_tokens") == [one + handed for one in before]
        assert link.experts_here(7, 0) == 0


def test_a_rank_that_hands_nothing_over_adds_the_sums_of_its_part() -> None:
    torch.manual_seed(5)
    layer = Layer("packed", 1)
    with stage_of([layer]) as stage:
        stage.start()
        shares = ExpertShares(EXPERTS, ((8, 4), (60, EXPERTS)))
        parts = [
            GpuExperts(CPU, [layer.slices], CHOSEN, "auto", Part(rank, 2)) for rank in range(2)
        ]
        first, second = (
            ExpertLink(parts[0], shares, stage.channel),
            ExpertLink(parts[1], shares, None),
        )
        for tokens in (8, 45, 60):
            given = routed(tokens)
            layer_tokens.take()
            total = computed(first, given).float() + computed(second, given).float()
            assert_close(total.bfloat16(), layer.expected(*given))
            assert layer_tokens.take().experts_on_gpu == tokens


def test_sockets_read_only_the_experts_that_are_left_to_them() -> None:
    torch.manual_seed(1)
    with stage_of([Layer("packed", 1)]) as stage:
        stage.start()
        computed(stage.link((1, 5)), routed(40))
        assert stage.totals("experts") == [EXPERTS - 5]


def test_tokens_are_there_before_the_device_reads_and_are_waited_for_behind_it() -> None:
    torch.manual_seed(2)
    layer = Layer("packed", 1)
    with stage_of([layer]) as stage:
        done = []
        channel, experts = stage.channel, stage.experts
        watched: list[tuple[Any, str]] = [
            (channel, "hand_over"), (channel, "take"), (experts, "begin"), (experts, "_read")
        ]  # fmt: skip
        for owner, name in watched:
            setattr(owner, name, noting(getattr(owner, name), name, done))
        stage.start()
        given = routed(90)
        assert_close(computed(stage.link((1, 4)), given), layer.expected(*given))
        first, rest = ["hand_over", "begin", "_read"], ["take", "hand_over"]
        assert done == [*first, *rest, *rest, "take"]


def noting(function: Any, name: str, into: list[str]) -> Any:
    def call(*given: Any) -> Any:
        into.append(name)
        return function(*given)

    return call


def test_the_operators_split_and_hand_over_what_is_too_few(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(3)
    layer = Layer("packed", 2)
    with stage_of([layer]) as stage:
        stage.start()
        monkeypatch.setattr(stage_experts, "_channels", [stage.channel])
        monkeypatch.setattr(stage_experts, "_links", [stage.link((50, 3))])
        for tokens in (0, 1, 45, 50, 90):
            given = routed(tokens)
            handed = torch.ops.ray_hetero.hand_experts_over(*given, 0)
            found = torch.ops.ray_hetero.take_expert_sums(*given, handed, 0)
            assert_close(found, layer.expected(*given)) if tokens else None
            assert found.shape == given[0].shape


def test_an_expert_rank_that_ends_or_stops_ends_a_split_step() -> None:
    torch.manual_seed(4)
    layer, given = Layer("packed", 2), routed(30)
    with stage_of([layer]) as stage:
        stage.theirs[1].close()
        with pytest.raises(dist.DistNetworkError, match="expert rank 1 has closed"):
            computed(stage.link((1, 3)), given)
    with (
        stage_of([layer], 0.3) as stage,
        pytest.raises(RankError, match=r"did not compute a layer's experts in 0\.3 s"),
    ):
        computed(stage.link((1, 3)), given)


def test_steps_that_are_captured_are_left_to_the_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    with stage_of([Layer("packed", 1)]) as stage:
        link = stage.link((8, 3))
        monkeypatch.setattr(link, "_is_gpu", True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
        assert link.experts_here(8, 0) == 3
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert link.experts_here(8, 0) == 0


def test_the_stream_of_the_handover_leaves_that_of_the_products_and_joins_it() -> None:
    done: list[str] = []

    class Event:
        def __init__(self, name: str) -> None:
            self.name = name

        def record(self, stream: Any) -> None:
            done.append(f"{stream.name} records {self.name}")

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: Event) -> None:
            done.append(f"{self.name} waits for {event.name}")

    def begin(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> None:
        done.append(f"handed over {ids.tolist()}")

    def sums(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, layer: int) -> torch.Tensor:
        done.append("waits for sums")
        return x

    products = Stream("products")
    channel: Any = SimpleNamespace(begin=begin, sums=sums)
    others: Any = OtherExperts(CPU, channel)
    others._module = SimpleNamespace(current_stream=lambda: products)
    others._stream, others._given, others._summed = Stream("beside"), Event("x"), Event("sums")
    x, weights, ids = torch.zeros(1, 4), torch.ones(1, 3), torch.tensor([[4, 1, -1]])
    others.begin(x, weights, ids, 0, torch.arange(EXPERTS) < 2)
    assert others.sums(x, weights, 0) is x
    assert done == [
        "products records x", "beside waits for x", "handed over [[4, -1, -1]]", "waits for sums",
        "beside records sums", "products waits for sums",
    ]  # fmt: skip

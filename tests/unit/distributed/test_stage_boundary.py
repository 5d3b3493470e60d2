"""The stage boundary between real processes, and how its time is told apart."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ray_hetero.distributed.gloo_link import GlooLink
from ray_hetero.distributed.link import Link
from ray_hetero.distributed.linking import LINKS
from ray_hetero.distributed.messages import ALIGNMENT, HEADER_BYTES, Message, Packing
from ray_hetero.distributed.neighbour import Neighbour, Neighbours
from ray_hetero.distributed.stage_boundary import StageBoundary
from ray_hetero.errors import AgreementError
from ray_hetero.kernels.step_route import DECODING_TOKENS, StepLimits, StepRoute

CPU = torch.device("cpu")
NUMA_MAPS = Path("/proc/self/numa_maps")
CAPACITY = 16
TEMPLATE = {
    "residual": torch.zeros(1, 24, dtype=torch.float32),
    "hidden_states": torch.zeros(1, 24, dtype=torch.bfloat16),
    "scales": torch.zeros(1, 3, 5, dtype=torch.float16),
}
STEPS = (1, CAPACITY, 3, 1, 1, 7, 1)
"""Tokens of each step; more steps than a boundary has messages."""


def tensors_of(step: int, tokens: int) -> dict[str, torch.Tensor]:
    """What a step sends; its rows differ from every other step's."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: torch.randn(tokens, *like.shape[1:], generator=generator).to(like.dtype)
        for name, like in TEMPLATE.items()
    }


@contextmanager
def boundary_of(
    rank: int, ranks: int, store: Path, *, may_share: bool = True, device: torch.device = CPU
) -> Iterator[StageBoundary]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    neighbours = Neighbours.in_line(dist.group.WORLD, list(range(ranks)), rank)
    yield StageBoundary(neighbours, device, links=LINKS if may_share else [GlooLink()])
    dist.destroy_process_group()


def step_of(tokens: int, *, is_decoding: bool = False) -> StepRoute:
    """The route of a step that only decodes, or of one that has a prompt."""
    return StepRoute.of_rows(tokens, 1 if is_decoding else DECODING_TOKENS + 1, StepLimits())


def boundary_links(boundary: StageBoundary) -> tuple[str, ...]:
    """How a stage exchanges, to the next one and from the previous one."""
    ends = [*boundary._senders, boundary._receiver]
    return tuple(type(end).__name__ for end in ends if end is not None)


def passes_all_steps_on(
    rank: int, ranks: int, store: Path, answers: Any, sharing: tuple[bool, ...]
) -> None:
    """Stage 0 sends, the others check and pass on what they have received."""
    with boundary_of(rank, ranks, store, may_share=sharing[rank]) as boundary:
        boundary.agree(TEMPLATE, CAPACITY)
        links, is_right = boundary_links(boundary), True
        for step, tokens in enumerate(STEPS):
            boundary.begin_step(step_of(tokens))
            expected = tensors_of(step, tokens)
            if rank > 0:
                received, handles, callbacks = boundary.irecv()
                for handle in handles:
                    handle.wait()
                assert not callbacks
                for name, tensor in expected.items():
                    is_right &= torch.equal(received[name][:tokens], tensor)
            if rank + 1 < ranks:
                sent = {name: t.clone() for name, t in expected.items()}
                boundary.isend(sent)
                # The boundary must not need them any more.
                for tensor in sent.values():
                    tensor.zero_()
        dist.barrier()
        exchanged = boundary.take()
        answers.put((rank, is_right, exchanged.received_bytes, exchanged.sent_bytes, links))


def tells_policy_of_messages(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """Stage 1 computes on node 0; stage 0 is the first to touch what it sends."""
    nodes = (0,) if rank == 1 else ()
    with boundary_of(rank, ranks, store) as boundary:
        boundary.agree(TEMPLATE, CAPACITY, numa_nodes=nodes)
        boundary.begin_step(step_of(1))
        if rank == 0:
            boundary.isend(tensors_of(0, 1))
        else:
            boundary.irecv()[1][0].wait()
        dist.barrier()
        lines = NUMA_MAPS.read_text().splitlines()
        answers.put((rank, [line.split()[1] for line in lines if "ray_hetero-messages" in line]))
        dist.barrier()


def refuses_other_tensors(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """Stage 1 takes wider hidden states than stage 0 sends."""
    template = {"hidden_states": torch.zeros(1, 24 + 8 * rank, dtype=torch.bfloat16)}
    with boundary_of(rank, ranks, store) as boundary:
        try:
            boundary.agree(template, CAPACITY)
        except AgreementError as error:
            answers.put((rank, str(error)))
        else:
            answers.put((rank, ""))
        dist.barrier()


class Ordered:
    """Words of a stream that is only given its work."""

    def __init__(self) -> None:
        self.waits: list[tuple[int, int]] = []

    def wait(self, address: int, value: int) -> None:
        self.waits.append((address, value))

    def are_there(self) -> list[bool]:
        """Whether a stream that waits for each word would go on."""
        return [ctypes.c_uint32.from_address(at).value >= value for at, value in self.waits]


@contextmanager
def second_stage_on_a_gpu(rank: int, store: Path) -> Iterator[StageBoundary]:
    """A boundary of two stages, whose second one takes this CPU for its GPU."""
    with boundary_of(rank, 2, store) as boundary:
        if rank == 1:
            StageBoundary._is_gpu = property(lambda self: True)  # type: ignore[assignment,method-assign]
            boundary._copied = defaultdict(torch.cpu.Event)  # type: ignore[assignment]
        boundary.agree(TEMPLATE, CAPACITY, timeout_s=20)
        yield boundary


def decodes_behind_words(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """The second stage's stream waits for rows of decode steps, its thread for those of others."""
    is_right, handles = True, []
    with second_stage_on_a_gpu(rank, store) as boundary:
        for step, tokens in enumerate(STEPS * 2):
            boundary.begin_step(step_of(tokens, is_decoding=tokens == 1))
            expected = tensors_of(step, tokens)
            if rank == 0:
                boundary.isend(expected)
                continue
            received, waited_for, callbacks = boundary.irecv()
            for one in (*(handle.wait for handle in waited_for), *callbacks):
                one()
            handles.append(len(waited_for))
            for name, tensor in expected.items():
                is_right &= torch.equal(received[name][:tokens], tensor)
            boundary.end_step()
        dist.barrier()
        answers.put((rank, is_right, handles, boundary.take().waiting_s >= 0))


def is_ordered_ahead(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """The second stage orders its step before the first one has sent anything, which then ends."""
    words, found = Ordered(), []
    with second_stage_on_a_gpu(rank, store) as boundary:
        for step in range(6):
            boundary.begin_step(step_of(1, is_decoding=True))
            if rank == 1:
                boundary._words = words
                _, _, (behind,) = boundary.irecv()
                behind()
                assert words.are_there() == [True] * step + [False]
            dist.barrier()
            if rank == 0 and step < 5:
                boundary.isend(tensors_of(step, 1))
            elif rank == 0:
                boundary._senders[0]._connection.socket.close()
            else:
                try:
                    boundary.end_step()
                except RuntimeError as error:
                    found.append(str(error))
                assert all(words.are_there())
        answers.put((rank, found, len({at for at, _ in words.waits})))


def memory_of(packing: Packing, capacity: int) -> torch.Tensor:
    return torch.empty(packing.message_bytes(capacity), dtype=torch.uint8)


def run(task: Callable[..., None], ranks: int, tmp_path: Path, *more: Any) -> list[Any]:
    """The answers of a task in so many processes, by rank."""
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=task, args=(rank, ranks, tmp_path / "store", answers, *more))
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=120) for _ in processes)
    for process in processes:
        process.join(30)
    return found


OVER_GLOO, SHARED = ("GlooSender", "GlooReceiver"), ("SharedMemorySender", "SharedMemoryReceiver")


@pytest.mark.parametrize(
    ("sharing", "links"),
    [
        ((True, True), [SHARED[:1], SHARED[1:]]),
        ((False, True), [OVER_GLOO[:1], OVER_GLOO[1:]]),
        # What the first stage offers, the second cannot reach.
        ((True, False), [OVER_GLOO[:1], OVER_GLOO[1:]]),
        ((True, True, True), [SHARED[:1], SHARED, SHARED[1:]]),
        ((True, True, False), [SHARED[:1], ("GlooSender", "SharedMemoryReceiver"), OVER_GLOO[1:]]),
    ],
)
def test_every_stage_gets_the_rows_of_each_step(
    sharing: tuple[bool, ...], links: list[tuple[str, ...]], tmp_path: Path
) -> None:
    ranks = len(sharing)
    found = run(passes_all_steps_on, ranks, tmp_path, sharing)
    nbytes = sum(HEADER_BYTES + tokens * Packing(TEMPLATE).row_bytes for tokens in STEPS)
    assert found == [
        (rank, True, nbytes if rank > 0 else 0, nbytes if rank + 1 < ranks else 0, links[rank])
        for rank in range(ranks)
    ]


def test_a_stream_waits_for_rows_of_decode_steps(tmp_path: Path) -> None:
    waited_for = [int(tokens > 1) for tokens in STEPS * 2]
    assert run(decodes_behind_words, 2, tmp_path) == [
        (0, True, [], True),
        (1, True, waited_for, True),
    ]


def test_a_decode_step_is_ordered_before_its_rows_are_there(tmp_path: Path) -> None:
    (_, none, _), (_, found, messages) = run(is_ordered_ahead, 2, tmp_path)
    assert not none
    (error,) = found
    assert "rank 0, at the other end of the stage boundary, has closed the connection" in error
    # Each message is waited for again once it is filled again.
    assert 1 < messages < 6


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel has no NUMA support")
def test_messages_lie_where_a_cpu_rank_computes_with_them(tmp_path: Path) -> None:
    assert run(tells_policy_of_messages, 2, tmp_path) == [(0, ["bind:0"]), (1, ["bind:0"])]


def test_other_tensors_are_refused_where_they_arrive(tmp_path: Path) -> None:
    (_, first), (_, second) = run(refuses_other_tensors, 2, tmp_path)
    assert first == second
    assert "rank 0 sends" in second
    assert "(24,)" in second
    assert "(32,)" in second


def refuses_more_tensors(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """The model of stage 0 sends what it has no template for."""
    with boundary_of(rank, ranks, store) as boundary:
        boundary.agree(TEMPLATE, CAPACITY)
        boundary.begin_step(step_of(1))
        said = ""
        if rank == 0:
            with pytest.raises(RuntimeError) as refused:
                boundary.isend(tensors_of(0, 1) | {"per_layer_inputs": torch.zeros(1, 4)})
            said = str(refused.value)
        answers.put((rank, said))
        dist.barrier()


def test_tensors_for_which_nothing_was_agreed_are_not_left_out(tmp_path: Path) -> None:
    (_, first), _ = run(refuses_more_tensors, 2, tmp_path)
    assert first.startswith("the model of this stage sends per_layer_inputs to the next one")


def sends_no_residual(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """The layers of stage 0 leave no residual, as MiniCPM's."""
    with boundary_of(rank, ranks, store) as boundary:
        boundary.agree(TEMPLATE, CAPACITY)
        is_zero = True
        for step in range(2):
            boundary.begin_step(step_of(1))
            if rank == 0:
                sent: dict[str, Any] = {**tensors_of(step, 1)}
                boundary.isend(sent if step == 0 else sent | {"residual": None})
            else:
                received, (handle,), _ = boundary.irecv()
                handle.wait()
                is_zero = not received["residual"][:1].any()
        answers.put((rank, is_zero))
        dist.barrier()


def test_what_a_stage_leaves_out_is_zero_on_the_next(tmp_path: Path) -> None:
    assert run(sends_no_residual, 2, tmp_path) == [(0, True), (1, True)]


class NoLink:
    """A link that is offered, and that nobody reaches."""

    name = "none"
    address = b""

    def offer(self, terms: Any, neighbour: Any) -> NoLink:
        return self

    def reach(self, address: bytes, terms: Any, neighbour: Any) -> None:
        return None

    def withdraw(self) -> None:
        """Nothing was held ready."""


def has_a_link_that_is_not_reached(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """The first link is tried first and fails; where it is the only one, both sides say so."""
    with boundary_of(rank, ranks, store) as boundary:
        boundary._links = [NoLink(), *LINKS]
        boundary.agree(TEMPLATE, CAPACITY)
        links = boundary_links(boundary)
        boundary._senders, boundary._receiver, boundary._links = [], None, [NoLink()]
        with pytest.raises(AgreementError, match="by none of the links that it offers: none"):
            boundary.agree(TEMPLATE, CAPACITY)
        answers.put((rank, links))
        dist.barrier()


def test_links_are_tried_in_their_order(tmp_path: Path) -> None:
    found = run(has_a_link_that_is_not_reached, 2, tmp_path)
    assert found == [(0, SHARED[:1]), (1, SHARED[1:])]


def sends_to_a_larger_stage(
    rank: int, ranks: int, store: Path, answers: Any, links: list[Link]
) -> None:
    """Stage 0 is rank 0, stage 1 the others; the ranks behind the first one take no part."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    group, others = dist.group.WORLD, range(1, ranks)
    if rank == 0:
        neighbours = Neighbours(2, following=tuple(Neighbour(r, group) for r in others))
    else:
        neighbours = Neighbours(2, previous=Neighbour(0, group))
    boundary = StageBoundary(neighbours, CPU, links=links)
    boundary.agree(TEMPLATE, CAPACITY)
    is_right = True
    for step, tokens in enumerate(STEPS):
        boundary.begin_step(step_of(tokens))
        expected = tensors_of(step, tokens)
        if rank == 0:
            boundary.isend(expected)
            continue
        received, (handle,), _ = boundary.irecv()
        handle.wait()
        is_right &= all(torch.equal(received[name][:tokens], expected[name]) for name in expected)
    dist.barrier()
    answers.put((rank, is_right, boundary.take().sent_bytes > 0))
    dist.barrier()
    dist.destroy_process_group()


@pytest.mark.parametrize("links", [LINKS, [GlooLink()]], ids=["shared", "gloo"])
def test_a_rank_sends_to_every_rank_that_looks_to_it(links: list[Link], tmp_path: Path) -> None:
    found = run(sends_to_a_larger_stage, 3, tmp_path, links)
    assert found == [(0, True, True), (1, True, False), (2, True, False)]


def test_a_rank_without_receivers_sends_nothing() -> None:
    boundary = StageBoundary(Neighbours(stages=2), CPU)
    boundary.agree(TEMPLATE, CAPACITY)
    boundary.begin_step(step_of(1))
    boundary.isend(tensors_of(0, 1))
    assert boundary.take().sent_bytes == 0


def test_tensors_of_a_row_lie_behind_each_other() -> None:
    packing = Packing(TEMPLATE)
    message = Message(packing, memory_of(packing, CAPACITY))
    assert {name: tuple(t.shape) for name, t in message.tensors.items()} == {
        name: (CAPACITY, *t.shape[1:]) for name, t in TEMPLATE.items()
    }
    for step in range(2):
        for name, tensor in tensors_of(step, CAPACITY).items():
            message.tensors[name].copy_(tensor)
    for name, tensor in tensors_of(1, CAPACITY).items():
        assert torch.equal(message.tensors[name], tensor)
    # 48, 96 and 30 bytes, each filled up.
    assert packing.row_bytes == 4 * ALIGNMENT
    assert message.of(3).nbytes == HEADER_BYTES + 3 * packing.row_bytes


@pytest.mark.parametrize(
    ("computed_at", "is_shared", "waiting", "exchange"),
    [
        (12.0, True, 2.0, 1.0),
        # Computed before this rank asked: it has only waited for the exchange.
        (7.0, True, 0.0, 3.0),
        # A clock of another host says nothing here.
        (12.0, False, 3.0, 0.0),
    ],
)
def test_waiting_ends_where_the_previous_stage_had_computed(
    computed_at: float, is_shared: bool, waiting: float, exchange: float
) -> None:
    boundary = StageBoundary(Neighbours(stages=2), CPU)
    boundary._is_clock_shared = is_shared
    packing = Packing(TEMPLATE)
    message = Message(packing, memory_of(packing, 1))
    message.computed_at = computed_at
    boundary.arrived(message, 10.0, 13.0)
    taken = boundary.take()
    assert (taken.waiting_s, taken.exchange_s) == (waiting, exchange)
    assert boundary.take().waiting_s == 0


def ends_before_it_sends(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """Stage 0 is gone when stage 1 waits for it, over Gloo."""
    with boundary_of(rank, ranks, store, may_share=False) as boundary:
        boundary.agree(TEMPLATE, CAPACITY, timeout_s=7)
        boundary.begin_step(step_of(1))
        if rank == 0:
            answers.put((rank, ""))
            answers.close()
            answers.join_thread()
            os._exit(0)
        (receiving,) = boundary.irecv()[1]
        with pytest.raises(RuntimeError) as raised:
            receiving.wait()
        answers.put((rank, str(raised.value)))


def test_a_stage_that_ends_is_named_over_gloo_too(tmp_path: Path) -> None:
    (_, _), (_, said) = run(ends_before_it_sends, 2, tmp_path)
    assert said.startswith("rank 0, at the other end of the stage boundary over Gloo, is gone or")
    assert "in 7 s (exchange.timeout_s)" in said

"""The stage boundary between real processes, and how its time is told apart."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from worlds import layout

from ray_hetero.distributed.messages import ALIGNMENT, HEADER_BYTES, Message, Packing
from ray_hetero.distributed.stage_boundary import StageBoundary
from ray_hetero.errors import AgreementError

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
    rank: int, ranks: int, store: Path, *, may_share: bool = True
) -> Iterator[StageBoundary]:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    yield StageBoundary(dist.group.WORLD, list(range(ranks)), rank, CPU, may_share=may_share)
    dist.destroy_process_group()


def boundary_links(boundary: StageBoundary) -> tuple[str, ...]:
    """How a stage exchanges, to the next one and from the previous one."""
    receiver = getattr(boundary, "_receiver", None)
    ends = [*boundary._senders, *([receiver] if receiver is not None else [])]
    return tuple(type(end).__name__ for end in ends)


def passes_all_steps_on(
    rank: int, ranks: int, store: Path, answers: Any, sharing: tuple[bool, ...]
) -> None:
    """Stage 0 sends, the others check and pass on what they have received."""
    with boundary_of(rank, ranks, store, may_share=sharing[rank]) as boundary:
        boundary.agree(TEMPLATE, CAPACITY)
        links, is_right = boundary_links(boundary), True
        for step, tokens in enumerate(STEPS):
            boundary.begin_step(tokens)
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


def fans_out(
    rank: int, ranks: int, store: Path, answers: Any, sizes: tuple[int, ...], *, may_share: bool
) -> None:
    """Stages of these sizes pass all steps on; every rank of a stage has the same rows."""
    made = layout(*("c" * size for size in sizes))
    stage = next(number for number in range(len(sizes)) if rank in made.ranks(number))
    tensor_rank = rank - made.first_rank(stage)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    boundary = StageBoundary(
        dist.group.WORLD, list(made.pipelines()[tensor_rank]), stage, CPU,
        receivers=made.receivers(stage, tensor_rank), may_share=may_share,
    )  # fmt: skip
    boundary.agree(TEMPLATE, CAPACITY)
    is_right = True
    for step, tokens in enumerate(STEPS):
        boundary.begin_step(tokens)
        expected = tensors_of(step, tokens)
        if stage > 0:
            received, (handle,), _ = boundary.irecv()
            handle.wait()
            for name, tensor in expected.items():
                is_right &= torch.equal(received[name][:tokens], tensor)
        if stage + 1 < len(sizes):
            boundary.isend(expected)
    dist.barrier()
    answers.put((rank, is_right, len(boundary._senders)))
    dist.destroy_process_group()


def tells_policy_of_messages(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """Stage 1 computes on node 0; stage 0 is the first to touch what it sends."""
    nodes = (0,) if rank == 1 else ()
    with boundary_of(rank, ranks, store) as boundary:
        boundary.agree(TEMPLATE, CAPACITY, numa_nodes=nodes)
        boundary.begin_step(1)
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


@pytest.mark.parametrize("may_share", [True, False])
@pytest.mark.parametrize(
    ("sizes", "receivers"),
    [((2, 1), [1, 0, 0]), ((1, 2), [2, 0, 0]), ((2, 3), [2, 1, 0, 0, 0])],
)
def test_stages_of_different_size_all_get_the_rows(
    sizes: tuple[int, ...], receivers: list[int], *, may_share: bool, tmp_path: Path
) -> None:
    task = partial(fans_out, may_share=may_share)
    found = run(task, sum(sizes), tmp_path, sizes)
    assert found == [(rank, True, count) for rank, count in enumerate(receivers)]


@pytest.mark.skipif(not NUMA_MAPS.exists(), reason="this kernel has no NUMA support")
def test_messages_lie_where_a_cpu_rank_computes_with_them(tmp_path: Path) -> None:
    assert run(tells_policy_of_messages, 2, tmp_path) == [(0, ["bind:0"]), (1, ["bind:0"])]


def test_other_tensors_are_refused_where_they_arrive(tmp_path: Path) -> None:
    (_, first), (_, second) = run(refuses_other_tensors, 2, tmp_path)
    assert first == ""
    assert "rank 0 sends" in second
    assert "(24,)" in second
    assert "(32,)" in second


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
    boundary = StageBoundary(None, [0, 1], 1, CPU)
    boundary._is_clock_shared = is_shared
    packing = Packing(TEMPLATE)
    message = Message(packing, memory_of(packing, 1))
    message.computed_at = computed_at
    boundary.arrived(message, 10.0, 13.0)
    taken = boundary.take()
    assert (taken.waiting_s, taken.exchange_s) == (waiting, exchange)
    assert boundary.take().waiting_s == 0

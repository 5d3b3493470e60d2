"""Tokens go to expert ranks and sums come back through memory that processes share."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import struct
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402
from handover_words import ExpertRank  # noqa: E402

from ray_hetero.distributed import expert_meeting, expert_memory  # noqa: E402
from ray_hetero.distributed.expert_channel import ExpertChannel  # noqa: E402
from ray_hetero.distributed.expert_meeting import (  # noqa: E402
    ExpertMeeting,
    Reached,
    is_ready,
    reach,
)
from ray_hetero.distributed.expert_memory import (  # noqa: E402
    Geometry,
    HandoverMemory,
    RemoteLayer,
)
from ray_hetero.distributed.expert_offers import taken  # noqa: E402
from ray_hetero.distributed.expert_service import ExpertService, HeldLayer  # noqa: E402
from ray_hetero.distributed.gpu_signals import GpuSignals  # noqa: E402
from ray_hetero.errors import AgreementError, RankError, StartupError  # noqa: E402

if expert_memory._native is None:
    pytest.skip("needs the native module", allow_module_level=True)

LAYERS = (RemoteLayer("a", 8, 2), RemoteLayer("b", 4, 3))
LIMIT_S = 20.0
CONTEXT = multiprocessing.get_context("fork")


def expected(layer: int, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """What all expert ranks together make of tokens: rank r's share is (r + 1 + layer) of it."""
    return x * (weights * ids).sum(1, keepdim=True)


def held(number: int, hidden: int, dtype: torch.dtype, layer: int) -> HeldLayer:
    def compute(x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if float(x[0, 0]) == 1000.0:
            raise RuntimeError("such tokens cannot be computed")
        return expected(layer, x, weights, ids) * (number + 1)

    return HeldLayer(hidden, dtype, compute)


def expert_rank(meeting: str, number: int, dtype: torch.dtype, stages: int = 1) -> None:
    torch.set_num_threads(1)
    layers = {layer.name: held(number, layer.hidden, dtype, at) for at, layer in enumerate(LAYERS)}
    service = ExpertService(layers, number)
    for stage in range(stages):
        reached = reach(meeting, stage, number, (0,), LIMIT_S)
        service.add(reached)
        is_ready(reached)
    service.serve()


@contextmanager
def channel(
    ranks: int, dtype: torch.dtype = torch.float32, limit_s: float = LIMIT_S, tokens: int = 5
) -> Iterator[tuple[ExpertChannel, list[multiprocessing.process.BaseProcess]]]:
    meeting = uuid.uuid4().hex
    listener = ExpertMeeting(meeting, 0)
    processes: list[multiprocessing.process.BaseProcess] = [
        CONTEXT.Process(target=expert_rank, args=(meeting, number, dtype), daemon=True)
        for number in range(ranks)
    ]
    for process in processes:
        process.start()
    geometry = Geometry.of(LAYERS, ranks=ranks, tokens=tokens, dtype=dtype)
    names = [f"expert rank {number}" for number in range(ranks)]
    made = None
    try:
        memory, connections = listener.accept(geometry, LAYERS, names, LIMIT_S)
        made = ExpertChannel(memory, LAYERS, connections, names, limit_s)
        yield made, processes
    finally:
        if made is not None:
            made.close()
        for process in processes:
            process.kill()
            process.join()


def given(layer: int, tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    chosen = LAYERS[layer].chosen
    ids = torch.randint(0, 7, (tokens, chosen), dtype=torch.int64)
    return torch.randn(tokens, LAYERS[layer].hidden).to(dtype), torch.rand(tokens, chosen), ids


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_of_all_expert_ranks_come_back(ranks: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    with channel(ranks, dtype) as (sender, _):
        for layer, tokens in [(0, 1), (1, 5), (0, 5), (0, 5), (1, 1)]:
            x, weights, ids = given(layer, tokens, dtype)
            sender.hand_over(x, weights, ids, layer)
            found = sender.take(tokens, layer)
            share = sum(number + 1 for number in range(ranks))
            torch.testing.assert_close(
                found.float(), (expected(layer, x, weights, ids) * share).float(),
                rtol=2**-6 if dtype is torch.bfloat16 else 1e-5, atol=1e-2,
            )  # fmt: skip
        assert sender.problem is None


def test_several_stages_have_a_channel_each_to_the_same_expert_rank() -> None:
    meeting = uuid.uuid4().hex
    listeners = [ExpertMeeting(meeting, stage) for stage in range(2)]
    process = CONTEXT.Process(
        target=expert_rank, args=(meeting, 0, torch.float32, len(listeners)), daemon=True
    )
    process.start()
    geometry = Geometry.of(LAYERS, ranks=1, tokens=5, dtype=torch.float32)
    stages = [
        ExpertChannel(memory, LAYERS, connections, ["expert rank 0"], LIMIT_S)
        for listener in listeners
        for memory, connections in [listener.accept(geometry, LAYERS, ["expert rank 0"], LIMIT_S)]
    ]
    torch.manual_seed(0)
    asked = [given(layer, 3, torch.float32) for layer in (0, 1)]
    # Both before either is waited for.
    for _ in range(20):
        for layer, stage in enumerate(stages):
            stage.hand_over(*asked[layer], layer)
        for layer, stage in reversed(list(enumerate(stages))):
            torch.testing.assert_close(stage.take(3, layer), expected(layer, *asked[layer]))
    # It ends with any of them, and the others hear of that.
    stages[0].close()
    process.join(LIMIT_S)
    assert isinstance(fails(stages[1]), dist.DistNetworkError)
    stages[1].close()


@pytest.mark.parametrize("in_python", [True, False])
def test_an_expert_rank_counts_steps_layers_and_experts(in_python: bool) -> None:
    dtype, native = torch.bfloat16, expert_memory.native()
    geometry = Geometry.of(LAYERS, ranks=1, tokens=5, dtype=dtype)
    descriptor = HandoverMemory.made(geometry)
    memory = HandoverMemory(descriptor, geometry)
    os.close(descriptor)
    mine, other = socket.socketpair()
    call = None if in_python else SimpleNamespace(function=native.ECHO, context=0, with_team=0)
    layers = {
        layer.name: replace(held(0, layer.hidden, dtype, at), call=call)
        for at, layer in enumerate(LAYERS)
    }
    service = ExpertService(layers, 0)
    service.add(Reached(memory, LAYERS, other))

    def serve() -> None:
        with pytest.raises(dist.DistNetworkError):
            service.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    sender = ExpertChannel(memory, LAYERS, [mine], ["expert rank 0"], LIMIT_S)
    asked = [
        (0, [[1, 2], [2, 1], [2, 5]]), (1, [[0, 1, 2], [0, 1, 2], [-1, -1, -1]]),
        (0, [[7, 7]]), (1, [[0, 3, 6]]),
    ]  # fmt: skip
    for layer, ids in asked:
        chosen, tokens = torch.tensor(ids), len(ids)
        x = torch.randn(tokens, LAYERS[layer].hidden).to(dtype)
        sender.hand_over(x, torch.ones(chosen.shape), chosen, layer)
        sender.take(tokens, layer)
    sender.close()
    thread.join(LIMIT_S)
    found = service.totals
    assert (found["steps"], found["tokens"], found["layers"]) == (2, 4, 4)
    assert found["experts"] == 3 + 3 + 1 + 3
    assert found["computing_s"] > 0
    assert found["waiting_s"] > 0


def test_a_stage_without_remote_experts_has_a_channel_too() -> None:
    assert Geometry.of((), ranks=2, tokens=8, dtype=torch.float32).nbytes > 0


def fails(sender: ExpertChannel) -> Exception:
    """What a step that is handed over ends with."""
    sender.hand_over(*given(0, 2, torch.float32), 0)
    with pytest.raises((RankError, dist.DistNetworkError)) as found:
        sender.take(2, 0)
    assert sender.problem is found.value
    return found.value


def test_an_expert_rank_that_dies_ends_the_wait_and_is_named() -> None:
    with channel(2) as (sender, processes):
        os.kill(processes[1].pid or 0, signal.SIGSTOP)
        sender.hand_over(*given(0, 2, torch.float32), 0)
        os.kill(processes[1].pid or 0, signal.SIGKILL)
        with pytest.raises(dist.DistNetworkError, match="expert rank 1 has closed"):
            sender.take(2, 0)
        # Whatever the step still asks for ends too, and what it would compute without that rank.
        fails(sender)
        with pytest.raises(dist.DistNetworkError, match="expert rank 1 has closed"):
            sender.check()


def test_an_expert_rank_that_stops_ends_the_wait_and_is_named_with_the_limit() -> None:
    with channel(2, limit_s=0.5) as (sender, processes):
        os.kill(processes[0].pid or 0, signal.SIGSTOP)
        error = fails(sender)
        assert isinstance(error, RankError)
        assert "expert rank 0 did not compute a layer's experts in 0.5 s" in str(error)


def test_an_expert_rank_that_fails_ends_the_wait() -> None:
    with channel(1) as (sender, processes):
        x, weights, ids = given(0, 1, torch.float32)
        x[0, 0] = 1000.0
        sender.hand_over(x, weights, ids, 0)
        with pytest.raises(dist.DistNetworkError, match="expert rank 0 has closed"):
            sender.take(1, 0)
        processes[0].join(LIMIT_S)
        assert processes[0].exitcode == 1


def test_an_expert_that_no_layer_has_is_named_before_memory_is_taken_for_it() -> None:
    with channel(1) as (sender, processes):
        x, weights, ids = given(0, 2, torch.float32)
        ids[1, 0] = 2**30
        sender.hand_over(x, weights, ids, 0)
        with pytest.raises(dist.DistNetworkError, match="expert rank 0 has closed"):
            sender.take(2, 0)
        processes[0].join(LIMIT_S)
        assert processes[0].exitcode == 1


def test_messages_that_are_none_are_told_with_who_has_sent_them() -> None:
    for message in (
        b"[", b"[]", b"{}", b"\xff\xfe", b"[" * 9000, b'{"layers": "a", "points": 1}',
        b'{"layers": 0, "points": [[1]]}', b'{"layers": 0, "points": 1e400}',
    ):  # fmt: skip
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            theirs.send(message)
            with pytest.raises(AgreementError, match="expert rank 7 has sent something else"):
                taken([ours], ["expert rank 7"], 1.0)


def test_an_expert_rank_ends_with_its_sender() -> None:
    with channel(2) as (sender, processes):
        sender.close()
        for process in processes:
            process.join(LIMIT_S)
            assert process.exitcode == 1


def raises(error: type[Exception], match: str, function: Callable[[], object]) -> None:
    with pytest.raises(error, match=match):
        function()


def test_who_does_not_come_is_named() -> None:
    listener = ExpertMeeting(uuid.uuid4().hex, 0)
    geometry = Geometry.of(LAYERS, ranks=1, tokens=1, dtype=torch.float32)
    raises(
        StartupError, r"rank 7 did not connect in 0.2 s \(startup.load_timeout_s\)",
        lambda: listener.accept(geometry, LAYERS, ["rank 7"], 0.2),
    )  # fmt: skip
    raises(
        StartupError, "tokens of stage 3 over was not there in 0.1 s",
        lambda: reach(uuid.uuid4().hex, 3, 0, (), 0.1),
    )  # fmt: skip


def test_layers_of_other_sizes_are_refused() -> None:
    meeting = uuid.uuid4().hex
    listener = ExpertMeeting(meeting, 0)
    geometry = Geometry.of(LAYERS, ranks=1, tokens=1, dtype=torch.float32)

    def serve() -> None:
        service = ExpertService({"a": held(0, 16, torch.float32, 0)}, 0)
        with pytest.raises(AgreementError, match=r"a: a stage hands over torch\.float32 of 8"):
            service.add(reach(meeting, 0, 0, (), LIMIT_S))

    process = CONTEXT.Process(target=serve, daemon=True)
    process.start()
    raises(
        StartupError, "rank 7 has closed the connection",
        lambda: listener.accept(geometry, LAYERS, ["rank 7"], LIMIT_S),
    )  # fmt: skip
    process.join(LIMIT_S)
    assert process.exitcode == 0


def test_requests_hold_what_can_be_asked_for() -> None:
    native = expert_memory.native()
    assert native.request(0, 1) != native.request(1, 1) != native.request(0, 2)
    for layer, tokens in [(native.MOST_LAYERS, 1), (-1, 1), (0, 0), (0, native.MOST_TOKENS + 1)]:
        with pytest.raises(ValueError, match="expected a layer below"):
            native.request(layer, tokens)


def test_addresses_of_engines_differ() -> None:
    assert expert_meeting.address_of("a", 0) != expert_meeting.address_of("b", 0)
    assert expert_meeting.address_of("a", 0) != expert_meeting.address_of("a", 1)


def test_rows_that_fill_a_captured_step_up_have_no_experts() -> None:
    signals = GpuSignals.__new__(GpuSignals)
    # What `parts` makes on the GPU.
    signals._rows = torch.arange(8).unsqueeze(1)
    signals._is_token = torch.ones(8, 1, dtype=torch.bool)
    signals._none = torch.tensor(-1, dtype=torch.int32)
    signals._mark, signals._every = torch.zeros(1, dtype=torch.int32), 0
    ids = torch.arange(12, dtype=torch.int32).view(4, 3)
    for given in (ids, ids.long()):
        to = torch.zeros(8, 3, dtype=torch.int32)
        signals.begin_step(8, 1)
        signals.write_ids(given, to[:4])
        assert torch.equal(to[:4], ids)
        # A step of three tokens, captured for four.
        signals.begin_step(3, 3)
        assert signals._mark.tolist() == [3]
        signals.write_ids(given, to[:4])
        assert torch.equal(to[:3], ids[:3])
        assert to[3:].tolist() == [[-1] * 3] + [[0] * 3] * 4


HIGH = 1500
"""A descriptor that `select` does not take."""


def test_a_rank_with_many_descriptors_is_watched_too() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(2 * HIGH, hard), hard))
    try:
        geometry = Geometry.of(LAYERS, ranks=1, tokens=5, dtype=torch.float32)
        descriptor = HandoverMemory.made(geometry)
        memory = HandoverMemory(descriptor, geometry)
        os.close(descriptor)
        low, other = socket.socketpair()
        mine = socket.socket(fileno=fcntl.fcntl(low.fileno(), fcntl.F_DUPFD_CLOEXEC, HIGH))
        low.close()
        sender = ExpertChannel(memory, LAYERS, [mine], ["expert rank 0"], LIMIT_S)
        try:
            other.close()
            # Without a watch, a GPU would wait for this rank for ever.
            assert isinstance(fails(sender), dist.DistNetworkError)
        finally:
            sender.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_expert_rank_serves_what_its_memory_has_room_for() -> None:
    module = expert_memory.native()
    geometry = Geometry.of(LAYERS, ranks=2, tokens=5, dtype=torch.bfloat16)
    parts = torch.zeros(geometry.nbytes, dtype=torch.uint8).split(geometry.sizes)
    words, x, ids, weights, y, _ = parts
    ours, theirs = socket.socketpair()

    def receiver(**other: Any) -> Any:
        made = module.Receiver()
        layer = (module.ECHO, 0, LAYERS[0].hidden, LAYERS[0].chosen, 8)
        made.add(**{
            "memory": words.data_ptr(), "ranks": 2, "rank": 0, "connection": ours.fileno(),
            "x": x.data_ptr(), "ids": ids.data_ptr(), "weights": weights.data_ptr(),
            "y": y.data_ptr(), "capacity": 5, "elements": 5 * 8, "routes": 5 * 2,
            "layers": [layer],
        } | other)  # fmt: skip
        return made

    for other, said in (
        ({"rank": 2}, "expected one of 2 expert ranks, got 2"),
        ({"capacity": 0}, "tokens and at most .* layers, got 0 and 1"),
        ({"capacity": module.MOST_TOKENS + 1}, f"got {module.MOST_TOKENS + 1} and 1"),
        ({"capacity": 6}, "memory for 6 tokens of 8 elements and 2 experts, got 40 elements"),
        ({"routes": 9}, "2 experts, got 40 elements and 9 experts"),
    ):
        with pytest.raises(ValueError, match=said):
            receiver(**other)
    # What another process has written is looked at before anything grows by it.
    served, sender = receiver(), module.Sender(words.data_ptr(), 2)
    ids.view(torch.int32)[1] = 2**31 - 1
    sender.post(0, 1)
    with pytest.raises(RuntimeError, match="a token of expert 2147483647, expected one below"):
        served.serve(0.1)
    ours.close()
    theirs.close()


def test_whatever_another_process_writes_is_answered_or_named() -> None:
    """Requests at random and near those that were agreed on, by a seed."""
    rng, rank, found = random.Random(7), ExpertRank(), Counter[str]()
    for _ in range(400):
        near = rng.choice((0, 1, 2, 5, 6, 2**20 - 1)) << 12 | rng.choice((0, 1, 2, 3, 4095))
        request = rng.choice((0, near, near, near, near, rng.getrandbits(32)))
        words = [
            rng.getrandbits(32),
            request,
            *(rng.getrandbits(32) for _ in range(5)),
            rng.getrandbits(rng.choice((1, 2, 32))),
        ]
        experts = (rng.choice((-1, 0, 7, 2**16 - 1, 2**16, -(2**31), 2**31 - 1)) for _ in range(15))
        content = struct.pack("8I15i", *words, *experts) + rng.randbytes(rng.randrange(120))
        found[re.sub(r"-?\d+", "N", rank.serve(content[: rng.choice((32, 44, 500))]))] += 1
    rank.close()
    request = "a request of layer N for N tokens is none that was agreed on"
    assert found.keys() == {
        "idle",
        "answered",
        request,
        "a token of expert N, expected one below N",
    }
    assert min(found.values()) > 5, found

"""What a GPU has computed for a CPU stage stays there for the next one.

The GPU is the CPU here, and the memory of both ranks is this process's.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from decoder_parts import HIDDEN, attends  # noqa: E402
from group_steps import GroupSteps  # noqa: E402
from native_module import needs_native  # noqa: E402
from paged_steps import CLOSE, Conversation, Steps  # noqa: E402
from stage_outputs import (  # noqa: E402
    CAPACITY,
    PACKING,
    TEMPLATE,
    Memory,
    offered,
    pretended_memory,
    results,
)
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.distributed import linking  # noqa: E402
from ray_hetero.distributed.messages import Message, Packing  # noqa: E402
from ray_hetero.distributed.neighbour import Neighbours  # noqa: E402
from ray_hetero.distributed.stage_boundary import StageBoundary, Staging  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.kernels.step_route import StepLimits, StepRoute  # noqa: E402
from ray_hetero.offload.group import group_layers  # noqa: E402
from ray_hetero.offload.prefill import kv_transfer, stage_output  # noqa: E402
from ray_hetero.offload.prefill.stage_output import GpuOffer, StageOutput, accept  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(120)]
CPU = torch.device("cpu")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return pretended_memory(monkeypatch)


def message() -> Message:
    return Message(PACKING, torch.zeros(PACKING.message_bytes(CAPACITY), dtype=torch.uint8))


class Stage:
    """Layers whose results are sent, and the memory that the next stage's rank sees."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, *, waits: bool = False, timeout_s: float = 60
    ) -> None:
        self.steps = Steps(monkeypatch)
        self.output, self.seen = offered(self.steps.made, waits=waits, timeout_s=timeout_s)
        assert self.seen.words is not None
        self.words, self.rows = self.seen.words, self.seen.rows

    def sent(self, *parts: tuple[Conversation, int, int]) -> tuple[Message, float]:
        """Compute a step and send it; its message, and how far its rows are from what they are."""
        positions, hidden = self.steps.begin(parts)
        x, total = self.steps.made(positions, hidden, None)
        sent = message()
        sent.is_on_gpu = self.output.holds({"hidden_states": x, "residual": total})
        if sent.is_on_gpu:
            sent.awaited = self.output.number
            self.output.sent(sent)
            self.output.settle()
            if sent.awaited:
                self.words.wait(sent.awaited)
            x, total = results(self.seen, len(positions))
        return sent, float(self.steps.apart(x, total, parts).max())

    def compute(self, sent: Message) -> None:
        """Be the next stage: read the rows, and compute with them."""
        self.words.say(sent.awaited)
        self.words.tell(sent.done_address, sent.awaited)


def test_prompts_stay_once_a_step_has_shown_what_is_sent(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    stage = Stage(monkeypatch)
    first, other, late = (stage.steps.request(tokens) for tokens in (70, 120, 50))
    sent, apart = stage.sent((first, 0, 69))
    assert not sent.is_on_gpu
    assert apart < CLOSE
    # One request decodes on the cores, before and behind a prompt's rows.
    sent, apart = stage.sent((first, 69, 70), (other, 0, 119))
    assert sent.is_on_gpu
    assert apart < CLOSE
    # The receiver has not read it yet.
    again, apart = stage.sent((late, 0, 49))
    assert not again.is_on_gpu
    assert apart < CLOSE
    sent.take()
    again, apart = stage.sent((other, 119, 120), (late, 49, 50))
    assert not again.is_on_gpu  # a decode step
    third = stage.steps.request(60)
    again, apart = stage.sent((third, 0, 60))
    assert again.is_on_gpu
    assert apart < CLOSE


def test_streams_wait_for_what_is_sent_before_it_is_computed(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    stage = Stage(monkeypatch, waits=True)
    gpu = stage.steps.made.gpu
    order: list[str] = []
    wait = gpu.wait
    monkeypatch.setattr(gpu, "wait", lambda: (order.append("wait"), wait())[1])
    notes = stage.output.sent
    monkeypatch.setattr(
        stage.output, "sent", lambda message: (order.append("send"), notes(message))
    )
    first, other, late = (stage.steps.request(tokens) for tokens in (70, 120, 50))
    sent, apart = stage.sent((first, 0, 69))
    assert not sent.is_on_gpu
    assert apart < CLOSE
    for number, parts in enumerate(([(first, 69, 70), (other, 0, 119)], [(late, 0, 49)]), 1):
        order.clear()
        sent, apart = stage.sent(*parts)
        assert (sent.is_on_gpu, sent.awaited) == (True, number)
        assert apart < CLOSE
        # The message goes first; what the GPU says is still heard.
        assert order[-2:] == ["send", "wait"]
        stage.compute(sent)
    # Of a decode step, which the cores compute, nobody waits for the GPU.
    order.clear()
    sent, apart = stage.sent((other, 119, 120), (late, 49, 50))
    assert not sent.is_on_gpu
    stage.output.settle()
    assert order == []


def test_a_stage_waits_for_its_turn_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: 40)
    stage = Stage(monkeypatch, waits=True)
    gpu = stage.steps.made.gpu
    products: list[int] = []
    product = gpu.product
    monkeypatch.setattr(
        gpu, "product", lambda x, linear: (products.append(len(x)), product(x, linear))[1]
    )
    stage.sent((stage.steps.request(60), 0, 60))
    first, _ = stage.sent((stage.steps.request(60), 0, 60))
    assert first.awaited == 1
    products.clear()
    before, found = stage.rows.clone(), queue.SimpleQueue[Any]()
    third = stage.steps.request(40)
    computing = threading.Thread(target=lambda: found.put(stage.sent((third, 0, 40))))
    computing.start()
    # The next stage has read the rows, and computes with them.
    stage.words.say(1)
    computing.join(2)
    assert computing.is_alive()
    assert products == []
    assert torch.equal(stage.rows, before)
    stage.words.tell(first.done_address, 1)
    sent, apart = found.get(timeout=60)
    computing.join()
    assert 1 < stage.output.take_waited() < 60
    assert stage.output.take_waited() == 0
    assert set(products) == {40}
    assert sent.awaited == 2
    assert apart < CLOSE


def test_small_steps_take_no_turns(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: 50)
    stage = Stage(monkeypatch, waits=True, timeout_s=0.2)
    stage.sent((stage.steps.request(60), 0, 60))
    sent, _ = stage.sent((stage.steps.request(60), 0, 60))
    for tokens in (40, 49):
        # The next stage has read the rows, and goes on.
        stage.words.say(sent.awaited)
        sent, apart = stage.sent((stage.steps.request(tokens), 0, tokens))
        assert sent.is_on_gpu
        assert apart < CLOSE
    stage.words.say(sent.awaited)
    with pytest.raises(TimeoutError):
        stage.sent((stage.steps.request(50), 0, 50))


def test_a_stage_that_gets_no_turn_says_so(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> None:
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: 40)
    stage = Stage(monkeypatch, waits=True, timeout_s=0.2)
    for _ in range(2):
        stage.sent((stage.steps.request(60), 0, 60))
    expected = r"has not computed step 1 of prompts .* in 0\.2 s \(exchange\.timeout_s\)"
    with pytest.raises(TimeoutError, match=expected):
        stage.sent((stage.steps.request(40), 0, 40))


@pytest.mark.parametrize("refuses", ["sender", "receiver"])
def test_a_driver_that_refuses_words_has_both_ranks_wait(
    refuses: str, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    words_of, calls = stage_output.words_of, iter(("receiver", "sender"))

    def refuse(*given: Any) -> Any:
        if next(calls) == refuses:
            raise UnsupportedError("CUDA's driver refuses a stream memory operation (CUresult 801)")
        return words_of(*given)

    monkeypatch.setattr(stage_output, "words_of", refuse)
    output = StageOutput(SimpleNamespace(device=CPU, computing=None))  # type: ignore[arg-type]
    offer = output.offer(PACKING, CAPACITY)
    assert offer is not None
    seen = accept(offer, CPU)
    assert seen is not None
    waits = seen.words is not None
    assert waits == (refuses == "sender")
    output.accepted(is_seen=True, waits=waits)
    assert output._words is None
    assert output.may_take(1) == output._is_direct


def test_the_first_rank_of_a_group_leaves_what_it_has_computed_for_all(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    group = GroupSteps(monkeypatch)
    group.join()
    output, seen = offered(group.ranks[0].made)
    copies: list[torch.Tensor] = []
    copied = group_layers._copies

    def copy_and_note(results: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        copies.append(results)
        return copied(results)

    monkeypatch.setattr(group_layers, "_copies", copy_and_note)
    stays = []
    one, other = group.request(70), group.request(120)
    for parts in ([(one, 0, 69)], [(one, 69, 70), (other, 0, 119)]):
        (x, total), (x_of_other, total_of_other) = group.step(*parts)
        assert x_of_other.shape == total_of_other.shape == x.shape
        stays.append(output.holds({"hidden_states": x, "residual": total}))
        if stays[-1]:
            x, total = results(seen, len(x))
        group.compare(x, total, parts)
    assert stays == [False, True]
    # Of the first step, by both ranks; nobody needs copies of what stays.
    assert len(copies) == 2


@pytest.mark.parametrize("turns_from", [60, CAPACITY + 1])
def test_a_message_goes_ahead_of_keys_and_values_where_no_turns_are_taken(
    turns_from: int, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: turns_from)
    stage = Stage(monkeypatch, waits=True)
    gpu, done = stage.steps.made.gpu, list[str]()
    note_writes(stage.steps.layers, done, gpu)
    for name in ("sent", "settle"):
        monkeypatch.setattr(stage.output, name, noted(getattr(stage.output, name), name, done))
    monkeypatch.setattr(gpu, "wait", noted(gpu.wait, "wait", done))
    request = stage.steps.request(70)
    stage.sent((stage.steps.request(60), 0, 60))
    done.clear()
    sent, apart = stage.sent((request, 0, 60))
    assert sent.awaited == 1
    assert apart < CLOSE
    if turns_from == 60:
        assert done == ["write", "write", "sent", "settle", "wait"]
    else:
        assert done == ["write", "sent", "settle", "write", "wait"]
    stage.compute(sent)
    # They are all in the cache that the next step reads.
    _, apart = stage.sent((request, 60, 61))
    assert apart < CLOSE


def noted(call: Any, name: str, done: list[str]) -> Any:
    """A call that is noted in a list."""
    return lambda *given: (done.append(name), call(*given))[1]


def note_writes(layers: Any, done: list[str], gpu: Any) -> None:
    """Note in a list when keys and values are written, which waits until a step is ordered."""

    def write_once_ordered(write: Any) -> Any:
        def call(*given: Any) -> None:
            gpu.submit(lambda: None).result(timeout=60)
            done.append("write")
            write(*given)

        return call

    for layer in layers:
        impl = attends(layer).impl
        impl.do_kv_cache_update = write_once_ordered(impl.do_kv_cache_update)


@pytest.mark.parametrize("fails", [False, True])
def test_the_others_of_a_group_go_on_once_keys_and_values_are_written(
    fails: bool, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    group = GroupSteps(monkeypatch)
    group.join()
    first, other = (rank.made for rank in group.ranks)
    done = list[str]()
    output, _ = offered(first, waits=True)
    request = group.request(120)
    (x, total), _ = group.step((request, 0, 60))
    assert not output.holds({"hidden_states": x, "residual": total})
    note_writes(group.ranks[0].layers, done, first.gpu)

    def send(*given: Any) -> Any:
        x, total = first(*given)
        assert output.holds({"hidden_states": x, "residual": total})
        done.append("sent")
        if fails:
            monkeypatch.setattr(kv_transfer, "LIMIT_S", 0)
            returns = first._on_gpu._layers.memory.returns
            monkeypatch.setattr(returns, "_sent", queue.SimpleQueue())
        output.settle()
        return x, total

    group.ranks[0].made = send
    group.ranks[1].made = noted_behind(other, done)
    found, of_other = group.step((request, 60, 119))
    writes = ["write"] * group.count  # those of a layer, into the caches of both ranks
    if fails:
        assert isinstance(found, TimeoutError)
        assert "has failed: waited 0 s for the GPU to compute keys" in str(of_other)
        assert done == [*writes, "sent"]
        return
    assert done == [*writes, "sent", *writes, "other"]
    group.ranks[0].made, group.ranks[1].made = first, other
    group.check((request, 119, 120))


def noted_behind(call: Any, done: list[str]) -> Any:
    """A call whose end is noted in a list."""

    def made(*given: Any) -> Any:
        found = call(*given)
        done.append("other")
        return found

    return made


def test_what_a_model_changes_goes_through_the_host(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    stage = Stage(monkeypatch)
    for _ in range(2):
        positions, hidden = stage.steps.begin([(stage.steps.request(60), 0, 60)])
        x, total = stage.steps.made(positions, hidden, None)
        assert not stage.output.holds({"hidden_states": 2 * x, "residual": total})


def test_a_model_that_begins_to_change_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    stage = Stage(monkeypatch)
    stage.sent((stage.steps.request(60), 0, 60))
    positions, hidden = stage.steps.begin([(stage.steps.request(60), 0, 60)])
    x, total = stage.steps.made(positions, hidden, None)
    with pytest.raises(RuntimeError, match=r"sends tensors .* cpu\.prefill_on_gpu to false"):
        stage.output.holds({"hidden_states": x.clone(), "residual": total})


def test_a_rank_on_another_gpu_reads_from_the_host(memory: Memory) -> None:
    output = StageOutput(SimpleNamespace(device=CPU))  # type: ignore[arg-type]
    offer = output.offer(PACKING, CAPACITY)
    assert offer is not None
    memory.seen_by["cpu"] = "GPU-2"
    assert accept(offer, CPU) is None
    output.accepted(is_seen=False)
    assert memory.of_handle == {}
    assert not output.may_take(1)


def test_memory_that_cannot_be_had_or_seen_is_no_error(
    monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    assert accept(GpuOffer("GPU-1", b"none", 1), CPU) is None
    output = StageOutput(SimpleNamespace(device=CPU))  # type: ignore[arg-type]
    more = {**TEMPLATE, "scales": torch.empty(1, 4)}
    assert output.offer(Packing(more), CAPACITY) is None

    def none(device: Any, nbytes: int) -> Any:
        raise RuntimeError("cuMemAlloc_v2 of CUDA's driver answers 2")

    monkeypatch.setattr(memory, "made", none)
    assert output.offer(PACKING, CAPACITY) is None
    output.accepted(is_seen=False)


class Neighbour:
    """The other end, in another thread of this process."""

    def __init__(self, told: queue.SimpleQueue[Any], heard: queue.SimpleQueue[Any]) -> None:
        self.rank, self._told, self._heard = 7, told, heard

    def tell(self, what: Any) -> None:
        self._told.put(what)

    def hear(self) -> Any:
        return self._heard.get(timeout=20)


class Event:
    """In place of CUDA's."""

    def record(self) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.mark.parametrize("waits", [False, True])
def test_a_boundary_sends_what_stays_by_a_message_that_says_so(
    waits: bool, monkeypatch: pytest.MonkeyPatch, memory: Memory
) -> None:
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: 0)
    waited: list[None] = []
    behind: list[int] = []

    def refuse(*given: Any) -> Any:
        raise UnsupportedError("CUDA's driver refuses a stream memory operation (CUresult 801)")

    if not waits:
        monkeypatch.setattr(stage_output, "words_of", refuse)
    monkeypatch.setattr(linking.dist, "get_rank", lambda: 0)
    # The receiver's terms, but for locked pages, are those of a rank on a GPU.
    monkeypatch.setattr(linking.Terms, "is_on_gpu", True)
    monkeypatch.setattr("ray_hetero.distributed.shared_memory_link.lock_pages", lambda memory: None)
    gpu: Any = SimpleNamespace(device=CPU, computing=None, wait=lambda: waited.append(None))
    output = StageOutput(gpu)
    there, back = queue.SimpleQueue[Any](), queue.SimpleQueue[Any]()
    ends: list[Any] = [
        Neighbours(2, following=(Neighbour(there, back),)),  # type: ignore[arg-type]
        Neighbours(2, previous=Neighbour(back, there)),  # type: ignore[arg-type]
    ]
    sender, receiver = (StageBoundary(one, CPU) for one in ends)
    agreeing = threading.Thread(target=sender.agree, args=(TEMPLATE, CAPACITY, 20, (), output))
    agreeing.start()
    receiver.agree(TEMPLATE, CAPACITY, 20)
    agreeing.join()
    receiver._copied = defaultdict(Event)  # type: ignore[assignment]
    receiver._staging_in = Staging(PACKING, CAPACITY, CPU)

    def step(tokens: int) -> tuple[dict[str, Any], dict[str, Any]]:
        for boundary in (sender, receiver):
            boundary.begin_step(StepRoute.of_rows(tokens, tokens, StepLimits()))
        values = {name: torch.randn(tokens, HIDDEN).bfloat16() for name in TEMPLATE}
        stays = output.may_take(tokens)
        if stays:
            assert output.has_turn(tokens)
            output.put(tokens, slice(None), values["hidden_states"], values["residual"])
            found = output.finish(values["hidden_states"], lambda: behind.append(tokens))
            sent = dict(zip(TEMPLATE, found, strict=True))
        else:
            sent = values
            output.note(sent["hidden_states"], sent["residual"])
        assert tokens not in behind
        sender.isend(sent)
        assert (tokens in behind) == stays
        rows, (way,), (copy,) = receiver.irecv()
        way.wait()
        copy()
        assert output.has_turn(tokens) == (not stays or not waits)
        receiver.end_step()
        assert output.has_turn(tokens)
        return values, {name: one[:tokens] for name, one in rows.items()}

    ways = []
    for tokens in (16, 200, 3, 64, 1, 5, 9):
        ways.append(output.may_take(tokens))
        values, found = step(tokens)
        assert all(torch.equal(found[name], values[name]) for name in TEMPLATE), tokens
    assert ways == [False, *[True] * 6]
    assert behind == [200, 3, 64, 1, 5, 9]
    assert len(waited) == 6
    assert output.number == (6 if waits else 0)
    sender.take()
    monkeypatch.setattr(output, "take_waited", lambda: 1.5)
    step(7)
    assert sender.take().waiting_s == 1.5

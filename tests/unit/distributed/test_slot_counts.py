"""Slots for experts that nobody has made: what they would hold, and what a step would take."""

from __future__ import annotations

import os
import random
import socket
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist  # noqa: E402

from placement.plan.devices import DeviceFigures  # noqa: E402
from placement.plan.expert_slots import (  # noqa: E402
    SlotCounts,
    SlotRates,
    step_with_layers,
    step_with_slots,
)
from ray_hetero.distributed import expert_memory  # noqa: E402
from ray_hetero.distributed.expert_channel import ExpertChannel  # noqa: E402
from ray_hetero.distributed.expert_meeting import Reached  # noqa: E402
from ray_hetero.distributed.expert_memory import Geometry, HandoverMemory, RemoteLayer  # noqa: E402
from ray_hetero.distributed.expert_service import ExpertService, HeldLayer  # noqa: E402
from ray_hetero.observability.slot_forecast import PERCENTS, SlotForecast, described  # noqa: E402
from ray_hetero.observability.step_clock import StepTotals  # noqa: E402
from ray_hetero.worker.speculation import rows_to_verified  # noqa: E402

if expert_memory._native is None:
    pytest.skip("needs the native module", allow_module_level=True)

NATIVE = expert_memory.native()
EXPERTS, CHOSEN = 40, 4
LAYERS = (RemoteLayer("a", 8, CHOSEN), RemoteLayer("b", 8, CHOSEN))
LIMIT_S = 20.0


class PlainSlots:
    """Slots of one size as a plain reference, with lists that are searched."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._in: list[int] = []
        self._used: dict[int, int] = {}
        self._now = 0

    def step(self, experts: Sequence[int]) -> tuple[int, int]:
        """How many of these are found, and how many are copied behind the step."""
        self._now += 1
        hits = sum(expert in self._in for expert in experts)
        seconds = [
            expert for expert in experts
            if expert not in self._in
            and expert in self._used
            and self._now - self._used[expert] <= NATIVE.SLOT_WINDOW
        ]  # fmt: skip
        self._used |= dict.fromkeys(experts, self._now)
        copies = 0
        for expert in seconds[: NATIVE.SLOT_COPIES]:
            if len(self._in) == self._count:
                oldest = min(self._in, key=self._used.__getitem__)
                if self._used[oldest] == self._now:
                    break
                self._in[self._in.index(oldest)] = expert
            else:
                self._in.append(expert)
            copies += 1
        return hits, copies


def even(rng: random.Random) -> list[int]:
    return rng.sample(range(EXPERTS), CHOSEN)


def skewed(rng: random.Random) -> list[int]:
    found: list[int] = []
    while len(found) < CHOSEN:
        expert = min(int(rng.paretovariate(0.7)) - 1, EXPERTS - 1)
        if expert not in found:
            found.append(expert)
    return found


@pytest.mark.parametrize("chosen", [even, skewed])
@pytest.mark.parametrize("tokens", [1, 3, 12])
def test_slots_hold_what_a_plain_search_finds(chosen: Any, tokens: int) -> None:
    rng, slots = random.Random(tokens), NATIVE.LayerSlots(EXPERTS)
    plain = [PlainSlots(max(1, (EXPERTS * percent + 50) // 100)) for percent in PERCENTS]
    hits, most_copies = [0] * len(PERCENTS), 0
    for _ in range(400):
        experts = list(dict.fromkeys(one for _ in range(tokens) for one in chosen(rng)))
        found, copied = slots.step(experts)
        assert list(zip(found, copied, strict=True)) == [one.step(experts) for one in plain]
        hits = [total + more for total, more in zip(hits, found, strict=True)]
        most_copies = max(most_copies, *copied)
    assert most_copies == NATIVE.SLOT_COPIES
    assert 0 < hits[0] < hits[1] < hits[2]


def test_an_expert_that_there_is_not_is_named() -> None:
    for experts in ([EXPERTS], [-1], [3, 3]):
        with pytest.raises(ValueError, match=f"different experts below {EXPERTS}, got"):
            NATIVE.LayerSlots(EXPERTS).step(experts)


@pytest.fixture(params=["native", "python"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[ExpertChannel, ExpertService]]:
    """A channel to an expert rank in a thread."""
    geometry = Geometry.of(LAYERS, ranks=1, tokens=100, dtype=torch.bfloat16)
    descriptor = HandoverMemory.made(geometry)
    memory = HandoverMemory(descriptor, geometry)
    os.close(descriptor)
    mine, other = socket.socketpair()
    echo = SimpleNamespace(function=NATIVE.ECHO, context=0, with_team=0)
    call = echo if request.param == "native" else None
    layer = HeldLayer(8, torch.bfloat16, lambda x, weights, ids: x, call=call, count=EXPERTS)
    service = ExpertService({one.name: layer for one in LAYERS}, 0)
    service.add(Reached(memory, LAYERS, other))

    def serve() -> None:
        with pytest.raises(dist.DistNetworkError):
            service.serve()

    thread = threading.Thread(target=serve)
    thread.start()
    sender = ExpertChannel(memory, LAYERS, [mine], ["expert rank 0"], LIMIT_S)
    yield sender, service
    sender.close()
    thread.join(LIMIT_S)
    mine.close()
    other.close()


def hand_over(sender: ExpertChannel, ids: Sequence[Sequence[int]], layer: int) -> None:
    given = torch.tensor(ids)
    sender.hand_over(torch.ones(len(ids), 8).bfloat16(), torch.ones(given.shape), given, layer)
    sender.take(len(ids), layer)


def totals_after(service: ExpertService, layers: int) -> dict[str, Any]:
    """Totals once the last layer was counted, which is behind its answer."""
    for _ in range(2000):
        found = service.totals
        if found["slot_layers"] >= layers:
            return found
        threading.Event().wait(0.001)
    raise AssertionError(service.totals)


def test_an_expert_rank_counts_tokens_that_are_no_drafts_and_no_padding(
    served: tuple[ExpertChannel, ExpertService],
) -> None:
    sender, service = served
    rng = random.Random(1)
    plain = [[PlainSlots((EXPERTS * percent + 50) // 100) for percent in PERCENTS] for _ in LAYERS]
    hits, copies, read, layers = [0] * len(PERCENTS), [0] * len(PERCENTS), 0, 0
    service.keep_routes()
    records = []
    # As in warm-up: nobody has said which rows are tokens.
    hand_over(sender, [skewed(rng)], 0)
    for every in [1, 3, 1, 3] * 60:
        for layer in range(len(LAYERS)):
            rows = [skewed(rng) for _ in range(2)]
            kept = list(dict.fromkeys(expert for row in rows for expert in row))
            records += [layer, 2, *rows[0], *rows[1]]
            if every == 3:
                rows = [rows[0], even(rng), even(rng), rows[1], even(rng), even(rng)]
            sender.begin_step(len(rows), every)
            hand_over(sender, [*rows, [-1] * CHOSEN], layer) if every == 1 else hand_over(
                sender, rows, layer
            )
            if every == 1:
                # The row of padding is one of the record's.
                records[-2 * CHOSEN - 1] = 3
                records += [2**16 - 1] * CHOSEN
            read, layers = read + len(kept), layers + 1
            for size, one in enumerate(plain[layer]):
                hit, copied = one.step(kept)
                hits[size] += hit
                copies[size] += copied
    # Neither a step whose drafts lie anywhere nor one of many tokens is counted.
    for tokens, every in ((6, 0), (NATIVE.COUNTED_TOKENS + 1, 1)):
        sender.begin_step(tokens, every)
        hand_over(sender, [even(rng) for _ in range(tokens)], 0)
    found = totals_after(service, layers)
    assert (found["slot_steps"], found["slot_layers"]) == (layers // 2, layers)
    assert found["slot_experts"] == read
    assert [found[f"slot_hits_{percent}"] for percent in PERCENTS] == hits
    assert [found[f"slot_copies_{percent}"] for percent in PERCENTS] == copies
    assert found["steps"] == layers // 2 + 3
    assert 0 < found["slot_computing_s"] < found["computing_s"]
    taken, lost = service.take_routes(close=True)
    assert torch.frombuffer(bytearray(taken), dtype=torch.uint16).tolist() == records
    assert lost == 0
    hand_over(sender, [even(rng)], 0)
    assert service.take_routes(close=True) == (b"", 0)


def test_drafts_are_known_where_all_requests_have_as_many() -> None:
    def step(counts: dict[str, int], drafts: dict[str, list[int]]) -> SimpleNamespace:
        return SimpleNamespace(num_scheduled_tokens=counts, scheduled_spec_decode_tokens=drafts)

    assert rows_to_verified(step({"a": 1, "b": 9}, {})) == 1
    assert rows_to_verified(step({"a": 3, "b": 3}, {"a": [1, 2], "b": [3, 4]})) == 3
    assert rows_to_verified(step({"a": 3, "b": 1}, {"a": [1, 2]})) == 0
    assert rows_to_verified(step({"a": 3, "b": 3}, {"a": [1, 2]})) == 0
    assert rows_to_verified(step({"a": 3, "b": 30}, {"a": [1, 2]})) == 0


@pytest.mark.parametrize("chosen", [even, skewed])
def test_the_book_of_a_gpu_is_one_of_the_shadow_cache(chosen: Any) -> None:
    rng, slots = random.Random(3), NATIVE.LayerSlots(EXPERTS)
    count = (EXPERTS * PERCENTS[2] + 50) // 100
    slots.have(count)
    plain = PlainSlots(count)
    for number in range(400):
        if number == 200:
            # It begins again, and the others do not; what was used when is known.
            slots.have(count + 3)
            again = PlainSlots(count + 3)
            again._used, again._now, plain = plain._used, number, again
        experts = list(dict.fromkeys(one for _ in range(3) for one in chosen(rng)))
        found, copied = slots.step(experts)
        assert (found[3], copied[3]) == plain.step(experts)
        if number < 200:
            assert (found[3], copied[3]) == (found[2], copied[2])
    slots.have(0)
    assert len(slots.step([1])[0]) == len(PERCENTS)


def orders_after(sender: ExpertChannel, most: int, count: int) -> list[list[int]]:
    """Orders of the first expert rank once there are so many."""
    found: list[list[int]] = []
    for _ in range(2000):
        found += sender.slot_orders.take_orders(most)
        if len(found) >= count:
            return found
        threading.Event().wait(0.001)
    raise AssertionError(found)


def test_a_gpu_that_follows_is_told_what_to_copy(
    served: tuple[ExpertChannel, ExpertService],
) -> None:
    sender, service = served
    orders, layers = sender.slot_orders, 0
    sender.begin_step(1)

    def step(*experts: int) -> None:
        nonlocal layers
        for layer in range(len(LAYERS)):
            hand_over(sender, [experts], layer)
            layers += 1

    orders.make_slots(3)
    step(0, 1, 2, 3)
    step(0, 1, 2, 3)
    totals_after(service, layers)
    # The book goes on by itself, and says so: two of each layer are copied.
    assert orders.take_orders(99) == []
    sums = orders.slot_sums
    assert sums[:2] == [2, 4]
    assert sums[4:] == [16, 0, 4]
    assert 0 < sums[2] < 1e9 * service.totals["slot_computing_s"] + 1
    orders.follow(True)
    step(0, 1, 2, 3)
    step(0, 1, 2, 3)
    # It is empty at first.  The third expert of a layer comes a step later, and the fourth never.
    expected = [[0, 0, 0], [0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 2, 2], [1, 2, 2]]
    assert orders_after(sender, 4, 6) == expected
    # What was ordered of a book is nothing for the one behind it.
    step(4, 5, 6, 7)
    step(4, 5, 6, 7)
    totals_after(service, layers)
    orders.follow(False)
    orders.follow(True)
    assert orders.take_orders(99) == []


def test_orders_wait_for_room_and_every_layer_has_its_turn(
    served: tuple[ExpertChannel, ExpertService],
) -> None:
    sender, service = served
    orders = sender.slot_orders
    orders.make_slots(6)
    orders.follow(True)
    sender.begin_step(1)
    rng, layers, seen = random.Random(5), 0, [0, 0]
    for number in range(300):
        for layer in range(len(LAYERS)):
            hand_over(sender, [rng.sample(range(20), CHOSEN)], layer)
            layers += 1
        totals_after(service, layers)
        if number == 100:
            waiting = orders.take_orders(99)
            assert len(waiting) == NATIVE.SLOT_ORDERS
            assert orders.slot_sums[6] == NATIVE.SLOT_ORDERS
        # One at a time, of two layers that could each have two in a step.
        if number > 100:
            for layer, _, _ in orders.take_orders(1):
                seen[layer] += 1
    # Next to all of them are taken, and half of them are each layer's.
    assert sum(seen) > 150
    assert min(seen) > 0.4 * sum(seen)


def test_experts_in_slots_are_counted_but_not_computed(
    served: tuple[ExpertChannel, ExpertService],
) -> None:
    sender, service = served
    service.keep_routes()
    sender.begin_step(2)
    hand_over(sender, [[0, -2 - 7, -1, 3], [-2 - 7, -2 - 9, 0, 5]], 0)
    found = totals_after(service, 1)
    assert (found["slot_experts"], found["slot_held"], found["experts"]) == (5, 2, 3)
    records, _ = service.take_routes(close=True)
    none = 2**16 - 1
    kept = torch.frombuffer(bytearray(records), dtype=torch.uint16).tolist()
    assert kept == [0, 2, 0, 7, none, 3, 7, 9, 0, 5]


COUNTS = SlotCounts(
    computing_s=8e-3, others_s=4e-3, layers=20, read=160, hits=120, copies=10
)  # fmt: skip
RATES = SlotRates(
    expert_bytes=10e6, slot_bytes=10e6, own_bytes=10e6, gpu_bandwidth=3e12, link_bandwidth=50e9,
    layer_s=13e-6,
)  # fmt: skip


def test_a_step_with_slots_by_hand() -> None:
    # Sockets read 160 − 120 + 10 of 160 experts; the GPU needs 20 · 13 µs and 120 reads of 3.3 µs.
    assert step_with_slots(COUNTS, RATES) == pytest.approx(4e-3 + 8e-3 * 50 / 160)
    slow = replace(RATES, gpu_bandwidth=300e9)
    assert step_with_slots(COUNTS, slow) == pytest.approx(4e-3 + 20 * 13e-6 + 120 * 10e6 / 300e9)
    # Ten experts of 10 MB take longer over this link than the step.
    narrow = replace(RATES, link_bandwidth=5e9)
    assert step_with_slots(COUNTS, narrow) == pytest.approx(100e6 / 5e9)
    gpu = 0.25 * 160 * 10e6 / 3e12
    assert step_with_layers(COUNTS, RATES, 0.25) == pytest.approx(4e-3 + 0.75 * 8e-3 + gpu)
    # In slots, codes of four bits are four times as large; whole layers keep them.
    codes = replace(RATES, slot_bytes=40e6)
    assert step_with_layers(COUNTS, codes, 0.25) == pytest.approx(4e-3 + 4 * gpu)
    assert step_with_layers(COUNTS, codes, 0.125) == pytest.approx(4e-3 + 0.5 * 8e-3 + 2 * gpu)


def test_rates_know_what_a_checkpoint_takes() -> None:
    gpu = DeviceFigures("GPU", "gpu", 3e12, 1e15, 80 << 30, host_link=50e9)
    compact = SlotRates.of(7.5e6, 5e6, gpu, is_16_bit=True)
    assert compact == replace(RATES, expert_bytes=7.5e6)
    codes = SlotRates.of(2.6e6, 5e6, gpu, is_16_bit=False)
    assert codes == replace(RATES, expert_bytes=2.6e6, own_bytes=2.6e6)
    assert SlotRates.of(1.0, 1.0, replace(gpu, host_link=None), is_16_bit=True) is None


def test_a_forecast_is_said_in_one_line() -> None:
    totals = StepTotals(
        slot_steps=10, slot_layers=200, slot_experts=1600, slot_computing_s=0.08,
        slot_waiting_s=0.04, slot_hits_5=400, slot_hits_10=800, slot_hits_25=1200,
        slot_copies_5=20, slot_copies_10=40, slot_copies_25=100,
    )  # fmt: skip
    found = SlotForecast.of(totals, RATES)
    assert [one.hit_share for one in found] == [0.25, 0.5, 0.75]
    assert found[2].slots_ms == pytest.approx(1000 * step_with_slots(COUNTS, RATES))
    assert found[2].layers_ms == pytest.approx(1000 * step_with_layers(COUNTS, RATES, 0.25))
    assert described(found) == (
        "GPU slots for 5, 10, 25 % of each layer's experts would hold 25, 50, 75 % of those read; "
        "a step of 12.00 ms is predicted to take 10.10, 8.20, 6.50 ms with them, and 11.63, 11.25, "
        "10.13 ms with whole layers in as much memory"
    )
    assert described(SlotForecast.of(totals, None)).endswith("75 % of those read")
    # The GPU has slots: what the sockets have computed is a quarter of it all.
    held = replace(totals, slot_held=1200, slot_computing_s=0.02)
    assert [one.held_share for one in SlotForecast.of(held, RATES)] == [0.75] * 3
    assert described(SlotForecast.of(held, RATES)) == (
        f"the GPU has computed 75 % of the experts from its slots; {described(found)}"
    )
    assert SlotForecast.of(StepTotals(), RATES) == ()


def test_the_sizes_are_those_of_the_native_module() -> None:
    assert list(PERCENTS) == NATIVE.SLOT_PERCENTS

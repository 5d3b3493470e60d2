"""Experts in slots of a GPU: their sums, entries, copies, and what expert ranks are told.

Without a GPU here: the CPU takes its place, with the same tables, copies and expansions; only
vLLM's kernel has one of torch's operators in its place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from linked_layers import CHOSEN, EXPERTS, Layer, assert_close, routed  # noqa: E402
from native_module import native  # noqa: E402

from placement.units import GIB  # noqa: E402
from ray_hetero.errors import AgreementError, UnsupportedError  # noqa: E402
from ray_hetero.kernels.experts.quantised_experts import KINDS  # noqa: E402
from ray_hetero.kernels.formats import FORMATS  # noqa: E402
from ray_hetero.offload.experts.expert_expansion import sizes_of  # noqa: E402
from ray_hetero.offload.experts.expert_slots import (  # noqa: E402
    ExpertSlots,
    expert_bytes,
    slots_within,
)
from ray_hetero.offload.experts.slot_switch import SLOT_TOKENS, Phase  # noqa: E402

if native is None:
    pytest.skip("needs the native module", allow_module_level=True)

CPU = torch.device("cpu")


class Orders:
    """Orders of a book that the test keeps."""

    def __init__(self) -> None:
        self.slots = 0
        self.follows: list[bool] = []
        self.given: deque[tuple[int, int, int]] = deque()
        self.slot_sums = [0] * 7

    def make_slots(self, slots: int) -> None:
        self.slots = slots

    def follow(self, is_following: bool) -> None:
        self.follows.append(is_following)

    def take_orders(self, most: int) -> Sequence[Sequence[int]]:
        return [self.given.popleft() for _ in range(min(most, len(self.given)))]


def budget(layers: Sequence[Layer], slots: int) -> int:
    """Bytes for so many slots of each layer."""
    slices = [layer.slices for layer in layers]
    sizes = sizes_of(slices)
    return sizes.beside + sizes.each + slots * sum(map(expert_bytes, slices))


def made(layers: Sequence[Layer], slots: int, orders: Orders | None = None, **more: Any) -> Any:
    slices = [layer.slices for layer in layers]
    return ExpertSlots(CPU, slices, budget(layers, slots), orders or Orders(), **more)


def together(slots: ExpertSlots, layer: Layer, given: Any, number: int = 0) -> torch.Tensor:
    """Compute a layer in a step: sums of the slots, and of the sockets for what is left."""
    x, weights, ids = given
    told = slots.told(ids, number)
    left: torch.Tensor = sum(rank(x, weights, told).float() for rank in layer.ranks)
    return slots.sums(x, weights, ids, number).float() + left


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("kind", [*FORMATS, *KINDS])
def test_slots_and_sockets_make_the_whole(kind: str, ranks: int) -> None:
    torch.manual_seed(0)
    activation = "swigluoai" if kind in ("packed", "mxfp4") else "silu"
    layer = Layer(kind, ranks, activation, inner=64 * ranks)
    given = routed(40)
    # A row that only fills a step up, and a token without its second expert.
    given[2][5] = -1
    given[2][6, 1] = -1
    given[1][7] = 0
    for count in (1, 4, EXPERTS):
        slots = made([layer], count, is_fixed=True)
        assert slots.slots == count
        x, weights, ids = given
        held = (ids >= 0) & (ids < count)
        told = slots.told(ids, 0)
        assert torch.equal(told, torch.where(held, -2 - ids, ids))
        found = together(slots, layer, given)
        assert_close(found, layer.expected(*given))
        assert_close(slots.sums(x, weights, ids, 0), layer.expected(x, weights * held, ids))
        assert not found[5].any()
        assert not found[7].any()
        assert torch.equal(found, together(slots, layer, given))


def test_sockets_read_nothing_of_what_they_are_told_is_in_a_slot() -> None:
    torch.manual_seed(1)
    layer = Layer("packed", 1)
    given = routed(12)
    slots = made([layer], 3, is_fixed=True)
    expected = together(slots, layer, given)
    # Weights of experts in slots are no numbers any more where the sockets would read them.
    for expert in range(3):
        for half in layer.ranks[0].weights[expert]:
            half.data.view(torch.bfloat16).fill_(float("nan"))
    assert torch.equal(together(slots, layer, given), expected)
    assert layer.ranks[0](*given).isnan().any()


def test_larger_steps_and_layers_that_cannot_be_read_have_no_slots() -> None:
    layer = Layer("packed", 1)
    slices = [None, layer.slices]
    slots = ExpertSlots(CPU, slices, budget([layer], 2), Orders(), is_fixed=True)
    assert [slots.holds(SLOT_TOKENS, number) for number in range(2)] == [False, True]
    assert not slots.holds(SLOT_TOKENS + 1, 1)
    assert slots.counts == [0, EXPERTS]
    orders = Orders()
    slots = ExpertSlots(CPU, slices, budget([layer], 2), orders)
    orders.given.extend([(0, 1, 0), (1, 2, 1)])
    for _ in range(2):
        slots.begin_step(1)
    assert slots.told(torch.arange(EXPERTS), 1).tolist().count(-2 - 2) == 1
    assert slots.copied == 1


def test_entries_follow_orders() -> None:
    torch.manual_seed(2)
    orders, layers = Orders(), [Layer("compact", 2, inner=128), Layer("fp8", 2, inner=128)]
    slots = made(layers, 2, orders)
    assert (orders.slots, orders.follows) == (2, [True])
    given = routed(20)

    def held() -> list[list[int]]:
        every = torch.arange(EXPERTS, dtype=torch.int32)
        told = [slots.told(every, number) for number in range(2)]
        return [(-2 - one[one < 0]).tolist() for one in told]

    def step(*more: tuple[int, int, int]) -> None:
        orders.given.extend(more)
        slots.begin_step(20)
        for number, layer in enumerate(layers):
            assert_close(together(slots, layer, given, number), layer.expected(*given))

    # What is ordered before a step is there in the one behind it.
    step((0, 3, 0), (1, 6, 1))
    assert held() == [[], []]
    step()
    assert held() == [[3], [6]]
    # The expert that makes room leaves before the copy, whose own entry comes behind it.
    step((0, 5, 0), (0, 1, 1))
    assert held() == [[], [6]]
    step()
    assert held() == [[1, 5], [6]]
    # Of two for one slot the later one stays; one that is there already is not copied again.
    copied = slots.copied
    step((1, 2, 0), (1, 4, 0), (1, 6, 0), (0, 5, 1))
    step()
    assert held() == [[1, 5], [4, 6]]
    assert slots.copied == copied + 1


def test_an_order_for_what_there_is_not_is_named() -> None:
    for order in ((1, 0, 0), (0, EXPERTS, 0), (0, 0, 2)):
        orders = Orders()
        slots = made([Layer("packed", 1)], 2, orders)
        orders.given.append(order)
        with pytest.raises(AgreementError, match=f"wants expert {order[1]} of layer {order[0]}"):
            slots.begin_step(1)


class Stream:
    """A stream that a test looks at."""

    def __init__(self, name: str, done: list[str]) -> None:
        self.name, self.done = name, done

    def wait_event(self, event: Event) -> None:
        self.done.append(f"{self.name} waits for {event.name}")


class Event:
    """An event that has happened when the test says so."""

    def __init__(self, name: str) -> None:
        self.name, self.is_done = name, False

    def record(self, stream: Stream) -> None:
        stream.done.append(f"{stream.name} records {self.name}")

    def query(self) -> bool:
        return self.is_done


def test_memory_is_overwritten_behind_steps_and_read_behind_copies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orders, done = Orders(), []
    slots = made([Layer("packed", 1)], 1, orders)
    steps, copies = Stream("steps", done), Stream("copies", done)
    slots._module = type("Module", (), {"current_stream": staticmethod(lambda: steps)})
    slots._cleared, slots._arrived = Event("cleared"), Event("arrived")
    slots._reader.copying = copies
    upload, put = slots._tables.upload, slots._put

    def noted_upload(*, is_empty: bool) -> None:
        upload(is_empty=is_empty)
        places = slots._tables.slots[0].tolist()
        done.append(f"steps find {[expert for expert, slot in enumerate(places) if slot == 0]}")

    def noted_put(layer: int, expert: int, slot: int) -> None:
        done.append(f"copies {expert}")
        put(layer, expert, slot)

    monkeypatch.setattr(slots._tables, "upload", noted_upload)
    monkeypatch.setattr(slots, "_put", noted_put)
    orders.given.append((0, 3, 0))
    slots.begin_step(1)
    order = ["steps records cleared", "copies waits for cleared"]
    assert done == ["steps find []", *order, "copies 3", "copies records arrived"]
    # While they are on their way, nothing changes and nothing more is ordered.
    done.clear()
    orders.given.append((0, 5, 0))
    slots.begin_step(1)
    assert done == []
    slots._arrived.is_done = True
    slots.begin_step(1)
    # In one upload: the entry of the first was made and taken back before any step read it.
    assert done == ["steps find []", *order, "copies 5", "copies records arrived"]


def test_phases_empty_the_tables_or_the_slots() -> None:
    orders, layer = Orders(), Layer("packed", 1)
    phases = deque([Phase.OFF, Phase.ON, Phase.ON, Phase.PAUSED, Phase.ON, Phase.OFF, Phase.ON])
    switch: Any = type("Switch", (), {"step": lambda *given: phases.popleft()})()
    slots = made([layer], 2, orders, switch=switch)
    every = torch.arange(EXPERTS)

    def found() -> list[int]:
        slots.begin_step(1)
        told = slots.told(every, 0)
        return (-2 - told[told < 0]).tolist()

    orders.given.append((0, 2, 1))
    assert [found() for _ in range(5)] == [[], [], [2], [], [2]]
    assert orders.follows == [True]
    assert found() == []
    assert orders.follows == [True, False]
    # What they held is forgotten: the book is empty too.
    assert found() == []
    assert orders.follows == [True, False, True]


def test_the_budget_is_for_all_that_slots_take() -> None:
    layers = [Layer("compact", 1), Layer("packed", 1)]
    slices = [layer.slices for layer in layers]
    each = sum(map(expert_bytes, slices))
    for slots in (1, 3):
        assert slots_within(budget(layers, slots), slices) == (slots, budget(layers, slots))
        assert slots_within(budget(layers, slots) + each - 1, slices)[0] == slots
    assert slots_within(GIB, slices)[0] == EXPERTS
    with pytest.raises(UnsupportedError, match=r"one slot for each of 2 layers needs .* GiB"):
        slots_within(budget(layers, 1) - 1, slices)
    weights = sum(half.shape[0] * half.shape[1] for half in slices[0][0].halves)
    assert expert_bytes(slices[0]) == 2 * weights
    assert CHOSEN < EXPERTS

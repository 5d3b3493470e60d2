"""Slots of a stage beside expert ranks: who computes what, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from linked_layers import CHOSEN, EXPERTS, HIDDEN, Layer, assert_close, routed  # noqa: E402
from native_module import native  # noqa: E402
from test_split_experts import CAPACITY, Stage, stage_of  # noqa: E402

from placement.plan.devices import DeviceFigures  # noqa: E402
from placement.units import GIB  # noqa: E402
from ray_hetero.config import ExpertsConfig  # noqa: E402
from ray_hetero.distributed import expert_memory, stage_experts, stage_slots  # noqa: E402
from ray_hetero.distributed.expert_memory import RemoteLayer  # noqa: E402
from ray_hetero.distributed.expert_offers import Offer  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.offload.experts.expert_expansion import sizes_of  # noqa: E402
from ray_hetero.offload.experts.expert_slots import ExpertSlots, expert_bytes  # noqa: E402
from ray_hetero.offload.experts.slot_switch import SLOT_TOKENS  # noqa: E402

if native is None or expert_memory._native is None:
    pytest.skip("needs the native modules", allow_module_level=True)

CPU = torch.device("cpu")
GPU = DeviceFigures("GPU", "gpu", 3e12, 1e15, 80 << 30, host_link=50e9)
FEW = 4
"""Experts that tokens keep to."""


def budget(layers: list[Layer], slots: int) -> int:
    sizes = sizes_of([layer.slices for layer in layers])
    each = sum(expert_bytes(layer.slices) for layer in layers)
    return sizes.beside + sizes.each + slots * each


def step(stage: Stage, slots: ExpertSlots, layers: list[Layer], given: Any) -> None:
    """Hand a step's tokens over as a rank does, and see that the sums are right."""
    stage.channel.begin_step(len(given[0]), 1)
    slots.begin_step(len(given[0]))
    for number, layer in enumerate(layers):
        handed = torch.ops.ray_hetero.hand_experts_over(*given, number)
        found = torch.ops.ray_hetero.take_expert_sums(*given, handed, number)
        assert_close(found, layer.expected(*given))


@pytest.mark.parametrize("ranks", [1, 2])
def test_experts_move_into_slots_while_steps_go_on(
    ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    layers = [
        Layer("compact", ranks, inner=64 * ranks),
        Layer("mxfp4", ranks, "swigluoai", inner=64 * ranks),
    ]
    with stage_of(layers) as stage:
        stage.start()
        slots = ExpertSlots(
            CPU, [layer.slices for layer in layers], budget(layers, FEW), stage.channel.slot_orders
        )
        monkeypatch.setattr(stage_experts, "_channels", [stage.channel])
        monkeypatch.setattr(stage_experts, "_slots", [slots])
        for _ in range(20):
            step(stage, slots, layers, routed(3, most=FEW))
        # What is used again and again is in slots: the sockets compute nothing any more.
        assert slots.copied == len(layers) * FEW
        before = stage.totals("experts")
        step(stage, slots, layers, routed(3, most=FEW))
        assert stage.totals("experts") == before
        assert stage.services[0].totals["slot_held"] > 0
        # Others take their places, one by one.
        for _ in range(40):
            step(stage, slots, layers, routed(5))
        assert slots.copied > len(layers) * FEW
        # A larger step leaves all to the sockets; here, what is handed over in two pieces is one.
        assert CAPACITY < SLOT_TOKENS
        before = stage.totals("experts")
        step(stage, slots, layers, routed(CAPACITY + 1))
        assert all(
            after - count > len(layers) * EXPERTS
            for count, after in zip(before, stage.totals("experts"), strict=True)
        )


@pytest.mark.parametrize("tokens", [1, 8])
def test_fixed_slots_compute_the_same_every_time(
    tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(1)
    layer, given = Layer("fp8", 2, inner=128), routed(tokens)
    with stage_of([layer]) as stage:
        stage.start()
        slots = ExpertSlots(
            CPU, [layer.slices], budget([layer], 3), stage.channel.slot_orders, is_fixed=True
        )
        monkeypatch.setattr(stage_experts, "_channels", [stage.channel])
        monkeypatch.setattr(stage_experts, "_slots", [slots])
        found = []
        for _ in range(5):
            step(stage, slots, [layer], given)
            handed = torch.ops.ray_hetero.hand_experts_over(*given, 0)
            found.append(torch.ops.ray_hetero.take_expert_sums(*given, handed, 0))
        assert all(torch.equal(one, found[0]) for one in found)
        assert slots.copied == 3


def made(config: dict[str, Any], layer: Layer, **more: Any) -> ExpertSlots | None:
    """Slots that a stage makes of a configuration."""
    asked = [RemoteLayer("a", HIDDEN, CHOSEN)]
    offers = [Offer(None, {"a": one}) for one in layer.slices]
    orders = SimpleNamespace(
        make_slots=lambda slots: None, follow=lambda is_following: None,
        take_orders=lambda most: [], slot_sums=[0] * 7,
    )  # fmt: skip
    channel: Any = SimpleNamespace(slot_orders=orders)
    how = {"dtype": torch.bfloat16, "ranks": 1, "gpu": GPU, "channel": channel} | more
    return stage_slots.made(
        ExpertsConfig.model_validate(config), CPU, asked, offers, how.pop("channel"),
        how.pop("gpu"), **how,
    )  # fmt: skip


def test_slots_are_made_where_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    layer = Layer("compact", 2, inner=128)
    assert made({}, layer) is None
    gib = budget([layer], 3) / GIB
    asked = {"slots_gib": gib + 1e-6}
    # Another rank of the stage hands tokens over.
    assert made(asked, layer, channel=None) is None
    with caplog.at_level(logging.INFO, "vllm.ray_hetero"):
        slots = made(asked, layer)
    assert slots is not None
    assert f"slots for 3 of {EXPERTS} experts of each of 1 layers" in caplog.text
    assert "used while steps are measured to be faster" in caplog.text
    assert slots._switch is not None
    rates = slots._switch._rates
    assert rates is not None
    # Of an expert: what both slices take in memory, and in 16 bits.
    stored = sum(one.nbytes for one in layer.slices) / EXPERTS
    in_slot = 2 * 3 * HIDDEN * 128
    assert (rates.expert_bytes, rates.slot_bytes, rates.own_bytes) == (stored, in_slot, in_slot)
    codes = made(asked | {"slots_gib": 0.1}, Layer("mxfp4", 1, inner=128))
    assert codes is not None
    assert codes._switch is not None
    rates = codes._switch._rates
    assert rates is not None
    assert rates.own_bytes == rates.expert_bytes < 0.3 * rates.slot_bytes
    for use in ("always", "fixed"):
        slots = made(asked | {"slots": use}, layer, gpu=None)
        assert slots is not None
        assert slots._switch is None
    unknown = made(asked, layer, gpu=replace(GPU, host_link=None))
    assert unknown is not None
    assert unknown._switch is not None
    assert unknown._switch._rates is None


def test_what_slots_cannot_be_made_of_is_said() -> None:
    layer = Layer("packed", 1)
    with pytest.raises(UnsupportedError, match=r"a stage has 2 GPUs: slots are for stages of one"):
        made({"slots_gib": 1.0}, layer, ranks=2)
    with pytest.raises(UnsupportedError, match=r"slots_gib is 1: tokens are torch\.float32"):
        made({"slots_gib": 1.0}, layer, dtype=torch.float32)
    with pytest.raises(UnsupportedError, match=r"slots_gib is 0\.001: one slot for each of 1"):
        made({"slots_gib": 0.001}, layer)

"""Layouts: kinds by stage, chosen or given, and what is said when devices are missing."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from worlds import layout

from placement.cluster.layout import auto_layout, given_layout
from placement.errors import LayoutError

STAGES, RANKS, DEVICES = st.integers(1, 8), st.integers(1, 8), st.integers(0, 20)


@given(STAGES, RANKS, DEVICES, DEVICES)
def test_auto_uses_what_is_there_or_says_what_is_missing(
    stages: int, ranks: int, gpus: int, sockets: int
) -> None:
    if gpus // ranks + sockets // ranks < stages:
        with pytest.raises(LayoutError, match=rf"{stages} .* {ranks} .* = {stages * ranks} rank"):
            auto_layout(stages, ranks, gpus, sockets)
        return
    made = auto_layout(stages, ranks, gpus, sockets)
    assert [len(stage) for stage in made.stages] == [ranks] * stages
    assert made.count("gpu") <= gpus
    assert made.count("cpu") <= sockets
    assert not any(made.is_mixed(stage) for stage in range(stages))
    assert made.count("gpu") == min(stages, gpus // ranks) * ranks
    # CPU stages first: the output matrix and the sampling stay on a GPU.
    assert list(made.stages) == sorted(made.stages)


@given(STAGES, RANKS, st.integers(0, 3), st.integers(1, 3))
def test_the_remedy_for_too_few_sockets_works(
    stages: int, ranks: int, gpus: int, sockets: int
) -> None:
    world = stages * ranks
    if gpus + sockets >= world or gpus // ranks + sockets // ranks >= stages:
        return
    with pytest.raises(LayoutError) as caught:
        auto_layout(stages, ranks, gpus, sockets)
    shares = re.search(r'"ranks_per_socket": (\d+)', str(caught.value))
    assert shares is not None
    kinds = ["gpu"] * gpus + ["cpu"] * (world - gpus)
    asked = [kinds[stage * ranks : (stage + 1) * ranks] for stage in range(stages)]
    made = given_layout(asked, stages, ranks, gpus, sockets * int(shares[1]))  # type: ignore[arg-type]
    assert made.count("cpu") == world - gpus


@pytest.mark.parametrize("gpus", [0, 1, 2, 3])
def test_the_remedy_for_too_few_sockets_satisfies_auto_too(gpus: int) -> None:
    with pytest.raises(LayoutError) as caught:
        auto_layout(4, 2, gpus, 1)
    shares = re.search(r'"ranks_per_socket": (\d+)', str(caught.value))
    assert shares is not None
    assert auto_layout(4, 2, gpus, int(shares[1])).tensor_parallel_size == 2


@pytest.mark.parametrize(
    ("stages", "ranks", "gpus", "sockets", "made"),
    [(1, 4, 2, 2, ["ggcc"]), (1, 2, 1, 1, ["gc"]), (3, 2, 3, 3, ["cc", "gc", "gg"])],
)
def test_devices_that_fill_no_stage_of_one_kind_get_a_layout_of_both(
    stages: int, ranks: int, gpus: int, sockets: int, made: list[str]
) -> None:
    with pytest.raises(LayoutError, match="Leave the sizes out") as caught:
        auto_layout(stages, ranks, gpus, sockets)
    written = str(caught.value).partition("--additional-config '")[2].rstrip("'")
    asked = json.loads(written)["ray_hetero"]["layout"]
    assert given_layout(asked, stages, ranks, gpus, sockets) == layout(*made)


def test_a_given_layout_keeps_its_order() -> None:
    made = given_layout([["gpu", "cpu"], ["cpu", "gpu"]], 2, 2, 2, 2)
    assert made == layout("gc", "cg")
    assert made.kinds == ("gpu", "cpu", "cpu", "gpu")
    assert [made.is_mixed(stage) for stage in (0, 1)] == [True, True]
    assert str(made) == "[gpu, cpu] → [cpu, gpu]"


def test_stages_of_different_size_say_the_size_of_the_largest() -> None:
    made = given_layout([["cpu", "cpu"], ["gpu"]], 2, 2, gpus=1, sockets=2)
    assert made == layout("cc", "g")
    assert (made.sizes, made.world_size, made.tensor_parallel_size) == ((2, 1), 3, 2)
    assert not made.is_even
    assert [made.first_rank(stage) for stage in (0, 1)] == [0, 2]


@pytest.mark.parametrize(
    ("stages", "expected"),
    [
        (("c", "g"), [True, False]),
        (("cc", "g"), [True, False]),
        (("c", "gg"), [True, False]),
        (("cc", "gg"), [False, False]),
        (("cc", "g", "cc"), [True, True, False]),
    ],
)
def test_the_first_rank_sends_alone_to_a_stage_of_one(
    stages: tuple[str, ...], expected: list[bool]
) -> None:
    made = layout(*stages)
    assert [made.sends_alone(stage) for stage in range(len(stages))] == expected


@given(st.lists(st.integers(1, 5), min_size=1, max_size=5))
def test_every_rank_receives_from_one_that_sends_to_it(sizes: list[int]) -> None:
    made = layout(*("g" * size for size in sizes))
    places = [(stage, tensor) for stage, size in enumerate(sizes) for tensor in range(size)]
    numbered = {place: rank for rank, place in enumerate(places)}
    assert [rank for stage in range(len(sizes)) for rank in made.ranks(stage)] == [
        *range(made.world_size)
    ]
    for (stage, tensor), rank in numbered.items():
        if stage:
            sender = made.sender(stage, tensor)
            (from_,) = (place for place in places if numbered[place] == sender)
            assert from_[0] == stage - 1
            assert rank in made.receivers(*from_)
        assert all(
            made.sender(stage + 1, other - made.first_rank(stage + 1)) == rank
            for other in made.receivers(stage, tensor)
        )
    for pipeline in made.pipelines():
        assert [rank in made.ranks(stage) for stage, rank in enumerate(pipeline)] == [True] * len(
            sizes
        )
        for stage, rank in enumerate(pipeline[1:], start=1):
            own = made.pipelines()[rank - made.first_rank(stage)]
            assert own[stage - 1] == made.sender(stage, rank - made.first_rank(stage))


@pytest.mark.parametrize(
    ("stages", "is_stock"),
    [(["gg", "gg"], True), (["gg", "g"], False), (["c"], False), (["gc"], False), (["g"], True)],
)
def test_gpus_in_stages_of_one_size_are_vllms_own(stages: list[str], *, is_stock: bool) -> None:
    assert layout(*stages).is_stock == is_stock


@pytest.mark.parametrize(
    ("stages", "pipeline", "tensor", "said"),
    [
        ([["cpu"]], 2, 1, r"1 stage of \[1\] ranks.*--pipeline-parallel-size 2"),
        ([["cpu", "cpu"]], 1, 1, r"\[2\] ranks.*type: .*-size 1 --tensor-parallel-size 2"),
        ([["cpu"], ["cpu", "cpu"]], 2, 1, r"\[1, 2\].*type: .*-size 2 --tensor-parallel-size 2"),
        ([["cpu"], ["cpu"], ["cpu"]], 3, 1, "asks for 3 CPU sockets, but 2 are free"),
        ([["gpu"], ["gpu"]], 2, 1, "asks for 2 GPUs, but 1 is free"),
    ],
)
def test_a_given_layout_that_cannot_be(
    stages: list[list[str]], pipeline: int, tensor: int, said: str
) -> None:
    with pytest.raises(LayoutError, match=said):
        given_layout(stages, pipeline, tensor, gpus=1, sockets=2)  # type: ignore[arg-type]

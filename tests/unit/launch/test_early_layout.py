"""A layout of GPUs only is known before the cluster is described, or not at all."""

from __future__ import annotations

import pytest

from placement.errors import LayoutError
from placement.host.gpus import visible_gpus
from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host
from ray_hetero.config import HeteroConfig
from ray_hetero.launch.early_layout import (
    known_gpus,
    refuse_missing_sockets,
    resolve_auto_layout,
)


@pytest.mark.parametrize(
    ("stages", "ranks", "gpus", "layout"),
    [
        (1, 1, 1, [["gpu"]]),
        (2, 2, 4, [["gpu", "gpu"], ["gpu", "gpu"]]),
        (2, 2, 8, [["gpu", "gpu"], ["gpu", "gpu"]]),
        (2, 1, 1, "auto"),
        (2, 2, 3, "auto"),
        (1, 4, 0, "auto"),
        (1, 1, None, "auto"),
        (0, 1, 8, "auto"),
    ],
)
def test_auto_is_written_out_where_the_gpus_suffice(
    stages: int, ranks: int, gpus: int | None, layout: object
) -> None:
    assert resolve_auto_layout(HeteroConfig(), stages, ranks, gpus).layout == layout


def test_a_layout_that_was_given_stays() -> None:
    given = HeteroConfig(layout=[["cpu"]])
    assert resolve_auto_layout(given, 1, 1, gpus=8) is given


def test_everything_else_of_the_configuration_stays() -> None:
    given = HeteroConfig(layers=[4], objective="throughput")
    settled = resolve_auto_layout(given, 1, 1, gpus=1)
    assert settled == HeteroConfig(layout=[["gpu"]], layers=[4], objective="throughput")


@pytest.mark.parametrize(
    ("visible", "count"), [(None, 4), ("", 0), ("-1", 0), ("2", 1), ("0,3", 2), ("0,1,2,3,4", 4)]
)
def test_ray_offers_the_visible_gpus(visible: str | None, count: int) -> None:
    assert visible_gpus(4, visible) == count


@pytest.mark.parametrize("name", ["RAY_ADDRESS", "RAY_OVERRIDE_RESOURCES"])
def test_what_ray_will_have_is_not_guessed(name: str) -> None:
    assert known_gpus({name: "x"}) is None


def test_more_ranks_than_sockets_are_refused_with_what_to_type() -> None:
    sockets = len(sockets_of(read_host(gpus=False)))
    refuse_missing_sockets(HeteroConfig(), 1, sockets)
    refuse_missing_sockets(HeteroConfig(cpu={"ranks_per_socket": 2}), 2, sockets)
    with pytest.raises(LayoutError, match=r'"ranks_per_socket": 2'):
        refuse_missing_sockets(HeteroConfig(), sockets + 1, 1)


def test_a_layout_with_a_gpu_is_refused_where_there_is_none() -> None:
    refuse_missing_sockets(HeteroConfig(layout=[["cpu"]]), 1, 1)
    with pytest.raises(LayoutError, match="asks for 1 GPU, but 0 are free"):
        refuse_missing_sockets(HeteroConfig(layout=[["cpu"], ["gpu"]]), 2, 1)

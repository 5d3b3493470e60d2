"""Engines of a data-parallel server: how many share one Ray, and who starts it."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace
from typing import Any

import pytest

from ray_hetero.errors import UnsupportedError
from ray_hetero.launch import data_parallel
from ray_hetero.launch.data_parallel import engines_together, ray_for_all
from ray_hetero.preflight.refusal import refuse_first
from ray_hetero.preflight.refusals import ENGINES_OF_CPU_RANKS

STARTED = "10.0.0.1:6379"


def arguments(size: int = 2, local: int | None = None, rank: int | None = None) -> Any:
    return SimpleNamespace(
        data_parallel_size=size, data_parallel_size_local=local, data_parallel_rank=rank
    )


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No cluster is named, and starting Ray is only told."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(data_parallel, "start_shared", lambda: STARTED)


@pytest.mark.parametrize(
    ("given", "engines"),
    [
        (arguments(), 2),
        (arguments(size=1), 1),
        (arguments(size=4, local=2), 2),
        (arguments(size=4, local=1), 1),
        (arguments(size=4, rank=3), 1),
    ],
)
def test_several_engines_of_a_host_share_a_ray_that_their_parent_starts(
    given: Any, engines: int
) -> None:
    assert engines_together(given) == engines
    assert ray_for_all(given) == (STARTED if engines > 1 else None)


def test_in_a_cluster_all_engines_are_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.9:6379")
    assert engines_together(arguments(size=4, local=2)) == 4
    assert engines_together(arguments(size=4, rank=3)) == 4
    assert ray_for_all(arguments()) is None
    monkeypatch.setattr(data_parallel, "connected_address", lambda: "10.0.0.9:6379")
    assert ray_for_all(arguments()) == "10.0.0.9:6379"


def test_engines_that_share_experts_are_refused() -> None:
    refuse_first(ENGINES_OF_CPU_RANKS, arguments(size=1))
    with pytest.raises(UnsupportedError, match=r"--data-parallel-size 2 .* a model with experts"):
        refuse_first(ENGINES_OF_CPU_RANKS, arguments(size=2))


def test_an_api_process_leaves_it_to_its_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: object())
    assert ray_for_all(arguments()) is None

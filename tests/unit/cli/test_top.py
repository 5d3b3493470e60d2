"""`ray-hetero top`: its page, at 80 columns, from a board's content and a server's metrics."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import pytest
from rich.console import Console
from worlds import node

from placement.cluster.assignment import assign
from placement.cluster.layout import Layout
from ray_hetero.cli import connection, top
from ray_hetero.cli.serving.comparison import Totals
from ray_hetero.errors import StartupError
from ray_hetero.observability import status
from ray_hetero.observability.engine_info import info_of
from ray_hetero.observability.status import EngineStatus
from ray_hetero.observability.status_board import BoardContent, RankNews, RankReport
from ray_hetero.observability.step_clock import StepTotals
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.world import World

METRICS = """\
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0"} 3
vllm:num_requests_running{engine="1"} 2
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0"} 1
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0"} 0.25
# TYPE vllm:prefix_cache_queries counter
vllm:prefix_cache_queries_total{engine="0"} 200
# TYPE vllm:prefix_cache_hits counter
vllm:prefix_cache_hits_total{engine="0"} 90
"""


def news(rank: int, recent: StepTotals, in_step_s: float = 0.0, age_s: float = 1.0) -> RankNews:
    return RankNews(RankReport(rank, 1, 1 << 30, 1 << 30, recent, in_step_s), age_s, recent)


def engine(**of_ranks: RankNews) -> EngineStatus:
    layout = Layout((("cpu",), ("gpu",)))
    world = World(layout, assign(layout, [node("a" * 40, sockets=2, gpus=1)]), (3, 50))
    info = info_of("1a2b3", "models/" + "long" * 30, LayerPlan(world, None), None)
    told = {int(name[1:]): one for name, one in of_ranks.items()}
    return EngineStatus(BoardContent(info, "serving", told), "10.0.0.1:6379")


def shown(engines: list[EngineStatus], lines: list[str], width: int = 80) -> list[str]:
    console = Console(width=width, no_color=True, force_terminal=False)
    with console.capture() as capture:
        console.print(top.page_of(engines, lines))
    return capture.get().splitlines()


def test_a_page_of_80_columns_has_every_figure() -> None:
    busy = StepTotals(steps=10, busy_s=0.4, exchange_s=0.1, waiting_s=0.5, sent_bytes=81920)
    page = shown([engine(r0=news(0, busy), r1=news(1, StepTotals()))], ["requests: 3 running"])
    assert page[0] == "requests: 3 running"
    assert max(map(len, page)) <= 80
    assert page[1].startswith("serving models/longlong")
    rank, other = (line for line in page if line.lstrip().startswith(("0 ", "1 ")))
    told = "0 socket 0 0-2 (3) 40.0 8 "
    assert " ".join(rank.split()) == told + "█" * 8 + "▒" * 2 + "░" * 10
    assert other.split() == ["1", "gpu", "0", "3-52", "(50)", "idle"]


def test_a_rank_that_is_not_well_says_so() -> None:
    hangs = news(0, StepTotals(steps=1, busy_s=1.0), in_step_s=40.0)
    page = "\n".join(shown([engine(r0=hangs)], []))
    assert "in one step for 40 s" in page
    assert "starting" in page


class Rays:
    """Several Rays of a host: which of them answer, and on which an engine runs."""

    def __init__(self, answering: Mapping[str, bool]) -> None:
        self.answering = answering
        self.now = ""

    def addresses(self) -> tuple[str, ...]:
        return ("10.0.0.1:1", "10.0.0.1:2", "10.0.0.1:3")

    @contextmanager
    def cluster(self, address: str) -> Iterator[None]:
        if address not in self.answering:
            raise StartupError(f"{address} does not take this token")
        self.now = address
        yield

    def running_engines(self) -> list[EngineStatus]:
        return [engine()] if self.answering[self.now] else []


@pytest.mark.parametrize(
    ("answering", "chosen"),
    [
        ({"10.0.0.1:2": False, "10.0.0.1:3": True}, "10.0.0.1:3"),
        ({"10.0.0.1:2": False, "10.0.0.1:3": False}, "10.0.0.1:2"),
        ({"10.0.0.1:1": True, "10.0.0.1:3": True}, "10.0.0.1:1"),
    ],
)
def test_a_ray_that_refuses_does_not_hide_the_engine_of_another(
    answering: Mapping[str, bool], chosen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rays = Rays(answering)
    monkeypatch.setattr(connection, "addresses", rays.addresses)
    monkeypatch.setattr(connection, "cluster", rays.cluster)
    monkeypatch.setattr(status, "running_engines", rays.running_engines)
    assert top.address_of_engines() == chosen


def test_without_a_ray_that_answers_the_last_refusal_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rays = Rays({})
    monkeypatch.setattr(connection, "addresses", rays.addresses)
    monkeypatch.setattr(connection, "cluster", rays.cluster)
    with pytest.raises(StartupError, match=r"10\.0\.0\.1:3 does not take this token"):
        top.address_of_engines()


def test_pages_end_with_their_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(status, "running_engines", list)
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        pages = top.pages_of(address, None, 0.0)
        next(pages)
    with pytest.raises(StartupError, match=f"the Ray at {address} has ended"):
        next(pages)


def test_without_engines_the_page_says_so() -> None:
    assert shown([], []) == ["no engine of ray_hetero runs on this Ray"]


@pytest.mark.parametrize("shares", [(1, 0, 0), (0.2, 0.3, 0.5), (1, 1, 1), (0.01, 0, 99)])
def test_a_bar_is_always_as_long(shares: tuple[float, ...]) -> None:
    assert len(top.bar(shares)) == top.BAR
    assert top.bar((0, 0, 0)) == ""


def test_requests_are_read_from_the_metrics() -> None:
    found = top.read_requests(METRICS)
    assert top.request_line(found) == (
        "requests: 5 running, 1 waiting; KV cache 25%; prefix cache hit 45%"
    )
    assert top.request_line(top.read_requests("")) == "requests: 0 running, 0 waiting; KV cache 0%"


def test_speed_is_that_of_the_last_seconds() -> None:
    since = Totals(generated=100, steps=25, between_s=4.0, firsts=2, first_s=0.5)
    assert list(top.speed_lines(since, 2.0)) == [
        "speed: 50.0 tokens/s in all, 25.0 each; first token after 250.0 ms"
    ]
    assert list(top.speed_lines(Totals(0, 0, 0, 0, 0), 2.0)) == []
    assert list(top.speed_lines(None, 2.0)) == []

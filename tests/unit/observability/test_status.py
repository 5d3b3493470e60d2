"""What is kept of the ranks' reports, and what is shown of it."""

from __future__ import annotations

import html
import json
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from worlds import node

from placement.cluster.assignment import assign
from placement.cluster.layout import Layout
from ray_hetero.kernels.step_route import Reason
from ray_hetero.names import actor_name, board_name, is_board
from ray_hetero.observability import status_board
from ray_hetero.observability.engine_info import EngineInfo, info_of
from ray_hetero.observability.slot_forecast import SlotForecast
from ray_hetero.observability.status import EngineStatus
from ray_hetero.observability.status_board import RankReport, StatusBoard
from ray_hetero.observability.step_clock import StepTotals
from ray_hetero.planning.planned_layers import LayerPlan
from ray_hetero.world import World

ADDRESS = "10.0.0.1:6379"


@pytest.fixture
def world() -> World:
    layout = Layout((("cpu",), ("gpu",)))
    return World(layout, assign(layout, [node("alpha", sockets=2, gpus=1)]), (3, 5))


@pytest.fixture
def info(world: World) -> EngineInfo:
    return info_of("1a2b3", "models/tiny", LayerPlan(world, None, threads={0: (2, 3)}), None)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The board's time, in seconds, set by the test."""

    class Clock:
        now = 100.0

        def monotonic(self) -> float:
            return self.now

    made = Clock()
    monkeypatch.setattr(status_board, "time", made)
    return made


def report(rank: int, steps: int, busy_s: float, in_step_s: float = 0.0) -> RankReport:
    totals = StepTotals(steps=steps, tokens=steps, busy_s=busy_s)
    return RankReport(rank, 4711 + rank, 3 << 30, rank << 30, totals, in_step_s)


def test_names_say_what_an_actor_is(world: World) -> None:
    assert [actor_name("1a2b3", seat) for seat in world.seats] == [
        "ray_hetero-1a2b3-rank0-stage0-tp0-cpu-socket0",
        "ray_hetero-1a2b3-rank1-stage1-tp0-gpu-gpu0",
    ]
    assert is_board(board_name("1a2b3"))
    assert not any(is_board(actor_name("1a2b3", seat)) for seat in world.seats)


def test_the_card_has_layers_and_the_threads_of_cpu_ranks(info: EngineInfo) -> None:
    first, second = info.ranks
    assert (first.first_layer, first.layers, first.threads) == (0, 3, (2, 3))
    assert (second.first_layer, second.layers, second.threads) == (3, 5, ())
    assert info.picture == ""


def test_step_times_are_those_of_the_last_seconds_with_steps(info: EngineInfo, clock: Any) -> None:
    board = StatusBoard(info)
    # 100 slow steps at the start, a minute later 10 quick ones, and then a pause.
    reports = ((100, 0, 0.0), (102, 100, 2.0), (160, 100, 2.0), (162, 105, 2.01),
               (164, 110, 2.02), (166, 110, 2.02))  # fmt: skip
    for clock.now, steps, busy_s in reports:
        board.report(report(0, steps, busy_s))
    clock.now = 190
    news = board.read().news[0]
    assert news.age_s == 24
    assert news.report.totals.steps == 110
    assert news.recent.steps == 10
    assert news.recent.busy_s == pytest.approx(0.02)


def test_health(info: EngineInfo, clock: Any) -> None:
    board = StatusBoard(info)
    board.report(report(0, 5, 0.1))
    assert [rank.health for rank in EngineStatus(board.read(), ADDRESS).ranks] == [
        "ok",
        "starting",
    ]
    board.report(report(1, 5, 0.1, in_step_s=95.4))
    clock.now += 60
    board.report(report(1, 5, 0.1, in_step_s=95.4))
    engine = EngineStatus(board.read(), ADDRESS)
    assert [rank.health for rank in engine.ranks] == ["silent for 60 s", "in one step for 95 s"]
    assert not engine.is_healthy


def test_steps_of_a_cpu_rank_are_shown_by_reason(info: EngineInfo) -> None:
    board, totals = StatusBoard(info), StepTotals(steps=3)
    for reason in (Reason.PROMPTS, Reason.DECODING, Reason.DECODING):
        totals.count_route(reason)
    board.report(RankReport(0, 4711, 1 << 30, 0, totals, 0.0))
    engine = EngineStatus(board.read(), ADDRESS)
    found, other = engine.to_dict()["ranks"]
    assert found["steps_by_reason"] == {"decoding": 2, "prompts": 1}
    assert "steps_by_reason" not in other
    console = Console(width=180, force_terminal=False)
    with console.capture() as shown:
        console.print(engine.table())
    assert "steps by reason" in shown.get()
    assert "2 decoding" in shown.get()
    assert "1 prompts" in shown.get()


def test_ranks_that_start_again_begin_anew(info: EngineInfo) -> None:
    board = StatusBoard(info)
    board.serve()
    board.report(report(0, 5, 0.1))
    board.begin(info)
    content = board.read()
    assert (content.state, content.news) == ("starting", {})


def test_expert_ranks_are_shown_with_what_they_read(clock: Any) -> None:
    layout = Layout((("gpu",),))
    seats = assign(layout, [node("alpha", sockets=2, gpus=1)], expert_ranks=2)
    world = World(layout, seats[:1], (8,), seats[1:], expert_layers=3)
    board = StatusBoard(info_of("1a2b3", "models/tiny", LayerPlan(world, None), None))
    slots = (
        SlotForecast(10, 0.55, 1.5, 0.0, 9.0, 6.0, 8.5),
        SlotForecast(25, 0.7, 1.0, 0.0, 9.0, 5.0, 7.5),
    )
    for clock.now, steps in ((100, 0), (102, 10)):
        totals = StepTotals(
            steps=steps, tokens=steps, busy_s=0.006 * steps, waiting_s=0.003 * steps,
            expert_layers=3 * steps, experts_read=24 * steps,
        )  # fmt: skip
        board.report(RankReport(1, 4712, 3 << 30, 0, totals, 0.0, slots if steps else ()))
    engine = EngineStatus(board.read(), ADDRESS)
    assert [rank.info.kind for rank in engine.ranks] == ["gpu", "experts", "experts"]
    console = Console(width=180, force_terminal=False)
    with console.capture() as shown:
        console.print(engine.table())
    row = next(line for line in shown.get().splitlines() if "socket 0" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:3] == ["1", "", "experts"]
    assert cells[5:] == ["5-7 (3)", "ok", "3.00", "10", "6.00", "3.00", "", "24.0"]
    assert "experts read" in shown.get()
    found = engine.to_dict()["ranks"][1]
    assert (found["stage"], found["recent_experts_read"]) == (None, 24)
    assert found["recent_layer_ms"] == pytest.approx(2)
    assert found["recent_layer_waiting_ms"] == pytest.approx(1)
    assert found["slots"][1] == {
        "percent": 25, "hit_share": 0.7, "copies": 1.0, "held_share": 0.0, "step_ms": 9.0,
        "slots_ms": 5.0, "layers_ms": 7.5,
    }  # fmt: skip
    line = "GPU slots for 10, 25 % of each layer's experts would hold 55, 70 % of those read"
    assert line in shown.get()
    assert line in html.unescape(engine._repr_html_())
    assert "24.0 a step" not in str(totals)
    assert "6.00 ms computing experts of 3.0 layers, 8.0 experts read a layer" in str(totals)


def test_table_json_and_notebook_show_the_same(info: EngineInfo, clock: Any) -> None:
    board = StatusBoard(replace(info, model="models/<tiny>", picture="<svg>plan</svg>"))
    board.serve()
    for clock.now, steps in ((100, 0), (102, 8)):
        board.report(report(0, steps, 0.0125 * steps))
    engine = EngineStatus(board.read(), ADDRESS)
    console = Console(width=160, force_terminal=False)
    with console.capture() as shown:
        console.print(engine.table())
    row = next(line for line in shown.get().splitlines() if "alpha" in line and "cpu" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")][5:] == [
        "0-2 (3)", "ok", "3.00", "8", "12.50", "0.00", "",
    ]  # fmt: skip
    first, second = json.loads(json.dumps(engine.to_dict()))["ranks"]
    assert (first["recent_busy_ms"], first["resident_bytes"]) == (12.5, 3 << 30)
    assert (second["health"], "pid" in second) == ("starting", False)
    page = engine._repr_html_()
    assert page.endswith("</table><svg>plan</svg>")
    assert "serving models/&lt;tiny&gt;" in page
    assert "<td>0-2 (3)</td><td>ok</td><td>3.00</td><td>8</td><td>12.50</td>" in page


@pytest.mark.parametrize("width", [80, 100])
def test_a_narrow_terminal_keeps_the_columns_that_matter_and_names_the_rest(
    info: EngineInfo, clock: Any, width: int
) -> None:
    board = StatusBoard(info)
    board.serve()
    for clock.now, steps in ((100, 0), (102, 8)):
        board.report(report(0, steps, 0.0125 * steps))
    engine = EngineStatus(board.read(), ADDRESS)
    console = Console(width=width, force_terminal=False)
    with console.capture() as shown:
        console.print(engine.table(width))
    text = shown.get()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    head = next(line for line in text.splitlines() if "rank" in line)
    for name in ("rank", "device", "layers", "health", "ms busy", "ms waiting"):
        assert f" {name} " in head
    assert "No room for: " in text
    wide = Console(width=160, force_terminal=False)
    with wide.capture() as all_shown:
        wide.print(engine.table(160))
    assert "No room" not in all_shown.get()

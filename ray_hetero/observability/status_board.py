"""The board on which ranks of a running engine report: one small Ray actor an engine.

Ranks are busy in `run` and cannot be asked, so each tells the board every few seconds, and whoever
wants to know asks the board.  It needs no CPU of the cluster and goes with the engine's driver.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ray_hetero.log import logger
from ray_hetero.names import board_name
from ray_hetero.observability.engine_info import EngineInfo
from ray_hetero.observability.metrics import FiguresWriter, RayMetrics, forget_figures
from ray_hetero.observability.slot_forecast import SlotForecast
from ray_hetero.observability.step_clock import StepTotals

REPORT_SECONDS = 2.0
RECENT_SECONDS = 10.0
"""Step times are averages over the last steps that were run within this time."""

State = Literal["starting", "serving"]


@dataclass(frozen=True)
class RankReport:
    """How a rank is, in its own words."""

    rank: int
    pid: int
    resident_bytes: int
    """Bytes of the rank's process in the host's memory."""
    gpu_bytes: int
    """Bytes of the rank's GPU that its process's allocator has in use; 0 for a CPU rank."""
    totals: StepTotals
    """Sums of the rank's steps since it serves."""
    in_step_s: float
    """Seconds that the step in progress has taken so far; 0 between steps."""
    slots: tuple[SlotForecast, ...] = ()
    """Slots in a GPU's memory that an expert rank counts since it serves; none of other ranks."""


@dataclass(frozen=True)
class RankNews:
    """The last report of a rank, and what became of its last steps."""

    report: RankReport
    age_s: float
    recent: StepTotals
    """Steps of the last seconds in which there were any."""


@dataclass(frozen=True)
class BoardContent:
    """Everything on a board."""

    info: EngineInfo
    state: State
    news: dict[int, RankNews]
    """Latest news by rank; ranks that have not reported yet are missing."""


class _History:
    """A rank's reports of the last seconds in which it ran steps."""

    def __init__(self) -> None:
        self._active: deque[tuple[float, StepTotals]] = deque()
        self.report: RankReport
        self.at = 0.0

    def add(self, report: RankReport, now: float) -> None:
        totals = report.totals
        if not self._active or self._active[-1][1].steps != totals.steps:
            self._active.append((now, totals))
        while len(self._active) > 2 and now - self._active[1][0] > RECENT_SECONDS:
            self._active.popleft()
        self.report, self.at = report, now

    def news(self, now: float) -> RankNews:
        first, last = self._active[0][1], self._active[-1][1]
        return RankNews(self.report, now - self.at, last - first)


class StatusBoard:
    """The actor class: keeps the last report of every rank."""

    def __init__(self, info: EngineInfo) -> None:
        self._figures: FiguresWriter | None = None
        self.begin(info)

    def begin(self, info: EngineInfo) -> None:
        """The engine's ranks start."""
        self._info = info
        self._state: State = "starting"
        self._histories: dict[int, _History] = {}
        if self._figures is not None:
            self._figures.close()
        self._figures = FiguresWriter(info.metrics_path, info.engine)

    def serve(self) -> None:
        """The engine serves from now on."""
        self._state = "serving"

    def report(self, report: RankReport) -> None:
        """Store a rank's report about itself."""
        self._histories.setdefault(report.rank, _History()).add(report, time.monotonic())
        assert self._figures is not None
        ranks = ((self._info.ranks[r], known.report) for r, known in self._histories.items())
        self._figures.write((info, known.totals) for info, known in ranks)

    def read(self) -> BoardContent:
        """Everything that is known now."""
        now = time.monotonic()
        news = {rank: history.news(now) for rank, history in self._histories.items()}
        return BoardContent(self._info, self._state, news)


class EngineBoard:
    """The driver's hold on its engine's board."""

    def __init__(self) -> None:
        self._actor: Any = None
        self._metrics_path = ""

    def starting(self, info: EngineInfo) -> None:
        """Put the board up, or tell the one that is up that other ranks start; returns at once."""
        self._metrics_path = info.metrics_path
        if self._actor is not None:
            self._actor.begin.remote(info)
            return
        here = ray.get_runtime_context().get_node_id()
        options = {
            "name": board_name(info.engine),
            "num_cpus": 0,
            "max_restarts": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
        }
        self._actor = ray.remote(StatusBoard).options(**options).remote(info)

    def serving(self) -> None:
        """Warm-up is done."""
        self._actor.serve.remote()

    def take_down(self) -> None:
        """Stop the board; nothing to do where Ray is gone already."""
        if self._actor is not None and ray.is_initialized():
            ray.kill(self._actor)
        if self._actor is not None:
            forget_figures(self._metrics_path)
        self._actor = None


class RankReporter:
    """A thread of a rank's process that tells the board how the rank is, while it serves.

    Args:
        engine: vLLM's instance id.
        report: makes one report; called in the thread.
        metrics: counts what is reported, too.

    """

    def __init__(self, engine: str, report: Callable[[], RankReport], metrics: RayMetrics) -> None:
        self._engine = engine
        self._report = report
        self._metrics = metrics
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._tell, daemon=True, name="RankReporter")

    def __enter__(self) -> RankReporter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()

    def _tell(self) -> None:
        try:
            board = ray.get_actor(board_name(self._engine))
        except ValueError:
            logger.warning(
                "`ray-hetero status` does not show this rank: the engine's status actor is gone"
            )
            return
        told: Any = None
        while not self._stop.is_set():
            report = self._report()
            # Not waited for: a board that hangs or is gone must not hold up the rank, and what it
            # has not taken yet must not pile up here.
            if told is None or ray.wait([told], timeout=0)[0]:
                told = board.report.remote(report)
            self._metrics.tell(report.totals)
            self._stop.wait(REPORT_SECONDS)

"""How the engines on a Ray cluster are: ranks, devices, layers, memory, step times, health."""

from __future__ import annotations

import html
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from rich.console import Console
from rich.table import Table

from placement.units import GIB
from ray_hetero.names import is_board
from ray_hetero.observability.engine_info import RankInfo
from ray_hetero.observability.slot_forecast import described
from ray_hetero.observability.status_board import BoardContent, RankNews
from ray_hetero.observability.step_clock import StepTotals
from ray_hetero.observability.world_table import layer_span

SILENT_SECONDS = 10.0
"""A rank that serves reports every two seconds; without a word for so long it hangs or is gone."""
LONG_STEP_SECONDS = 30.0
"""No step takes as long; a rank that is in one waits for another rank."""
ANSWER_SECONDS = 10.0
"""Longest wait for one engine's answer."""


@dataclass(frozen=True)
class RankStatus:
    """One rank of a running engine."""

    info: RankInfo
    news: RankNews | None
    """Latest news of the rank; None before its first report."""

    @property
    def health(self) -> str:
        """`ok`, `starting`, or what is wrong."""
        if self.news is None:
            return "starting"
        if self.news.age_s > SILENT_SECONDS:
            return f"silent for {self.news.age_s:.0f} s"
        if self.news.report.in_step_s > LONG_STEP_SECONDS:
            return f"in one step for {self.news.report.in_step_s:.0f} s"
        return "ok"

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for JSON: bytes, seconds, milliseconds where the name says so."""
        info, news = self.info, self.news
        found = asdict(info) | {"threads": list(info.threads), "health": self.health}
        found["predicted_step_ms"] = found.pop("predicted_ms")
        if news is None:
            return found
        report, recent = news.report, news.recent
        return found | {
            "pid": report.pid,
            "reported_s_ago": news.age_s,
            "resident_bytes": report.resident_bytes,
            "gpu_bytes": report.gpu_bytes,
            "steps": report.totals.steps,
            "tokens": report.totals.tokens,
            "busy_s": report.totals.busy_s,
            "waiting_s": report.totals.waiting_s,
            "recent_steps": recent.steps,
            "recent_busy_ms": _per_step_ms(recent.busy_s, recent.steps),
            "recent_waiting_ms": _per_step_ms(recent.waiting_s, recent.steps),
            **_of_routes(report.totals),
            **_of_experts(report.totals, recent),
            **({"slots": [asdict(one) for one in report.slots]} if report.slots else {}),
        }


def _of_routes(totals: StepTotals) -> dict[str, Any]:
    """Steps by the reason of their route, which only CPU ranks count."""
    found = totals.by_reason
    return {"steps_by_reason": {str(one): count for one, count in found.items()}} if found else {}


def _of_experts(totals: StepTotals, recent: StepTotals) -> dict[str, Any]:
    """Figures that only expert ranks have."""
    if not totals.expert_layers:
        return {}
    layers = recent.expert_layers
    return {
        "expert_layers": totals.expert_layers,
        "experts_read": totals.experts_read,
        "recent_experts_read": _experts_of_a_step(recent),
        "recent_layer_ms": _per_step_ms(recent.busy_s, layers),
        "recent_layer_waiting_ms": _per_step_ms(recent.waiting_s, layers),
    }


@dataclass(frozen=True)
class EngineStatus:
    """One running engine.  In a notebook it shows itself as a table and the plan's picture."""

    content: BoardContent
    address: str
    """Address of the Ray that it runs on, for RAY_ADDRESS."""

    @property
    def ranks(self) -> tuple[RankStatus, ...]:
        """All ranks, in vLLM's order."""
        news = self.content.news
        return tuple(RankStatus(info, news.get(info.rank)) for info in self.content.info.ranks)

    @property
    def is_healthy(self) -> bool:
        """Whether nothing is wrong; an engine that starts is healthy."""
        return all(rank.health in ("ok", "starting") for rank in self.ranks)

    @property
    def headline(self) -> str:
        """The engine in one line."""
        info = self.content.info
        age = int(time.time() - info.started)
        return (
            f"engine {info.engine}: {self.content.state} {info.model}, started {age} s ago "
            f"on the Ray at {self.address}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for JSON."""
        info = self.content.info
        return {
            "engine": info.engine,
            "ray": self.address,
            "model": info.model,
            "state": self.content.state,
            "driver_pid": info.pid,
            "started": info.started,
            "healthy": self.is_healthy,
            "ranks": [rank.to_dict() for rank in self.ranks],
        }

    def table(self, width: int | None = None) -> Table:
        """One row a rank, memory in GiB, times in milliseconds a step.

        Args:
            width: of the terminal, in columns; columns of `_SPARED` for which it has no room are
                left out and named below. None for all columns.

        """
        table = self._table(())
        for number in range(1, len(_SPARED) + 1):
            if width is None or _width(table) <= width:
                break
            table = self._table(_SPARED[:number])
        return table

    def _table(self, left_out: Sequence[str]) -> Table:
        kept = [name for name in self._columns if name not in left_out]
        missing = [name for name in self._columns if name in left_out]
        notes = [self.slots] if self.slots else []
        if missing:
            notes.append(f"No room for: {', '.join(missing)}; --json has them.")
        table = Table(
            title=self.headline, title_justify="left",
            caption="\n".join(notes) or None, caption_justify="left",
        )  # fmt: skip
        for name in kept:
            table.add_column(name, justify="left" if name in _LEFT else "right", no_wrap=True)
        for row in self._rows:
            cells = dict(zip(self._columns, row, strict=True))
            if missing:
                cells["device"] = cells["device"].partition(" (")[0]
            table.add_row(*(cells[name] for name in kept))
        return table

    @property
    def slots(self) -> str:
        """Predicted savings of slots for experts, in one line; empty where nothing was counted."""
        # All expert ranks see the same tokens.
        slots = (rank.news.report.slots for rank in self.ranks if rank.news is not None)
        return next((described(found) for found in slots if found), "")

    @property
    def _optional(self) -> dict[str, Callable[[RankStatus], str]]:
        """Columns that not all engines have, by their heads."""
        found: dict[str, Callable[[RankStatus], str]] = {}
        if any(rank.news and rank.news.report.totals.by_reason for rank in self.ranks):
            found["steps by reason"] = _reasons
        if any(rank.info.stage is None for rank in self.ranks):
            found["experts read"] = _experts_read
        return found

    @property
    def _columns(self) -> tuple[str, ...]:
        return (*_LEFT, *_RIGHT, *self._optional)

    @property
    def _rows(self) -> list[tuple[str, ...]]:
        more = self._optional.values()
        return [(*_row(rank), *(cell(rank) for cell in more)) for rank in self.ranks]

    def _repr_html_(self) -> str:
        rows = "".join(_html_row("td", row) for row in self._rows)
        slots = f"<p>{html.escape(self.slots)}</p>" if self.slots else ""
        return (
            f"<p>{html.escape(self.headline)}</p>"
            f"<table>{_html_row('th', self._columns)}{rows}</table>"
            f"{slots}{self.content.info.picture}"
        )


def _width(table: Table) -> int:
    """Columns that a table takes where it has as much room as it wants."""
    console = Console(width=1000)
    return console.measure(table).maximum


def _html_row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


_LEFT = ("rank", "stage", "kind", "node", "device", "layers", "health")
_RIGHT = ("GiB", "steps", "ms busy", "ms waiting", "ms predicted")
_SPARED = (
    "steps by reason", "node", "kind", "steps", "ms predicted", "experts read", "stage", "GiB",
)  # fmt: skip
"""Columns that a narrow terminal leaves out, the first ones first."""


def _row(rank: RankStatus) -> tuple[str, ...]:
    info, news = rank.info, rank.news
    stage = "" if info.stage is None else str(info.stage)
    where = (str(info.rank), stage, info.kind, info.node, info.device)
    predicted = "" if info.predicted_ms is None else f"{info.predicted_ms:.2f}"
    span = layer_span(info.first_layer, info.layers)
    if news is None:
        return (*where, span, rank.health, "", "", "", "", predicted)
    report, recent = news.report, news.recent
    nbytes = report.gpu_bytes if info.kind == "gpu" else report.resident_bytes
    return (
        *where,
        span,
        rank.health,
        f"{nbytes / GIB:.2f}",
        str(report.totals.steps),
        _shown(_per_step_ms(recent.busy_s, recent.steps)),
        _shown(_per_step_ms(recent.waiting_s, recent.steps)),
        predicted,
    )


def _reasons(rank: RankStatus) -> str:
    """Steps since the rank serves, by the reason of their route."""
    found = {} if rank.news is None else rank.news.report.totals.by_reason
    return "\n".join(f"{count} {str(one).replace('_', ' ')}" for one, count in found.items())


def _experts_read(rank: RankStatus) -> str:
    """Experts of a step of the last seconds."""
    if rank.news is None or not rank.news.recent.expert_layers:
        return ""
    read = _experts_of_a_step(rank.news.recent)
    return "" if read is None else f"{read:.1f}"


def _experts_of_a_step(recent: StepTotals) -> float | None:
    return recent.experts_read / recent.steps if recent.steps else None


def _per_step_ms(seconds: float, steps: int) -> float | None:
    return 1000 * seconds / steps if steps else None


def _shown(milliseconds: float | None) -> str:
    return "" if milliseconds is None else f"{milliseconds:.2f}"


def running_engines() -> tuple[EngineStatus, ...]:
    """Ask every engine on the Ray cluster that this process is connected to, the oldest first.

    An engine that ends while it is asked is left out.
    """
    address = str(ray.get_runtime_context().gcs_address)
    found = [EngineStatus(content, address) for content in _contents()]
    return tuple(sorted(found, key=lambda engine: engine.content.info.started))


def _contents() -> Iterator[BoardContent]:
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if not is_board(actor["name"]):
            continue
        try:
            board = ray.get_actor(actor["name"], namespace=actor["namespace"])
            yield ray.get(board.read.remote(), timeout=ANSWER_SECONDS)
        except (ValueError, RayActorError, GetTimeoutError):
            continue

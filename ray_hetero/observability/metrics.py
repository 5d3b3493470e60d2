"""Metrics of every rank's step clock, for Prometheus to scrape.

- Each rank counts in Ray's metrics, which every node of a cluster exports.
- `vllm serve` shows all ranks on its own `/metrics`: the engine's status board writes the ranks'
  totals into a piece of memory that the server's process has made, and a collector there reads
  them when it is scraped.

Seconds are counters, so a rank's share of busy time is `rate(ray_hetero_rank_busy_seconds_total)`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from prometheus_client.core import REGISTRY, CounterMetricFamily
from prometheus_client.registry import Collector
from ray.util.metrics import Counter

from ray_hetero.kernels.step_route import Reason
from ray_hetero.log import logger
from ray_hetero.observability.slot_forecast import PERCENTS

if TYPE_CHECKING:
    from ray_hetero.observability.engine_info import RankInfo
    from ray_hetero.observability.step_clock import StepTotals


PREFIX = "ray_hetero_rank_"
LABELS = ("engine", "rank", "stage", "kind", "node")
KIND = LABELS.index("kind")
REASON = "reason"
"""Label of sums of steps by the reason of their route."""
READS = 3
"""Times that the memory is read until no write falls into the reading."""


@dataclass(frozen=True)
class Figure:
    """One sum of a rank's step clock."""

    field: str
    """Name of the sum in StepTotals."""
    help: str
    metric: str = ""
    """Name of the metric; empty where it is that of the sum."""
    reason: str = ""
    """Value of the label `REASON`; empty for sums without this label."""

    @property
    def name(self) -> str:
        """Name of the metric."""
        return self.metric or self.field


FIGURES = (
    Figure("steps", "Steps that the rank has run."),
    Figure("tokens", "Tokens in these steps."),
    Figure("busy_s", "Time of computing.", "busy_seconds"),
    Figure(
        "waiting_s",
        "Time of waiting for the previous stage to compute, of a first stage for tokens of the "
        "step before; of an expert rank, for the next layer.",
        "waiting_seconds",
    ),
    Figure("exchange_s", "Time of sending and receiving between stages.", "exchange_seconds"),
    Figure("received_bytes", "Bytes received from the previous stage."),
    Figure("sent_bytes", "Bytes sent to the next stage."),
    Figure(
        "native_layer_tokens",
        "Tokens times decoder layers, computed by native calls on a CPU rank's cores.",
    ),
    Figure("gpu_layer_tokens", "Tokens times decoder layers, computed by a GPU for a CPU rank."),
    Figure(
        "operator_layer_tokens",
        "Tokens times decoder layers, computed operator by operator on a CPU rank.",
    ),
    Figure("expert_layers", "Layers whose experts an expert rank has computed."),
    Figure("experts_read", "Experts that these have read, each once a layer."),
    Figure(
        "expert_layer_tokens",
        "Tokens times layers of experts, all or some of which an expert rank's cores computed.",
    ),
    Figure(
        "slot_experts",
        "Experts that an expert rank has read in steps of few tokens, for which slots are counted.",
    ),
    *(
        Figure(
            f"slot_hits_{percent}",
            f"Part of these that slots for {percent} % of each layer's experts would have held.",
        )
        for percent in PERCENTS
    ),
    *(
        Figure(
            f"slot_copies_{percent}",
            f"Experts that would have been copied into slots for {percent} % of them.",
        )
        for percent in PERCENTS
    ),
    Figure("slot_held", "Part of these experts that a GPU computed from its slots."),
    Figure("slot_copied", "Experts that a GPU has copied into its slots."),
    Figure(
        "linked_expert_tokens",
        "Tokens times layers of experts, all or some of which a GPU read over its link.",
    ),
    *(
        Figure(
            f"{reason}_steps",
            "Steps of a CPU rank, by the reason for which they were computed where they were.",
            "routed_steps",
            str(reason),
        )
        for reason in Reason
    ),
)


BY_NAME = {name: tuple(some) for name, some in groupby(FIGURES, key=lambda figure: figure.name)}
"""Figures by the name of their metric."""


def labels_with(figure: Figure) -> tuple[str, ...]:
    """Names of the labels of a figure's metric."""
    return (*LABELS, REASON) if figure.reason else LABELS


def labels_of(engine: str, rank: int, stage: int | None, kind: str, node: str) -> tuple[str, ...]:
    """Values of `LABELS`; an expert rank is of no stage."""
    return (engine, str(rank), "" if stage is None else str(stage), kind, node)


@dataclass(frozen=True)
class RankFigures:
    """The sums of one rank."""

    labels: Sequence[str]
    """Values of `LABELS`."""
    totals: Mapping[str, float]
    """Sums of the rank by `Figure.field`."""

    @classmethod
    def of(cls, engine: str, info: RankInfo, totals: StepTotals) -> RankFigures:
        """Known figures of a rank of an engine."""
        return cls(
            labels_of(engine, info.rank, info.stage, info.kind, info.node),
            {figure.field: getattr(totals, figure.field) for figure in FIGURES},
        )


class RayMetrics:
    """Counts a rank's totals in Ray's metrics.

    Args:
        labels: values of `LABELS`.

    """

    def __init__(self, labels: Sequence[str]) -> None:
        self._labels = dict(zip(LABELS, labels, strict=True))
        self._told: dict[str, float] = {}
        self._counters = {
            name: Counter(PREFIX + name, some[0].help, tag_keys=labels_with(some[0]))
            for name, some in BY_NAME.items()
        }

    def tell(self, totals: StepTotals) -> None:
        """Count what has come since the last call."""
        for figure in FIGURES:
            value = getattr(totals, figure.field)
            if (new := value - self._told.get(figure.field, 0)) > 0:
                own = {REASON: figure.reason} if figure.reason else {}
                self._counters[figure.name].inc(new, tags=self._labels | own)
                self._told[figure.field] = value


class SharedFigures:
    """A piece of memory without a name, which other processes of this user write into.

    It goes away with the process that has made it, however that one ends.
    """

    def __init__(self) -> None:
        self._descriptor = os.memfd_create("ray_hetero-metrics")
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def read(self) -> list[RankFigures]:
        """Figures that were last written; none before the first time."""
        for _ in range(READS):
            content = os.pread(self._descriptor, os.fstat(self._descriptor).st_size, 0)
            try:
                return [RankFigures(**row) for row in json.loads(content or "[]")]
            except ValueError:
                # A write fell into the reading.
                continue
        return []


class FiguresWriter:
    """Writes the totals of an engine's ranks where its server reads them.

    Args:
        path: of the server's `SharedFigures`; where it cannot be opened nothing is written.
        engine: vLLM's instance id.

    """

    def __init__(self, path: str, engine: str) -> None:
        self._engine = engine
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_WRONLY)
        except OSError as error:
            # As where Ray's processes are another user's, or in another container.
            logger.warning("the server's /metrics will not show the ranks: %s", error)

    def close(self) -> None:
        """Write no more; safe to call twice."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def write(self, ranks: Iterable[tuple[RankInfo, StepTotals]]) -> None:
        """Replace what is there."""
        if self._descriptor is None:
            return
        rows = [RankFigures.of(self._engine, info, totals) for info, totals in ranks]
        content = json.dumps([asdict(row) for row in rows]).encode()
        os.pwrite(self._descriptor, content, 0)
        os.ftruncate(self._descriptor, len(content))


def forget_figures(path: str) -> None:
    """Take an engine that has ended off its server's metrics; nothing where that is gone."""
    with suppress(OSError):
        os.truncate(path, 0)


class RankCollector(Collector):
    """Shows the ranks of this process's engines to prometheus_client."""

    def __init__(self) -> None:
        self._shared: list[SharedFigures] = []

    def add_engine(self) -> str:
        """Make room for one more engine; answers the path for its `FiguresWriter`."""
        self._shared.append(SharedFigures())
        return self._shared[-1].path

    def collect(self) -> Iterable[CounterMetricFamily]:
        """One family a name, and of each rank one sample, or one a reason."""
        rows = [row for shared in self._shared for row in shared.read()]
        for name, some in BY_NAME.items():
            labels = labels_with(some[0])
            family = CounterMetricFamily(PREFIX + name, some[0].help, labels=labels)
            for row in rows:
                for figure in some:
                    if figure.reason and row.labels[KIND] != "cpu":
                        continue
                    own = (figure.reason,) if figure.reason else ()
                    family.add_metric([*row.labels, *own], row.totals[figure.field])
            yield family

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Nothing: a registry would else read all figures when this is registered."""
        return ()


_collector: RankCollector | None = None


def show_engine() -> str:
    """Show one more engine on this process's metrics.

    Returns:
        The path for its `FiguresWriter`, which must be on this host.

    """
    global _collector
    if _collector is None:
        _collector = RankCollector()
        REGISTRY.register(_collector)
    return _collector.add_engine()

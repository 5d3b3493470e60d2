"""Figures of the ranks on their way to a scrape: written by one process, collected in another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from ray_hetero.kernels.step_route import Reason
from ray_hetero.observability.engine_info import RankInfo
from ray_hetero.observability.metrics import (
    FIGURES,
    PREFIX,
    FiguresWriter,
    RankCollector,
    forget_figures,
)
from ray_hetero.observability.step_clock import StepTotals

TOTALS = StepTotals(steps=7, tokens=56, busy_s=1.5, waiting_s=0.25, exchange_s=0.125,
                    received_bytes=2048, sent_bytes=1024)  # fmt: skip


def info(rank: int, kind: str = "cpu") -> RankInfo:
    return RankInfo(
        rank=rank, stage=rank, tensor_rank=0, kind=kind, node="host-a", device="", threads=(),
        first_layer=0, layers=1, actor="", predicted_ms=None,
    )  # fmt: skip


def scraped(collector: RankCollector) -> list[str]:
    """Lines of samples that a scrape of this collector answers."""
    registry = CollectorRegistry()
    registry.register(collector)
    lines = generate_latest(registry).decode().splitlines()
    return [line for line in lines if not line.startswith("#")]


def sample(name: str, engine: str, rank: int, value: float, kind: str = "cpu") -> str:
    labels = f'engine="{engine}",kind="{kind}",node="host-a",rank="{rank}",stage="{rank}"'
    return f"{PREFIX}{name}_total{{{labels}}} {value}"


def sorted_labels(line: str) -> str:
    """A sample with its labels in alphabetical order."""
    name, _, rest = line.partition("{")
    labels, _, value = rest.partition("}")
    return f"{name}{{{','.join(sorted(labels.split(',')))}}}{value}"


def test_a_scrape_shows_every_figure_of_every_rank() -> None:
    collector = RankCollector()
    writer = FiguresWriter(collector.add_engine(), "one")
    assert scraped(collector) == []
    writer.write([(info(0), TOTALS), (info(1, "gpu"), StepTotals(steps=1))])
    lines = list(map(sorted_labels, scraped(collector)))
    assert len(lines) == 2 * len(FIGURES) - len(Reason)  # a GPU rank has none of these
    assert sample("busy_seconds", "one", 0, 1.5) in lines
    assert sample("sent_bytes", "one", 0, 1024.0) in lines
    assert sample("steps", "one", 1, 1.0, "gpu") in lines


def test_what_is_written_replaces_what_was_there() -> None:
    collector = RankCollector()
    writer = FiguresWriter(collector.add_engine(), "one")
    writer.write([(info(0), TOTALS), (info(1), TOTALS)])
    writer.write([(info(0), StepTotals(steps=8))])
    lines = list(map(sorted_labels, scraped(collector)))
    assert len(lines) == len(FIGURES)
    assert sample("steps", "one", 0, 8.0) in lines


def test_engines_of_one_process_share_a_family() -> None:
    collector = RankCollector()
    for name in ("one", "two"):
        FiguresWriter(collector.add_engine(), name).write([(info(0), TOTALS)])
    lines = list(map(sorted_labels, scraped(collector)))
    assert sample("tokens", "one", 0, 56.0) in lines
    assert sample("tokens", "two", 0, 56.0) in lines


def test_steps_of_cpu_ranks_are_shown_by_reason() -> None:
    collector, totals = RankCollector(), StepTotals(steps=3)
    for reason in (Reason.DECODING, Reason.PROMPTS, Reason.DECODING):
        totals.count_route(reason)
    assert totals.by_reason == {Reason.DECODING: 2, Reason.PROMPTS: 1}
    writer = FiguresWriter(collector.add_engine(), "one")
    writer.write([(info(0), totals), (info(1, "gpu"), StepTotals(steps=3))])
    shown = [line for line in scraped(collector) if "routed_steps_total" in line]
    assert len(shown) == len(Reason)
    assert all('rank="0"' in line for line in shown)
    assert [line.split()[-1] for line in shown if 'reason="decoding"' in line] == ["2.0"]


def test_another_process_can_write() -> None:
    collector = RankCollector()
    code = (
        "import sys; from test_metrics import TOTALS, info; "
        "from ray_hetero.observability.metrics import FiguresWriter; "
        "FiguresWriter(sys.argv[1], 'one').write([(info(0), TOTALS)])"
    )
    run_beside([sys.executable, "-c", code, collector.add_engine()])
    assert sample("steps", "one", 0, 7.0) in map(sorted_labels, scraped(collector))


def run_beside(command: Sequence[str]) -> None:
    subprocess.run(command, check=True, cwd=__file__.rpartition("/")[0], timeout=120)


def test_a_server_that_cannot_be_reached_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    writer = FiguresWriter("/proc/1/fd/no-such", "one")
    writer.write([(info(0), TOTALS)])
    assert "/metrics will not show the ranks" in caplog.text


def test_an_engine_that_has_ended_is_not_shown() -> None:
    collector = RankCollector()
    path = collector.add_engine()
    FiguresWriter(path, "one").write([(info(0), TOTALS)])
    assert scraped(collector)
    forget_figures(path)
    assert scraped(collector) == []
    # A server that is gone has nothing to be forgotten.
    forget_figures("/proc/1/fd/no-such")


def test_a_writer_gives_its_descriptor_back() -> None:
    path, before = RankCollector().add_engine(), len(os.listdir("/proc/self/fd"))
    writer = FiguresWriter(path, "one")
    writer.close()
    writer.close()
    assert len(os.listdir("/proc/self/fd")) == before

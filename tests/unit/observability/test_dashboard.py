"""The Grafana dashboard and the alerts of Prometheus ask for metrics that there are."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client import REGISTRY
from promql import Asked, asked
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.observability.metrics import FIGURES, LABELS, PREFIX, REASON

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

from draw_dashboard import ANSWERS, PICTURE, drawn  # noqa: E402

DASHBOARD = ROOT / "docs" / "grafana" / "ray_hetero.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yml"
OURS = {f"{PREFIX}{figure.name}_total" for figure in FIGURES}
CASES = ALERTS.with_name("alerts.test.yml")
OF_PROMETHEUS = {"up"}
OF_ALERTS = {"ALERTS"}
"""What Prometheus makes of alerts."""
KNOWN_LABELS = {*LABELS, REASON, "job", "instance", "le", "alertname", "alertstate"}
"""Those of this package's metrics, of what is scraped, of histograms and of alerts."""


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


@pytest.fixture(scope="module")
def vllms_metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """Names of what vLLM's own logger shows on /metrics."""
    folder = tmp_path_factory.mktemp("llama")
    model = write_demo_model(folder, shape=DemoShape(layers=1, hidden=64, heads=2))
    arguments = EngineArgs(model=str(model), max_model_len=128)
    # Histograms and gauges are made, and registered, with the logger.
    PrometheusStatLogger(arguments.create_engine_config())
    found = {family.name for family in REGISTRY.collect() if family.name.startswith("vllm:")}
    unregister_vllm_metrics()
    return found


def test_every_metric_exists(panels: list[dict[str, Any]], vllms_metrics: set[str]) -> None:
    # Grafana writes an interval into each expression.
    shown = together(
        target["expr"].replace("$__rate_interval", "1m")
        for panel in panels
        for target in panel["targets"]
    )
    vllms = {name for name in shown.metrics if name.startswith("vllm:")}
    assert shown.metrics - vllms == OURS
    assert len(vllms) > 5
    assert without_suffixes(vllms) - vllms_metrics == set()
    assert shown.labels <= KNOWN_LABELS
    assert counters(shown.counted)


def without_suffixes(names: set[str]) -> set[str]:
    """Families of vLLM's metrics by the names of their samples."""
    return {re.sub(r"_(total|bucket)$", "", name) for name in names}


def together(expressions: Iterable[str]) -> Asked:
    """What expressions ask for; each has to be one that Prometheus takes."""
    found = [asked(one) for one in expressions]
    assert found
    return Asked(
        *(
            set().union(*(getattr(one, part.name) for one in found))
            for part in dataclasses.fields(Asked)
        )
    )


def counters(names: set[str]) -> bool:
    """Whether these are counters, of which a rate means something."""
    return bool(names) and all(name.endswith(("_total", "_bucket")) for name in names)


@pytest.fixture(scope="module")
def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_every_metric_of_the_alerts_exists(
    alerts: list[dict[str, Any]], vllms_metrics: set[str]
) -> None:
    found = together(alert["expr"] for alert in alerts)
    vllms = {name for name in found.metrics if name.startswith("vllm:")}
    assert found.metrics - vllms <= OURS | OF_PROMETHEUS
    assert len(found.metrics & OURS) >= 3
    assert without_suffixes(vllms) - vllms_metrics == set()
    assert found.labels <= KNOWN_LABELS
    assert counters(found.counted)


def test_the_cases_of_the_alerts_have_every_metric_that_these_ask_for(
    alerts: list[dict[str, Any]],
) -> None:
    cases = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    series = together(one["series"] for case in cases for one in case["input_series"])
    assert series.metrics == together(alert["expr"] for alert in alerts).metrics
    assert series.labels <= KNOWN_LABELS
    ends = together(one["expr"] for case in cases for one in case.get("promql_expr_test", ()))
    assert ends.metrics == OF_ALERTS
    assert ends.labels <= KNOWN_LABELS


@pytest.mark.parametrize(
    "expression", ["rate(up)", "up >", "sum by (instance (up)", "rates(up[1m])", "up{job=x}"]
)
def test_expressions_that_prometheus_refuses_are_refused(expression: str) -> None:
    with pytest.raises(ValueError, match=r".+"):
        asked(expression)


def test_an_alert_is_complete(alerts: list[dict[str, Any]]) -> None:
    assert len({alert["alert"] for alert in alerts}) == len(alerts) > 5
    for alert in alerts:
        assert alert.keys() <= {"alert", "expr", "for", "labels", "annotations"}
        assert alert["labels"]["severity"] in {"critical", "warning"}
        assert alert["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+m", alert.get("for", "1m"))
        labels = re.findall(r"\$labels\.(\w+)", alert["annotations"]["summary"])
        assert set(labels) <= {"instance"}
        # What a summary names is what is left of the labels.
        assert "by (instance" in alert["expr"] or "up{" in alert["expr"]


def test_every_label_exists(panels: list[dict[str, Any]]) -> None:
    named = {
        label
        for panel in panels
        for target in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"])
    }
    assert {"rank", "kind", "node"} <= named <= {*LABELS, REASON}


def test_panels_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len({(x, y) for _, _, x, y in places}) == len(panels)
    assert all(x + width <= 24 for _, width, x, _ in places)


def test_the_picture_is_of_this_dashboard(panels: list[dict[str, Any]]) -> None:
    dashboard, answers = (
        json.loads(path.read_text(encoding="utf-8")) for path in (DASHBOARD, ANSWERS)
    )
    picture = PICTURE.read_text(encoding="utf-8")
    assert picture == drawn(dashboard, answers), "python tools/draw_dashboard.py"
    shown = re.findall(r'font-weight="bold">([^<]*)<', picture)
    assert shown == [panel["title"].replace("'", "&#x27;") for panel in panels]


def test_a_server_under_load_gives_every_panel_of_its_ranks_lines(
    panels: list[dict[str, Any]],
) -> None:
    answers = json.loads(ANSWERS.read_text(encoding="utf-8"))
    empty = {
        panel["title"]
        for panel in panels
        if not any(
            value for found in answers["panels"][str(panel["id"])]
            for line in found for value in line["values"]
        )
    }  # fmt: skip
    # It had no expert ranks, and its release did not count steps by reason.
    assert empty == {
        "Experts of expert ranks", "Who computes the experts of expert ranks",
        "Experts that slots would hold", "Experts that would be copied into slots",
        "Steps of CPU ranks by reason",
    }  # fmt: skip


def test_a_panel_without_answers_says_so() -> None:
    panel = {
        "id": 1, "title": "Steps < 1", "gridPos": {"h": 8, "w": 12, "x": 0, "y": 0},
        "targets": [{"expr": "x", "legendFormat": "rank {{rank}}"}],
    }  # fmt: skip
    made = {"title": "one", "panels": [panel]}
    answers: dict[str, Any] = {"step_s": 5, "steps": 3, "panels": {"1": [[]]}}
    assert "No data" in drawn(made, answers)
    answers["panels"]["1"] = [[{"labels": {"rank": "7"}, "values": [None, 2.0, 4.0]}]]
    picture = drawn(made, answers)
    assert "No data" not in picture
    assert ">rank 7<" in picture
    assert ">Steps &lt; 1<" in picture
    # From the middle of the plot to its end, from half of the height to the top.
    assert re.search(r'd="M317.0 [0-9.]+L568.0 32.0"', picture)

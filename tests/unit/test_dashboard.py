"""The Grafana dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.observability.metrics import FIGURES, LABELS, PREFIX

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "ray_hetero.json"


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
    asked = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    ours = {f"{PREFIX}{figure.name}_total" for figure in FIGURES}
    assert set(re.findall(rf"{PREFIX}\w+", asked)) == ours
    vllms = {re.sub(r"_(total|bucket)$", "", name) for name in re.findall(r"vllm:\w+", asked)}
    assert len(vllms) > 5
    assert vllms - vllms_metrics == set()


def test_every_label_exists(panels: list[dict[str, Any]]) -> None:
    named = {
        label
        for panel in panels
        for target in panel["targets"]
        for label in re.findall(r"{{(\w+)}}", target["legendFormat"])
    }
    assert {"rank", "kind", "node"} <= named <= set(LABELS)


def test_panels_do_not_overlap(panels: list[dict[str, Any]]) -> None:
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len({(x, y) for _, _, x, y in places}) == len(panels)
    assert all(x + width <= 24 for _, width, x, _ in places)

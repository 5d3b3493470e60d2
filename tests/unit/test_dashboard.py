"""The Grafana dashboard asks for metrics that there are."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from ray_hetero.observability.metrics import FIGURES, LABELS, PREFIX

DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "ray_hetero.json"


@pytest.fixture(scope="module")
def panels() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(DASHBOARD.read_text())["panels"]
    return found


def test_every_metric_exists(panels: list[dict[str, Any]]) -> None:
    asked = " ".join(target["expr"] for panel in panels for target in panel["targets"])
    ours = {f"{PREFIX}{figure.name}_total" for figure in FIGURES}
    assert set(re.findall(rf"{PREFIX}\w+", asked)) == ours
    vllms = {re.sub(r"_(total|bucket)$", "", name) for name in re.findall(r"vllm:\w+", asked)}
    vllm = find_spec("vllm")
    assert vllm is not None and vllm.origin is not None  # noqa: PT018
    source = Path(vllm.origin).with_name("v1").joinpath("metrics", "loggers.py").read_text()
    assert len(vllms) > 5
    assert {name for name in vllms if f'"{name}"' not in source} == set()


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

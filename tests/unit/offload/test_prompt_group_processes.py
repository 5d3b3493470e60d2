"""Ranks of a group in processes of their own: what one of them leaves behind for the others."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import needs_native

pytestmark = [needs_native, pytest.mark.timeout(400)]
HERE = Path(__file__).parents[1]
COUNT = 2
STEPS = (145, 2, 72, 81, 2)
LIMIT_S = 20.0
"""More than the GPU takes for a step."""


def lines(process: subprocess.Popen[str]) -> Iterator[dict[str, Any]]:
    """What a rank prints; the test's own limit ends the wait."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            yield json.loads(line)


@pytest.fixture
def more() -> dict[str, Any]:
    """What each rank is given besides."""
    return {}


@pytest.fixture
def ranks(tmp_path: Path, more: dict[str, Any]) -> Iterator[list[subprocess.Popen[str]]]:
    made = []
    for own in range(COUNT):
        given = {"own": own, "count": COUNT, "store": str(tmp_path / "store"), "limit_s": LIMIT_S}
        given |= more
        made.append(
            subprocess.Popen(
                [sys.executable, str(HERE / "prompt_group_process.py"), json.dumps(given)],
                stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
        )  # fmt: skip
    try:
        yield made
    finally:
        for process in made:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


@pytest.mark.parametrize(
    ("lost", "by"),
    [
        (1, signal.SIGKILL),
        pytest.param(0, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_is_lost_in_a_prompt_is_named_by_the_others(
    lost: int, by: signal.Signals, ranks: list[subprocess.Popen[str]]
) -> None:
    said = [lines(rank) for rank in ranks]
    for one in said:
        assert [next(one) for _ in STEPS] == [{"step": tokens} for tokens in STEPS]
        # Nothing has a name that could stay behind.
        assert next(one) == {"named": []}
    assert next(said[0]) == {"attending": True}
    ranks[lost].send_signal(by)
    (error,) = (line["error"] for line in said[1 - lost] if "error" in line)
    why = (
        "has ended"
        if by == signal.SIGKILL
        else f"was not there in {LIMIT_S:g} s (exchange.timeout_s)"
    )
    assert error == f"rank {lost}, of the same tensor-parallel group, {why}"


@pytest.mark.parametrize("more", [{"link": 2.5}])
def test_ranks_agree_on_the_tokens_from_which_a_slow_link_pays(
    ranks: list[subprocess.Popen[str]],
) -> None:
    first, other = ([line for line in lines(rank) if "step" not in line] for rank in ranks)
    assert first == other
    settled, below, above = first
    least = settled["from_tokens"]
    # 2.5 times 128, and what products take in truth.
    assert 288 < least < 1024
    assert settled["step_tokens"] == 128
    assert below["by_operators"] > 0 == below["on_gpu"]
    assert above["on_gpu"] > 0 == above["by_operators"]

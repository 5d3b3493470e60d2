"""A trained model's likelihood of a text, from engines in every format and way of computing.

benchmarks/quality.py asks, and compares with the same weights in Transformers, in float32.  Mean
differences have to be as near to zero as the differences of stock vLLM in bf16, which were measured
from window to window of the text, allow; between single tokens they may not be much larger.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from engines import START_SECONDS, Child, Json, start
from filelock import FileLock
from leftovers import Scene

from ray_hetero.cli.demo.trained import write_trained_model
from ray_hetero.errors import UnsupportedError
from ray_hetero.kernels.linear import streaming_linear

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import quality  # noqa: E402

pytestmark = [
    pytest.mark.timeout(2400),
    pytest.mark.skipif(streaming_linear._native is None, reason="needs the native module"),
]
SCRIPT = ROOT / "benchmarks" / "quality.py"
RAW = ROOT / "benchmarks" / "results" / "2026-11-29-quality.json"
OF_STOCK = 0.002
"""Nats that bf16 may be away from stock vLLM over the whole text."""
NOISIER = 2
"""Times stock's standard deviation between tokens that an engine may have."""
FEW = 2
"""Windows of the rows that are measured first, whose bound is 2.6 times that of all windows."""
USUAL = (("bf16/half", "fp8/half"), ("12 bits/half", "w4a16/half"))
"""Rows of one rank each, as most of their time is that of starting ranks; those of two processes
side by side, each of which has half of the socket."""
COMPILES_NOTHING = {"TORCHDYNAMO_DISABLE": "1"}
"""Environment in which vLLM's count of better tokens, for logprobs, is not compiled for 20 s."""
WAYS, SOME = ("bf16/pipeline", "12 bits/tensor", "fp8/chunks", "w4a16/drafts"), 6
"""Rows of other ways, and their windows."""

Measured = Callable[..., list[Json]]


@pytest.fixture(scope="session")
def trained(request: pytest.FixtureRequest) -> Path:
    """The trained model, kept for the next run."""
    kept = request.config.cache.mkdir("trained")
    folder = kept / "smollm2"
    with FileLock(kept / "lock"):
        if not (folder / "config.json").exists():
            try:
                write_trained_model(folder, force=True)
            except UnsupportedError as error:
                pytest.skip(str(error))
    return folder


@dataclass
class Measuring:
    """A process that measures rows.

    Args:
        rows: FORMAT/WAY of each.
        child: the process.
        folder: where it leaves its results.

    """

    rows: Sequence[str]
    child: Child
    folder: Path

    def found(self) -> list[Json]:
        """Rows of the process, in order."""
        status = self.child.wait(START_SECONDS * (len(self.rows) + 1))
        assert status == 0, self.child.tail()
        found: list[Json] = json.loads((self.folder / "quality.json").read_text())["rows"]
        assert [f"{row['format']}/{row['way']}" for row in found] == list(self.rows)
        return found


@pytest.fixture
def measuring(scene: Scene, trained: Path, tmp_path: Path) -> Callable[..., Measuring]:
    """Begin to measure rows FORMAT/WAY over some windows, in one process."""

    def begin(rows: Sequence[str], windows: int = quality.WINDOWS, name: str = "rows") -> Measuring:
        folder = tmp_path / name
        command = [
            sys.executable, str(SCRIPT), "--model", str(trained), "--out", str(folder),
            "--rows", ",".join(rows), "--windows", str(windows), "--one-ray",
        ]  # fmt: skip
        child = start(scene, command, tmp_path / f"{name}.log", COMPILES_NOTHING)
        return Measuring(rows, child, folder)

    return begin


@pytest.fixture
def measured(measuring: Callable[..., Measuring]) -> Measured:
    """Measure rows FORMAT/WAY over some windows, in one process."""
    return lambda *given: measuring(*given).found()


def stock() -> Json:
    """Figures of stock vLLM in bf16, as measured."""
    rows: list[Json] = json.loads(RAW.read_text())["rows"]
    (found,) = (row for row in rows if quality.is_of(row, *quality.STOCK))
    return found


def check(row: Json, windows: int) -> None:
    """Fail if an engine's likelihoods are further away than rounding takes them."""
    wanted = stock()
    for mine, theirs, deviations in (
        (row, wanted, quality.DEVIATIONS),
        (row["continued"], wanted["continued"], quality.CHOSEN_DEVIATIONS),
    ):
        assert abs(mine["difference"]) < quality.bound(theirs, windows, deviations), row
        assert mine["between_tokens"] < NOISIER * theirs["between_tokens"], row
    # Half of each window was read from the prefix cache when the engine went on with it.
    assert row["cached"] == quality.WINDOW // 2
    assert "Paris" in row["answers"][0]


def test_usual_formats(measuring: Callable[..., Measuring]) -> None:
    begun = [measuring(rows, FEW, str(at)) for at, rows in enumerate(USUAL)]
    for row in (row for one in begun for row in one.found()):
        check(row, FEW)


@pytest.mark.slow
def test_ways_of_formats(measured: Measured) -> None:
    rows = measured(WAYS, SOME)
    for row in rows:
        check(row, SOME)
    assert rows[-1]["accepted"] > 0


@pytest.mark.slow
def test_bf16_is_as_far_from_float32_as_stock_is(measured: Measured) -> None:
    theirs, *rows = measured(
        [f"bf16/{way}" for way in ("stock", "one", "pipeline", "tensor", "drafts")]
    )
    for row in rows:
        check(row, quality.WINDOWS)
        assert abs(row["engine"] - theirs["engine"]) < OF_STOCK


@pytest.mark.slow
@pytest.mark.parametrize("half", [0, 1])
def test_every_format(half: int, measured: Measured) -> None:
    for row in measured([f"{name}/pipeline" for name in quality.formats()][half::2]):
        check(row, quality.WINDOWS)

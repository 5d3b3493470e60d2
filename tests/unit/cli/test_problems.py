"""Errors on the command line: rows of a terminal have whole words, and a file has lines."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from placement.errors import PlacementError
from ray_hetero.cli.problems import print_problem

MESSAGE = (
    "a model does not fit: 10.0 GiB needed\n"
    "  rank 0: weights 9.0 GiB\n"
    "Add a stage (--pipeline-parallel-size) on another socket or GPU, or take another model."
)


@pytest.mark.parametrize("columns", [40, 80])
def test_rows_of_a_terminal_have_whole_words(columns: int) -> None:
    written = io.StringIO()
    print_problem(
        PlacementError(MESSAGE), Console(file=written, width=columns, force_terminal=True)
    )
    rows = written.getvalue().splitlines()
    assert len(rows) > len(MESSAGE.splitlines())
    assert max(map(len, rows)) <= columns
    assert " ".join(rows).split() == f"ray-hetero: {MESSAGE}".split()


def test_a_file_has_the_lines_of_the_message() -> None:
    written = io.StringIO()
    print_problem(PlacementError(MESSAGE), Console(file=written, width=40))
    assert written.getvalue() == f"ray-hetero: {MESSAGE}\n"

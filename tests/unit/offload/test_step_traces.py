"""Scripted steps have the routes, pieces, graphs, words and messages of a file."""

from __future__ import annotations

from itertools import groupby

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import needs_native  # noqa: E402
from recorded_events import StepTrace  # noqa: E402
from step_traces import SCRIPTS, TRACES, lines_of  # noqa: E402

from ray_hetero.kernels.step_route import Place, Reason  # noqa: E402
from ray_hetero.kernels.step_trace import Event, followed, note  # noqa: E402

pytestmark = [needs_native, pytest.mark.usefixtures("one_thread")]


def written() -> dict[str, list[str]]:
    """Lines of the file, by script."""
    found: dict[str, list[str]] = {}
    for line in TRACES.read_text(encoding="utf-8").splitlines():
        if line.startswith("# "):
            found[line.removeprefix("# ")] = own = []
        own.append(line)
    return {name: lines if lines[-1] else lines[:-1] for name, lines in found.items()}


@pytest.mark.parametrize("name", SCRIPTS)
def test_steps_do_what_the_file_says(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = written()[name]
    assert lines_of(name, monkeypatch) == expected, "type: python tests/unit/step_traces.py"


def test_the_file_has_every_script_and_many_steps() -> None:
    scripts = written()
    assert list(scripts) == list(SCRIPTS)
    text = "\n".join(line for lines in scripts.values() for line in lines)
    steps = [key for key, _ in groupby(text.split("\n"), key=bool) if not key]
    assert len(steps) >= 60
    # Every place and every kind of event is there.
    assert {place for place in Place if f"route: {place}," in text} == set(Place)
    assert {kind for kind in Event if f" {kind}: " in text} == set(Event)
    assert {Reason.NO_ROOM, Reason.MOSTLY_DECODING} <= {one for one in Reason if one in text}


def test_a_trace_has_the_events_of_its_context_only() -> None:
    first, second = StepTrace(), StepTrace()
    note(Event.SHARE, 1)
    with followed(first):
        note(Event.SHARE, 2)
        with followed(second):
            note(Event.MESSAGE, "a rank", "begins")
        note(Event.SHARE, 3)
    note(Event.SHARE, 4)
    assert first.of(Event.SHARE) == [(2,), (3,)]
    assert second.of(Event.MESSAGE) == [("a rank", "begins")]
    assert second.of(Event.SHARE) == []
    first.clear()
    assert first.of(Event.SHARE) == []

"""Display of a server's start in `ray-hetero serve` and `make demo`."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import vllm
from rich.table import Table

from ray_hetero.cli.serving import start_display
from ray_hetero.cli.serving.start_display import StartDisplay
from ray_hetero.observability import world_table
from ray_hetero.observability.progress import STEPS

WRITTEN = {
    "entrypoints/serve/utils/api_utils.py": "non-default args: ",
    "config/model.py": "Using max model len ",
    "v1/engine/core.py": "Initializing a V1 ",  # codespell:ignore
}
"""Where vLLM has the words by which a phase is known."""

ENGINE = "(EngineCore pid=2) INFO 11-23 15:04:36 "
LOG = [
    "(APIServer pid=1) INFO 11-23 15:04:03 [api_utils.py:286] non-default args: {'model': 'llama'}",
    "(APIServer pid=1) INFO 11-23 15:04:04 [model.py:2152] Using max model len 2048",
    f"{ENGINE}[core.py:133] {WRITTEN['v1/engine/core.py']}LLM engine",
    f"{ENGINE}[progress.py:49] [1/6] discover: 7.1 s: 1 nodes, 2 sockets",
    f"{ENGINE}[progress.py:49] [2/6] plan: 0.0 s: [cpu] → [cpu]",
    f"{ENGINE}[progress.py:49] [3/6] reserve: 0.0 s",
    "(rank 0 cpu vm pid=3) INFO 11-23 15:04:50 [model.py:2152] Using max model len 2048",
    f"{ENGINE}[progress.py:49] [4/6] spawn: 19.1 s",
    f"{ENGINE}[progress.py:49] [5/6] connect: 3.3 s",
    f"{ENGINE}[progress.py:49] [6/6] warm up: 0.1 s: finish",
    f"{ENGINE}[core.py:402] init engine took 1.2 s",
]


def test_each_phase_begins_once_and_each_step_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    display = StartDisplay()
    for line in LOG:
        display.saw(f"{line}\n")
    shown = capsys.readouterr().out.splitlines()
    before = ["loading vLLM", "reading the model's configuration"]
    before += ["loading vLLM in the engine's process"]
    assert [line.split(":")[0].strip() for line in shown[:3]] == before
    assert [line.split(":")[0].strip() for line in shown[3:]] == [
        f"[{number}/6] {step}" for number, step in enumerate(STEPS, 1)
    ]


def test_what_it_is_busy_with_is_told_now_and_then(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(start_display.time, "monotonic", lambda: now[0])
    display = StartDisplay()
    for _ in range(25):
        now[0] += 1
        display.tick()
    display.end()
    display.tick()
    assert capsys.readouterr().out.splitlines() == [
        "  … loading vLLM: 10 s",
        "  … loading vLLM: 20 s",
    ]


SHARDS = "\x1b[36m(rank 0 cpu vm pid=7)\x1b[0m Loading safetensors checkpoint shards: "


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (" 25% Completed | 2/8 [00:10<00:30,  5.0s/it]", ", 2.5 of 10.0 GiB, about 30 s left"),
        (" 50% Completed | 4/8 [1:00:10<1:00:09]", ", 5.0 of 10.0 GiB, about 3609 s left"),
        ("  0% Completed | 0/8 [00:00<?, ?it/s]", ", 0.0 of 10.0 GiB"),
        ("100% Completed | 8/8 [00:40<00:00,  5.0s/it]", ", 10.0 of 10.0 GiB"),
    ],
)
def test_loaded_bytes_are_shown(
    line: str, shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(start_display.time, "monotonic", lambda: now[0])
    display = StartDisplay(10 << 30)
    display.saw(SHARDS + line)
    now[0] += 20
    display.tick()
    assert capsys.readouterr().out == f"  … loading vLLM: 20 s{shown}\n"


@pytest.mark.parametrize("path", WRITTEN)
def test_vllm_still_writes_what_a_phase_is_known_by(path: str) -> None:
    written = WRITTEN[path]
    assert written in (Path(vllm.__file__).parent / path).read_text(encoding="utf-8")
    assert any(begin.search(written) for begin, _ in start_display.PHASES[1:])


def test_the_placement_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table()
    for column in world_table.COLUMNS:
        table.add_column(column)
    cells = ("0", "0", "0", "cpu", "node-a", "socket 0 (NUMA 0, 28 cores)", "0-27", "0-29 (30)")
    table.add_row(*cells)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(start_display.sys.stdout, "isatty", lambda: True)
    display = StartDisplay()
    for line in world_table.as_text(table).splitlines():
        display.saw(f"{line}\n")
    shown = capsys.readouterr().out.replace("\r\x1b[K", "").splitlines()
    assert [len(line) <= 80 for line in shown] == [True] * 5
    heads, row = (
        [cell.strip() for cell in re.split("[┃│]", line)[1:-1]] for line in (shown[1], shown[3])
    )
    assert heads == ["rank", "stage", "kind", "device", "threads", "layers"]
    assert row == ["0", "0", "cpu", "socket 0 (NUMA 0, 28 cores)", "0-27", "0-29 (30)"]
    assert {len(line) for line in shown} == {len(shown[0])}


def test_the_counting_line_is_cut_where_it_would_go_on_in_the_next_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    monkeypatch.setattr(start_display.sys.stdout, "isatty", lambda: True)
    StartDisplay().tick()
    assert capsys.readouterr().out == "\r\x1b[K  … loading vLLM: 0"

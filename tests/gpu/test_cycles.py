"""Ten engines started, asked and stopped in a row leave nothing: on the GPU, in /dev/shm, in Ray.

Nothing else may use the GPU meanwhile.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import START_SECONDS, Child, start
from gpu_host import SHARES, Checkpoint, GpuState, environment, gpu_state, needs_gpus
from leftovers import GONE_SECONDS, Scene, marked_processes, wait_until

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

SCRIPT = Path(__file__).with_name("cycles.py")
CYCLES = 10
CPU = {"ranks_per_socket": SHARES, "kv_cache_gib": 0.5}
ENGINES: dict[str, tuple[str, dict[str, Any]]] = {
    "a CPU stage": ("llama", {"layout": [["cpu"], ["gpu"]], "cpu": CPU}),
    "an expert rank": ("mixtral", {
        "layout": [["gpu"]], "cpu": CPU,
        "experts": {"ranks": 1, "layers": "all", "prefill_on_gpu": False},
    }),
}  # fmt: skip
"""Model and configuration of the engines beside a GPU."""
SLACK_MIB = 16
"""What the driver itself may keep for a while."""


def _left(scene: Scene, child: Child) -> list[str]:
    """What the last engine has left; the process that started it goes on to the next one."""
    own = {child.process.pid, *_trackers(scene)}
    return [
        what
        for what in scene.leftovers()
        if not any(what.startswith(f"process {pid}:") for pid in own)
    ]


def _trackers(scene: Scene) -> list[int]:
    """Python's own helper of a process that shares memory; it ends with that process."""
    processes = marked_processes(scene.marker).items()
    return [pid for pid, words in processes if "multiprocessing.resource_tracker" in words]


@pytest.mark.parametrize("name", ENGINES)
def test_ten_in_a_row(
    name: str, scene: Scene, logs: Path, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    before = gpu_state()
    architecture, keys = ENGINES[name]
    model = checkpoint(architecture, "float32")
    command = [sys.executable, SCRIPT, model, tmp_path, CYCLES, json.dumps(keys)]
    log = logs / f"cycles-{name.replace(' ', '-')}"
    child = start(scene, list(map(str, command)), log, environment())
    answers = []
    for number in range(CYCLES):
        stopped = tmp_path / f"stopped-{number}"
        wait_until(lambda: stopped.exists() or child.process.poll() is not None, START_SECONDS)  # noqa: B023
        assert stopped.exists(), child.tail()
        answers.append(json.loads(stopped.read_text()))
        assert wait_until(lambda: not _left(scene, child), GONE_SECONDS), _left(scene, child)
        _assert_gpu_is_as_it_was(before)
        (tmp_path / f"go-{number}").touch()
    assert child.wait(GONE_SECONDS) == 0
    assert [answer == answers[0] for answer in answers] == [True] * CYCLES


def _assert_gpu_is_as_it_was(before: GpuState) -> None:
    def is_free() -> bool:
        now = gpu_state()
        return now.processes == before.processes and now.used_mib <= before.used_mib + SLACK_MIB

    assert wait_until(is_free, GONE_SECONDS), f"before {before}, now {gpu_state()}"

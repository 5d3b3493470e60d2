"""Whatever process of an engine dies or stops, there is a reason, a status and an end."""

from __future__ import annotations

from pathlib import Path

import pytest
from engines import Model
from faulty_server import FaultyServer
from leftovers import clean_scene
from process_faults import LIMITS, OTHERS, RESTARTS, all_faults

pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "gcs_server" else pytest.mark.slow)
             for name in OTHERS],
)  # fmt: skip
def test_each_process_is_stopped_and_killed(name: str, logs: Path, model: Model) -> None:
    # What ends is the server; one of them is first made to live through the stops of all.
    lives = name == "raylet"
    with clean_scene() as scene:
        server = FaultyServer(
            scene, logs / f"kill-{name}", model("llama", "f32"), max_restarts=RESTARTS, **LIMITS
        )
        for fault in all_faults(server, name, lives=lives):
            print(fault)

"""`ray-hetero tune` over CPU ranks of this machine's socket."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from engines import START_SECONDS, Model, start
from leftovers import Scene

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

CONFIG = "cpu: {ranks_per_socket: 2, kv_cache_gib: 0.25}\n"


def test_layouts_are_measured_and_the_best_command_is_printed(
    scene: Scene, logs: Path, model: Model
) -> None:
    (logs / "config.yaml").write_text(CONFIG)
    child = start(
        scene,
        [str(Path(sys.executable).with_name("ray-hetero")), "tune", str(model("llama", "f32")),
         "--layouts", "2", "--users", "2", "--max-model-len", "512", "--prompt-tokens", "32",
         "--tokens", "16", "--enforce-eager", "--host", "127.0.0.1"],
        logs / "tune",
        {"RAY_HETERO_CONFIG": str(logs / "config.yaml")},
    )  # fmt: skip
    assert child.wait(3 * START_SECONDS) == 0, child.tail()
    speeds = re.findall(r"^(as planned|\[\[.*\]\])\n(?:.*\n)*?  ([\d.]+) tokens/s", child.log, re.M)
    assert len(speeds) == 2, child.tail()
    best, _ = max(speeds, key=lambda one: float(one[1]))
    (said,) = re.findall(r"^Best: (.*)$", child.log, re.M)
    assert said == best or len({speed for _, speed in speeds}) == 1
    (command,) = re.findall(r"^Run: (vllm serve .*)$", child.log, re.M)
    assert command.endswith("--enforce-eager --host 127.0.0.1")
    assert ("layout" in command) == (best != "as planned")
    scene.assert_clean()

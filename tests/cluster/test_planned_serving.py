"""`ray-hetero serve` from the plan to Ctrl-C."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from engines import START_SECONDS, STOP_SECONDS, Model, free_port, start
from leftovers import Scene, wait_until

pytestmark = [pytest.mark.timeout(1800), pytest.mark.slow]

LINE = re.compile(r"\d\d:\d\d:\d\d  1\.0 users a step: [\d.]+ tokens/s each, predicted [\d.]+; ")


def test_a_planned_server_is_compared_with_its_plan(scene: Scene, logs: Path, model: Model) -> None:
    port = str(free_port())
    child = start(
        scene,
        [str(Path(sys.executable).with_name("ray-hetero")), "serve", str(model("llama", "f32")),
         "--max-model-len", "512", "--log", str(logs / "server"), "--enforce-eager",
         "--served-model-name", "tiny", "--host", "127.0.0.1", "--port", port],
        logs / "serve",
    )  # fmt: skip
    assert wait_until(lambda: "ready after" in child.log, START_SECONDS, 0.5), child.tail()
    assert '{"model": "tiny"' in child.log
    assert "Application startup complete" in (logs / "server").read_text()
    body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 64, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    assert httpx.post(url, json=body, trust_env=False, timeout=60).status_code == 200
    assert wait_until(lambda: LINE.search(child.log) is not None, 60, 1.0), child.tail()
    (typed,) = re.findall(r"ray-hetero (bench .*)", child.log)
    command = [str(Path(sys.executable).with_name("ray-hetero")), *shlex.split(typed), "--json"]
    command += ["--users", "1,4", "--prompt-tokens", "32", "--tokens", "16"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    measured = json.loads(done.stdout)["users"]
    assert [row["users"] for row in measured] == [1, 4]
    assert all(row["step_s"] > 0 and row["predicted_per_s"] > 0 for row in measured)
    child.process.send_signal(signal.SIGINT)
    assert child.wait(STOP_SECONDS) == 0, child.tail()
    for text in ("Traceback", "leaked", "ERROR"):
        assert text not in child.log

"""A plugin of vLLM's that makes one rank misbehave; only for tests.

A variable of the environment names the rank and what it does: in a step of its warm-up "disagree"
(say that it was the next step) or "hold" (make a file and stay), while it serves "raise" or "index"
(read behind the end of a tensor of its device; CUDA tells of that later), or "vanish" (send itself
a signal where the other ranks of its group go on into their native step, once there is a file).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

VARIABLE = "RAY_HETERO_TEST_FAULT"


def site(directory: Path) -> str:
    """Install the plugin into an empty directory; what to put on PYTHONPATH."""
    info = directory / "faulty_rank-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-rank\nVersion: 1\n")
    entry = "[vllm.general_plugins]\nfaulty_rank = faulty_rank:register\n"
    (info / "entry_points.txt").write_text(entry)
    return os.pathsep.join([str(directory), str(Path(__file__).parent)])


def register() -> None:
    """Called by vLLM in each of its processes; a rank's has the module of ranks loaded."""
    fault: dict[str, Any] = json.loads(os.environ.get(VARIABLE, "{}"))
    module = sys.modules.get("ray_hetero.worker.rank_actor")
    if not fault or module is None or hasattr(module.perform, "fault"):
        return
    if fault["do"] == "vanish":
        _vanish(fault["rank"], fault["signal"], Path(fault["file"]))
        return
    if fault["do"] in ("raise", "index"):
        _fail_in_steps(fault["rank"], fault["do"])
        return
    perform = module.perform

    def misbehave(worker: Any, context: Any, step: Any) -> Any:
        if (context.rank, step.number) != (fault["rank"], fault["step"]):
            return perform(worker, context, step)
        if fault["do"] == "hold":
            Path(fault["file"]).touch()
            time.sleep(3600)
        return replace(perform(worker, context, step), step=step.number + 1)

    misbehave.fault = True  # type: ignore[attr-defined]
    module.perform = misbehave  # type: ignore[attr-defined]


def _fail_in_steps(rank: int, how: str) -> None:
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    execute_model = Worker.execute_model

    def fail(self: Any, scheduler_output: Any) -> Any:
        if self.rank == rank and scheduler_output.total_num_scheduled_tokens:
            if how == "raise":
                raise RuntimeError("no such kernel")
            device = self.device
            torch.zeros(1, device=device)[torch.tensor([5], device=device)]
        return execute_model(self, scheduler_output)

    Worker.execute_model = fail


def _vanish(rank: int, number: int, when: Path) -> None:
    import torch.distributed as dist

    from ray_hetero.kernels.layers import decode_step

    meeting = decode_step.meeting

    @contextmanager
    def vanish(sums: Any) -> Iterator[None]:
        if dist.get_rank() == rank and when.exists():
            os.kill(os.getpid(), number)
        with meeting(sums):
            yield

    decode_step.meeting = vanish

"""What an engine's plan sets of vLLM's configuration, without a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.engine.arg_utils import EngineArgs

from placement.cluster.assignment import Turn
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat.engine import engine_args, shared_batches
from ray_hetero.compat.worker import late_tokens
from ray_hetero.executor.engine_plan import EnginePlanner

STOCK = "vllm.v1.core.sched.scheduler.Scheduler"


@pytest.mark.parametrize("asked", [None, STOCK])
@pytest.mark.parametrize("earlier", [late_tokens.SCHEDULER, shared_batches.CLASS])
def test_a_plan_does_not_keep_the_scheduler_of_an_earlier_one(
    asked: str | None, earlier: str, tmp_path: Path
) -> None:
    model = write_demo_model(tmp_path / "model", shape=DemoShape(layers=2, hidden=64, heads=2))
    config = EngineArgs(
        model=str(model),
        distributed_executor_backend="ray_hetero",
        additional_config={"ray_hetero": {"layout": [["cpu"], ["cpu"]]}},
        scheduler_cls=asked,
    ).create_engine_config()
    planner = EnginePlanner(config, engine_args.spec_of(config), Turn(), None, None)
    config.scheduler_config.scheduler_cls = earlier
    planner._forget_scheduler()
    assert config.scheduler_config.scheduler_cls == asked

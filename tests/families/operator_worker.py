"""vLLM's worker with all that a CPU rank adds to it, which notes what operators its steps call."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from torch.profiler import ProfilerActivity, profile
from vllm.v1.worker.cpu_worker import CPUWorker

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from worlds import world

from families.operators import DECODE, PROMPT, START
from ray_hetero.compat.worker import model_runner
from ray_hetero.config import CpuConfig, HeteroConfig
from ray_hetero.kernels.step_route import StepRoute
from ray_hetero.worker.cpu_rank import CpuRank
from ray_hetero.worker.rank_actor import prepare_platform_of_cpus
from ray_hetero.world import RankSpec

CALLED: defaultdict[str, set[str]] = defaultdict(set)
"""By kind of step: operators of vLLM's that were called."""
OF_VLLM = ("_C", "_moe_C")
"""Beginnings of the namespaces of vLLM's compiled operators."""


@contextmanager
def _noted(kind: str) -> Iterator[None]:
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        yield
    CALLED[kind] |= {
        event.key for event in seen.key_averages() if event.key.startswith(OF_VLLM)
    }  # fmt: skip


class Worker(CPUWorker):  # type: ignore[misc]
    """A worker that computes as that of a CPU rank."""

    _rank: CpuRank
    _kind = PROMPT

    def __init__(self, vllm_config: Any, *given: Any, **named: Any) -> None:
        prepare_platform_of_cpus(vllm_config)
        super().__init__(vllm_config, *given, **named)

    def init_device(self) -> None:
        """Join the groups, and take the cores."""
        with _noted(START):
            super().init_device()

    def load_model(self, **given: Any) -> None:
        """Load the model as `RankActor.start` does."""
        with _noted(START):
            self._load(**given)

    def _load(self, **given: Any) -> None:
        one = world("c", layers=self.model_config.get_total_num_hidden_layers())
        spec = SimpleNamespace(
            seat=one.seats[0], world=one, spare=(), place="", gpus_beside=(),
            engine=SimpleNamespace(config=HeteroConfig(cpu=CpuConfig(linear_kernel="streaming"))),
            shared=SimpleNamespace(
                max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens
            ),
        )  # fmt: skip
        self._rank = CpuRank(cast("RankSpec", spec), self.vllm_config, None)
        super().load_model(**given)
        self._rank.loaded(self.model_runner)
        model_runner.draw_for_kept_tokens_only(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run one step as `RankWorker` does."""
        counts = scheduler_output.num_scheduled_tokens.values()
        route: StepRoute = self._rank.route(counts)
        self._kind = DECODE if counts and max(counts) == 1 else PROMPT
        with _noted(self._kind), self._rank.step(scheduler_output, route):
            return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample the tokens of that step."""
        with _noted(self._kind):
            return super().sample_tokens(grammar_output)

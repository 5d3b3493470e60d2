"""The forward pass that a GPU rank makes while CPU ranks get ready."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.compat.worker import warmup  # noqa: E402
from ray_hetero.worker import warmup_actions  # noqa: E402
from ray_hetero.worker.warmup_schedule import Action, Step  # noqa: E402


class Worker:
    """Stands for vLLM's; notes what is asked of it."""

    randomize_dummy_inputs = True
    vllm_config = object()

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[Any] = []
        self.error = error
        self.model_runner = SimpleNamespace(
            max_num_tokens=512,
            _dummy_run=self._run,
            warming_up_model=lambda: self.asked.append("on CPU"),
            vllm_config=SimpleNamespace(use_v2_model_runner=False),
        )

    def _run(self, tokens: int, **how: Any) -> None:
        self.asked.append((tokens, how))
        if self.error is not None:
            raise self.error

    @contextmanager
    def _scoped_allocator_max_split(self, *, max_split_size_mb: int) -> Iterator[None]:
        self.asked.append(max_split_size_mb)
        yield


def test_a_gpu_rank_makes_the_pass_of_its_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker()
    monkeypatch.setattr(type(current_platform), "is_cuda", lambda self: True)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.accelerator, name, lambda name=name: worker.asked.append(name))
    warmup.run_ahead(worker)
    run = (512, {"is_profile": True, "randomize_inputs": True})
    assert worker.asked == [20, run, "synchronize", "empty_cache"]


def test_a_rank_that_only_pretends_to_be_a_gpu_makes_the_pass_of_a_cpu() -> None:
    worker = Worker()
    warmup.run_ahead(worker)
    assert worker.asked == ["on CPU"]


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("serving", [(), (6, 7)])
def test_cores_of_cpu_ranks_are_left_alone_meanwhile(
    serving: tuple[int, ...], fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[Any] = []

    def ahead(worker: Any) -> None:
        done.append("run")
        assert torch.is_inference_mode_enabled()
        if fails:
            raise RuntimeError("out of memory")

    @contextmanager
    def current(config: Any) -> Iterator[None]:
        yield

    monkeypatch.setattr(warmup_actions.warmup, "run_ahead", ahead)
    monkeypatch.setattr(warmup_actions, "set_current_vllm_config", current)
    monkeypatch.setattr(warmup_actions, "keep_to", lambda cpus: cpus and done.append(cpus))
    if fails:
        with pytest.raises(RuntimeError, match="out of memory"):
            warmup_actions.run_ahead(Worker(), serving, range(8))
    else:
        warmup_actions.run_ahead(Worker(), serving, range(8))
    assert done == ([(6, 7), "run", range(8)] if serving else ["run"])


@pytest.mark.parametrize(("has_run", "tokens"), [(False, 512), (True, 512), (True, 1)])
def test_the_schedule_does_not_make_that_pass_again(
    has_run: bool, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = Worker()
    monkeypatch.setattr(warmup_actions, "check_what_is_read", lambda worker, context: None)
    context = warmup_actions.RankContext(0, "cpu", None, 1, has_run_ahead=has_run)
    warmup_actions._forward(worker, context, Step(1, Action.FORWARD, tokens))
    expected = [(1, {"is_profile": True})] if tokens == 1 else ["on CPU"]
    assert worker.asked == ([] if has_run and tokens == 512 else expected)

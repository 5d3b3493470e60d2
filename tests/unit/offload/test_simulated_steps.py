"""Steps of an engine from a seed, with a pretended GPU: whatever comes, all rows are right.

Requests of any length come, decode, verify drafts, share prefixes, are set back and leave; the
GPU's memory runs out, and pauses last longer than any wait may.  More seeds:
RAY_HETERO_SEEDS=500 (as many from the first one) or RAY_HETERO_SEEDS=1234:1235 (these).
"""

from __future__ import annotations

import os
import queue
import random
import threading
import time
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import needs_native  # noqa: E402
from paged_steps import Conversation  # noqa: E402
from scheduled_steps import LARGE, Engine, GroupEngine, Part  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.kernels.step_route import DECODING_TOKENS, PROMPT_TOKENS  # noqa: E402
from ray_hetero.offload.decode import mlp_columns  # noqa: E402
from ray_hetero.offload.decode.step_graphs import StepGraphs  # noqa: E402
from ray_hetero.offload.prefill import gpu_layers, kv_transfer  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(900), pytest.mark.usefixtures("one_thread")]

SOME, STEPS, MOST, REQUESTS = 40, 24, 256, 7
"""A length of prompts, steps of a seed, most tokens of a step, and most
requests of one."""
LENGTHS = (
    1, 2, DECODING_TOKENS - 1, DECODING_TOKENS, DECODING_TOKENS + 1, 12, PROMPT_TOKENS - 1,
    PROMPT_TOKENS, PROMPT_TOKENS + 1, SOME - 1, SOME, SOME + 1, 64, 127, 128, 129, LARGE,
)  # fmt: skip
PAUSE_S = 3600.0
"""Longer than any wait may be."""
COLUMNS: dict[Any, dict[str, Any]] = {Engine: {"columns": 12}, GroupEngine: {"share": 0.75}}
"""Arguments of engines whose decode steps have a part for the GPU."""
SHORTAGES = 0.04
"""Part of the calls of the GPU that memory runs out in, in engines where it does."""


class Clock:
    """A clock that only a pause moves on, for waits that have a limit."""

    def __init__(self) -> None:
        self.now = 0.0
        self.waiting = 0
        self._lock = threading.Lock()

    def pause(self) -> None:
        """Let more time pass than any wait may last, once nobody gets on."""
        time.sleep(0.02)
        self.now += PAUSE_S
        end = time.monotonic() + 60
        while self.waiting and time.monotonic() < end:
            time.sleep(0.001)

    def made(self) -> Any:
        """In place of the module `queue`: its limits are of this clock."""
        clock = self

        class Waiting:
            def __init__(self) -> None:
                self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()

            def put(self, item: Any) -> None:
                self._queue.put(item)

            def get(self, timeout: float) -> Any:
                end = clock.now + timeout
                with clock._lock:
                    clock.waiting += 1
                try:
                    while True:
                        try:
                            return self._queue.get(timeout=0.002)
                        except queue.Empty:
                            if clock.now > end:
                                raise
                finally:
                    with clock._lock:
                        clock.waiting -= 1

        return SimpleNamespace(SimpleQueue=Waiting, Empty=queue.Empty)


@dataclass(eq=False)
class Running:
    """A request of an engine."""

    conversation: Conversation
    total: int
    """Tokens that it has at its end."""
    prompt: int
    done: int = 0
    is_new: bool = True
    """Whether the ranks have not heard of it."""
    shares: bool = False
    """Whether another one has some of its blocks."""


class Simulation:
    """An engine, its requests, and what happens to them.

    Args:
        engine: of one rank, or of a group.
        chance: of everything.

    """

    def __init__(self, engine: Engine | GroupEngine, chance: random.Random, clock: Clock) -> None:
        self.engine, self.chance, self.clock = engine, chance, clock
        self.running: list[Running] = []
        self.told: list[str] = []
        """Everything that has happened, for messages."""

    def run(self) -> None:
        """Let some steps come."""
        for _ in range(STEPS):
            self._leave()
            self._come()
            parts, known = self._parts()
            if not parts:
                continue
            asked = [(begin, end) for _, begin, end in parts]
            self.told.append(f"{asked[:known]} decode or go on, {asked[known:]} are new")
            self.engine.schedule(*parts, known=known)
            if self.chance.random() < 0.1:
                time.sleep(0.01)  # vLLM prepares the step for longer
            self.engine.compute(*parts)
            if self.chance.random() < 0.3:
                self.told.append("pause")
                self.clock.pause()

    def _leave(self) -> None:
        """End requests that are done or aborted, and set some back."""
        for one in list(self.running):
            if one.done >= one.total or self.chance.random() < 0.05:
                self.running.remove(one)
                if not one.shares:
                    self.engine.free(one.conversation)
            elif not one.is_new and self.chance.random() < 0.05:
                one.done = 0

    def _come(self) -> None:
        """Have requests come, alone or many alike."""
        if self.chance.random() < 0.4:
            return
        length, many = self.chance.choice(LENGTHS), self.chance.random() < 0.5
        for _ in range(self.chance.randint(3, 6) if many else 1):
            if len(self.running) >= REQUESTS:
                return
            self.running.append(self._request(length))

    def _request(self, prompt: int) -> Running:
        total = prompt + self.chance.choice((1, 1, 3, 12))
        block = self.engine.block
        others = [one for one in self.running if one.done >= block]
        if not others or prompt <= block or self.chance.random() < 0.5:
            return Running(self.engine.request(total), total, prompt)
        # A prefix that another one has computed.
        other = self.chance.choice(others)
        shared = min(other.done // block, (prompt - 1) // block)
        made = self.engine.request(total, after=other.conversation, shared=shared)
        other.shares = True
        return Running(made, total, prompt, done=shared * block, shares=True)

    def _parts(self) -> tuple[list[Part], int]:
        """A step: requests that the ranks know first; how many these are."""
        known = [one for one in self.running if not one.is_new]
        new = [one for one in self.running if one.is_new]
        if new and self.chance.random() < 0.5:
            known = []
        left, parts = MOST, []
        for one in (*known, *new):
            begin = one.done
            wanted = one.prompt - begin if begin < one.prompt else self._decoded(one)
            count = min(wanted, left)
            if not count:
                break
            one.done, one.is_new, left = begin + count, False, left - count
            parts.append((one.conversation, begin, one.done))
        return parts, min(len(known), len(parts))

    def _decoded(self, one: Running) -> int:
        """A token, or some with drafts."""
        most = min(DECODING_TOKENS, one.total - one.done)
        return self.chance.choice((1, 1, most))


def shortages(monkeypatch: pytest.MonkeyPatch, chance: random.Random, told: list[str]) -> None:
    """Have memory of the GPU run out in some calls of whatever takes some there."""

    def fail_sometimes(owner: Any, name: str) -> None:
        stock = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if chance.random() < SHORTAGES:
                told.append(f"no memory for {name}")
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return stock(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    fail_sometimes(gpu_layers, "attend")
    fail_sometimes(mlp_columns, "expanded_whole")
    fail_sometimes(StepGraphs, "fetch")
    fail_sometimes(OffloadGpu, "read_first")
    fail_sometimes(OffloadGpu, "linear")


def seeds() -> range:
    asked = os.environ.get("RAY_HETERO_SEEDS", "12")
    first, _, end = asked.rpartition(":")
    return range(int(first or 0), int(end))


@pytest.fixture(autouse=True)
def _small_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    # Two blocks of 32 tokens and two heads of keys at once.
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 2 * 32 * 2 * 2 * 64 * 2)


@pytest.mark.parametrize("seed", seeds())
def test_a_simulated_engine(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, clock = random.Random(seed), Clock()
    monkeypatch.setattr(kv_transfer, "queue", clock.made())
    kind = chance.choice((Engine, GroupEngine))
    given = {
        "layers": chance.choice((2, 3)),
        "blocks": 160,
        **chance.choice(({}, COLUMNS[kind])),
        "least": chance.choice((9, 16, 33)),
        "unwritten": 50.0,
    }
    simulation = Simulation(kind(monkeypatch, **given), chance, clock)
    if has_shortages := chance.random() < 0.5:
        shortages(monkeypatch, random.Random(seed), simulation.told)
    simulation.told.append(f"{kind.__name__} {given}, shortages: {has_shortages}")
    try:
        simulation.run()
    except Exception as error:
        raise AssertionError("\n".join([f"seed {seed}:", *simulation.told])) from error

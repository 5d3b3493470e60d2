"""Steps of one request, and the pieces of weights that each copies to a GPU, pretended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
from paged_steps import Conversation, Steps
from recorded_events import StepTrace

from ray_hetero.kernels.step_trace import Event, followed
from ray_hetero.offload.decode import column_pieces
from ray_hetero.offload.decode.mlp_columns import MlpColumnOffload
from ray_hetero.offload.decode.shared_decode import SharedDecode
from ray_hetero.offload.prefill import offload_gpu
from ray_hetero.offload.weights.piece_reader import PieceReader
from ray_hetero.offload.weights.resident_pieces import IdleMemory
from ray_hetero.offload.weights.weight_pieces import Piece
from ray_hetero.planning import prefill_memory

LAYERS = 5


def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the small weights of tests be cut into several pieces, of which not all can stay, and
    have a GPU compute columns of their few."""
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 64 << 10)
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 64 << 10)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    monkeypatch.setattr(column_pieces, "LEAST_COLUMNS", 64)


class CopiedPieces:
    """Steps of one request, and the pieces that a step copies.

    Args:
        monkeypatch: as for `Steps`.
        tokens: of the request.
        given: of `Steps`.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tokens: int, **given: Any) -> None:
        self.steps = Steps(monkeypatch, layers=LAYERS, **given)
        self.request: Conversation = self.steps.request(tokens)
        self.done = 0
        self.trace = StepTrace()
        """Events of the last step."""

    @property
    def copied(self) -> list[Piece]:
        """Pieces that were copied in the last step."""
        return [piece for (piece,) in self.trace.of(Event.COPY)]

    @contextmanager
    def traced(self) -> Iterator[None]:
        """Let `trace` have the events of a context, instead of those of the last step."""
        self.trace.clear()
        with followed(self.trace):
            yield

    def of_step(self, tokens: int) -> list[Piece]:
        """Compute the request's next tokens, and compare them; the pieces that were copied until
        nothing more was ordered."""
        with self.traced():
            self.steps.check((self.request, self.done, self.done + tokens))
        self.done += tokens
        assert self.steps.made.gpu is not None
        self.steps.made.gpu.settle()
        return self.copied


class KeptColumns(CopiedPieces):
    """Steps of one request, whose columns a GPU computes.

    Args:
        monkeypatch: as for `Steps`.
        most: tokens of a step at most.
        given: of `Steps`.

    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, most: int, **given: Any) -> None:
        super().__init__(monkeypatch, 900, columns=12, most=most, **given)

    @property
    def shared(self) -> SharedDecode:
        """Decode steps with the GPU's help."""
        assert self.steps.shared is not None
        return self.steps.shared

    @property
    def columns(self) -> MlpColumnOffload:
        """What computes columns."""
        columns = self.steps.columns
        assert isinstance(columns, MlpColumnOffload)
        return columns

    @property
    def reader(self) -> PieceReader:
        """Reader of the pieces."""
        assert self.steps.made.gpu is not None
        reader = self.steps.made.gpu.reader
        assert isinstance(reader, PieceReader)
        return reader

    def have_idle(self, monkeypatch: pytest.MonkeyPatch, memory: Sequence[IdleMemory]) -> None:
        """Let pieces stay here only."""
        monkeypatch.setattr(self.columns, "_idle", lambda step: memory)

    @property
    def of_layers(self) -> list[list[Piece]]:
        """Pieces of a step's columns, by layer."""
        (step,) = self.columns._pieces.values()
        return [[placed.piece for placed in layer.all] for layer in step.layers]


class Decoding:
    """Requests of which more or fewer decode in a step.

    Args:
        steps: that computes them.
        prompts: tokens of each prompt, all but a few of which are computed at once.

    """

    def __init__(self, steps: Steps, *prompts: int) -> None:
        self._steps = steps
        self._requests = [steps.request(tokens) for tokens in prompts]
        self._done = [tokens - 50 for tokens in prompts]
        steps.check(*((one, 0, end) for one, end in zip(self._requests, self._done, strict=True)))

    def step(self, count: int) -> None:
        """Decode one token of each of the first requests, and compare."""
        some = list(zip(self._requests, self._done, strict=True))[:count]
        self._steps.check(*((one, end, end + 1) for one, end in some))
        for at in range(count):
            self._done[at] += 1

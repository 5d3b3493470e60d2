"""Traces of scripted steps with a pretended GPU: routes, pieces, graphs, words and messages.

    python tests/unit/step_traces.py     writes data/step_traces.txt

Each paragraph is a step; `ahead` is what happens when it is scheduled, before it is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from paged_steps import Conversation
from recorded_events import StepTrace
from scheduled_steps import Engine, GroupEngine, Part
from vllm.platforms import current_platform

from ray_hetero.kernels.step_route import StepRoute
from ray_hetero.kernels.step_trace import Event, followed
from ray_hetero.offload.decode.column_channel import PHASE, PHASES
from ray_hetero.offload.decode.share_choice import Share, Shares
from ray_hetero.offload.decode.shared_decode import STEPS
from ray_hetero.offload.decode.step_graphs import StepKind
from ray_hetero.offload.prefill import gpu_layers, stage_output
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu
from ray_hetero.offload.weights import resident_pieces
from ray_hetero.offload.weights.weight_pieces import Piece, WeightSlice
from ray_hetero.planning import prefill_memory

current_platform.import_kernels()

TRACES = Path(__file__).parent / "data" / "step_traces.txt"
LAYERS = 2
MATRICES = ("qkv", "output", "gate_up", "down")
FROM_TOKENS, ROOM = 96, 4096
"""Tokens of a step from which the GPU computes it, and up to which it has room."""
TURNS_FROM = 1024
"""Tokens of a step from which two stages take turns on the GPU, which engines measure."""
WIDTH = 100


class PieceNames:
    """Names of pieces: layer, matrix, rank of a group, and outputs.

    Args:
        weights: pieces of each weight, layer by layer in the order of `MATRICES`.

    """

    def __init__(self, weights: list[list[WeightSlice]]) -> None:
        assert len(weights) == LAYERS * len(MATRICES)
        self._weights = [[placed.piece for placed in some] for some in weights]
        ranks = dict.fromkeys(map(self._memory, [one for some in self._weights for one in some]))
        self._ranks = list(ranks)

    @staticmethod
    def _memory(piece: Piece) -> int:
        return int(piece.weight.untyped_storage().data_ptr())

    def __call__(self, piece: Piece) -> str:
        """Name of a piece, which steps may have cut otherwise."""
        at = piece.stored.data_ptr()
        for number, some in enumerate(self._weights):
            for one in some:
                begin = one.stored.data_ptr()
                if begin <= at < begin + one.stored.nbytes:
                    layer, matrix = divmod(number, len(MATRICES))
                    rank = self._ranks.index(self._memory(one)) if self._is_group(number) else 0
                    of_rank = f"@{rank}" if rank else ""
                    return f"{layer}.{MATRICES[matrix]}{of_rank}:{piece.begin}-{piece.end}"
        raise AssertionError("a piece of no weight")

    def _is_group(self, number: int) -> bool:
        return len(set(map(self._memory, self._weights[number]))) > 1


def _layers(count: int, native: int, on_gpu: int, by_operators: int) -> str:
    ways = {"native": native, "gpu": on_gpu, "operators": by_operators}
    return f"{count} × " + ", ".join(f"{tokens} {way}" for way, tokens in ways.items() if tokens)


def _route(route: StepRoute) -> str:
    ahead = ", reads ahead" if route.reads_ahead else ""
    return (
        f"{route.place}, {route.reason}: {route.tokens} tokens, {route.longest} at most, "
        f"{route.prompt_tokens} of prompts{ahead}"
    )


def _graph(act: str, kind: StepKind) -> str:
    kept = f"{kind.kept.columns} and {kind.kept.outputs} blocks"
    return f"{act} for {kind.tokens} tokens, cores keep {kept}, phase {kind.first // PHASE}"


def _word(act: str, name: str, number: int) -> str:
    return f"{act} {name} {number % PHASE}"


def _message(*values: object) -> str:
    return " ".join(map(str, values))


@dataclass(frozen=True)
class Script:
    """An engine, whose steps are traced.

    Args:
        engine: of one rank or of a group.
        trace: of this process.
        told: lines of all steps up to now.

    """

    engine: Any
    trace: StepTrace
    told: list[str]

    def request(self, tokens: int, **given: Any) -> Conversation:
        """A request of so many tokens; arguments as of `Engine.request`."""
        made: Conversation = self.engine.request(tokens, **given)
        return made

    def step(self, title: str, *parts: Part, known: int = 0) -> None:
        """Schedule and compute a step.

        Args:
            title: of its paragraph.
            parts: requests with their first token and the one behind their last.
            known: requests that are no new ones, the first.

        """
        self._begin(title, partial(self.engine.schedule, *parts, known=known))
        self.engine.computed(*parts)
        self.told.extend(f"  {line}" for line in self._events())

    def idle(self) -> None:
        """Let the engine learn that no request is left."""
        self._begin("no request is left", self.engine.idle)

    def _begin(self, title: str, schedule: Callable[[], None]) -> None:
        self.told.extend(["", title])
        self.trace.clear()
        schedule()
        self.told.extend(f"  ahead {line}" for line in self._events())
        self.trace.clear()

    def prompt(self, tokens: int, title: str = "") -> None:
        """A step of one new prompt, which leaves at once."""
        request = self.request(tokens)
        self.step(title or f"prompt of {tokens}", (request, 0, tokens))
        self.engine.free(request)

    def decode(self, counts: list[int], title: str) -> None:
        """A step of requests with cached tokens, of so many tokens each, which leave at once."""
        requests = [self.request(40 + count) for count in counts]
        parts = [(one, 40, 40 + count) for one, count in zip(requests, counts, strict=True)]
        for one in requests:
            self.engine.computed((one, 0, 40))
        self.step(title, *parts, known=len(parts))
        for one in requests:
            self.engine.free(one)

    def _events(self) -> Iterator[str]:
        names = PieceNames(self.engine.gpu.pieces)
        forms: dict[Event, Callable[..., str]] = {
            Event.ROUTE: _route, Event.INSTEAD: str, Event.LAYERS: _layers, Event.SHARE: str,
            Event.COPY: names, Event.GRAPH: _graph, Event.WORD: _word, Event.MESSAGE: _message,
        }  # fmt: skip
        assert set(forms) == set(Event)
        for kind, form in forms.items():
            found = [form(*values) for values in self.trace.of(kind)]
            if kind in {Event.ROUTE, Event.INSTEAD, Event.LAYERS, Event.SHARE, Event.MESSAGE}:
                found.sort()  # the ranks of a group are threads
            yield from _wrapped(str(kind), found)


def _wrapped(kind: str, found: list[str]) -> Iterator[str]:
    """Lines of one kind of events; several alike, one after the other, are counted."""
    counted: list[list[Any]] = []
    for one in found:
        if counted and counted[-1][0] == one:
            counted[-1][1] += 1
        else:
            counted.append([one, 1])
    line = ""
    for one, count in counted:
        text = one if count == 1 else f"{one} ({count} times)"
        if line and len(line) + len(text) > WIDTH:
            yield f"{kind}: {line}"
            line = ""
        line += f"; {text}" if line else text
    if line:
        yield f"{kind}: {line}"


def thresholds(script: Script) -> None:
    """Steps of one rank around every number of tokens that decides."""
    for tokens in (FROM_TOKENS - 1, FROM_TOKENS, FROM_TOKENS + 1):
        script.prompt(tokens)
    for tokens in (1, 7, 8, 9, 15, 16, 17):
        script.decode([tokens], f"one request of {tokens} tokens behind 40")
    for requests in (7, 8, 9, 15, 16, 17, 95, 96, 97):
        script.decode([1] * requests, f"{requests} requests decode")
    for last in (7, 8):
        script.decode([8] * 15 + [last], f"15 requests of 8 tokens and one of {last}")
    script.decode([8] * 16 + [1], "16 requests of 8 tokens and one of 1")
    for tokens in (127, 128, 129, ROOM - 1, ROOM, ROOM + 1):
        script.prompt(tokens)


def mixtures(script: Script) -> None:
    """Chunks, shared prefixes, and requests that decode beside prompts."""
    long = script.request(400)
    script.step("first chunk of 240 tokens", (long, 0, 240))
    script.step("second chunk of 100 tokens", (long, 240, 340), known=1)
    other = script.request(200, after=long, shared=2)
    script.step("prompt whose first 64 tokens are cached", (other, 64, 190))
    script.step(
        "one decodes beside a prompt of 120", (long, 340, 341), (script.request(120), 0, 120),
        known=1,
    )  # fmt: skip
    decoding = [script.request(60) for _ in range(20)]
    for one in decoding:
        script.engine.computed((one, 0, 40))
    parts = [(one, 40, 41) for one in decoding]
    script.step(
        "20 decode beside a prompt of 80", *parts, (script.request(80), 0, 80), known=len(parts)
    )
    writing = script.request(200)
    reading = script.request(100, after=writing, shared=2)
    script.step(
        "one decodes with blocks that a prompt writes", (reading, 64, 65), (writing, 0, 200),
        known=1,
    )  # fmt: skip


def shared(script: Script) -> None:
    """Decode steps whose MLPs a GPU computes in part, before and behind prompts."""
    chat = script.request(600)
    script.step("prompt of 150", (chat, 0, 150))
    done = 150
    for number in range(1, 3 + PHASES):
        script.step(f"decode step {number}", (chat, done, done + 1), known=1)
        done += 1
    script.step("3 drafts", (chat, done, done + 4), known=1)
    done += 4
    script.prompt(300, "prompt of 300, which evicts pieces")
    for _ in range(2):
        script.step("decode step behind it", (chat, done, done + 1), known=1)
        done += 1
    script.step("chunk of 200", (chat, done, done + 200), known=1)
    done += 200
    script.step("decode step behind it", (chat, done, done + 1), known=1)
    script.idle()
    script.prompt(150)
    script.engine.layers.shared.shares = Shares((Share(1, 4), Share(3, 20)))
    for count in (1, *[3] * STEPS, 1):
        script.decode([1] * count, f"{count} decode, of which another share is measured best")


def shortages(script: Script) -> None:
    """Memory of the GPU runs out in one place after the other."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OffloadGpu, "read_first", _run_out)
        script.prompt(150, "prompt of 150, no memory for its first weights")
    script.prompt(150, "prompt of 150 behind it")
    script.decode([1] * 7, "7 requests decode")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OffloadGpu, "linear", _run_out)
        script.prompt(150, "prompt of 150, no memory for its products")
    script.prompt(150, "prompt of 150 behind it")


def no_attention(script: Script) -> None:
    """Steps in which memory of the GPU runs out in an attention."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(gpu_layers, "attend", _run_out)
        script.prompt(150, "prompt of 150, no memory for its attention")
    script.prompt(150, "prompt of 150 behind it")


def _run_out(*given: Any, **others: Any) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def of_group(script: Script) -> None:
    """Steps of two ranks, the first of which has the GPU."""
    chat = script.request(400)
    script.step("prompt of 150", (chat, 0, 150))
    for number in range(1, 3 + PHASES):
        script.step(f"decode step {number}", (chat, 149 + number, 150 + number), known=1)
    done = 152 + PHASES
    script.step(
        "one decodes beside a prompt of 120", (chat, done, done + 1),
        (script.request(120), 0, 120), known=1,
    )  # fmt: skip
    script.decode([1] * 9, "9 requests decode")
    script.prompt(95)
    no_attention(script)


SCRIPTS: dict[str, tuple[type[Any], dict[str, Any], Callable[[Script], None]]] = {
    "thresholds of one rank": (Engine, {"most": ROOM, "blocks": 320}, thresholds),
    "mixtures": (Engine, {}, mixtures),
    "decode steps shared with the GPU": (Engine, {"columns": 12}, shared),
    "shortages": (Engine, {"columns": 12}, shortages),
    "a shortage in an attention": (Engine, {}, no_attention),
    "two ranks of a group": (GroupEngine, {"share": 0.75}, of_group),
}
"""Engine, its arguments, and the script of its steps."""


def lines_of(name: str, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of one script's steps."""
    kind, given, script = SCRIPTS[name]
    # Few pieces, whose names are read easily.
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 256 << 10)
    monkeypatch.setattr(prefill_memory, "KV_SPAN_BYTES", 64 << 10)
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: TURNS_FROM)
    # Memory of a GPU begins at a multiple of this; that of the pretended one at one of 64, so that
    # by chance one piece more or less would stay.
    monkeypatch.setattr(resident_pieces, "SLOT_ALIGNMENT", 64)
    common = {"layers": LAYERS, "blocks": 160, "least": FROM_TOKENS, "unwritten": 0.0}
    engine = kind(monkeypatch, **(common | given))
    trace = StepTrace()
    told = [f"# {name}"]
    with followed(trace):
        script(Script(engine, trace, told))
    return told


def lines() -> Iterator[str]:
    """Lines of all scripts."""
    torch.set_num_threads(1)
    for name in SCRIPTS:
        with pytest.MonkeyPatch.context() as monkeypatch:
            yield from [*lines_of(name, monkeypatch), ""]


if __name__ == "__main__":
    TRACES.write_text("\n".join(lines()), encoding="utf-8")

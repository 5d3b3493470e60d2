"""Inputs that follow coverage, for what reads other programs' bytes: tests/fuzz/fuzz.py TARGET.

    pip install 'atheris>=3'
    python tests/fuzz/fuzz.py headers -max_total_time=60    # headers of safetensors files
    python tests/fuzz/fuzz.py offers -max_total_time=60     # what expert ranks offer to a stage
    python tests/fuzz/fuzz.py meetings -max_total_time=60   # what a stage tells its expert ranks
    python tests/fuzz/fuzz.py groups -max_total_time=60     # what ranks of a group tell each other
    python tests/fuzz/fuzz.py weights -max_total_time=60    # what they tell of their weights
    python tests/fuzz/fuzz.py handovers -max_total_time=60  # words and tokens for an expert rank

Only errors of this project may come of an input; anything else ends the run and leaves the input in
`crash-…`.  Inputs begin with those of `seeds/TARGET/`; options are libFuzzer's.  `handovers` is
native code, of which coverage sees nothing: run it with the modules of `make sanitize`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import atheris
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
READERS = ["placement", "ray_hetero.distributed", "ray_hetero.kernels", "ray_hetero.runtime"]
with atheris.instrument_imports(include=READERS):
    from handover_words import ExpertRank

    from placement.errors import PlacementError
    from placement.model.reading import shape_from_safetensors
    from ray_hetero.distributed import expert_meeting, expert_memory, expert_offers
    from ray_hetero.distributed.expert_meeting import Reached
    from ray_hetero.distributed.expert_service import ExpertService, HeldLayer
    from ray_hetero.errors import RayHeteroError
    from ray_hetero.offload.group import joining
    from ray_hetero.offload.group.prompt_group import PromptGroup
    from ray_hetero.runtime import sealed_memory

SEEDS = Path(__file__).with_name("seeds")
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 8, "vocab_size": 100,
}  # fmt: skip
LIMIT_S = 0.2
PAGE = 4096
MOST_MEMORY = 1 << 24


def headers() -> Callable[[bytes], None]:
    """Sizes of a checkpoint whose one file has these bytes, with room for tensors behind them."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))

    def read(content: bytes) -> None:
        with (folder / "model.safetensors").open("wb") as file:
            file.write(content)
            file.truncate(len(content) + 256)
        shape_from_safetensors(folder)

    return read


@contextmanager
def memory_of(content: bytes, begin: int = 0) -> Iterator[int]:
    """Sealed memory that ends with these bytes."""
    descriptor = sealed_memory.made("fuzz", begin + len(content), can_grow=True)
    try:
        os.pwrite(descriptor, content, begin)
        sealed_memory.seal(descriptor)
        yield descriptor
    finally:
        os.close(descriptor)


@contextmanager
def told_by_a_peer(*messages: tuple[bytes, list[int]]) -> Iterator[socket.socket]:
    """Our end of a connection whose other one has sent these messages and has ended."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours:
        with theirs:
            theirs.setblocking(False)
            # The queue of messages may be full.
            with contextlib.suppress(BlockingIOError):
                for message, descriptors in messages:
                    socket.send_fds(theirs, [message or b" "], descriptors)
        yield ours


def parts_of(content: bytes) -> tuple[bytes, bytes]:
    """Messages, and behind a line of two hyphens what is in memory."""
    messages, _, memory = content.partition(b"\n--\n")
    return messages, memory


def offers() -> Callable[[bytes], None]:
    """The messages of an expert rank, one a line, with a descriptor of memory each."""

    def read(content: bytes) -> None:
        messages, memory = parts_of(content)
        with memory_of(memory, PAGE) as descriptor:
            lines = [(line, [descriptor]) for line in messages.split(b"\n")[:20]]
            with told_by_a_peer(*lines) as ours:
                expert_offers.taken([ours], ["expert rank 0"], LIMIT_S)

    return read


def meetings() -> Callable[[bytes], None]:
    """What the rank of a stage tells of its layers and of memory, and what is served of it."""
    layers = {name: HeldLayer(8, torch.float32, torch.add, chosen=2) for name in ("a", "b")}

    def read(content: bytes) -> None:
        with expert_meeting.naming("the rank of a stage", LIMIT_S):
            agreed, geometry = expert_meeting._agreed(content, 0)
            nbytes = geometry.nbytes if geometry.nbytes < MOST_MEMORY else PAGE
            with memory_of(b"", nbytes) as descriptor:
                memory = expert_memory.HandoverMemory(descriptor, geometry)
        with told_by_a_peer() as ours:
            ExpertService(layers, 0).add(Reached(memory, agreed, ours))

    return read


def groups() -> Callable[[bytes], None]:
    """A message of a rank that computes prompts with others: a step, its end, or its caches."""
    own = [torch.zeros(4, 2, 16, 32, dtype=torch.bfloat16)] * 2

    def group_of(connection: socket.socket, *, is_first: bool) -> PromptGroup:
        connections = [None, connection] if is_first else [connection, None]
        sums: Any = SimpleNamespace(
            is_first=is_first, size=2, ranks=(6, 7), connections=connections, limit_s=LIMIT_S
        )
        return PromptGroup(sums, own[0])

    def read(content: bytes) -> None:
        kind, message = content[:1], content[1:]
        with (
            memory_of(b"", 16 * PAGE) as memory,
            told_by_a_peer((message, [memory])) as ours,
            contextlib.suppress(dist.DistError, torch.OutOfMemoryError),
        ):
            if kind == b"c":
                group_of(ours, is_first=True)._taken(1, own)
            elif kind == b"b":
                group_of(ours, is_first=True).begin((1, 2, 3, 4))
            else:
                group_of(ours, is_first=False).wait()

    return read


def weights() -> Callable[[bytes], None]:
    """What a rank of a group says of the weights that the first one's GPU reads."""
    sums: Any = SimpleNamespace(ranks=(6, 7), limit_s=LIMIT_S)

    def read(content: bytes) -> None:
        message, description = parts_of(content)
        with memory_of(description) as told, memory_of(b"", 4 * PAGE) as pages:
            messages = [(message, [told]), *[(b"\0", [pages])] * 3]
            with told_by_a_peer(*messages) as ours:
                try:
                    with joining.naming(sums):
                        joining._weights(ours, LIMIT_S)
                except RuntimeError as error:
                    # The name of who has sent it; anything else comes from elsewhere.
                    if not str(error).startswith(("one of the ranks", "shared memory is not")):
                        raise

    return read


def handovers() -> Callable[[bytes], None]:
    """Words, experts and tokens that the rank of a stage writes, served natively and in Python."""
    return ExpertRank().serve


TARGETS = (headers, offers, meetings, groups, weights, handovers)


def main() -> None:
    """Fuzz one target."""
    logging.disable(logging.WARNING)
    targets = {made.__name__: made for made in TARGETS}
    if len(sys.argv) < 2 or sys.argv[1] not in targets:
        sys.exit(f"expected one of {', '.join(targets)}, then options of libFuzzer")
    name = sys.argv.pop(1)
    read = targets[name]()

    def one(content: bytes) -> None:
        # What is said to a user, in one line.
        with contextlib.suppress(PlacementError, RayHeteroError):
            read(content)

    # New inputs that reach more go into the first folder.
    found = tempfile.mkdtemp(prefix=f"fuzz-{name}-")
    atheris.Setup([*sys.argv, found, str(SEEDS / name)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main()

"""Inputs that follow coverage, for what reads other programs' bytes: tests/fuzz/fuzz.py TARGET.

    pip install 'atheris>=3'
    python tests/fuzz/fuzz.py headers -max_total_time=60    # headers of safetensors files
    python tests/fuzz/fuzz.py offers -max_total_time=60     # what expert ranks offer to a stage
    python tests/fuzz/fuzz.py meetings -max_total_time=60   # what a stage tells its expert ranks

Only errors of this project may come of an input; anything else ends the run and leaves the input in
`crash-…`.  Inputs begin with those of `seeds/TARGET/`; options are libFuzzer's.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["placement", "ray_hetero.distributed"]):
    from placement.errors import PlacementError
    from placement.model.reading import shape_from_safetensors
    from ray_hetero.distributed import expert_meeting, expert_offers
    from ray_hetero.errors import RayHeteroError

SEEDS = Path(__file__).with_name("seeds")
CONFIG = {
    "model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128,
    "num_attention_heads": 8, "vocab_size": 100,
}  # fmt: skip
LIMIT_S = 0.2


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


def offers() -> Callable[[bytes], None]:
    """The messages of an expert rank, one a line, with a descriptor of memory each."""

    def read(content: bytes) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        memory = os.memfd_create("fuzz")
        os.truncate(memory, 4096)
        with ours, theirs:
            theirs.setblocking(False)
            # The queue of messages may be full.
            with contextlib.suppress(BlockingIOError):
                for line in content.split(b"\n")[:20]:
                    socket.send_fds(theirs, [line or b" "], [memory])
            theirs.close()
            os.close(memory)
            expert_offers.taken([ours], ["expert rank 0"], LIMIT_S)

    return read


def meetings() -> Callable[[bytes], None]:
    """What the rank of a stage tells of its layers and of memory."""

    def read(content: bytes) -> None:
        with expert_meeting.naming("the rank of a stage", LIMIT_S):
            expert_meeting._agreed(content)

    return read


def main() -> None:
    """Fuzz one target."""
    targets = {made.__name__: made for made in (headers, offers, meetings)}
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

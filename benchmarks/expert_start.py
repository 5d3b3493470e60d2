"""Start of an expert rank: of its process, and how its experts come from the disk into memory.

    python benchmarks/expert_start.py MODEL [--by files vllm] [--rounds 3]
    python benchmarks/expert_start.py --made mxfp4 fp8 bf16 [--folder FOLDER] [--rounds 3]

The first prints the time from the start of the process until its experts are in memory, by who
loads them.  No Ray and no stage are needed: the process makes the actor's object and loads, which
is all of its start but for the meeting with the stages.  Seconds are those of the clock, and of
processors.

The second makes checkpoints of some gigabytes, which stay, and compares loading one with reading
the same files once, by several threads: into buffers that are used again, and into new memory, of
which a host may have little at hand.  Files come from the disk, for which the page cache is emptied
before, or from the page cache.  Loading includes making the memory, and bringing weights into the
order of the kernels.  "keeping" writes them in that order too (experts.keep_packed), "kept" reads
these files in place of the checkpoint's.
"""

from __future__ import annotations

import argparse
import mmap
import os
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

CHILD = "--child"
READERS, READ_AT_ONCE = 8, 8 << 20
"""Threads, and bytes, of plain reading."""
DROP = Path("/proc/sys/vm/drop_caches")


def rank_spec(model: Path, by: str, keep: str) -> Any:
    """The one expert rank beside a pretended stage, with the source of its experts."""
    import json

    from placement.cluster.assignment import Seat
    from placement.cluster.layout import Layout
    from placement.model.config import decoder_section
    from placement.model.expert_tensors import ExpertTensors
    from ray_hetero.config import HeteroConfig
    from ray_hetero.world import EngineSpec, ExpertSource, RankSpec, SharedSettings, World

    config = json.loads((model / "config.json").read_text())
    text = dict(decoder_section(config))
    text["quantization_config"] = config.get("quantization_config")
    tensors = ExpertTensors.of(config["architectures"][0], text)
    layers = int(text["num_hidden_layers"])
    seat = Seat(
        1, 1, 0, "cpu", local_rank=0, serves_experts=True, node_id="n", address="a",
        node_name="n", is_driver_node=True,
    )  # fmt: skip
    experts = {"ranks": 1, "prefill_on_gpu": True} | ({"keep_packed": keep} if keep else {})
    keys = {"cpu": {"linear_kernel": "streaming"}, "experts": experts}
    world = World(Layout((("gpu",),)), (), (layers,), (seat,), layers)
    return RankSpec(
        world, seat, EngineSpec(cast(Any, None), HeteroConfig.model_validate(keys), None),
        SharedSettings("e", "bfloat16", 128, 16, 0, 32, 8, False, False, False, (), ()), (), (),
        source=None if by == "vllm" or tensors is None
        else ExpertSource(str(model), tensors, layers),
    )  # fmt: skip


def child(model: Path, by: str, keep: str) -> None:
    """Load as the actor's process does."""
    from ray_hetero.worker.expert_actor import ExpertActor
    from ray_hetero.worker.expert_rows import Share

    args = b""
    if by == "vllm":
        from vllm.engine.arg_utils import EngineArgs

        args = pickle.dumps(EngineArgs(model=str(model), skip_tokenizer_init=True))
    actor = ExpertActor(rank_spec(model, by, keep), {}, args)
    actor.prepare()
    began, before = time.monotonic(), sum(os.times()[:2])
    held = actor._loaded(Share(0, 1))
    took, used = time.monotonic() - began, sum(os.times()[:2])
    modules = sum(name.partition(".")[0] in ("vllm", "transformers") for name in sys.modules)
    print(f"LOADED {len(held)} {used:.2f} {modules} {took:.2f} {used - before:.2f}", flush=True)


def loaded(model: Path, by: str, keep: str = "") -> tuple[float, float, int, float, float]:
    """Start a process that loads.

    Returns:
        Seconds of the clock, and of processors; modules of vLLM and Transformers; and both kinds of
        seconds for loading alone.

    """
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__, str(model), CHILD, "--by", by, "--keep", keep],
        env=environment, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("LOADED "):
                _, _, used, modules, *loading = line.split()
                took, processors = map(float, loading)
                return time.monotonic() - began, float(used), int(modules), took, processors
    raise SystemExit(f"the process ended with {process.returncode}")


def plainly_read(files: list[Path], *, keeps: bool = False) -> float:
    """Seconds of reading files once.

    Args:
        files: of a checkpoint.
        keeps: whether all of it is in new memory in the end.

    """
    places: list[tuple[int, int, int, int]] = []
    descriptors = [os.open(path, os.O_RDONLY) for path in files]
    total = 0
    for descriptor in descriptors:
        size = os.fstat(descriptor).st_size
        for at in range(0, size, READ_AT_ONCE):
            length = min(READ_AT_ONCE, size - at)
            places.append((descriptor, at, total, length))
            total += length
    began = time.monotonic()
    memory = mmap.mmap(-1, total if keeps else READERS * READ_AT_ONCE)
    memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)

    def read(reader: int) -> None:
        for descriptor, at, begin, length in places[reader::READERS]:
            to = begin if keeps else reader * READ_AT_ONCE
            os.preadv(descriptor, [view[to : to + length]], at)

    with ThreadPoolExecutor(READERS) as pool:
        list(pool.map(read, range(READERS)))
    took = time.monotonic() - began
    for one in descriptors:
        os.close(one)
    return took


def forget(files: list[Path]) -> None:
    """Empty the page cache of these files; of all, where that is permitted."""
    os.sync()
    try:
        DROP.write_text("1")
    except OSError:
        for path in files:
            descriptor = os.open(path, os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def row(how: str, model: Path, files: list[Path], keep: str = "") -> str:
    """Row of a table: floors and loading, from the disk or the page cache."""

    def prepare() -> None:
        if how.endswith("disk"):
            forget(files)
        else:
            plainly_read(files)

    prepare()
    floor = plainly_read(files)
    prepare()
    kept = plainly_read(files, keeps=True)
    prepare()
    *_, took, used = loaded(model, "files", keep)
    gib = sum(path.stat().st_size for path in files) / (1 << 30)
    return (
        f"| {model.name} | {how} | {gib:.2f} | {floor:.2f} | {kept:.2f} | {took:.2f} "
        f"| {took / floor:.2f} | {took / kept:.2f} | {used:.2f} |"
    )


def compared(names: list[str], folder: Path, keep: str, rounds: int) -> Iterator[str]:
    """Rows of a table: each form of checkpoint from the disk and from the page cache."""
    from expert_checkpoint import FORMS, write_checkpoint

    yield (
        "| experts | read from | files, GiB | floor, s | into new memory, s | loading, s "
        "| times the floor | times new memory | of processors, s |"
    )
    yield f"|{' --- |' * 9}"
    for name in names:
        model = write_checkpoint(folder / name, FORMS[name])
        files = sorted(model.glob("*.safetensors"))
        for how in ("disk", "page cache"):
            for _ in range(rounds):
                yield row(how, model, files)
        if keep:
            yield row("keeping, page cache", model, files, keep)
            kept = sorted(Path(keep).rglob("*.packed"))
            for how in ("kept, disk", "kept, page cache"):
                for _ in range(rounds):
                    yield row(how, model, kept, keep)
            for path in kept:
                path.unlink()


def main() -> None:
    """Print a row for each round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--by", nargs="+", default=["vllm", "files"], choices=["vllm", "files"])
    parser.add_argument("--made", nargs="*", default=[], help="mxfp4, fp8 or bf16")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/expert-start"))  # noqa: S108
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", default="", help="folder, see experts.keep_packed")
    parser.add_argument(CHILD, action="store_true")
    given = parser.parse_args()
    if given.child:
        child(given.model, given.by[0], given.keep)
        return
    if given.made:
        for line in compared(given.made, given.folder, given.keep, given.rounds):
            print(line, flush=True)
    if given.model is None:
        return
    print("| by | seconds | of processors | modules of vLLM and Transformers |")
    print("| --- | --- | --- | --- |")
    for _ in range(given.rounds):
        for by in given.by:
            took, used, modules, *_ = loaded(given.model, by)
            print(f"| {by} | {took:.1f} | {used:.1f} | {modules} |", flush=True)


if __name__ == "__main__":
    main()

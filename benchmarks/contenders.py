"""Contenders: commands that serve one model with the same layers outside the GPU.

Every vLLM contender compiles and captures CUDA graphs unless its name says eager: both ways of
streaming weights can (a weight in host memory is an ordinary address for a kernel, and the
prefetching copies are captured with the graph).
"""

from __future__ import annotations

import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from engine_run import Point
from shapes import QUANTISED, SHAPES, layer_bytes

HERE = Path(__file__).parent
ENGINE = (sys.executable, str(HERE / "engine_run.py"))
ACCELERATE = (sys.executable, str(HERE / "accelerate_run.py"))
LLAMA_CPP = (sys.executable, str(HERE / "llama_cpp.py"))
GIB = 1 << 30


@dataclass(frozen=True)
class Contender:
    """One way to serve, as a command to which shape and points are added."""

    name: str
    command: tuple[str, ...]
    reads: str
    """Memory from which a step reads the layers outside the GPU, a key of `floor.Bandwidths`."""
    environment: Mapping[str, str] = field(default_factory=dict)
    points: str | None = None
    """Points of its own, where not all of the run's."""


@dataclass(frozen=True)
class Split:
    """How a shape is cut for all contenders of a run."""

    shape: str
    outside: int
    """Layers held outside the GPU."""

    @property
    def layers(self) -> int:
        """All layers."""
        return SHAPES[self.shape]["num_hidden_layers"]

    @property
    def outside_bytes(self) -> int:
        """Weights of the layers outside."""
        return self.outside * layer_bytes(SHAPES[self.shape])

    @property
    def group(self) -> tuple[int, int]:
        """The smallest group of layers, and how many of it are outside, that give this split."""
        common = math.gcd(self.layers, self.outside)
        return self.layers // common, self.outside // common


def with_gpu(
    split: Split, *, share: float | None, engine: Mapping[str, Any], prefetch_step: int
) -> list[Contender]:
    """Contenders on a host with a GPU, in the order they are worth their time.

    Args:
        split: layers outside the GPU.
        share: of the GPU's memory, for a run with a limit; None is vLLM's default.
        engine: more arguments of LLM(), for all of vLLM's contenders.
        prefetch_step: layers that the prefetching backend copies ahead; each takes a buffer.

    """
    inside = split.layers - split.outside
    config: dict[str, Any] = {} if share is None else {"gpu": {"memory_utilization": share}}
    stock = dict(engine) | ({} if share is None else {"gpu_memory_utilization": share})
    uva = {"offload_backend": "uva", "cpu_offload_gb": split.outside_bytes / GIB}
    size, outside = split.group
    prefetch = {
        "offload_backend": "prefetch",
        "offload_group_size": size,
        "offload_num_in_group": outside,
        "offload_prefetch_step": prefetch_step,
    }
    ours = {"engine": engine, "reads": "socket"}
    return [
        hetero("ray_hetero cpu-gpu", ["cpu"], ["gpu"], config=config | {
            "layers": [split.outside, inside]}, **ours),
        stock_engine("vllm uva", stock | uva, "link"),
        stock_engine("vllm prefetch", stock | prefetch, "link"),
        hetero("ray_hetero gpu-cpu", ["gpu"], ["cpu"], config=config | {
            "layers": [inside, split.outside]}, **ours),
        hetero("ray_hetero 2cpu-gpu", ["cpu", "cpu"], ["gpu"], config=config | {
            "layers": [split.outside, inside], "cpu": {"ranks_per_socket": 2}}, **ours),
        hetero("ray_hetero cpu-gpu unshared", ["cpu"], ["gpu"], config=config | {
            "layers": [split.outside, inside], "cpu": {"decode_gpu_share": 0}}, **ours),
        hetero("ray_hetero cpu-gpu synchronous", ["cpu"], ["gpu"], config=config | {
            "layers": [split.outside, inside]},
            engine={**engine, "async_scheduling": False}, reads="socket"),
        *of_experts(split, config, ours),
        stock_engine("all on gpu", dict(engine), "gpu"),
        Contender("accelerate", (*ACCELERATE, "--outside", str(split.outside)), "link"),
        stock_engine("vllm uva eager", stock | uva, "link", "--eager"),
        stock_engine("vllm prefetch eager", stock | prefetch, "link", "--eager"),
    ]  # fmt: skip


def of_experts(split: Split, config: Mapping[str, Any], ours: Mapping[str, Any]) -> list[Contender]:
    """Routed experts of the layers outside on the socket, the rest of all layers on the GPU."""
    if "num_experts" not in SHAPES[split.shape]:
        return []
    experts = {"ranks": 1, "layers": split.outside}
    return [hetero("ray_hetero experts", ["gpu"], config={**config, "experts": experts}, **ours)]


@dataclass(frozen=True)
class LlamaCpp:
    """Programs of llama.cpp, and the model that they are to run."""

    bench: Path
    """`llama-bench`."""
    gguf: Path | None
    """The model's file; None is the checkpoint of the run's shape."""
    threads: int
    cpu_experts: int | None = None
    """`--n-cpu-moe`; None is as many layers as are outside the GPU."""

    def contender(self, split: Split, *, has_gpu: bool) -> Contender:
        """The same split: whole layers outside, or of a mixture the experts of as many layers."""
        outside = split.outside if self.cpu_experts is None else self.cpu_experts
        if not has_gpu:
            places: tuple[str, ...] = ("--n-gpu-layers", "0")
        elif "num_experts" in SHAPES[split.shape]:
            places = ("--n-cpu-moe", str(outside))
        else:
            # The output matrix counts as a layer, the last one.
            places = ("--n-gpu-layers", str(split.layers - split.outside + 1))
        model = () if self.gguf is None else ("--gguf", str(self.gguf))
        command = (
            *LLAMA_CPP, "--llama-bench", str(self.bench), *model, *places,
            "--threads", str(self.threads),
        )  # fmt: skip
        return Contender("llama.cpp", command, "socket" if has_gpu else "together")


STORED = tuple(f" {stored}" for stored in ("bf16", *QUANTISED))
"""Ends of the names of contenders that say how weights are stored."""
FEW = "1x128,8x128"


def formats(
    split: Split, *, share: float | None, engine: Mapping[str, Any], prefetch_step: int
) -> list[Contender]:
    """The same split with weights in bf16, FP8 and four bits, each beside prefetching."""
    found = []
    for stored in (None, *QUANTISED):
        of = with_gpu(split, share=share, engine=engine, prefetch_step=prefetch_step)
        for one in of:
            if one.name in ("ray_hetero cpu-gpu", "vllm prefetch"):
                more = ("--stored", stored) if stored else ()
                name = f"{one.name} {stored or 'bf16'}"
                command = (*one.command, *more)
                found.append(replace(one, name=name, command=command, points=FEW))
    return found


def in_flight(
    split: Split, points: Sequence[Point], *, sockets: int | None, step_tokens: int | None = None
) -> list[Contender]:
    """The same split with two batches in the pipeline, one a stage, and with one.

    Args:
        split: layers of the CPU stage; the GPU stage, behind it, holds the rest.
        points: requests in flight; half of them are measured as one batch too.
        sockets: of a host without a GPU, where two CPU ranks hold half of the layers each.
        step_tokens: most tokens of a step; None is an eighth of the largest point's prompts, so
            that there are some to work on at the same time.

    """
    engine: dict[str, Any] = {"max_num_batched_tokens": step_tokens or _eighth_of_prompts(points)}
    halves = [replace(point, batch=point.batch // 2) for point in points]
    if sockets is None:
        kinds, layers, cpu = ("cpu", "gpu"), [split.outside, split.layers - split.outside], {}
        sizes = sorted({point.batch for point in [*halves, *points]})
        engine["compilation_config"] = {"cudagraph_capture_sizes": sizes}
    else:
        kinds, layers = ("cpu", "cpu"), [split.layers // 2, split.layers - split.layers // 2]
        cpu = {"ranks_per_socket": ranks_per_socket(sockets)}

    def with_batches(number: int, points: Sequence[Point]) -> Contender:
        return hetero(
            f"{number} in flight",
            *([kind] for kind in kinds),
            engine=engine,
            config={"cpu": cpu, "layers": layers, "pipeline": {"batches_in_flight": number}},
            reads="socket" if sockets is None else "in turn",
            points=",".join(map(str, points)),
        )

    return [with_batches(2, points), with_batches(1, [*halves, *points])]


DRAFTS = (1, 3, 7)
NGRAM = {
    "method": "ngram", "num_speculative_tokens": 7, "prompt_lookup_min": 1, "prompt_lookup_max": 4
}  # fmt: skip

DRAFT_MODEL: dict[str, Any] = {
    "method": "draft_model", "model": "1b-16", "num_speculative_tokens": 3
}  # fmt: skip
"""Drafts of a shape with the vocabulary of the 8B one."""


def drafting(split: Split, *, sockets: int | None, share: float | None = None) -> list[Contender]:
    """The same split with drafts of several numbers, with drafts from n-grams and of a model.

    An engine each.  Drafts of the first are accepted with a forced chance, those from n-grams and
    of a model where they are right: with --heavy-tailed, whose greedy text repeats itself, and is
    that of the drafting model.

    Args:
        split: layers of the CPU stage; the GPU stage, behind it, holds the rest.
        sockets: of a host without a GPU, where two CPU ranks hold half of the layers each.
        share: of the GPU's memory, for a run with a limit; None is vLLM's default.

    """
    if sockets is None:
        kinds, layers, cpu = ("cpu", "gpu"), [split.outside, split.layers - split.outside], {}
    else:
        kinds, layers = ("cpu", "cpu"), [split.layers // 2, split.layers - split.layers // 2]
        cpu = {"ranks_per_socket": ranks_per_socket(sockets)}

    # Each engine would measure for itself how many layers the GPU helps with.
    cpu |= {"decode_gpu_share": 0}
    gpu = {} if share is None else {"gpu": {"memory_utilization": share}}
    words = [SHAPES[name]["vocab_size"] for name in (split.shape, DRAFT_MODEL["model"])]
    has_drafter = words[0] == words[1]

    def one(name: str, *more: str, **engine: Any) -> Contender:
        made = hetero(
            name,
            *([kind] for kind in kinds),
            engine=engine,
            config=gpu | {"cpu": cpu, "layers": layers, "pipeline": {"batches_in_flight": 1}},
            reads="socket" if sockets is None else "in turn",
        )
        return replace(made, command=(*made.command, *more))

    return [
        one("no drafts"),
        # vLLM captures whole CUDA graphs for an engine's largest number of drafts only.
        *(one(f"forced {count}", "--drafts", str(count), "--accepted", "0.7") for count in DRAFTS),
        one("n-grams", speculative_config=NGRAM),
        *([one("draft model", speculative_config=DRAFT_MODEL)] if has_drafter else []),
    ]


def _eighth_of_prompts(points: Sequence[Point]) -> int:
    most = max(points, key=lambda point: point.batch * point.prompt)
    return max(most.prompt, min(most.batch * most.prompt // 8, 8192))


def ranks_per_socket(sockets: int) -> int:
    """CPU ranks a socket, where there is to be room for two of them."""
    return -(-2 // sockets)


def cpu_ranks(number: int, sockets: int) -> list[Contender]:
    """CPU ranks in tensor parallel beside vLLM's own `mp`, both with vLLM's kernels.

    One rank leaves cores for the driver on one socket.
    """
    shares = ranks_per_socket(sockets)
    config = {"cpu": {"ranks_per_socket": shares, "linear_kernel": "vllm"}}
    return [
        hetero("ray_hetero", ["cpu"] * number, config=config, engine={}, reads="socket"),
        mp("mp", {"tensor_parallel_size": number}, "socket", shares),
    ]


def model_runners(
    layout: Sequence[Sequence[str]], sockets: int, kernel: str | None
) -> list[Contender]:
    """CPU ranks with vLLM's model runners V1 and V2, one step after another.

    Args:
        layout: of CPU ranks.
        sockets: of the host.
        kernel: `cpu.linear_kernel`; None is its default.

    """
    shares = -(-sum(map(len, layout)) // sockets)
    cpu = {"ranks_per_socket": shares} | ({} if kernel is None else {"linear_kernel": kernel})
    return [
        replace(
            hetero(
                runner,
                *layout,
                config={"cpu": {**cpu, "model_runner": runner}},
                engine={"async_scheduling": False},
                reads="socket",
            ),
            # Engines that take turns share their sockets; claims are there to prevent that.
            environment={"RAY_HETERO_CLAIM_DIR": tempfile.mkdtemp(prefix=f"ray_hetero-{runner}-")},
        )
        for runner in ("v2", "v1")
    ]


def of_checkout(contender: Contender, checkout: Path) -> Contender:
    """The same contender with the code of another checkout of this project.

    Args:
        contender: an engine of this project.
        checkout: its root, with the native modules built in their places
            (`python setup.py build_ext --inplace`).

    """
    here = str(Path(__file__).parent)
    command = tuple(part.replace(here, str(checkout / "benchmarks")) for part in contender.command)
    # Engines that take turns share their sockets; claims are there to prevent that.
    claims = str(Path(tempfile.gettempdir()) / f"ray_hetero-before-{os.getuid()}")
    path = os.pathsep.join(filter(None, (str(checkout), os.environ.get("PYTHONPATH"))))
    return replace(
        contender,
        name="before",
        # Ray's workers import from the folder that their driver was started in.
        command=("env", "-C", str(checkout), *command),
        environment={**contender.environment, "PYTHONPATH": path, "RAY_HETERO_CLAIM_DIR": claims},
    )


def cpu_only(sockets: int) -> list[Contender]:
    """Contenders on a host without a GPU: two CPU ranks, beside vLLM's own `mp`."""
    shares = ranks_per_socket(sockets)
    config = {"cpu": {"ranks_per_socket": shares}}
    return [
        hetero("ray_hetero tp2", ["cpu", "cpu"], config=config, engine={}, reads="together"),
        mp("mp tp2", {"tensor_parallel_size": 2}, "together", shares),
        hetero("ray_hetero pp2", ["cpu"], ["cpu"], config=config, engine={}, reads="in turn"),
        mp("mp pp2", {"pipeline_parallel_size": 2}, "in turn", shares),
    ]


def cpu_formats(cpus: Sequence[int]) -> list[Contender]:
    """One CPU rank on a host without a GPU, beside vLLM's own, with weights in each format.

    Args:
        cpus: logical CPUs that both compute on.

    """
    here = ",".join(map(str, cpus))
    config = {"cpu": {"reserved_cores": 0, "kv_cache_gib": 1}}
    environment = {"VLLM_CPU_OMP_THREADS_BIND": here, "VLLM_CPU_KVCACHE_SPACE": "1"}
    found = []
    for stored in (None, *QUANTISED):
        pair = (
            hetero("ray_hetero", ["cpu"], config=config, engine={}, reads="socket"),
            stock_engine("vllm", {}, "socket", "--backend", "mp", environment=environment),
        )
        more = ("--stored", stored) if stored else ()
        found += [
            replace(one, name=f"{one.name} {stored or 'bf16'}", command=(*one.command, *more))
            for one in pair
        ]
    return found


def mp(name: str, sizes: Mapping[str, int], reads: str, shares: int) -> Contender:
    """vLLM's own CPU ranks, in groups of these sizes, so many of them a socket."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "2"}
    if math.prod(sizes.values()) == 1:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0"
    elif shares > 1:
        # Stock vLLM takes one NUMA node for one rank unless it is told to pretend.
        environment["VLLM_CPU_SIM_MULTI_NUMA"] = "1"
    engine = {**sizes, "distributed_executor_backend": "mp"}
    return stock_engine(name, engine, reads, "--backend", "mp", environment=environment)


def hetero(
    name: str,
    *layout: Sequence[str],
    config: Mapping[str, Any],
    engine: Mapping[str, Any],
    reads: str,
    points: str | None = None,
) -> Contender:
    """An engine of this project."""
    command = (*ENGINE, "--layout", json.dumps(layout), "--config", json.dumps(config))
    return Contender(name, (*command, "--engine", json.dumps(engine)), reads, points=points)


def stock_engine(
    name: str,
    engine: Mapping[str, Any],
    reads: str,
    *more: str,
    environment: Mapping[str, str] | None = None,
) -> Contender:
    """An engine of vLLM's own."""
    backend = () if "--backend" in more else ("--backend", "uni")
    command = (*ENGINE, *backend, *more, "--engine", json.dumps(engine))
    return Contender(name, command, reads, environment or {})

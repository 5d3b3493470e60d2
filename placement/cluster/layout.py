"""Kind of device of each rank of the world: stages, each with its tensor-parallel ranks.

Ranks are numbered stage by stage.  Where all stages have one size this is the order of vLLM
(`initialize_model_parallel`): rank = stage · TP + tp.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from placement.errors import LayoutError
from placement.words import plural

Kind = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Layout:
    """Kinds of all ranks, stage by stage; stages may differ in size."""

    stages: tuple[tuple[Kind, ...], ...]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return tuple(map(len, self.stages))

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks of the largest stage, which is what --tensor-parallel-size says."""
        return max(self.sizes)

    @property
    def is_even(self) -> bool:
        """Whether all stages have the same number of ranks."""
        return len(set(self.sizes)) == 1

    @property
    def is_stock(self) -> bool:
        """Whether vLLM itself can run such ranks: GPUs only, in stages of one size."""
        return self.is_even and "cpu" not in self.kinds

    @property
    def world_size(self) -> int:
        """Ranks of all stages."""
        return sum(self.sizes)

    def first_rank(self, stage: int) -> int:
        """The rank that is tensor-parallel rank 0 of that stage."""
        return sum(self.sizes[:stage])

    def ranks(self, stage: int) -> range:
        """The ranks of that stage, in tensor-parallel order."""
        first = self.first_rank(stage)
        return range(first, first + self.sizes[stage])

    def sender(self, stage: int, tensor_rank: int) -> int:
        """The rank of the stage before from which a rank receives: every rank of a stage holds the
        whole hidden state.
        """
        before = self.ranks(stage - 1)
        return before[tensor_rank % len(before)]

    def receivers(self, stage: int, tensor_rank: int) -> tuple[int, ...]:
        """The ranks of the next stage that receive from a rank: none where others suffice."""
        if stage + 1 == len(self.stages):
            return ()
        return tuple(self.ranks(stage + 1)[tensor_rank :: self.sizes[stage]])

    def sends_alone(self, stage: int) -> bool:
        """Whether one rank of a stage, the first, sends for all of them to the next stage."""
        if stage + 1 >= len(self.stages):
            return False
        others = range(1, len(self.stages[stage]))
        return not any(self.receivers(stage, rank) for rank in others)

    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """The pipeline that each tensor-parallel rank of the largest stage is in: one rank a stage.

        A rank of a smaller stage is in several.
        """
        return tuple(
            tuple(self.ranks(stage)[lane % size] for stage, size in enumerate(self.sizes))
            for lane in range(self.tensor_parallel_size)
        )

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """Kind of each rank, by rank."""
        return tuple(kind for stage in self.stages for kind in stage)

    def count(self, kind: Kind) -> int:
        """How many ranks are of that kind."""
        return self.kinds.count(kind)

    def is_mixed(self, stage: int) -> bool:
        """Whether that stage's tensor-parallel group has both kinds in it."""
        return len(set(self.stages[stage])) > 1

    @property
    def words(self) -> str:
        """The stages for people, like "2 sockets → GPU"; a mixed stage is "GPU + socket"."""
        return " → ".join(map(_stage_words, self.stages))

    def __str__(self) -> str:
        return " → ".join("[" + ", ".join(stage) + "]" for stage in self.stages)


def _stage_words(stage: Sequence[Kind]) -> str:
    names: dict[Kind, str] = {"gpu": "GPU", "cpu": "socket"}
    counts = {name: stage.count(kind) for kind, name in names.items() if kind in stage}
    return " + ".join(name if count == 1 else f"{count} {name}s" for name, count in counts.items())


def auto_layout(
    pipeline_parallel_size: int, tensor_parallel_size: int, gpus: int, sockets: int
) -> Layout:
    """Give as many stages as possible to GPUs and the rest to sockets; no stage is mixed.

    CPU stages come first: the output matrix and the sampling then stay on a GPU, and a decode
    step reads the output matrix whole while it reads one row of the input embedding.

    Args:
        pipeline_parallel_size: stages.
        tensor_parallel_size: ranks in a stage.
        gpus: GPUs that are free for this engine.
        sockets: sockets that are free for this engine.

    Raises:
        LayoutError: there are too few devices.

    """
    size = tensor_parallel_size
    gpu_stages = min(pipeline_parallel_size, gpus // size)
    cpu_stages = pipeline_parallel_size - gpu_stages
    if cpu_stages > sockets // size:
        raise LayoutError(_too_few(pipeline_parallel_size, size, gpus, sockets))
    cpu: Kind = "cpu"
    gpu: Kind = "gpu"
    kinds = [cpu] * cpu_stages + [gpu] * gpu_stages
    return Layout(tuple((kind,) * size for kind in kinds))


def _too_few(stages: int, size: int, gpus: int, sockets: int) -> str:
    world = stages * size
    message = (
        f"{plural(stages, 'pipeline stage')} × {plural(size, 'tensor-parallel rank')} = "
        f"{plural(world, 'rank')}, each stage of "
        f"one kind, but there are {plural(gpus, 'GPU')} ({plural(gpus // size, 'stage')}) and "
        f"{plural(sockets, 'CPU socket')} "
        f"({plural(sockets // size, 'stage')})."
    )
    if gpus + sockets >= world:
        written = json.dumps({"ray_hetero": {"layout": _mixed_stages(stages, size, gpus)}})
        return (
            f"{message} Leave the sizes out, and stages are chosen, or name stages of both kinds: "
            f"--additional-config '{written}'"
        )
    on_sockets = (stages - gpus // size) * size
    shares = -(-on_sockets // sockets) if sockets else 0
    if shares:
        return (
            f"{message} Ask for at most {plural(gpus + sockets, 'rank')}, or split each "
            f"socket between "
            f'{shares} ranks: --additional-config \'{{"ray_hetero": {{"cpu": '
            f'{{"ranks_per_socket": {shares}}}}}}}\''
        )
    return f"{message} Ask for at most {plural(gpus, 'rank')}."


def _mixed_stages(stages: int, size: int, gpus: int) -> list[list[str]]:
    """Stages with as many GPUs as there are, the last stages first; sockets are the other ranks."""
    kinds = (["gpu"] * gpus + ["cpu"] * (stages * size))[: stages * size]
    return [kinds[first : first + size] for first in range(0, stages * size, size)][::-1]


def divides_heads(size: int, heads: int, kv_heads: int) -> bool:
    """Whether so many tensor-parallel ranks can share a model's heads.

    With more ranks than KV heads, several keep the same one.
    """
    return heads % size == 0 and (kv_heads % size == 0 or size % kv_heads == 0)


def heads_problem(layout: Layout, heads: int, kv_heads: int) -> str | None:
    """Why the ranks of a stage cannot share a model's heads, with the numbers that can."""
    for stage, size in enumerate(layout.sizes):
        if not divides_heads(size, heads, kv_heads):
            fitting = [str(n) for n in range(1, heads + 1) if divides_heads(n, heads, kv_heads)]
            return (
                f"stage {stage} of layout {layout} has {size} tensor-parallel ranks, but the model "
                f"has {heads} attention heads and {kv_heads} KV heads: {heads} / {size} = "
                f"{heads / size:g}, {kv_heads} / {size} = {kv_heads / size:g}. Numbers of ranks in "
                f"a stage that fit: {', '.join(fitting)}."
            )
    return None


def sizes_to_type(sizes: Sequence[int]) -> str:
    """Command-line options for a layout with stages of these sizes."""
    return (
        f"Leave both out, or type: --pipeline-parallel-size {len(sizes)} "
        f"--tensor-parallel-size {max(sizes)} (the ranks of the largest stage)."
    )


def given_layout(
    stages: Sequence[Sequence[Kind]],
    pipeline_parallel_size: int,
    tensor_parallel_size: int,
    gpus: int,
    sockets: int,
) -> Layout:
    """Check a layout that the user wrote against the sizes asked for and the devices there are.

    Raises:
        LayoutError: sizes do not match, or there are too few devices.

    """
    sizes = [len(stage) for stage in stages]
    if (len(sizes), max(sizes)) != (pipeline_parallel_size, tensor_parallel_size):
        raise LayoutError(
            f"layout has {plural(len(sizes), 'stage')} of {sizes} ranks, but vLLM was asked for "
            f"--pipeline-parallel-size {pipeline_parallel_size} --tensor-parallel-size "
            f"{tensor_parallel_size}. {sizes_to_type(sizes)}"
        )
    layout = Layout(tuple(tuple(stage) for stage in stages))
    for asked, there, noun in (
        (layout.count("gpu"), gpus, "GPU"),
        (layout.count("cpu"), sockets, "CPU socket"),
    ):
        if asked > there:
            raise LayoutError(
                f"layout {layout} asks for {plural(asked, noun)}, "
                f"but {there} {'is' if there == 1 else 'are'} free. "
                "`ray-hetero topology --cluster` shows what there is."
            )
    return layout

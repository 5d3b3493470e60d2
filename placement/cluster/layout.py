"""Which kind of device each rank of the world gets: stages × tensor-parallel ranks.

The order of ranks is vLLM's own (`initialize_model_parallel`): rank = stage · TP + tp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from placement.errors import LayoutError

Kind = Literal["cpu", "gpu"]


@dataclass(frozen=True)
class Layout:
    """Kinds of all ranks, stage by stage."""

    stages: tuple[tuple[Kind, ...], ...]

    @property
    def tensor_parallel_size(self) -> int:
        """Ranks in each stage."""
        return len(self.stages[0])

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

    def __str__(self) -> str:
        return " → ".join("[" + ", ".join(stage) + "]" for stage in self.stages)


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
        f"{stages} pipeline stages × {size} tensor-parallel ranks = {world} ranks, each stage of "
        f"one kind, but there are {gpus} GPUs ({gpus // size} stages) and {sockets} CPU sockets "
        f"({sockets // size} stages)."
    )
    if gpus + sockets >= world:
        return f'{message} Name the stages yourself, for example "layout": [["gpu", "cpu"], …].'
    on_sockets = (stages - gpus // size) * size
    shares = -(-on_sockets // sockets) if sockets else 0
    if shares:
        return (
            f"{message} Ask for at most {gpus + sockets} ranks, or split each socket between "
            f'{shares} ranks: --additional-config \'{{"ray_hetero": {{"cpu": '
            f'{{"ranks_per_socket": {shares}}}}}}}\''
        )
    return f"{message} Ask for at most {gpus} ranks."


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
    if sizes != [tensor_parallel_size] * pipeline_parallel_size:
        raise LayoutError(
            f"layout has {len(sizes)} stages of {sizes} ranks, but vLLM was asked for "
            f"--pipeline-parallel-size {pipeline_parallel_size} --tensor-parallel-size "
            f"{tensor_parallel_size}. Make the two agree."
        )
    layout = Layout(tuple(tuple(stage) for stage in stages))
    for asked, there, noun in (
        (layout.count("gpu"), gpus, "GPUs"),
        (layout.count("cpu"), sockets, "CPU sockets"),
    ):
        if asked > there:
            raise LayoutError(
                f"layout {layout} asks for {asked} {noun}, but {there} are free. "
                "`ray-hetero topology --cluster` shows what there is."
            )
    return layout

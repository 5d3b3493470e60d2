"""vLLM's groups between real processes, where stages differ in size."""

from __future__ import annotations

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
from worlds import world

pytest.importorskip("vllm")


def joins(rank: int, stages: tuple[str, ...], store: Path, answers: Any) -> None:
    os.environ |= {"VLLM_TARGET_DEVICE": "cpu", "VLLM_DIST_IDENT": str(store).replace("/", "-")}
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state as groups

    from ray_hetero.compat.worker import parallel_state
    from ray_hetero.distributed.groups import HeteroGroup, set_world

    made = world(*stages)
    layout = made.layout
    set_world(made, "gloo")
    parallel_state.use_groups(HeteroGroup)
    parallel_state.use_stages(
        [list(layout.ranks(stage)) for stage in range(len(stages))],
        [list(ranks) for ranks in reversed(layout.pipelines())],
    )
    with set_current_vllm_config(VllmConfig()):
        size = layout.world_size
        groups.init_distributed_environment(size, rank, f"file://{store}", rank, "gloo")
        groups.ensure_model_parallel_initialized(1, len(stages))
        tensor, pipeline = groups.get_tp_group(), groups.get_pp_group()
        total = tensor.all_reduce(torch.full((4,), float(rank)))
        neighbours = pipeline.boundary._neighbours
        before = neighbours.previous
        answers.put(
            (
                rank,
                (tensor.rank_in_group, tuple(tensor.ranks), float(total[0])),
                (pipeline.rank_in_group, pipeline.world_size),
                (pipeline.is_first_rank, pipeline.is_last_rank),
                None if before is None else before.rank,
                tuple(one.rank for one in neighbours.following),
            )
        )
        torch.distributed.barrier()


def test_every_rank_is_in_the_groups_of_its_own_stage(tmp_path: Path) -> None:
    stages = ("c", "cc")
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [
        context.Process(target=joins, args=(rank, stages, tmp_path / "store", answers))
        for rank in range(3)
    ]
    for process in processes:
        process.start()
    found = sorted(answers.get(timeout=300) for _ in processes)
    for process in processes:
        process.join(60)
    assert found == [
        (0, (0, (0,), 0.0), (0, 2), (True, False), None, (1, 2)),
        (1, (0, (1, 2), 3.0), (1, 2), (False, True), 0, ()),
        (2, (1, (1, 2), 3.0), (1, 2), (False, True), 0, ()),
    ]

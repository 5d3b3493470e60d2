"""The stage boundary between a CPU rank and a real GPU, whose stream waits for messages."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gpu_host import IS_PRETENDED, needs_gpus

sys.path.append(str(Path(__file__).parents[1] / "unit/distributed"))

from test_stage_boundary import CAPACITY, STEPS, TEMPLATE, boundary_of, run, step_of, tensors_of

pytestmark = [
    pytest.mark.gpu,
    needs_gpus(1),
    pytest.mark.skipif(IS_PRETENDED, reason="the CPU has no stream"),
]
LATE_S = 0.2
"""Seconds that the first stage takes for a step."""


def decodes(rank: int, ranks: int, store: Path, answers: Any) -> None:
    """The second stage has submitted a step before the first one has sent its rows."""
    device = torch.device("cuda:0" if rank == 1 else "cpu")
    is_right, were_ahead = True, []
    with boundary_of(rank, ranks, store, device=device) as boundary:
        boundary.agree(TEMPLATE, CAPACITY, timeout_s=60)
        for like in TEMPLATE.values():
            like.to(device).float().sum()  # loads the kernels
        for step, tokens in enumerate(STEPS * 2):
            boundary.begin_step(step_of(tokens, is_decoding=tokens == 1))
            dist.barrier()
            expected = tensors_of(step, tokens)
            if rank == 0:
                time.sleep(LATE_S)
                boundary.isend(expected)
                continue
            began = time.monotonic()
            received, handles, callbacks = boundary.irecv()
            for one in (*(handle.wait for handle in handles), *callbacks):
                one()
            # A step's work: it is ordered on the stream that waits.
            sums = {name: tensor[:tokens].float().sum() for name, tensor in received.items()}
            were_ahead.append(time.monotonic() - began < LATE_S / 2)
            boundary.end_step()
            for name, tensor in expected.items():
                is_right &= torch.equal(received[name][:tokens].cpu(), tensor)
                is_right &= torch.allclose(sums[name].cpu(), tensor.float().sum(), rtol=1e-3)
        dist.barrier()
    answers.put((rank, is_right, were_ahead))


def test_a_decode_step_is_submitted_before_its_rows_are_there(tmp_path: Path) -> None:
    ahead = [tokens == 1 for tokens in STEPS * 2]
    assert run(decodes, 2, tmp_path) == [(0, True, []), (1, True, ahead)]

"""Memory of a pretended GPU in which stages leave their results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decoder_parts import HIDDEN

from ray_hetero.distributed.messages import Packing
from ray_hetero.offload.prefill import offload_gpu, stage_output
from ray_hetero.offload.prefill.stage_output import SeenOutput, StageOutput, accept
from ray_hetero.planning import prefill_memory

CAPACITY = 256
TEMPLATE = {
    name: torch.empty(1, HIDDEN, dtype=torch.bfloat16) for name in ("hidden_states", "residual")
}
PACKING = Packing(TEMPLATE)


class Memory:
    """In place of the memory of GPUs."""

    def __init__(self) -> None:
        self.of_handle: dict[bytes, Any] = {}
        self.seen_by = {"cpu": "GPU-1"}

    def identity(self, device: Any) -> str:
        return self.seen_by[str(device)]

    def made(self, device: Any, nbytes: int) -> tuple[Any, bytes]:
        handle = bytes([len(self.of_handle)])
        self.of_handle[handle] = torch.zeros(nbytes, dtype=torch.uint8)
        return self.of_handle[handle], handle

    def opened(self, device: Any, handle: bytes, nbytes: int) -> Any:
        if handle not in self.of_handle:
            raise RuntimeError("cuIpcOpenMemHandle_v2 of CUDA's driver answers 201")
        assert self.of_handle[handle].nbytes == nbytes
        return self.of_handle[handle]

    def give_back(self, memory: Any) -> None:
        for handle, one in list(self.of_handle.items()):
            if one is memory:
                del self.of_handle[handle]


def offered(
    layers: Any, *, waits: bool = False, timeout_s: float = 60
) -> tuple[StageOutput, SeenOutput]:
    """Have layers leave their results in such memory; both ends of it.

    Args:
        layers: the last ones of a stage.
        waits: whether streams wait for words.
        timeout_s: longest wait for a step of the next stage.

    """
    output = layers.output = StageOutput(layers.gpu)
    offer = output.offer(PACKING, CAPACITY)
    assert offer is not None
    seen = accept(offer, torch.device("cpu"))
    assert seen is not None
    assert seen.words is not None
    output.accepted(is_seen=True, waits=waits, timeout_s=timeout_s)
    return output, seen


def results(seen: SeenOutput, tokens: int) -> tuple[Any, Any]:
    """Both results of a step as the next stage's rank sees them; views of the memory."""
    there = PACKING.views(seen.rows.view(CAPACITY, PACKING.row_bytes)[:tokens])
    return there["hidden_states"], there["residual"]


def pretended_memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    """Have stages leave their results in such memory, and small weights be cut into pieces."""
    made = Memory()
    monkeypatch.setattr(stage_output, "gpu_memory", made)
    # Of no step until a test says otherwise.
    monkeypatch.setattr(stage_output, "turns_from", lambda gpu: CAPACITY + 1)
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)
    return made

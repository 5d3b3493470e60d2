"""Cosines and sines of positions that stay on a GPU, pretended."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from ray_hetero.offload.prefill.gpu_attention import GpuAngles  # noqa: E402
from ray_hetero.offload.prefill.step_memory import StepMemory  # noqa: E402

TOKENS = 12
ROTATED = 8


class Angles:
    """Angles of tables, and how many rows of a table were sent."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        memory = StepMemory(torch.device("cpu"), TOKENS, 16, 16, 16)
        self.angles = GpuAngles(memory, TOKENS)
        self.sent: list[int] = []
        send = GpuAngles._sent

        def note(angles: GpuAngles, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            self.sent.append(len(rows))
            return send(angles, rows)

        monkeypatch.setattr(GpuAngles, "_sent", note)

    def check(self, table: torch.Tensor, positions: Sequence[int]) -> None:
        own = torch.tensor(positions)
        cos, sin = self.angles(table, own)
        for found, expected in zip((cos, sin), table[own].float().chunk(2, dim=-1), strict=True):
            assert torch.equal(found, expected.unsqueeze(1))
            assert found.dtype == torch.float32
            assert found.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_those_of_new_prompts_are_sent_once(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    angles, table = Angles(monkeypatch), torch.randn(100, ROTATED).to(dtype)
    angles.check(table, range(5))
    angles.check(table, range(TOKENS))
    # Two prompts, and a chunk of one.
    angles.check(table, [*range(5), *range(7)])
    angles.check(table, range(3, TOKENS))
    assert angles.sent == [TOKENS]


def test_those_further_on_are_sent_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    angles, table = Angles(monkeypatch), torch.randn(100, ROTATED)
    for _ in range(2):
        angles.check(table, range(4, 4 + TOKENS))
    angles.check(table, [99, 0])
    assert angles.sent == [TOKENS, TOKENS, TOKENS, 2]


def test_a_table_may_be_shorter_than_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    angles, table = Angles(monkeypatch), torch.randn(6, ROTATED)
    angles.check(table, range(6))
    angles.check(table, [*range(6), *range(6)])
    assert angles.sent == [6]


def test_each_table_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    angles = Angles(monkeypatch)
    tables = [torch.randn(50, ROTATED) for _ in range(2)]
    for table in (*tables, *tables):
        angles.check(table, range(8))
    assert angles.sent == [TOKENS, TOKENS]

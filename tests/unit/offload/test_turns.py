"""From how many tokens on two stages take turns is measured, and leaves later steps as they are."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from copied_pieces import CopiedPieces  # noqa: E402
from native_module import needs_native  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.offload.prefill import offload_gpu  # noqa: E402
from ray_hetero.offload.prefill.stage_output import SHARE, turns_from  # noqa: E402
from ray_hetero.offload.weights.piece_reader import ROUNDS  # noqa: E402
from ray_hetero.planning import prefill_memory  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(120)]


@pytest.fixture(autouse=True)
def _many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_memory, "PIECE_BYTES", 128 << 10)
    monkeypatch.setattr(offload_gpu, "LEAST_BYTES", 1)


@pytest.mark.parametrize("is_compact", [False, True])
def test_steps_behind_it_are_right(monkeypatch: pytest.MonkeyPatch, *, is_compact: bool) -> None:
    copies = CopiedPieces(monkeypatch, 900, most=512, is_compact=is_compact, columns=12)
    gpu = copies.steps.made.gpu
    assert gpu is not None
    for tokens in (100, 1, 1, 1, 90, 1, 120, 120):
        copies.of_step(tokens)
        with copies.traced():
            assert turns_from(gpu) >= 0
        assert copies.copied == [gpu.reader.largest] * ROUNDS


def test_it_follows_from_both_times(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = CopiedPieces(monkeypatch, 100, most=256).steps.made.gpu
    assert gpu is not None
    monkeypatch.setattr(gpu.reader, "seconds", lambda multiply: (0.002, 0.0005))
    assert turns_from(gpu) == int(SHARE * 4 * 256)

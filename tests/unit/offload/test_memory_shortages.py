"""The GPU's memory, which is the CPU's here, runs out ahead of a step, or within one."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from native_module import needs_native  # noqa: E402
from scheduled_steps import LARGE, Engine, GroupEngine  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from ray_hetero.offload.prefill import gpu_layers  # noqa: E402
from ray_hetero.offload.prefill.offload_gpu import OffloadGpu  # noqa: E402

current_platform.import_kernels()
pytestmark = [needs_native, pytest.mark.timeout(120)]
SHORT = 29
"""Tokens of a step that the cores can compute as a decode step."""


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(
    ("owner", "name"),
    [(OffloadGpu, "read_first"), (gpu_layers, "attend")],
    ids=["first weights", "attention"],
)
@pytest.mark.parametrize("kind", [Engine, GroupEngine])
def test_memory_that_runs_out_before_the_layers_is_the_cores_work(
    kind: type[Engine | GroupEngine], owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own attention multiplies what nobody has written with 0.
    engine, failed = kind(monkeypatch, layers=3, unwritten=0.0), []

    def fail(*given: Any, **more: Any) -> Any:
        failed.append(name)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, fail)
        for tokens in (SHORT, LARGE):
            engine.step((engine.request(tokens), 0, tokens))
    assert failed
    engine.step((engine.request(LARGE), 0, LARGE))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kind", [Engine, GroupEngine])
def test_requests_decode_beside_prompts_that_the_gpu_has_no_memory_for(
    kind: type[Engine | GroupEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    # vLLM's own attention multiplies what nobody has written with 0.
    engine = kind(monkeypatch, layers=3, unwritten=0.0)
    request = engine.request(42)
    engine.step((request, 0, 40))
    engine.schedule((request, 40, 41), (other := engine.request(LARGE), 0, LARGE), known=1)
    with engine.gpu.leaving_shortage():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
    # The other ranks decode theirs, and wait for the first one meanwhile.
    engine.compute((request, 40, 41), (other, 0, LARGE))
    engine.schedule((request, 41, 42), known=1)
    engine.compute((request, 41, 42))

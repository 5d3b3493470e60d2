"""Unit tests start no Ray and no engine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NoReturn

import pytest
import ray
from hypothesis import HealthCheck, settings

ANY_SPEED = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
# The same inputs in every run; `make fuzz` looks for new ones.
settings.register_profile("usual", max_examples=50, derandomize=True, **ANY_SPEED)
settings.register_profile("fuzz", max_examples=800, print_blob=True, **ANY_SPEED)
settings.load_profile("usual")


@pytest.fixture(autouse=True)
def _no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise AssertionError("a unit test started Ray; it belongs in tests/cluster")

    monkeypatch.setattr(ray, "init", refuse)


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for each operator: several, which wait for each other, take uncertain times where
    other programs compute too."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def own_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured decode steps count, whoever else computes on these cores: what is done about steps
    that others disturb has tests of its own."""
    from ray_hetero.offload.decode import shared_decode

    monkeypatch.setattr(shared_decode, "had_cores", lambda *given: True)


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Tokens of each step whose layers a prompt GPU has computed."""
    from ray_hetero.offload.prefill.gpu_layers import GpuLayers

    found: list[int] = []
    call = GpuLayers.__call__

    def call_and_note(self: GpuLayers, *given: Any) -> Any:
        found.append(given[3].tokens)
        return call(self, *given)

    monkeypatch.setattr(GpuLayers, "__call__", call_and_note)
    return found


@pytest.fixture
def contexts(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What vLLM's forward context gives decoder layers, by name of a layer."""
    from ray_hetero.kernels.layers import attention, decoder_layers, fused_modules

    found: dict[str, Any] = {}
    for module in (attention, decoder_layers):
        monkeypatch.setattr(module, "get_attention_context", found.__getitem__)
    before = len(fused_modules._layers)
    yield found
    del fused_modules._layers[before:]

"""A rank without vLLM's compiled operators says so, or refuses what needs others."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from ray_hetero.compat.models import torch_operators  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.worker.missing_operators import stand_in  # noqa: E402


def config(**of_model: Any) -> Any:
    """Attributes of a configuration that `needs_more` reads: by default those of a dense model."""
    others = {"speculative_config": None, "cache_dtype": "auto"}
    others |= {key: of_model.pop(key) for key in list(of_model) if key in others}
    given = {"use_mla": False, "has_inner_state": False, "experts": 0, "dtype": torch.bfloat16}
    model = SimpleNamespace(**given | of_model)
    model.get_num_experts = lambda: model.experts
    return SimpleNamespace(
        model_config=model, speculative_config=others["speculative_config"],
        cache_config=SimpleNamespace(cache_dtype=others["cache_dtype"]),
    )  # fmt: skip


NEEDY: list[tuple[dict[str, Any], str]] = [
    ({"use_mla": True}, "latent attention"),
    ({"has_inner_state": True}, "layers with a state"),
    ({"experts": 8, "dtype": torch.float32}, r"a mixture of experts in float32 \(--dtype bfloat16"),
    ({"speculative_config": object()}, "speculative decoding"),
    ({"cache_dtype": "fp8_e5m2"}, "a KV cache in fp8_e5m2"),
]


def test_with_compiled_operators_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    for needy, _ in NEEDY:
        stand_in(config(**needy))
    assert not caplog.records


@pytest.mark.parametrize(("needy", "said"), NEEDY)
def test_what_needs_others_is_refused(
    needy: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_operators, "define_missing", lambda: ("rms_norm",))
    message = rf"does not stand in for those of {said}.*Type: ray-hetero install-cpu-kernels$"
    with pytest.raises(UnsupportedError, match=message):
        stand_in(config(**needy))


def test_a_line_names_what_pytorch_computes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch_operators, "define_missing", lambda: ("rms_norm", "silu_and_mul"))
    monkeypatch.setattr(logging.getLogger("ray_hetero"), "propagate", True)
    with caplog.at_level(logging.WARNING):
        stand_in(config(experts=8))
        stand_in(config(dtype=torch.float32))
    assert caplog.text.count("PyTorch computes rms_norm, silu_and_mul in their place") == 2

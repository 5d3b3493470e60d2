"""Models that read images are loaded where torchvision is not installed."""

from __future__ import annotations

import importlib.util
import sys

import pytest
from vllm.model_executor.models.registry import ModelRegistry

from ray_hetero.compat.models import model_registry
from ray_hetero.errors import UnsupportedError

MODELS = (
    "Glm5NextForCausalLM",
    "MiniMaxM3SparseForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM",
    "Qwen4ExpForCausalLM",
)


@pytest.mark.parametrize("name", MODELS)
def test_their_classes_are_loaded(name: str) -> None:
    had = importlib.util.find_spec("torchvision") is not None
    model_registry.load_models_without_torchvision()
    assert ModelRegistry.models[name].load_model_cls().__name__ == name
    # Nothing takes the library for installed afterwards.
    assert (importlib.util.find_spec("torchvision") is not None) == had


@pytest.mark.skipif(
    importlib.util.find_spec("torchvision") is not None, reason="torchvision is installed"
)
def test_what_needs_the_library_says_so_when_it_is_called() -> None:
    with model_registry._absent_library():
        from torchvision.transforms.v2 import functional

    with pytest.raises(UnsupportedError, match=r"functional\.resize is needed for images"):
        functional.resize("an image", 8)
    assert "torchvision" not in sys.modules
    with pytest.raises(ModuleNotFoundError, match="torchvision"):
        import torchvision  # noqa: F401

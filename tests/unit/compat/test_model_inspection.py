"""What a model's class can do is looked at in the same process where there are no GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from ray_hetero.compat.models import model_registry
from ray_hetero.compat.patching import STOCK

pytestmark = pytest.mark.skipif(not current_platform.is_cpu(), reason="needs vLLM for CPUs")


@pytest.fixture
def known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An architecture that no cache knows, in a registry whose process cannot be started."""
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(tmp_path))
    monkeypatch.setattr(registry, "_SUBPROCESS_COMMAND", [str(tmp_path / "nothing")])
    # vLLM's own, whatever an earlier test in this process has put there; put back in the end.
    found = registry._run_in_subprocess
    monkeypatch.setattr(registry, "_run_in_subprocess", getattr(found, STOCK, found))
    return registry.ModelRegistry.models["LlamaForCausalLM"]


def test_no_process_is_started_for_it(known: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        known.inspect_model_cls()
    model_registry.inspect_here()
    model_registry.inspect_here()
    found = known.inspect_model_cls()
    assert found == registry._ModelInfo.from_model_cls(known.load_model_cls())
    assert found.supports_pp
    # The next process finds it there.
    assert list(tmp_path.glob("modelinfos/*.json"))


def test_with_gpus_it_stays_as_it_was(known: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stock = registry._run_in_subprocess
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    model_registry.inspect_here()
    assert registry._run_in_subprocess is stock

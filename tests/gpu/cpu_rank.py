"""What a CPU rank's process finds that has a GPU beside it."""

from __future__ import annotations

from typing import Any

import pytest
import torch


class _Nothing:
    """What vLLM's CPU worker has in the place of streams and events, for all of its process."""

    def __init__(self, *args: object) -> None: ...
    def __getattr__(self, name: str) -> Any:
        return lambda *args: None

    def __enter__(self) -> None: ...
    def __exit__(self, *args: object) -> None: ...


def replace_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have torch's streams and events be those of such a process."""
    for name in ("Event", "Stream", "stream", "current_stream", "set_stream"):
        monkeypatch.setattr(torch.cuda, name, _Nothing)


def layout() -> str:
    """Layout of caches on this processor, where the kernels are built."""
    from ray_hetero import _streaming_linear as native

    return "amx" if "amx" in [level.name for level in native.levels()] else "vec"

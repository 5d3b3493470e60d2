"""The engine's executor: what runs in the driver's process.

`ray_hetero.executor.HeteroExecutor` is the public name of vLLM's executor class over GPU and CPU
ranks; it is imported when it is first asked for, because it imports vLLM.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ray_hetero.executor.hetero_executor import HeteroExecutor

__all__ = ["HeteroExecutor"]


def __getattr__(name: str) -> Any:
    if name != "HeteroExecutor":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ray_hetero.executor.hetero_executor import HeteroExecutor

    return HeteroExecutor

"""vLLM's compilation of models."""

from __future__ import annotations

from typing import Any


def is_compiled(module: Any) -> bool:
    """Whether vLLM compiles a module at its first call, or has done so.

    Uses: `support_torch_compile`, whose instances say so in `do_not_compile`.
    """
    return not getattr(module, "do_not_compile", True)


def leave_uncompiled(module: Any) -> None:
    """Leave a module uncompiled.

    Args:
        module: one that `is_compiled`, and that was not called yet.

    Uses: `support_torch_compile`, which looks at `do_not_compile` in every call.
    """
    module.do_not_compile = True

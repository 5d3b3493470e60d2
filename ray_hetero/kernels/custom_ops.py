"""Operators of this package in PyTorch's registry, without importing vLLM for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


def register_op(
    library: torch.library.Library,
    name: str,
    function: Callable[..., Any],
    shapes_of: Callable[..., Any],
    *,
    mutated: Sequence[str] = (),
) -> None:
    """Register an operator of CPUs; it exists as long as its library does.

    Args:
        library: of the operator's namespace.
        name: of the operator.
        function: computes; its annotations are the operator's schema.
        shapes_of: the same for tensors without memory.
        mutated: arguments that it writes.

    """
    library.define(name + torch.library.infer_schema(function, mutates_args=tuple(mutated)))
    library.impl(name, function, dispatch_key="CPU")
    torch.library.register_fake(f"{library.ns}::{name}", shapes_of, lib=library)

"""`quantization_config` of checkpoints as the library compressed-tensors writes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def compressed_tensors(
    layout: str, ignored: Sequence[str], weights: Mapping[str, Any],
    activations: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Configuration of a checkpoint all of whose linear layers are quantised alike.

    Args:
        layout: of the tensors, the key `format`.
        ignored: layers that stay as they are.
        weights: how these are quantised.
        activations: the same; None leaves them as they are.

    """
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": list(ignored),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**weights, "dynamic": False},
                "input_activations": activations,
            }
        },
    }

"""A demo model's linear layers in eight bits, as compressed-tensors stores them (W8A8).

Integer products on both kinds of device: of weights with one scale an output row and activations
with one scale a token, both symmetric.
"""

from __future__ import annotations

from typing import Any

LARGEST = 127
"""Of a signed byte, so that the range is symmetric."""
UNQUANTISED = ("lm_head",)


def scheme() -> dict[str, Any]:
    """`quantization_config` of the checkpoint."""
    byte = {"num_bits": 8, "type": "int", "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": "int-quantized",
        "quantization_status": "compressed",
        "ignore": list(UNQUANTISED),
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**byte, "strategy": "channel", "dynamic": False},
                "input_activations": {**byte, "strategy": "token", "dynamic": True},
            }
        },
    }


def quantised(model: Any) -> dict[str, Any]:
    """The state dict of a `transformers` model, its linear layers' weights as bytes and scales."""
    import torch

    layers = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name not in UNQUANTISED
    }
    state: dict[str, Any] = {}
    for name, weight in model.state_dict().items():
        if name not in layers:
            state[name] = weight
            continue
        rows = weight.float()
        scale = rows.abs().amax(dim=1, keepdim=True) / LARGEST
        state[name] = (rows / scale).round().to(torch.int8)
        state[f"{name}_scale"] = scale
    return state

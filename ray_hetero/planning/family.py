"""How far the family of a model was tested, in a sentence for plans."""

from __future__ import annotations

from ray_hetero.compat.fused_architectures import ARCHITECTURES


def family_of(model_type: str) -> str:
    """What the tests compare with stock vLLM: this family, one of the same layers, or neither.

    Args:
        model_type: of the model's config.json.

    """
    for one in ARCHITECTURES:
        if model_type in one.in_engines:
            return f"yes: tokens of engines of {model_type} models are compared with stock vLLM"
        if model_type in one.model_types:
            others = f" ({', '.join(one.in_engines)})" if one.in_engines else ""
            return (
                f"in parts: {model_type} models compute the layers of families that are tested"
                f"{others}"
            )
    return f"no: neither {model_type} models nor others with the same layers are tested"

"""Small configurations of the text-generation architectures in vLLM's registry.

`small_config("MixtralForCausalLM")` is the content of a `config.json`: the architecture's own
configuration class with shrunk sizes.  Where neither Transformers nor vLLM has a class,
`own_classes.py` names the keys that vLLM's model reads.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from families.own_classes import OWN_CLASSES
from families.small_sizes import HEADS, LAYERS, NONE, ROWS, SIZES

Json = dict[str, Any]

_NVFP4 = {"num_bits": 4, "type": "float", "group_size": 16}
_GROUP = {"strategy": "tensor_group", "symmetric": True}
FORMATS: dict[str, Json] = {
    "modelopt": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "input_activations": _NVFP4 | {"dynamic": False},
                "weights": _NVFP4 | {"dynamic": False},
                "targets": ["Linear"],
            }
        },
    },
    "nvfp4": {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "format": "nvfp4-pack-quantized",
                "input_activations": _NVFP4 | _GROUP | {"dynamic": "local"},
                "weights": _NVFP4 | _GROUP | {"dynamic": False},
                "targets": ["Linear"],
            }
        },
    },
}
"""Formats of checkpoints, as their configurations describe them."""
DRAFTER = "+mtp"
"""End of the name of a model of which the layers that draft are meant."""
ONE_DRAFT_LAYER = {"num_nextn_predict_layers": 1, "mtp_num_hidden_layers": 1}
"""Keys of the number of such layers, in the configurations of different families."""
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def architectures() -> list[str]:
    """Names of all text-generation architectures that the installed vLLM registers."""
    from vllm.model_executor.models import registry

    return sorted(registry._TEXT_GENERATION_MODELS)


@functools.cache
def _model_types() -> dict[str, str]:
    """Architecture → model type, as Transformers' automatic classes map them."""
    from transformers.models.auto import modeling_auto

    found: dict[str, str] = {}
    for names in (
        modeling_auto.MODEL_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    ):
        for kind, classes in names.items():
            for name in (classes,) if isinstance(classes, str) else classes:
                found[name] = kind
    return found


def config_class(model_type: str) -> Any:
    """vLLM's configuration class of a model type, or else Transformers'.

    Raises:
        KeyError: neither has one.

    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from vllm.transformers_utils.config import _CONFIG_REGISTRY

    return (
        _CONFIG_REGISTRY[model_type]
        if model_type in _CONFIG_REGISTRY
        else CONFIG_MAPPING[model_type]
    )


def small_config(architecture: str) -> Json | str:
    """The content of a small `config.json`.

    Args:
        architecture: a name of vLLM's registry, also with one of `FORMATS` behind an `@`, or with
            `DRAFTER` behind it.

    Returns:
        The keys and values, or the reason why there is no small configuration.

    """
    if architecture.endswith(DRAFTER):
        plain = small_config(architecture.removesuffix(DRAFTER))
        return plain if isinstance(plain, str) else plain | ONE_DRAFT_LAYER
    architecture, _, form = architecture.partition("@")
    if form:
        plain = small_config(architecture)
        return plain if isinstance(plain, str) else plain | {"quantization_config": FORMATS[form]}
    if architecture in NONE:
        return NONE[architecture]
    row = ROWS.get(architecture, {})
    if architecture in OWN_CLASSES:
        model_type, own = OWN_CLASSES[architecture]
    elif (found := row.get("model_type") or _model_types().get(architecture)) is not None:
        model_type, own = str(found), {}
    else:
        return "neither Transformers nor vLLM has a configuration class"
    given = {**own, **{key: value for key, value in row.items() if key != "model_type"}}
    return _written(architecture, model_type, given)


def _written(architecture: str, model_type: str, given: Json) -> Json:
    made_by = config_class(model_type)
    known = made_by().to_dict()
    sizes = {key: value for key, value in SIZES.items() if known.get(key, None) is not None}
    if "kv_lora_rank" in known:
        sizes["num_key_value_heads"] = HEADS
    chosen = {"num_hidden_layers": LAYERS, **TOKENS, **sizes, **given}
    if chosen["num_hidden_layers"] is None:
        # It has another name, or follows from the kinds of the layers.
        del chosen["num_hidden_layers"], given["num_hidden_layers"]
    config = made_by(**chosen)
    written: Json = json.loads(config.to_json_string(use_diff=False))
    for key in (
        "_name_or_path",
        "transformers_version",
        "dtype",
        "id2label",
        "label2id",
        "time_step_limit",
    ):
        written.pop(key, None)
    # Keys that the class does not know, and parts whose own classes would write more.
    written |= {
        key: value
        for key, value in given.items()
        if key not in written or (isinstance(value, dict) and key != "rope_parameters")
    }
    return written | {"architectures": [architecture], "model_type": model_type, "dtype": "float32"}

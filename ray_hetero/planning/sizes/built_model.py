"""The process that builds vLLM's class of a model without memory and says what is in it.

    python -m ray_hetero.planning.sizes.built_model REQUEST ANSWER

REQUEST is a JSON file: `folder` with a config.json, `dtype`, `trust_remote_code`.  ANSWER is
written: `{"parts": …}`, or `{"problem": …}` where vLLM cannot build it.  The process is to be
started with `model_probe.environment`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

STAGES = 3
"""Stages of which the middle one shows what a stage holds beside its layers."""


def main(request: Path, answer: Path) -> None:
    """Build the model of a request and write the answer."""
    asked = json.loads(request.read_text(encoding="utf-8"))
    # vLLM and its dependencies raise whatever they like on a configuration that they do not take.
    try:
        found: dict[str, Any] = {"parts": built(**asked)}
    except Exception as error:  # noqa: BLE001
        reason = next(iter(str(error).strip().splitlines()), "")
        found = {"problem": f"{type(error).__name__}: {reason}"}
    answer.write_text(json.dumps(found), encoding="utf-8")


def built(folder: str, dtype: str = "auto", *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Tensors of vLLM's class of a model; see `compat.model_parts.parts_of`.

    Args:
        folder: with a config.json.
        dtype: vLLM's --dtype.
        trust_remote_code: vLLM's --trust-remote-code.

    Raises:
        Whatever vLLM raises for a model that it cannot build.

    """
    from vllm.engine.arg_utils import EngineArgs

    from ray_hetero.compat.models import pipeline_models
    from ray_hetero.compat.models.meta_model import made, made_between, make_without_kernels
    from ray_hetero.compat.models.model_parts import has_vocabulary, is_divided, parts_of
    from ray_hetero.compat.models.model_registry import (
        inspect_here,
        load_models_without_torchvision,
    )

    make_without_kernels()
    # As ranks make their stages.
    pipeline_models.prepare_loading()
    inspect_here()
    load_models_without_torchvision()

    def parts(folder: str) -> dict[str, Any]:
        # vLLM's CPU platform takes back the prefix caching that models with latents and states
        # begin with, and then refuses the block size that goes with it.
        args = EngineArgs(
            model=folder, dtype=dtype, trust_remote_code=trust_remote_code, load_format="dummy",
            skip_tokenizer_init=True, enforce_eager=True, max_num_seqs=1,
            kv_cache_memory_bytes=1 << 30, enable_prefix_caching=False,
        )  # fmt: skip
        vllm_config = args.create_engine_config()
        model = made(vllm_config)
        found = parts_of(model, vllm_config)
        if not is_divided(model):
            return found | {"divides": False}
        if found["layers"] < STAGES:
            return found
        try:
            everywhere = has_vocabulary(made_between(vllm_config))
        except Exception:  # noqa: BLE001
            # It is no stage that vLLM can build, whatever its class says.
            return found | {"divides": False}
        return found | {"vocabulary_everywhere": everywhere}

    try:
        return parts(folder)
    except Exception:
        # A model with images whose class cannot be had here, for want of a library.
        text = _decoder_alone(Path(folder))
        if text is None:
            raise
        with tempfile.TemporaryDirectory() as alone:
            (Path(alone) / "config.json").write_text(json.dumps(text), encoding="utf-8")
            return parts(alone) | {"decoder_alone": True}


def _decoder_alone(folder: Path) -> dict[str, Any] | None:
    """Configuration of the decoder of a model that has other parts too; None where it has none."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    text = content.get("text_config")
    if not isinstance(text, dict):
        return None
    own = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(text.get("model_type")))
    names = text.get("architectures") or ([own] if own else [])
    passed_on = ("quantization_config", "dtype", "torch_dtype", "tie_word_embeddings")
    outer = {key: content[key] for key in passed_on if key in content}
    return {**outer, **text, "architectures": names} if names else None


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

"""Process of the test of experts that are read without vLLM: both ways to load them, compared.

    python expert_files_process.py {write,vllm,files} MODEL…

The first writes a small model of the architecture that its folder is named after.  The others write
digests of what each of two expert ranks holds of it into it.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from placement.model.config import decoder_section
from placement.model.expert_tensors import ExpertTensors
from ray_hetero.config import HeteroConfig
from ray_hetero.distributed.expert_service import HeldLayer
from ray_hetero.world import ExpertSource

RANKS = 2
CONFIG = HeteroConfig.model_validate(
    {"cpu": {"linear_kernel": "streaming"}, "experts": {"ranks": RANKS, "prefill_on_gpu": False}}
)


def digest(tensor: torch.Tensor | None) -> str | None:
    """Short text that is equal for equal tensors."""
    if tensor is None:
        return None
    content = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return f"{tuple(tensor.shape)} {hashlib.sha256(content).hexdigest()[:16]}"


def described(layer: HeldLayer) -> dict[str, Any]:
    """All that a layer holds."""
    experts = layer.experts
    assert experts is not None, "the kernel computes it"
    return {
        "sizes": [layer.hidden, layer.chosen, layer.count, str(layer.dtype)],
        "activation": {name: str(value) for name, value in asdict(experts.activation).items()},
        "weights": [
            [[type(weight).__name__, digest(weight.data)] for weight in expert]
            for expert in experts.weights
        ],
        "biases": [digest(bias) for bias in experts.biases],
    }


def by_vllm(model: Path) -> list[dict[str, HeldLayer]]:
    """Slices of each rank, as vLLM's classes load them."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs

    from ray_hetero.compat.models import model_registry
    from ray_hetero.distributed.stage_experts import are_remote
    from ray_hetero.worker import vllm_experts

    model_registry.load_models_without_torchvision()
    args = EngineArgs(
        model=str(model), dtype="bfloat16", skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=128, kv_cache_memory_bytes=1 << 28,
    )  # fmt: skip
    found = []
    for number in range(RANKS):
        # It knows the layers of one model.
        vllm_config = args.create_engine_config()
        layers = vllm_config.model_config.get_total_num_hidden_layers()
        with set_current_vllm_config(vllm_config):
            if not torch.distributed.is_initialized():
                vllm_experts._make_groups_of_one()
            is_remote = are_remote(layers, layers)
            found.append(vllm_experts.load_experts(vllm_config, CONFIG, is_remote, number, RANKS))
    return found


def by_files(model: Path) -> list[dict[str, HeldLayer]]:
    """Slices of each rank, as they are read from the files."""
    from ray_hetero.kernels.linear import streaming_linear
    from ray_hetero.worker.expert_files import load_from_files
    from ray_hetero.worker.expert_rows import Share

    config = json.loads((model / "config.json").read_text())
    text = dict(decoder_section(config))
    text["quantization_config"] = config.get("quantization_config")
    tensors = ExpertTensors.of(config["architectures"][0], text)
    assert tensors is not None, f"{model} is not known"
    layers = next(text[key] for key in ("num_hidden_layers", "num_layers") if key in text)
    source = ExpertSource(str(model), tensors, layers)
    kernel = streaming_linear.choose(CONFIG.cpu)
    assert kernel is not None
    found = [
        load_from_files(source, CONFIG, kernel, layers, Share(number, RANKS))
        for number in range(RANKS)
    ]
    assert not {"vllm", "transformers"} & sys.modules.keys()
    return found


def main() -> None:
    torch.set_num_threads(2)
    how, *models = sys.argv[1:]
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    for model in map(Path, models):
        if how == "write":
            sys.path.append(str(Path(__file__).parents[2]))
            from families.checkpoints import write_checkpoint

            write_checkpoint(model, model.name)
            continue
        found = (by_vllm if how == "vllm" else by_files)(model)
        said = [{name: described(layer) for name, layer in one.items()} for one in found]
        (model / f"{how}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()

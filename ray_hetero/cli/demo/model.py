"""Tiny random checkpoints with a working tokenizer, for trying and testing without a download."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from placement.given import shown
from ray_hetero.cli.demo.stored import FORMATS, quantise
from ray_hetero.cli.demo.tokenizer import text_tokens, train_tokenizer
from ray_hetero.cli.demo.weights import fill
from ray_hetero.errors import ConfigError

Dtype = Literal["bf16", "f32"]
MAX_POSITIONS = 2048
SLIDING_WINDOW = 32
EXPERTS = 8
MOST = {"layers": 200, "hidden": 16384, "heads": 256}
MOST_SEED = 2**63 - 1


@dataclass(frozen=True)
class DemoShape:
    """Size of a demo model."""

    layers: int = 4
    hidden: int = 256
    heads: int = 8

    def __post_init__(self) -> None:
        """Refuse sizes that no architecture can have, or that make no demo.

        Raises:
            ConfigError: a size below one or too large, or a head size that attention kernels
                cannot use.

        """
        for name, value in vars(self).items():
            if not 1 <= value <= MOST[name]:
                raise ConfigError(f"--{name}: expected 1 to {MOST[name]}, got {shown(value)}")
        if self.hidden % self.heads or self.head_size % 32:
            raise ConfigError(
                f"--hidden {self.hidden} with --heads {self.heads}: expected a head size (hidden "
                f"/ heads) that is a multiple of 32, got {self.hidden / self.heads:g}; "
                f"type: --hidden {self.heads * 32}"
            )

    @property
    def head_size(self) -> int:
        """Elements of one attention head."""
        return self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Two query heads share one key-value head, where the count is even."""
        return self.heads // 2 if self.heads % 2 == 0 else self.heads

    @property
    def intermediate(self) -> int:
        """Width of the feed-forward part; a multiple of 64."""
        return -(-self.hidden * 8 // 3 // 64) * 64


def _llama(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**common, **_gated(shape), tie_word_embeddings=False)


def _qwen3(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(
        **common, **_gated(shape), head_dim=shape.head_size, tie_word_embeddings=False
    )


def _mixtral(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import MixtralConfig

    return MixtralConfig(
        **common,
        **_gated(shape),
        num_local_experts=EXPERTS,
        num_experts_per_tok=2,
        sliding_window=None,
        tie_word_embeddings=False,
    )


def _qwen3_moe(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    return Qwen3MoeConfig(
        **common,
        **_gated(shape),
        head_dim=shape.head_size,
        num_experts=2 * EXPERTS,
        num_experts_per_tok=4,
        moe_intermediate_size=shape.intermediate // 4,
        norm_topk_prob=True,
        mlp_only_layers=[0],
        tie_word_embeddings=False,
    )


def _gemma(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import Gemma3TextConfig

    return Gemma3TextConfig(
        **common,
        **_gated(shape),
        head_dim=shape.head_size,
        query_pre_attn_scalar=shape.head_size,
        sliding_window=SLIDING_WINDOW,
        layer_types=[
            "full_attention" if layer % 2 else "sliding_attention" for layer in range(shape.layers)
        ],
        tie_word_embeddings=True,
    )


def _opt(shape: DemoShape, common: dict[str, Any]) -> Any:
    from transformers import OPTConfig

    return OPTConfig(
        **common,
        ffn_dim=4 * shape.hidden,
        word_embed_proj_dim=shape.hidden,
        do_layer_norm_before=True,
        dropout=0.0,
        tie_word_embeddings=False,
    )


def _gated(shape: DemoShape) -> dict[str, int]:
    return {"num_key_value_heads": shape.kv_heads, "intermediate_size": shape.intermediate}


ARCHITECTURES: dict[str, Callable[[DemoShape, dict[str, Any]], Any]] = {
    "llama": _llama,
    "opt": _opt,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
    "gemma": _gemma,
}
"""Name → maker of its transformers config; gemma has tied embeddings and sliding windows."""


def write_demo_model(
    directory: Path | str,
    architecture: str = "llama",
    *,
    shape: DemoShape | None = None,
    seed: int = 0,
    dtype: Dtype = "bf16",
    stored: str | None = None,
    force: bool = False,
) -> Path:
    """Write a checkpoint and its tokenizer; the same arguments give the same bytes.

    Args:
        directory: where to; made if it is not there.
        architecture: one of `ARCHITECTURES`.
        shape: layers, width and heads.
        seed: seed of all weights.
        dtype: type that the weights are stored in.
        stored: format that the linear layers are quantised to, one of `FORMATS`.
        force: write into a directory that has a checkpoint, or anything else, in it.

    Returns:
        The directory.

    Raises:
        ConfigError: an unknown architecture, dtype or format, or a directory that is not empty.

    """
    shape = shape or DemoShape()
    target = Path(directory)
    _check(target, architecture, dtype, seed, stored=stored, force=force)
    tokenizer = train_tokenizer(MAX_POSITIONS)
    model = _model(architecture, shape, tokenizer, dtype)
    fill(model, seed, text_tokens(tokenizer))
    target.mkdir(parents=True, exist_ok=True)
    for stale in target.glob("*.safetensors*"):  # of a model with more shards than this one
        stale.unlink()
    if stored is not None:
        model.config.quantization_config, state = quantise(model, stored)
        model.save_pretrained(target, state_dict=state, save_original_format=False)
    else:
        model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    let_others_read(target)
    return target


def _check(
    target: Path, architecture: str, dtype: str, seed: int, *, stored: str | None, force: bool
) -> None:
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ConfigError(f"--architecture: expected one of {known}; got {architecture!r}")
    if dtype not in ("bf16", "f32"):
        raise ConfigError(f"--dtype: expected bf16 or f32; got {dtype!r}")
    if not 0 <= seed <= MOST_SEED:
        raise ConfigError(f"--seed: expected 0 to {MOST_SEED}, got {shown(seed)}")
    if stored is not None and stored not in FORMATS:
        known = ", ".join(FORMATS)
        raise ConfigError(f"--stored: expected one of {known}; got {shown(stored)}")
    check_directory(target, force=force)


def check_directory(target: Path, *, force: bool) -> None:
    """Refuse a place that a checkpoint cannot be written to.

    Args:
        target: the directory, which need not exist.
        force: whether what is in it may be replaced.

    Raises:
        ConfigError: a file, or a directory that is not empty.

    """
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{target}: expected a directory, this is a file")
    if not force and target.is_dir() and any(target.iterdir()):
        raise ConfigError(
            f"{target} is not empty; add --force to replace the checkpoint in it, "
            "or name another place"
        )


def _model(architecture: str, shape: DemoShape, tokenizer: Any, dtype: Dtype) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    common = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "max_position_embeddings": MAX_POSITIONS,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    config = ARCHITECTURES[architecture](shape, common)
    precision = torch.bfloat16 if dtype == "bf16" else torch.float32
    model = AutoModelForCausalLM.from_config(config, dtype=precision)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return model


def let_others_read(directory: Path) -> None:
    """Give a checkpoint's weights the permissions of its configuration.

    safetensors writes files for their owner only, and a container may run as another user.
    """
    mode = (directory / "config.json").stat().st_mode
    for file in directory.glob("*.safetensors"):
        file.chmod(mode)

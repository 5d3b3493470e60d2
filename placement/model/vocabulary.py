"""Tensors of a known architecture outside its layers: embedding, final norm, output head."""

from __future__ import annotations

from dataclasses import dataclass

from placement.model.config import Config
from placement.model.quantisation import Stored


@dataclass(frozen=True)
class Vocabulary:
    """Parts of a model before the first and after the last layer."""

    embedding: tuple[Stored, ...]
    final_norm: tuple[Stored, ...]
    output_head: tuple[Stored, ...]
    """Empty where the embedding serves as output matrix."""


def vocabulary_of(config: Config, width: int, *, tied: bool) -> Vocabulary:
    """Tensors outside the layers.

    Args:
        config: the model's config.
        width: bytes of one weight.
        tied: whether the embedding serves as output matrix.

    """
    if config.model_type == "opt":
        return _opt(config, width, tied=tied)
    hidden, vocab = config.hidden, config.number("vocab_size")
    head = Stored("lm_head.weight", vocab * hidden, width)
    return Vocabulary(
        (Stored("embed_tokens.weight", vocab * hidden, width),),
        (Stored("norm.weight", hidden, width, values=0),),
        () if tied else (head,),
    )


def _opt(config: Config, width: int, *, tied: bool) -> Vocabulary:
    hidden, vocab = config.hidden, config.number("vocab_size")
    inner = config.number("word_embed_proj_dim", "hidden_size")
    # OPT's positions start at 2, the two rows in front are never used.
    positions = config.number("max_position_embeddings") + 2
    embedding = [
        Stored("embed_tokens.weight", vocab * inner, width),
        Stored("embed_positions.weight", positions * hidden, width, values=0),
    ]
    final = []
    if config.flag("do_layer_norm_before", True) and not config.flag("_remove_final_layer_norm"):
        names = ("weight", "bias") if config.flag("layer_norm_elementwise_affine", True) else ()
        final = [Stored(f"final_layer_norm.{name}", hidden, width, values=0) for name in names]
    if inner != hidden:
        embedding.append(Stored("project_in.weight", inner * hidden, width))
        final.append(Stored("project_out.weight", inner * hidden, width))
    head = () if tied else (Stored("lm_head.weight", vocab * inner, width),)
    return Vocabulary(tuple(embedding), tuple(final), head)

"""`ray-hetero demo-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Architecture = Literal["llama", "opt", "qwen3", "mixtral", "gemma"]


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    architecture: Annotated[Architecture, typer.Option(help="Family of the model.")] = "llama",
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    dtype: Annotated[Literal["bf16", "f32"], typer.Option(help="Type of the weights.")] = "bf16",
    force: Annotated[bool, typer.Option(help="Write into a directory that is not empty.")] = False,
) -> None:
    """Write a tiny random checkpoint with a working tokenizer, offline."""
    from transformers.utils import logging

    from ray_hetero.demo_model import DemoShape, write_demo_model

    logging.disable_progress_bar()
    shape = DemoShape(layers=layers, hidden=hidden, heads=heads)
    write_demo_model(directory, architecture, shape=shape, seed=seed, dtype=dtype, force=force)
    typer.echo(f"wrote a random {architecture} model ({layers} layers, {dtype}) to {directory}")

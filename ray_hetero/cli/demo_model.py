"""`ray-hetero demo-model`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated, Literal

import typer

from placement.given import file_shown
from placement.words import plural
from ray_hetero.errors import ConfigError, UnsupportedError

Architecture = Literal["llama", "opt", "qwen3", "mixtral", "gemma"]


def demo_model(
    directory: Annotated[Path, typer.Argument(help="Where to; made if it is not there.")],
    architecture: Annotated[Architecture, typer.Option(help="Family of the model.")] = "llama",
    layers: Annotated[int, typer.Option(help="Transformer layers.")] = 4,
    hidden: Annotated[int, typer.Option(help="Width of the residual stream.")] = 256,
    heads: Annotated[int, typer.Option(help="Attention heads.")] = 8,
    seed: Annotated[int, typer.Option(help="The same seed gives the same bytes.")] = 0,
    dtype: Annotated[Literal["bf16", "f32"], typer.Option(help="Type of the weights.")] = "bf16",
    stored: Annotated[
        str | None, typer.Option(help="Format of quantised linear layers: int8, fp8, w4a16, …")
    ] = None,
    force: Annotated[bool, typer.Option(help="Write into a directory that is not empty.")] = False,
) -> None:
    """Write a tiny random checkpoint with a working tokenizer, offline."""
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(
            "demo-model needs transformers, which comes with vLLM; "
            "type: pip install 'ray-hetero[cpu]'"
        )
    from safetensors import SafetensorError
    from transformers.utils import logging

    from ray_hetero.cli.demo.model import DemoShape, write_demo_model

    logging.disable_progress_bar()
    shape = DemoShape(layers=layers, hidden=hidden, heads=heads)
    try:
        write_demo_model(
            directory, architecture, shape=shape, seed=seed, dtype=dtype, stored=stored, force=force
        )
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{file_shown(directory)}: cannot be written: {reason}; name another place"
        ) from None
    held = f"{dtype}, linear layers in {stored}" if stored else dtype
    typer.echo(
        f"wrote a random {architecture} model ({plural(layers, 'layer')}, {held}) to {directory}"
    )

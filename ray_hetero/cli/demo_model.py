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
    context: typer.Context,
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
    trained: Annotated[
        bool, typer.Option("--trained", help="Fetch SmolLM2-135M-Instruct instead (93 MB).")
    ] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Write into a directory that is not empty.")
    ] = False,
) -> None:
    """Write a tiny random checkpoint with a working tokenizer, offline, or a small trained one."""
    if importlib.util.find_spec("transformers") is None:
        raise UnsupportedError(
            "demo-model needs transformers, which comes with vLLM; "
            "type: pip install 'ray-hetero[cpu]'"
        )
    from ray_hetero.preflight.host_checks import torchvision_check

    if (check := torchvision_check()).status == "fail":
        raise UnsupportedError(f"{check.found}; type: {check.remedy}")
    from safetensors import SafetensorError
    from transformers.utils import logging

    from ray_hetero.cli.demo.model import DemoShape, write_demo_model
    from ray_hetero.cli.demo.trained import write_trained_model

    logging.disable_progress_bar()
    shape = DemoShape(layers=layers, hidden=hidden, heads=heads)
    try:
        if trained:
            _refuse_sizes(context)
            write_trained_model(directory, stored=stored, force=force)
        else:
            write_demo_model(
                directory, architecture,
                shape=shape, seed=seed, dtype=dtype, stored=stored, force=force,
            )  # fmt: skip
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{file_shown(directory)}: cannot be written: {reason}; name another place"
        ) from None
    held = f"{dtype}, linear layers in {stored}" if stored else dtype
    what = "SmolLM2-135M-Instruct" if trained else f"a random {architecture} model"
    typer.echo(
        f"wrote {what} ({plural(30 if trained else layers, 'layer')}, {held}) to {directory}"
    )


def _refuse_sizes(context: typer.Context) -> None:
    """Refuse options of random models beside `--trained`.

    Raises:
        ConfigError: one of them was given.

    """
    given = [
        f"--{name}"
        for name in ("architecture", "layers", "hidden", "heads", "seed", "dtype")
        if (source := context.get_parameter_source(name)) and source.name != "DEFAULT"
    ]
    if given:
        raise ConfigError(
            f"--trained with {', '.join(given)}: a trained model has sizes and weights of its own; "
            "leave either away"
        )

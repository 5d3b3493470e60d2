"""`ray-hetero ray-args`."""

from __future__ import annotations

import typer


def ray_args() -> None:
    """Print what to add to `ray start` here: `ray start --head $(ray-hetero ray-args)`.

    The options go to standard output, what to export before to standard error.
    """
    from placement.sysfs import read_host
    from ray_hetero.ray_arguments import ray_arguments

    arguments = ray_arguments(read_host())
    for name, value in arguments.environment.items():
        typer.echo(f"before `ray start`, type: export {name}={value}", err=True)
    typer.echo(" ".join(arguments.options))

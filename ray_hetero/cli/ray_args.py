"""`ray-hetero ray-args`."""

from __future__ import annotations

import os

import typer


def ray_args() -> None:
    """Print what to add to `ray start` on this host.

    As in `ray start --head $(ray-hetero ray-args)`: the options go to standard output; what is
    still to be exported before, to standard error.
    """
    from placement.host.sysfs import read_host
    from ray_hetero.runtime.ray_arguments import ray_arguments

    arguments = ray_arguments(read_host())
    for name, value in arguments.environment.items():
        if os.environ.get(name) != value:
            typer.echo(f"before `ray start`, type: export {name}={value}", err=True)
    typer.echo(" ".join(arguments.options))

"""The `ray-hetero` command."""

from __future__ import annotations

import sys
from importlib.metadata import version
from typing import Annotated

import typer

from placement.errors import PlacementError
from ray_hetero.cli.bench import bench
from ray_hetero.cli.config import config
from ray_hetero.cli.demo_model import demo_model
from ray_hetero.cli.doctor import doctor
from ray_hetero.cli.install_cpu_kernels import install_cpu_kernels
from ray_hetero.cli.plan import plan
from ray_hetero.cli.problems import print_problem
from ray_hetero.cli.ray_args import ray_args
from ray_hetero.cli.serve import serve
from ray_hetero.cli.status import status
from ray_hetero.cli.top import top
from ray_hetero.cli.topology import topology
from ray_hetero.cli.tune import tune
from ray_hetero.errors import RayHeteroError

commands = typer.Typer(
    help="One vLLM engine over GPUs and CPU sockets, placed by Ray.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
# Lines of the list of commands, which cuts off longer ones.
commands.command(short_help="NUMA nodes, cores, memory and GPUs of this host.")(topology)
commands.command(short_help="Predict where a model goes, and its speed.")(plan)
commands.command(
    short_help="Serve a model as planned, and compare it with the plan.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(serve)
commands.command(short_help="Measure a running server, or this host.")(bench)
commands.command(
    short_help="Try settings of a server, and print the best command.",
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
)(tune)
commands.command(short_help="The configuration in force, and its sources.")(config)
commands.command(short_help="Diagnose this host and print the fix.")(doctor)
commands.command(short_help="The engines that run on the Ray cluster.")(status)
commands.command(short_help="What the engines do now, page by page.")(top)
commands.command("install-cpu-kernels", short_help="Fetch CPU kernels for a host with GPUs.")(
    install_cpu_kernels
)
commands.command("ray-args", short_help="What to add to `ray start` on this host.")(ray_args)
commands.command("demo-model", short_help="Write a tiny random checkpoint to try.")(demo_model)


@commands.callback(invoke_without_command=True)
def options(
    ctx: typer.Context,
    show_version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True)
    ] = False,
) -> None:
    """One vLLM engine over GPUs and CPU sockets, placed by Ray."""
    if show_version:
        typer.echo(f"ray-hetero {version('ray-hetero')}")
        raise typer.Exit


def app() -> None:
    """Run the command line; what a user or machine can cause is a message and exit status 1."""
    try:
        commands()
    except (RayHeteroError, PlacementError) as error:
        print_problem(error)
        sys.exit(1)

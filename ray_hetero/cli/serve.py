"""`ray-hetero serve`: plan a model, start the planned server, and compare it with the plan."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from placement.words import size
from ray_hetero.cli.plan import plan
from ray_hetero.config_sources import ADDITIONAL_CONFIG
from ray_hetero.errors import ConfigError, StartupError

EVERY_S = 30.0
"""Interval between two comparisons with the plan, in seconds."""
ELSEWHERE = {"--topology", "--cluster", "--compare", "--json", "--svg"}
"""Options of `ray-hetero plan` that show something and start nothing."""
SHOWN_USERS = (1, 4, 16)
PLAN_S = 900.0
"""Longest wait for a plan, in seconds; it may measure the host and build vLLM's class."""
LOUD = (" ERROR ", " CRITICAL ", "ray_hetero: ")
"""Texts in lines of a running server's log that are shown."""


def serve(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or a name on the hub.")],
    log: Annotated[
        Path | None, typer.Option(help="File for the server's log; default is in ~/.local/state.")
    ] = None,
) -> None:
    """Plan a model and serve it as planned: `vllm serve` with the options that the plan prints.

    All other options are those of `ray-hetero plan` and of `vllm serve`.
    """
    options, others = divided(ctx.args)
    found = planned(model, options)
    command = shlex.split(found["command"])
    from ray_hetero.cli.serving.parsers import parser_options

    command += [*parser_options(found["model_type"], others), *others]
    _run(command, log or _log_path(), found)


def divided(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Arguments of `ray-hetero plan`, and those of `vllm serve` that a plan does not know.

    Args:
        arguments: of the user; `--` has no meaning in them.

    Raises:
        ConfigError: one of them has no meaning for a server that is planned.

    """
    known = _plan_options()
    of_plan: list[str] = []
    others: list[str] = []
    left = [argument for argument in arguments if argument != "--"]
    while left:
        argument = left.pop(0)
        name, is_joined, _ = argument.partition("=")
        if name in ELSEWHERE:
            raise ConfigError(f"{name}: expected with `ray-hetero plan`, which starts nothing")
        if name == ADDITIONAL_CONFIG:
            raise ConfigError(
                f"{name}: expected settings as options of `ray-hetero plan`, or in the file that "
                "RAY_HETERO_CONFIG names, so that the plan knows them"
            )
        taken = of_plan if name in known else others
        taken.append(argument)
        if name in known and not is_joined and left:
            taken.append(left.pop(0))
    return of_plan, others


def _plan_options() -> set[str]:
    """Names of the options of `ray-hetero plan`, each of which takes a value."""
    app = typer.Typer()
    app.command()(plan)
    parameters = typer.main.get_command(app).params
    return {name for one in parameters for name in one.opts if name.startswith("-")} - ELSEWHERE


def planned(model: str, options: Sequence[str]) -> Mapping[str, Any]:
    """The plan as JSON; where there is none, this process ends as `ray-hetero plan` does.

    Args:
        model: to plan.
        options: of `ray-hetero plan`.

    Raises:
        StartupError: the plan takes too long, or the model is a configuration without weights.

    """
    command = [str(Path(sys.executable).with_name("ray-hetero")), "plan", model, "--json", *options]
    if os.environ.get("RAY_ADDRESS"):
        command.append("--cluster")
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=False, timeout=PLAN_S
        )
    except subprocess.TimeoutExpired:
        raise StartupError(
            f"no plan in {PLAN_S:g} s. Type: {shlex.join(command)}, which shows what it waits for"
        ) from None
    if done.returncode:
        raise typer.Exit(done.returncode)
    found: Mapping[str, Any] = json.loads(done.stdout)
    if shlex.split(found["command"])[2] != model:
        raise StartupError(
            f"{model}: expected a folder with safetensors files or a name on the hub, found a "
            "configuration without weights. `ray-hetero plan` takes it, a server does not"
        )
    return found


def of_this_environment(command: Sequence[str]) -> list[str]:
    """A command whose program is that beside this Python, which may not be the shell's."""
    return [str(Path(sys.executable).with_name(command[0])), *command[1:]]


def _log_path() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state"
    return Path(state) / "ray_hetero" / f"serve-{os.getpid()}.log"


def _summary(found: Mapping[str, Any]) -> list[str]:
    """Lines about a plan: speed, memory, and its choice."""
    shown = [row for row in found["users"] if row["users"] in SHOWN_USERS]
    rates = ", ".join(f"{row['tokens_per_s']:.1f}" for row in shown)
    users = ", ".join(str(row["users"]) for row in shown)
    return [
        f"{found['model']}: {size(found['weight_bytes'])} of weights. Predicted for {users} users: "
        f"{rates} tokens/s each, with {found['context']:,} tokens of context.",
        *found["notes"][:1],
    ]


def _at_words(text: str, indent: str = "") -> str:
    """A text whose lines end at words on a terminal; one line elsewhere, for programs.

    Args:
        text: one line.
        indent: of the lines below the first.

    """
    if not sys.stdout.isatty():
        return text
    return textwrap.fill(text, shutil.get_terminal_size().columns, subsequent_indent=indent)


def _run(command: Sequence[str], log: Path, found: Mapping[str, Any]) -> None:
    from ray_hetero.cli.serving.server_process import ServerProcess

    for line in _summary(found):
        typer.echo(_at_words(line))
    typer.echo(f"\n$ {shlex.join(command)}\n  log: {log}\n")
    stopped = threading.Event()

    def show(line: str) -> None:
        # vLLM's server logs errors while it ends, too, which are harmless.
        if not stopped.is_set() and any(text in line for text in LOUD):
            typer.echo(line.rstrip("\n"))

    try:
        server = ServerProcess(of_this_environment(command), log, found["weight_bytes"], show)
    except OSError as error:
        raise StartupError(f"{error.filename}: {error.strerror}") from None

    def stop(signum: int, _frame: object) -> None:
        stopped.set()
        server.interrupt()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    # The server has made the folder.
    plan_file = log.with_name(f"{log.name}.plan.json")
    plan_file.write_text(json.dumps(found), encoding="utf-8")
    try:
        took = server.wait_until_healthy()
        typer.echo(f"\nready after {took:.0f} s at {server.address}; Ctrl-C stops it. Try:")
        asked = {"model": _served_name(server.address) or command[2], "prompt": "The old boat"}
        typer.echo(
            f"  curl {server.address}/v1/completions -H 'content-type: application/json' -d "
            f"{shlex.quote(json.dumps(asked))}\n"
            f"  ray-hetero bench --url {server.address} --plan {shlex.quote(str(plan_file))}\n"
        )
        _compare(server.address, found["users"], server.process)
    except StartupError as error:
        if stopped.is_set():
            raise typer.Exit(server.stop()) from None
        raise StartupError(f"{error}\nThe whole log: {log}") from None
    finally:
        status = server.stop()
    if status and not stopped.is_set():
        raise StartupError(
            f"vllm serve ended with status {status}: {server.reason()}\nThe whole log: {log}"
        )
    raise typer.Exit(status)


def _served_name(address: str) -> str:
    """Name of the served model; empty where the server wants a key for that."""
    from ray_hetero.cli.serving.server_process import fetched

    text = fetched(f"{address}/v1/models")
    return "" if text is None else str(json.loads(text)["data"][0]["id"])


def _compare(
    address: str, users: Sequence[Mapping[str, Any]], process: subprocess.Popen[str]
) -> None:
    """Print a line of measured and predicted speed now and then, until the server ends."""
    from ray_hetero.cli.serving.comparison import ask_totals, compared

    last, began = ask_totals(address), time.monotonic()
    while process.poll() is None:
        try:
            process.wait(EVERY_S)
        except subprocess.TimeoutExpired:
            now, asked = ask_totals(address), time.monotonic()
            if last is not None and now is not None:
                line = compared(now - last, asked - began, users)
                if line:
                    typer.echo(_at_words(f"{time.strftime('%H:%M:%S')}  {line}", "          "))
            last, began = now, asked

"""`ray-hetero tune`: the settings that matter, tried on this host one after the other."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from placement.given import numbers, shown
from placement.words import duration
from ray_hetero.cli.serve import divided, of_this_environment, planned
from ray_hetero.errors import ConfigError, StartupError

if TYPE_CHECKING:
    from ray_hetero.cli.serving.load import Measured

MOST_LAYOUTS = 8
MOST_DRAFTS = 16
EXPECTED_CHANCE = 0.7
"""Chance that a draft is accepted, for the plan of a trial; what counts is what is measured."""
ROUNDS = 3
"""Loads of a trial after the first, which finds cold caches; the median counts."""


@dataclass(frozen=True)
class Setting:
    """Options of `ray-hetero plan` that are tried together."""

    name: str
    options: tuple[str, ...] = ()


@dataclass(frozen=True)
class Trial:
    """A setting with what it gave."""

    name: str
    command: tuple[str, ...]
    measured: Measured | None
    problem: str = ""
    """Why there is no measured speed."""

    @property
    def speed(self) -> float:
        """Tokens per second of all users, the time for prompts included; 0 without a speed."""
        return 0.0 if self.measured is None else self.measured.total_per_s


def tune(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="Checkpoint directory, or a name on the hub.")],
    layouts: Annotated[
        int,
        typer.Option(min=1, max=MOST_LAYOUTS, help="Layouts: the planned one and runner-ups."),
    ] = 2,
    lengths: Annotated[
        str | None, typer.Option(help="Longest sequences (--max-model-len) to try, like 32k,8k.")
    ] = None,
    drafts: Annotated[
        str | None, typer.Option(help="Drafts by n-grams to try beside none, like 2,4.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
) -> None:
    """Start a model with one setting after the other, measure each, and print the best command.

    Layouts come first, then lengths, then drafts, each with the best of those before. All other
    options are those of `ray-hetero plan` and of `vllm serve`; --users is the load.
    """
    given, others = divided(ctx.args)
    axes = [
        tuple(Setting(f"length {one}", ("--max-model-len", one)) for one in _words(lengths)),
        tuple(_drafts(drafts)),
    ]
    found = planned(model, [*given, "--compare"])
    first = layout_settings(found, layouts)
    best, kept = None, Setting("")
    for axis in (first, *axes):
        for setting in axis:
            options = [*given, *kept.options, *setting.options]
            name = ", ".join(filter(None, (kept.name, setting.name)))
            trial = _tried(model, name, options, others, prompt_tokens, tokens)
            _show(trial)
            if best is None or trial.speed > best[0].speed:
                best = trial, Setting(name, (*kept.options, *setting.options))
        assert best is not None
        kept = best[1]
    if best is None or best[0].measured is None:
        raise StartupError("none of these settings served; the lines above say why")
    typer.echo(f"\nBest: {best[0].name}\nRun: {shlex.join(best[0].command)}")


def layout_settings(found: Mapping[str, Any], count: int) -> tuple[Setting, ...]:
    """The planned layout and its runner-ups, the shortest predicted step first.

    Args:
        found: what `ray-hetero plan --compare --json` printed.
        count: most settings.

    """
    fitting = [one for one in found.get("candidates", ()) if "decode_step_s" in one]
    settings = [Setting("as planned")]
    for one in fitting[1:count]:
        stages = ", ".join(f"[{', '.join(stage)}]" for stage in one["layout"])
        name, options = f"[{stages}]", ["--layout", f"[{stages}]"]
        if one["expert_ranks"]:
            name += f" + experts on {one['expert_ranks']}"
            options += ["--experts", str(one["expert_ranks"])]
        settings.append(Setting(name, tuple(options)))
    return tuple(settings)


def _words(text: str | None) -> list[str]:
    return [] if text is None else [word.strip() for word in text.split(",")]


def _drafts(text: str | None) -> list[Setting]:
    if text is None:
        return []
    counts = numbers(text)
    if not counts or not all(1 <= count <= MOST_DRAFTS for count in counts):
        raise ConfigError(
            f"--drafts: expected numbers from 1 to {MOST_DRAFTS}, like 2,4; got {shown(text)}"
        )
    return [
        Setting(f"{count} drafts", ("--speculative", f"{count},{EXPECTED_CHANCE}"))
        for count in counts
    ]


def _tried(
    model: str,
    name: str,
    options: Sequence[str],
    others: Sequence[str],
    prompt_tokens: int,
    tokens: int,
) -> Trial:
    """A server of these options, measured and stopped."""
    typer.echo(f"\n{name}")
    try:
        found = planned(model, options)
    except typer.Exit:
        return Trial(name, (), None, "there is no such plan")
    command = (*shlex.split(found["command"]), *others)
    try:
        return Trial(name, command, _measured(command, found, prompt_tokens, tokens))
    except StartupError as error:
        return Trial(name, command, None, str(error).splitlines()[0])


def _measured(
    command: Sequence[str], found: Mapping[str, Any], prompt_tokens: int, tokens: int
) -> Measured:
    from ray_hetero.cli.serving.load import Server
    from ray_hetero.cli.serving.server_process import ServerProcess, free_port

    port = [] if "--port" in command else ["--port", str(free_port())]
    process = ServerProcess(
        [*of_this_environment(command), *port], weight_bytes=found["weight_bytes"]
    )
    try:
        process.wait_until_healthy()
        server = Server(process.address)
        server.check_room(prompt_tokens, tokens)
        rounds = [server.measure(found["batch"], prompt_tokens, tokens) for _ in range(ROUNDS + 1)]
    finally:
        process.stop()
    return sorted(rounds[1:], key=lambda one: one.total_per_s)[ROUNDS // 2]


def _show(trial: Trial) -> None:
    if trial.measured is None:
        typer.echo(f"  not measured: {trial.problem}")
        return
    one = trial.measured
    typer.echo(
        f"  {one.total_per_s:.1f} tokens/s in all, {one.tokens_per_s:.1f} each; first token after "
        f"{duration(one.first_token_s)}"
    )

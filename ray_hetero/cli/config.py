"""`ray-hetero config`: the configuration in force, and where each value is from."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from pydantic import BaseModel

from placement.given import key_of, shown
from ray_hetero.config import read_settings, validated
from ray_hetero.config_sources import ADDITIONAL_CONFIG, ENVIRONMENT_VARIABLE, Merged, Path
from ray_hetero.errors import ConfigError

WIDTH_WITHOUT_TERMINAL = 160
LEFT_TO_VLLM = {
    "layers": "VLLM_PP_LAYER_PARTITION",
    "serving.step_timeout_s": "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS",
}
"""Key → the variable of vLLM's that decides where the key has its default."""
NOT_READ = {
    "VLLM_CPU_KVCACHE_SPACE": "cpu.kv_cache_gib",
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "cpu.reserved_cores",
    "VLLM_CPU_OMP_THREADS_BIND": "cpu.cores",
    "GLOO_SOCKET_IFNAME": "exchange.interface",
}
"""A variable that ranks of this backend do not go by → the key that is in its place."""


@dataclass(frozen=True)
class Row:
    """One key of the configuration in force."""

    key: str
    value: object
    source: str
    """`default`, `file`, `environment` or `additional_config`."""
    origin: str | None
    """The source by name, such as `RAY_HETERO_CONFIG=/etc/ray_hetero.yaml`; None for a default."""


def config(
    additional_config: Annotated[
        str | None,
        typer.Option(
            ADDITIONAL_CONFIG, help="What `vllm serve` would be given, as JSON.", metavar="JSON"
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable output.")] = False,
) -> None:
    """Print the configuration in force here, and where each value is from.

    The file is the one that RAY_HETERO_CONFIG names; type RAY_HETERO_CONFIG=FILE before the
    command to check another.
    """
    given = read_settings(_parsed(additional_config))
    rows = list(rows_of(validated(given), given))
    notes = list(_notes())
    if as_json:
        typer.echo(json.dumps({"keys": [asdict(row) for row in rows], "notes": notes}, indent=2))
    else:
        _show(rows, notes)


def rows_of(section: BaseModel, given: Merged, above: Path = ()) -> Iterator[Row]:
    """Every key of a section with its value and its source, those of sections in it too."""
    for name in type(section).model_fields:
        value, path = getattr(section, name), (*above, name)
        if isinstance(value, BaseModel):
            yield from rows_of(value, given, path)
        elif isinstance(value, dict) and value:
            for key, entry in value.items():
                yield _row((*path, key), entry, given)
        else:
            yield _row(path, value, given)


def _row(path: Path, value: object, given: Merged) -> Row:
    key = key_of(path)
    source = given.origins.get(path)
    variable = LEFT_TO_VLLM.get(key)
    is_left = value in ("auto", None)
    if is_left and variable is not None and (said := os.environ.get(variable)):
        return Row(key, said, "environment", variable)
    if source is None:
        return Row(key, value, "default", None)
    return Row(key, value, source.kind, source.name)


def _notes() -> Iterator[str]:
    for variable, key in NOT_READ.items():
        if value := os.environ.get(variable):
            yield f"{variable}={value} is not read by ranks of ray_hetero; {key} decides"


def _parsed(text: str | None) -> Any:
    if text is None:
        return None
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{ADDITIONAL_CONFIG}: not JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{ADDITIONAL_CONFIG}: nested too deeply") from None
    if not isinstance(found, dict):
        raise ConfigError(
            f"{ADDITIONAL_CONFIG}: expected an object, got {shown(found)}; "
            f'type: {ADDITIONAL_CONFIG} \'{{"ray_hetero": {{"max_restarts": 3}}}}\''
        )
    return found


def _show(rows: list[Row], notes: list[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH_WITHOUT_TERMINAL)
    table = Table(box=None, pad_edge=False)
    for column in ("key", "value", "from"):
        table.add_column(column, justify="left", overflow="fold")
    for row in rows:
        style = "dim" if row.source == "default" else "bold"
        cells = (row.key, json.dumps(row.value, ensure_ascii=False), row.origin or row.source)
        table.add_row(*(Text(cell) for cell in cells), style=style)
    console.print(table)
    if ENVIRONMENT_VARIABLE not in os.environ:
        console.print(f"no file: {ENVIRONMENT_VARIABLE} is not set")
    for note in notes:
        console.print(Text(f"note: {note}"))

"""Write docs/api.md's tables of what is public, from the signatures and docstrings of the code.

    python tools/write_api_page.py

What is public is listed here; everything else may change from one release to the next.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from typing import Any

import typer
from page_blocks import DOCS, replaced, rewrite, table

from ray_hetero.cli.main import commands
from ray_hetero.observability.metrics import BY_NAME, LABELS, PREFIX, REASON

PAGE = DOCS / "api.md"
MARKS = {
    part: (f"<!-- {part}: written by tools/write_api_page.py -->", f"<!-- end of {part} -->")
    for part in ("names", "errors", "commands", "metrics")
}
PUBLIC = {
    "ray_hetero.executor": ("HeteroExecutor",),
    "ray_hetero.config": ("HeteroConfig", "load_config"),
    "ray_hetero.observability.status": ("running_engines", "EngineStatus"),
    "ray_hetero.cli.demo.model": ("write_demo_model", "DemoShape"),
}
"""Module → its public names, errors left out."""
ERRORS = ("ray_hetero.errors", "placement.errors")
"""Modules whose classes are all public."""


def public() -> Iterator[tuple[str, str, Any]]:
    """Module, name and object of everything that is public but errors."""
    for module, names in PUBLIC.items():
        for name in names:
            yield module, name, getattr(importlib.import_module(module), name)


def errors() -> Iterator[tuple[str, type[Exception]]]:
    """Module and class of every error, bases first."""
    for module in ERRORS:
        for found in vars(importlib.import_module(module)).values():
            if isinstance(found, type) and found.__module__ == module:
                yield module, found


def first_line(found: Any) -> str:
    """The sentence that an object's docstring begins with."""
    return " ".join((inspect.getdoc(found) or "").partition("\n\n")[0].split())


def members(found: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties of a class with their signatures and meanings."""
    for name, member in vars(found).items():
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property):
            yield name, first_line(member)
        elif inspect.isfunction(member):
            yield f"{name}{signature(member)}", first_line(member)


def signature(found: Any) -> str:
    """Parameters as one writes them, without types and without self."""
    names = []
    for parameter in inspect.signature(found).parameters.values():
        if parameter.name != "self":
            is_needed = parameter.default is inspect.Parameter.empty
            names.append(parameter.name if is_needed else f"{parameter.name}={parameter.default!r}")
            if parameter.kind is inspect.Parameter.KEYWORD_ONLY and "*" not in names:
                names.insert(-1, "*")
    return f"({', '.join(names)})"


def names_table() -> str:
    """Classes and functions; of `HeteroConfig` and executors their own pages tell."""
    rows = []
    for module, name, found in public():
        if inspect.isfunction(found):
            rows.append((f"`{module}.{name}{signature(found)}`", first_line(found)))
            continue
        rows.append((f"`{module}.{name}`", first_line(found)))
        if name == "EngineStatus":
            rows += [(f"`EngineStatus.{member}`", said) for member, said in members(found)]
    return table(("name", "meaning"), rows)


def errors_table() -> str:
    """Every class of error with its base."""
    rows = (
        (f"`{module}.{found.__name__}`",
         ", ".join(f"`{base.__name__}`" for base in found.__bases__), first_line(found))
        for module, found in errors()
    )  # fmt: skip
    return table(("error", "bases", "meaning"), rows)


def parameters(command: Any) -> Iterator[str]:
    """Arguments and options of one of typer's commands as one types them."""
    for parameter in command.params:
        if parameter.param_type_name == "argument":
            yield f"`{parameter.name.upper()}`"
        elif parameter.opts[0] != "--help":
            yield f"`{parameter.opts[0]}`" if parameter.is_flag else f"`{parameter.opts[0]} …`"


def commands_table() -> str:
    """Every command with its meaning and parameters."""
    group: Any = typer.main.get_command(commands)
    rows = (
        (f"`ray-hetero {name}`", re.sub(r"\s+", " ", command.help or "").strip(),
         ", ".join(parameters(command)) or "–")
        for name, command in group.commands.items()
    )  # fmt: skip
    return table(("command", "meaning", "arguments and options"), rows)


def metrics_table() -> str:
    """Every metric as a scrape shows it."""
    rows = ((f"`{PREFIX}{name}_total`", some[0].help) for name, some in BY_NAME.items())
    labels = [f"`{label}`" for label in LABELS]
    named = f"{', '.join(labels[:-1])} and {labels[-1]}"
    return table(("counter", "meaning"), rows) + (
        f"\n\nAll of them have the labels {named}; steps by reason have the label `{REASON}` too."
    )


def written(page: str) -> str:
    """The page with its tables written anew.

    Raises:
        ValueError: the page has lost one of the marks.

    """
    parts = {
        "names": names_table(), "errors": errors_table(), "commands": commands_table(),
        "metrics": metrics_table(),
    }  # fmt: skip
    for part, content in parts.items():
        page = replaced(page, *MARKS[part], content)
    return page


if __name__ == "__main__":
    rewrite(PAGE, written)

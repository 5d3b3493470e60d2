"""Write the table of all keys into docs/configuration.md, from the configuration's own model.

    python tools/write_configuration_page.py

Types, defaults and meanings come from `ray_hetero.config`; the text around the table is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from page_blocks import DOCS, replaced, rewrite, table
from pydantic import BaseModel

from ray_hetero.config import HeteroConfig

PAGE = DOCS / "configuration.md"
BEGIN = "<!-- keys: written by tools/write_configuration_page.py -->"
END = "<!-- end of keys -->"
WORDS = {
    "integer": "whole number",
    "number": "number",
    "string": "text",
    "null": "`null`",
    "boolean": "`true`, `false`",
}
BOUNDS = {
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
}


def keys_of(section: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, str, str]]:
    """Key, values, default and meaning of every setting, sections opened."""
    schemas = section.model_json_schema()["properties"]
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys_of(kind, f"{prefix}{name}.")
        else:
            meaning = " ".join((field.description or "").split())
            yield f"{prefix}{name}", values(schemas[name]), _text(field.default), meaning


def values(schema: dict[str, Any]) -> str:
    """Values that a JSON schema allows, in words."""
    if "anyOf" in schema:
        return " or ".join(values(one) for one in schema["anyOf"])
    if "const" in schema:
        return _text(schema["const"])
    if "enum" in schema:
        return ", ".join(_text(value) for value in schema["enum"])
    if schema["type"] == "array":
        return f"list of ({values(schema['items'])})"
    if schema["type"] == "object":
        return "names with text values"
    bounds = [f"{word} {schema[key]:g}" for key, word in BOUNDS.items() if key in schema]
    return " ".join([WORDS[schema["type"]], " and ".join(bounds)]).strip()


def _text(value: object) -> str:
    return f"`{value if isinstance(value, str) else json.dumps(value)}`"


def written(page: str) -> str:
    """The page with its table written anew.

    Raises:
        ValueError: the page has lost one of the two marks between which the table is.

    """
    rows = ((f"`{key}`", *more) for key, *more in keys_of(HeteroConfig))
    return replaced(page, BEGIN, END, table(("key", "values", "default", "meaning"), rows))


if __name__ == "__main__":
    rewrite(PAGE, written)

"""JSON files that people write: one meaning, or an error that says what is wrong.

As in `placement.yaml_file`, a key that comes twice is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn


class JsonError(ValueError):
    """The file cannot be read, is not JSON, or has no single meaning."""


def read_json(path: str | Path) -> object:
    """Content of a file; None where it is empty.

    Raises:
        JsonError: it cannot be read, is not JSON, or a key comes twice.

    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise JsonError(f"the file cannot be read: {error}") from None
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_refuse)
    except JsonError:
        raise
    except ValueError as error:
        raise JsonError(f"not JSON: {error}") from None
    except RecursionError:
        raise JsonError("not JSON that can be read: nested too deeply") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise JsonError(f"not JSON with one meaning: key {key!r} comes twice")
        found[key] = value
    return found


def _refuse(word: str) -> NoReturn:
    raise JsonError(f"not JSON: {word} is no number")

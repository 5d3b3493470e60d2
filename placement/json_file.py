"""JSON files that people write: one meaning, or an error that says what is wrong.

As in `placement.yaml_file`, a key that comes twice is refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

from placement.text_file import FileError, read_text


def read_json(path: str | Path) -> object:
    """Content of a file; None where it is empty.

    Raises:
        FileError: it cannot be read, is not JSON, or a key comes twice.

    """
    text = read_text(path)
    if not text.strip():
        return None
    try:
        return json.loads(text, object_pairs_hook=_once_each, parse_constant=_refuse)
    except FileError:
        raise
    except ValueError as error:
        raise FileError(f"not JSON: {error}") from None
    except RecursionError:
        raise FileError("not JSON that can be read: nested too deeply") from None


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise FileError(f"not JSON with one meaning: key {key!r} comes twice")
        found[key] = value
    return found


def _refuse(word: str) -> NoReturn:
    raise FileError(f"not JSON: {word} is no number")

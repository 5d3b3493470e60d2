"""YAML files that people write: one meaning, or an error that says what is wrong.

Stricter than YAML 1.1, where `010` is eight, `1:30` is ninety, `no` is false, and the second of
two equal keys silently wins.  Here numbers are decimal, truth is `true` or `false`, and a key that
comes twice is refused.  Anchors may repeat values, but only as far as a person could have written
them out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.constructor import ConstructorError

from placement.given import shown
from placement.text_file import FileError, read_text

TAG = "tag:yaml.org,2002:"
MOST_VALUES = 100_000
"""Limit of the values of a file with those that aliases repeat."""


@dataclass(frozen=True)
class _Kind:
    """Values that are no text without quotes around them."""

    name: str
    pattern: re.Pattern[str]
    first: str
    """Characters that such a value may begin with."""
    value: Callable[[str], object]

    def construct(self, loader: yaml.SafeLoader, node: yaml.ScalarNode) -> object:
        """The value of a node; with an explicit tag it may not look like one."""
        text = loader.construct_scalar(node)
        if not self.pattern.fullmatch(text):
            raise ConstructorError(None, None, f"{text!r} is no {self.name}", node.start_mark)
        return self.value(text)


def _float(text: str) -> float:
    return float(re.sub(r"\.(?=[in])", "", text.lower()))


_KINDS = (
    _Kind("null", re.compile(r"~|null|Null|NULL|"), "~nN", lambda text: None),
    _Kind("bool", re.compile(r"(?i:true|false)"), "tTfF", lambda text: text.lower() == "true"),
    _Kind("int", re.compile(r"[-+]?(0|[1-9][0-9]*)"), "-+0123456789", int),
    _Kind(
        "float",
        re.compile(
            r"[-+]?(\.[0-9]+|(0|[1-9][0-9]*)(\.[0-9]*)?)([eE][-+]?[0-9]+)?"
            r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
        ),
        "-+.0123456789",
        _float,
    ),
)
"""Kinds of plain scalars in the order of matching: a whole number looks like a float too."""


class _OneMeaning(yaml.SafeLoader):
    """Text, lists, mappings without a key twice, and the kinds above; no other tags."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012
    yaml_constructors: ClassVar[dict[str | None, Any]] = {
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (f"{TAG}str", f"{TAG}seq", f"{TAG}map", None)
    }

    def construct_mapping(
        self, node: yaml.MappingNode, deep: bool = False
    ) -> dict[Hashable, object]:
        """Refuse what a dictionary would quietly swallow."""
        seen: set[tuple[str, str]] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                name = (key.tag, key.value)
                if name in seen:
                    raise ConstructorError(
                        None, None, f"key {key.value!r} comes twice", key.start_mark
                    )
                seen.add(name)
        return super().construct_mapping(node, deep)


for _kind in _KINDS:
    _OneMeaning.add_constructor(TAG + _kind.name, _kind.construct)
    _OneMeaning.add_implicit_resolver(
        # The resolver only matches at the beginning.
        TAG + _kind.name, re.compile(f"(?:{_kind.pattern.pattern})$"), [*_kind.first]
    )  # fmt: skip
_OneMeaning.add_implicit_resolver(f"{TAG}null", re.compile("$"), [""])


def _values(node: yaml.Node, known: dict[yaml.Node, int]) -> int:
    """Values of a node, those of aliases as often as they come; too many where it is in itself."""
    if node in known:
        return known[node]
    known[node] = MOST_VALUES + 1
    inner: list[yaml.Node] = []
    if isinstance(node, yaml.SequenceNode):
        inner = node.value
    elif isinstance(node, yaml.MappingNode):
        inner = [one for pair in node.value for one in pair]
    known[node] = min(MOST_VALUES + 1, 1 + sum(_values(one, known) for one in inner))
    return known[node]


def read_yaml(path: str | Path) -> object:
    """Content of a file; None where it is empty.

    Raises:
        FileError: it cannot be read, is not YAML, or a key comes twice.

    """
    text = read_text(path)
    try:
        loader = _OneMeaning(text)
        node = loader.get_single_node()
        if node is None:
            return None
        if _values(node, {}) > MOST_VALUES:
            raise FileError(
                f"not YAML that can be used: its aliases (*name) repeat more than {MOST_VALUES:,} "
                "values, or repeat themselves; write the values out"
            )
        return loader.construct_document(node)
    except FileError:
        raise
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = "" if mark is None else f"line {mark.line + 1}, column {mark.column + 1}: "
        problem = shown(error.problem or error.context).strip("'\"")
        raise FileError(f"not YAML: {place}{problem}") from None
    except yaml.reader.ReaderError as error:
        raise FileError(
            f"not YAML: character #x{error.character:04x} at position {error.position}: "
            f"{error.reason}"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise FileError(f"not YAML: {shown(str(error))}") from None
    except RecursionError:
        raise FileError("not YAML that can be read: nested too deeply") from None

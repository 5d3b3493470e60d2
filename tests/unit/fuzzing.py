"""What the fuzz tests share: values from nowhere, and good values with something wrong in them."""

from __future__ import annotations

import copy
import math
from typing import Any

from hypothesis import strategies as st

ODD_NUMBERS = st.sampled_from(
    [0, -1, -0.0, 10**9, 10**18, 10**400, 2**63, 1e-320, 1e300, math.inf, -math.inf, math.nan]
)
SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats() | ODD_NUMBERS | st.text(max_size=8)
    | st.sampled_from(["auto", "cpu", "gpu", "numa", "", " ", "\x00", "\n", "ü", "\udcff", "0x10"])
)  # fmt: skip
KEYS = st.sampled_from(["cpu", "gpu", "env", "cores", "layout", "layers", "nodes", "name", "[key]"])
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(KEYS | st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=12,
)
"""Anything that JSON can hold, and a few things more."""


def places(value: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside nested dictionaries and lists."""
    inner: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        inner = list(value.items())
    elif isinstance(value, list):
        inner = list(enumerate(value))
    return [path] + [place for key, one in inner for place in places(one, (*path, key))]


def changed(value: Any, path: tuple[Any, ...], new: Any, *, drop: bool) -> Any:
    """A copy with the value at a path replaced or taken out."""
    if not path:
        return new
    result = copy.deepcopy(value)
    inside = result
    for key in path[:-1]:
        inside = inside[key]
    if drop:
        del inside[path[-1]]
    else:
        inside[path[-1]] = new
    return result


@st.composite
def damaged(draw: st.DrawFn, good: st.SearchStrategy[Any]) -> Any:
    """A good value with one to three of its parts replaced, taken out or added."""
    value = draw(good)
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(places(value)))
        value = changed(value, path, draw(JSON), drop=draw(st.booleans()))
        if isinstance(value, dict) and draw(st.integers(0, 9)) == 0:
            value = {**value, draw(KEYS | st.text(max_size=5)): draw(JSON)}
    return value


@st.composite
def scratched(draw: st.DrawFn, good: st.SearchStrategy[str]) -> str:
    """A good text with characters replaced, taken out, doubled or put in."""
    text = draw(good)
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(text)))
        end = draw(st.integers(at, min(len(text), at + 12)))
        new = draw(
            st.sampled_from(["", "\n", "\t", ": ", "- ", "{", "}", "[", "]", "&a ", "*a", "!!int "])
            | st.just(text[at:end] * 2)
            | st.text(max_size=3)
        )
        text = text[:at] + new + text[end:]
    return text

"""Docstrings stand alone: subject first, then unit or shape."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("ray_hetero", "placement", "benchmarks", "examples", "tools")
FRAGMENTS = {
    "Above", "After", "Among", "As", "At", "Before", "Behind", "Below", "Beside", "Between",
    "By", "For", "From", "Has", "How", "If", "In", "Into", "Is", "It", "Its", "None", "Nothing",
    "Of", "On", "Or", "Per", "Since", "Than", "That", "Their", "Theirs", "There", "They",
    "This", "Those", "Through", "To", "Under", "Until", "Up", "What", "When", "Where", "Which",
    "Who", "Whose", "With", "Without",
}  # fmt: skip
"""First words of docstrings whose subject is in the attribute's name or beside it."""


def attribute_docstrings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and text of each string that follows an assignment."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list):
            continue
        for before, after in pairwise(body):
            if (
                isinstance(before, ast.Assign | ast.AnnAssign)
                and isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            ):
                yield after.lineno, after.value.value


def fragments(source: str) -> list[tuple[int, str]]:
    """Line and first line of each attribute's docstring that does not name its subject."""
    return [
        (line, text.strip().splitlines()[0])
        for line, text in attribute_docstrings(ast.parse(source))
        if (text.split() or [""])[0].rstrip(",:;.") in FRAGMENTS
    ]


@pytest.mark.parametrize(
    "text", ["Of what the MLP adds.", "As `X.biases`.", "Theirs, bf16.", "None for a GPU rank."]
)
def test_a_fragment_is_found_by_its_first_word(text: str) -> None:
    source = f'class Layer:\n    norm: object\n    """{text}"""\n'
    assert fragments(source) == [(3, text)]


@pytest.mark.parametrize(
    "text", ["Norm of the MLP's output; None for none.", "Whether it adds.", "[N, K], float32."]
)
def test_a_docstring_with_a_subject_is_no_fragment(text: str) -> None:
    assert fragments(f'norm = 1\n"""{text}"""\n') == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_of_attributes_name_their_own_subject(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in fragments(path.read_text(encoding="utf-8"))
    ]
    assert not found, "start with the subject, then its unit or shape:\n" + "\n".join(found)


RIDDLES = ("What", "Have")
"""First words of docstrings of modules, classes and functions that name no subject."""


def riddles(source: str) -> list[str]:
    """First line of each docstring that begins with one of `RIDDLES`."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [
        ast.get_docstring(node) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, documented)
    ]
    return [
        text.splitlines()[0] for text in texts if text.split()[:1] and text.split()[0] in RIDDLES
    ]


@pytest.mark.parametrize(
    "source",
    ['"""What a rank holds."""', 'class Rank:\n    """What computes."""\n',
     'def start() -> None:\n    """Have the ranks start."""\n'],
)  # fmt: skip
def test_a_riddle_is_found_in_modules_classes_and_functions(source: str) -> None:
    assert len(riddles(source)) == 1
    assert riddles(source.replace("What", "Weights that").replace("Have", "Make")) == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_begin_with_a_noun_or_a_verb(folder: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in sorted((ROOT / folder).rglob("*.py"))
        for text in riddles(path.read_text(encoding="utf-8"))
    ]
    assert not found, "begin with the subject, or with the verb of the action:\n" + "\n".join(found)

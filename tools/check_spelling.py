"""Check the spelling of pages, docstrings, comments and messages; British where both exist.

    python tools/check_spelling.py [FILE …]

Each file's prose is written into a folder of its own, with code blanked and lines kept, and
codespell reads that: names of other projects' options, such as vLLM's `quantization`, are code and
not prose.  A comment `codespell:ignore` spares its line.  Exits with 1 where a word is wrong.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path

import codespell_lib

ROOT = Path(__file__).resolve().parent.parent
WORDS = ROOT / "tools" / "spelling"
BUILTIN = "clear,rare,usage"
"""Dictionaries of codespell: certain mistakes, rare words that often are one, and usage."""
AMERICAN = Path(codespell_lib.__file__).parent / "data" / "dictionary_en-GB_to_en-US.txt"
LEFT_OUT = ("benchmarks/results/", "tests/unit/data/", "README.ko.md")
"""Written by programs, or in another language."""
SUFFIXES = {
    ".py", ".pyi", ".md", ".yml", ".yaml", ".toml", ".h", ".cpp", ".conf", ".service", ".sh",
}  # fmt: skip
NAMES = {"Makefile", "Containerfile", "run"}
CODE = (
    re.compile(r"`[^`]*`"),
    re.compile(r"\]\([^)\s]+\)"),
    re.compile(r"https?://\S+"),
    re.compile(r"<[^>\n]+>"),
    # Options, paths, calls and names: `--quantization`, `a/b`, `f(`, `a_b`, `a.b`, `a=`, `{a}`.
    re.compile(r"--[\w-]+|[\w.\-]*[/_=(][\w./=\-]*|\w+\.[a-z_]\w+|\{[^{}]*\}|\$\w+"),
)


def british_words() -> str:
    """Lines for codespell from the American form of a word to the British one.

    They are those of codespell's own British list, read backwards, without words that British has
    too (a program, a meter, a story), and what `british.txt` adds.
    """
    both = set((WORDS / "both.txt").read_text(encoding="utf-8").split())
    pairs = (line.split("->") for line in AMERICAN.read_text(encoding="utf-8").split())
    lines = [f"{american}->{british}" for british, american in pairs if american not in both]
    own = (WORDS / "british.txt").read_text(encoding="utf-8").split()
    return "\n".join(sorted({*lines, *own})) + "\n"


def blanked(text: str) -> str:
    """The text with its code replaced by nothing but line breaks."""
    for pattern in CODE:
        text = pattern.sub(lambda found: "\n" * found[0].count("\n") or " ", text)
    return text


def prose_of_page(text: str) -> str:
    """A Markdown page without its fenced blocks."""
    fence = re.compile(r"^ *```.*?^ *```$", re.M | re.S)
    return fence.sub(lambda found: "\n" * found[0].count("\n"), text)


def _strings(tree: ast.AST) -> Iterator[ast.Constant]:
    """Docstrings and messages: string literals of several words."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value:
            yield node


def prose_of_python(text: str) -> str:
    """Comments, docstrings and messages, each on the line where it begins."""
    lines = [""] * (text.count("\n") + 2)
    for node in _strings(ast.parse(text)):
        for offset, line in enumerate(node.value.split("\n")):
            at = min(node.lineno - 1 + offset, len(lines) - 1)
            lines[at] += " " + line
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] += " " + token.string
    return "\n".join(lines)


def prose_of_cpp(text: str) -> str:
    """Comments and messages."""
    lines = []
    for line in text.split("\n"):
        code, _, comment = line.partition("//")
        messages = [part for part in re.findall(r'"([^"]*)"', code) if " " in part]
        lines.append(" ".join([*messages, comment]))
    return "\n".join(lines)


def prose(path: Path) -> str:
    """Prose of a file, on the lines where it stands."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".md":
            text = prose_of_page(text)
        case ".py" | ".pyi":
            text = prose_of_python(text)
        case ".h" | ".cpp":
            text = prose_of_cpp(text)
    return blanked(text)


def files() -> list[str]:
    """All tracked files, and new ones, that hold prose."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    return [
        name
        for name in listed.stdout.splitlines()
        if (Path(name).suffix in SUFFIXES or Path(name).name in NAMES)
        and not name.startswith(LEFT_OUT)
        and (ROOT / name).is_file()
    ]


def misspelt(names: list[str]) -> str:
    """Report of codespell about these files, one line for each wrong word."""
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            # In a folder of their own: codespell takes a pyproject.toml beside it for its settings.
            target = Path(folder, "prose", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(prose(ROOT / name), encoding="utf-8")
        british = Path(folder, ".british")
        british.write_text(british_words(), encoding="utf-8")
        command = [
            *(sys.executable, "-m", "codespell_lib", "--builtin", BUILTIN),
            *("--dictionary", "-", "--dictionary", str(british)),
            *("--quiet-level", "2", "--check-hidden", "--", *(f"prose/{name}" for name in names)),
        ]
        found = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if found.returncode not in (0, 65):
        raise RuntimeError(f"codespell ended with {found.returncode}:\n{found.stderr}")
    return re.sub(r"^prose/", "", found.stdout, flags=re.M)


def main() -> int:
    """Check the files that are named, or all."""
    names = [str(Path(name).resolve().relative_to(ROOT)) for name in sys.argv[1:]] or files()
    found = misspelt(names)
    print(found, end="")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

"""Print modules and lines of ray_hetero by room, and what commits have added to them.

    python tools/count_modules.py
    python tools/count_modules.py --since v0.1.0
    python tools/count_modules.py --since v0.1.0 --apart 1a2b3c4 5d6e7f8
    python tools/count_modules.py --since 6540e025 --apart @tools/features_apart.txt

Since a commit, each later one that changes modules is listed with what it adds, so that features
and changes of structure can be told apart: `--apart` counts the named commits by themselves.  A
file of them has a commit a line, whatever follows it, and comments behind a #.
"""

from __future__ import annotations

import argparse
import subprocess
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "ray_hetero"


@dataclass(frozen=True)
class Size:
    """Number of modules and of their lines, or a change of both."""

    modules: int = 0
    lines: int = 0

    def __add__(self, other: Size) -> Size:
        """Both together."""
        return Size(self.modules + other.modules, self.lines + other.lines)

    def __str__(self) -> str:
        """In columns."""
        return f"{self.modules:5d} {self.lines:7d}"


@dataclass(frozen=True)
class Change:
    """Modules and lines that a commit adds, fewer than none if it removes more."""

    commit: str
    subject: str
    size: Size


def rooms(root: Path = ROOT) -> dict[str, Size]:
    """Size of each room, and of the modules beside them as ""."""
    sizes: dict[str, Size] = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root / PACKAGE).parts
        room = parts[0] if len(parts) > 1 else ""
        own = Size(1, len(path.read_text(encoding="utf-8").splitlines()))
        sizes[room] = sizes.get(room, Size()) + own
    return sizes


def changes(log: Iterable[str]) -> list[Change]:
    """Changes of commits, as `git log --format=@%h%x20%s --numstat --summary` prints them."""
    found: list[Change] = []
    for line in log:
        if line.startswith("@"):
            commit, _, subject = line.removeprefix("@").partition(" ")
            found.append(Change(commit, subject, Size()))
            continue
        words = line.split()
        added = Size()
        if words[:2] in (["create", "mode"], ["delete", "mode"]) and line.endswith(".py"):
            added = Size(1 if words[0] == "create" else -1)
        elif len(words) > 2 and words[0].isdigit() and line.rstrip("}").endswith(".py"):
            added = Size(0, int(words[0]) - int(words[1]))
        if found:
            last = found[-1]
            found[-1] = Change(last.commit, last.subject, last.size + added)
    return [one for one in found if one.size != Size()]


def changes_since(commit: str) -> list[Change]:
    """Changes of the commits behind one, the oldest first.

    Raises:
        subprocess.CalledProcessError: git knows no such commit.

    """
    command = ["git", "log", "--reverse", "--no-renames", "--numstat", "--summary",
               "--format=@%h %s", f"{commit}..HEAD", "--", PACKAGE]  # fmt: skip
    log = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return changes(log.splitlines())


def apart(found: Iterable[Change], named: Sequence[str]) -> tuple[Size, Size]:
    """Sums of the commits that are named, by the beginnings of their hashes, and of all others."""
    sums: Counter[tuple[bool, str]] = Counter()
    for one in found:
        is_named = one.commit.startswith(tuple(named)) if named else False
        sums[is_named, "modules"] += one.size.modules
        sums[is_named, "lines"] += one.size.lines
    of_named, others = (Size(sums[own, "modules"], sums[own, "lines"]) for own in (True, False))
    return of_named, others


class Parser(argparse.ArgumentParser):
    """Parser of a command line, and of files with commits (`@file`)."""

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        """The commit that a line of a file names, if it names one."""
        return arg_line.partition("#")[0].split()[:1]


def parser() -> Parser:
    """The parser of this script."""
    found = Parser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        fromfile_prefix_chars="@",
    )
    found.add_argument("--since", metavar="COMMIT", help="commit before the first one listed")
    found.add_argument("--apart", metavar="COMMIT", nargs="+", default=[])
    return found


def main() -> None:
    """Print the tables."""
    options = parser().parse_args()
    sizes = rooms()
    print("modules lines  room")
    for room, size in sizes.items():
        print(f"{size}  {room or 'beside the rooms'}")
    now = sum(sizes.values(), Size())
    print(f"{now}  all")
    if options.since is None:
        return
    found = changes_since(options.since)
    print("\nmodules lines  commit")
    for one in found:
        mark = " *" if options.apart and one.commit.startswith(tuple(options.apart)) else ""
        print(f"{one.size}  {one.commit}{mark} {one.subject}")
    named, others = apart(found, options.apart)
    before = Size(now.modules - named.modules - others.modules,
                  now.lines - named.lines - others.lines)  # fmt: skip
    print(f"\n{before}  before\n{named}  commits named with --apart (*)\n{others}  all others")
    print(f"{before + named}  before, with the named commits alone")
    print(f"{before + others}  now, without the named commits")


if __name__ == "__main__":
    main()

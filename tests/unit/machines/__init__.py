"""Machines as the literal content of their /sys and /proc files.

Each YAML file has `files` and what is expected of them, written by hand.  A path with a range such
as `cpu{0-55}` stands for one file for each number; `{n}`, `{n+112}` in its content are computed
from that number.  Nothing here knows how the files are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
NAMES = sorted(path.stem for path in FOLDER.glob("*.yaml"))


def load(name: str) -> dict[str, Any]:
    """The whole YAML file of a machine."""
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text(encoding="utf-8"))


def write_tree(name: str, root: Path) -> Path:
    """Write the machine's files below `root`."""
    for path, content in load(name)["files"].items():
        for number in _numbers(path):
            target = root / re.sub(r"\{\d+-\d+\}", str(number), path)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_filled(str(content), number))
    return root


def _numbers(path: str) -> range:
    match = re.search(r"\{(\d+)-(\d+)\}", path)
    return range(int(match[1]), int(match[2]) + 1) if match else range(1)


def _filled(content: str, number: int) -> str:
    return re.sub(r"\{n([+-]\d+)?\}", lambda match: str(number + int(match[1] or 0)), content)

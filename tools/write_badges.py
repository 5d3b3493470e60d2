"""Write the badges of README into docs/badges/: licence, versions of Python, releases of vLLM.

    python tools/write_badges.py

They are pictures in the repository: no other host is asked for them when a page is read.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

from page_blocks import DOCS

from ray_hetero.supported import SUPPORTED_VLLM, UNTRIED

FOLDER = DOCS / "badges"
CHARACTER, PADDING, HEIGHT = 6.7, 8, 20
"""Pixels: width of a letter at the font's size, space beside a text, and the badge's height."""
BADGE = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" role="img" \
aria-label="{name}: {value}"
     font-family="Verdana, sans-serif" font-size="11" text-anchor="middle" fill="#fff">
  <clipPath id="round"><rect width="{width}" height="{height}" rx="3"/></clipPath>
  <g clip-path="url(#round)">
    <rect width="{left}" height="{height}" fill="#4b5563"/>
    <rect x="{left}" width="{right}" height="{height}" fill="#2f6fb0"/>
  </g>
  <text x="{name_at:g}" y="14" textLength="{name_length}">{name}</text>
  <text x="{value_at:g}" y="14" textLength="{value_length}">{value}</text>
</svg>
"""


def badge(name: str, value: str) -> str:
    """Picture of a name and its value.

    Args:
        name: on the left.
        value: on the right.

    """
    lengths = [round(CHARACTER * len(text)) for text in (name, value)]
    left, right = (length + 2 * PADDING for length in lengths)
    return BADGE.format(
        name=name, value=value, width=left + right, height=HEIGHT, left=left, right=right,
        name_at=left / 2, name_length=lengths[0],
        value_at=left + right / 2, value_length=lengths[1],
    )  # fmt: skip


def values(project: Mapping[str, Any]) -> dict[str, tuple[str, str]]:
    """Name and value of each badge, by its file.

    Args:
        project: the table `project` of pyproject.toml.

    """
    named = [text.rpartition(" :: ")[2] for text in project["classifiers"]]
    pythons = [text for text in named if text.startswith("3.")]
    releases = [
        f"{minor} (partly tested)" if minor in UNTRIED else minor for minor in SUPPORTED_VLLM
    ]
    return {
        "licence.svg": ("licence", project["license"]),
        "python.svg": ("Python", f"{pythons[0]} – {pythons[-1]}"),
        "vllm.svg": ("vLLM", " | ".join(releases)),
    }


def written() -> dict[str, str]:
    """Text of each badge, by its file."""
    text = (DOCS.parent / "pyproject.toml").read_text(encoding="utf-8")
    found = values(tomllib.loads(text)["project"])
    return {file: badge(*both) for file, both in found.items()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for file, text in written().items():
        (FOLDER / file).write_text(text, encoding="utf-8")

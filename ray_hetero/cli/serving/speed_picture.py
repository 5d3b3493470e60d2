"""Measured speeds of a server beside predicted ones, as an SVG for light and dark pages."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from placement.plan.svg import FONT
from placement.words import plural
from ray_hetero.cli.serving.load import Measured

WIDTH, LEFT, RIGHT = 640, 96, 130
TOP, BAR, GAP = 84, 18, 22
STYLE = """\
.ink{fill:#1d2733}.soft{fill:#5b6876}.measured{fill:#2f6fb0}.predicted{fill:#b9c2cc}
@media (prefers-color-scheme:dark){.ink{fill:#e7ecf2}.soft{fill:#a9b4c0}
.measured{fill:#6aa5df}.predicted{fill:#566270}}"""


def speed_svg(model: str, rows: Sequence[Measured]) -> str:
    """Bars of the tokens per second of each user, one group for each number of users.

    Args:
        model: its name.
        rows: what was measured, with predictions or without.

    """
    height = TOP + sum(_height(row) + GAP for row in rows)
    longest = max(max(row.tokens_per_s, row.predicted_per_s or 0) for row in rows)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" role="img" font-family="{FONT}">',
        f"<title>{escape(_words(model, rows))}</title>",
        f"<style>{STYLE}</style>",
        _text(16, 30, model[:60], "ink", 18),
        _text(
            16, 54, "tokens per second of each user: measured, and predicted in grey", "soft", 13
        ),
    ]
    y = TOP
    for row in rows:
        parts.append(_text(16, y + BAR - 4, plural(row.users, "user"), "ink", 13))
        for kind, rate in (("measured", row.tokens_per_s), ("predicted", row.predicted_per_s)):
            if rate is None:
                continue
            long = max(1.0, rate / longest * (WIDTH - LEFT - RIGHT))
            parts.append(
                f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{long:.1f}" height="{BAR - 2}" '
                'rx="2"/>'
            )
            parts.append(_text(LEFT + long + 8, y + BAR - 5, f"{rate:.1f}", "soft", 13))
            y += BAR
        y += GAP
    return "\n".join([*parts, "</svg>"]) + "\n"


def _height(row: Measured) -> int:
    return BAR if row.predicted_per_s is None else 2 * BAR


def _words(model: str, rows: Sequence[Measured]) -> str:
    said = [
        f"{plural(row.users, 'user')} {row.tokens_per_s:.1f}"
        + ("" if row.predicted_per_s is None else f" (predicted {row.predicted_per_s:.1f})")
        for row in rows
    ]
    return f"Tokens per second of each user of {model}: {', '.join(said)}"


def _text(x: float, y: float, text: str, kind: str, size: int) -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" font-size="{size}">{escape(text)}</text>'

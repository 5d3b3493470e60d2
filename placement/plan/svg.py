"""A few SVG shapes in colours for a light and a dark page, and how wide a text will be."""

from __future__ import annotations

from xml.sax.saxutils import escape

FONT = "'Helvetica Neue', Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"

INK, SOFT, FAINT, LINE, PAPER, PANEL = (
    "#1d2733", "#5b6876", "#8d98a5", "#d5dce4", "#ffffff", "#f5f7fa",
)  # fmt: skip
DARK = {
    f'text[fill="{INK}"]': "fill:#e7ecf2",
    f'text[fill="{SOFT}"]': "fill:#a9b4c0",
    f'text[fill="{FAINT}"]': "fill:#a9b4c0",
    f'rect[fill="{PAPER}"]': "fill:#161b22",
    f'rect[fill="{PANEL}"]': "fill:#1f2630",
    f'rect[stroke="{LINE}"]': "stroke:#3a4450",
}
"""Rules by selector for readers whose colours are dark.  Text in the colour of paper stands on
coloured boxes, and stays as it is."""

_NARROW = frozenset("iljtfrI.,:;'|!()[] ·")
_WIDE = frozenset("mwMWGOQ@%&")


def width(text: str, size: float, *, bold: bool = False) -> float:
    """Width of a line in the widest of the fonts, rather too wide than too narrow, in pixels."""
    ems = sum(0.36 if c in _NARROW else 0.95 if c in _WIDE else 0.64 for c in text)
    return ems * size * (1.12 if bold else 1.0)


def fitted(text: str, size: float, room: float) -> str:
    """The text, cut with an ellipsis where it is wider than the room."""
    if width(text, size, bold=True) <= room:
        return text
    while text and width(text + "…", size, bold=True) > room:
        text = text[:-1]
    return text.rstrip() + "…"


def wrapped(text: str, size: float, room: float) -> list[str]:
    """The text in lines that are no wider than the room."""
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".strip()
        if lines[-1] and width(longer, size) > room:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


class Svg:
    """A picture under construction."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        fill: str,
        *,
        radius: float = 0,
        line: str | None = None,
        dashed: bool = False,
    ) -> None:
        """A rectangle."""
        stroke = f' stroke="{line}"' if line else ""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" '
            f'rx="{radius:g}" fill="{fill}"{stroke}{dash}/>'
        )

    def text(
        self, x: float, y: float, text: str, size: float, fill: str, *, bold: bool = False
    ) -> None:
        """A line of text that starts at x; y is its base line."""
        self._text(x, y, text, size, fill, bold, "start")

    def text_end(
        self, x: float, y: float, text: str, size: float, fill: str, *, bold: bool = False
    ) -> None:
        """A line of text that ends at x."""
        self._text(x, y, text, size, fill, bold, "end")

    def _text(
        self, x: float, y: float, text: str, size: float, fill: str, bold: bool, anchor: str
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" fill="{fill}"{weight} '
            f'text-anchor="{anchor}" xml:space="preserve">{escape(text)}</text>'
        )

    def render(self, height: int) -> str:
        """The picture with a background, as SVG text."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {height}" '
            f'width="{self._width}" height="{height}" font-family="{escape(FONT)}" '
            'role="img" class="ray-hetero">'
        )
        # The class keeps the rules from other pictures of a notebook's page.
        rules = "".join(f".ray-hetero {chosen}{{{rule}}}" for chosen, rule in DARK.items())
        style = f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>"
        paper = f'<rect width="{self._width}" height="{height}" fill="{PAPER}"/>'
        return "\n".join([head, style, paper, *self._parts, "</svg>", ""])

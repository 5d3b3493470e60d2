"""Draw what a command prints in terminals of several widths, with headless Chromium.

    python tools/look_at_terminal.py --out shots -- ray-hetero plan MODEL --topology HOST

Lines that are longer than the terminal are listed, and go on in the next row of the picture, as
they do there.  Commands that move the cursor are drawn line by line, as they wrote.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import fcntl
import os
import pty
import shutil
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from look_at_pages import BROWSERS, Tab, tab_of
from rich.ansi import AnsiDecoder
from rich.cells import cell_len
from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, MONOKAI, TerminalTheme
from rich.text import Text

COLUMNS = (80, 100, 160)
ROWS = 50
THEMES = {"light": DEFAULT_TERMINAL_THEME, "dark": MONOKAI}
PAGE = (
    '<!DOCTYPE html><meta charset="utf-8">'
    '<body style="margin: 0; background: {background}; color: {foreground}">'
    "<pre style=\"margin: 8px; font: 14px/1.25 'DejaVu Sans Mono', monospace; "
    'width: COLUMNSch; border-right: 1px dashed #888">{code}</pre></body>'
)
SIZE = "[document.body.scrollWidth, document.body.scrollHeight]"


def printed(command: Sequence[str], columns: int) -> tuple[list[Text], int]:
    """Lines that a command writes to a terminal of a width, and its exit status."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, columns, 0, 0))
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": str(columns)}
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, env=environment)
    os.close(its)
    written = b"".join(_read(ours))
    os.close(ours)
    text = written.decode(errors="replace").replace("\r\n", "\n")
    return list(AnsiDecoder().decode(text)), process.wait()


def _read(terminal: int) -> Iterator[bytes]:
    while True:
        try:
            part = os.read(terminal, 1 << 16)
        except OSError:
            # The kernel's answer once the last writer has closed the terminal.
            return
        if not part:
            return
        yield part


def page_of(lines: Sequence[Text], columns: int, theme: TerminalTheme) -> str:
    """Lines of a terminal as an HTML page; a dashed line stands at its right edge."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(record=True, width=columns, file=nowhere, force_terminal=True)
        for line in lines:
            for row in line.divide(range(columns, len(line), columns)):
                console.print(row, no_wrap=True, crop=False, overflow="ignore")
        form = PAGE.replace("COLUMNS", str(columns))
        return console.export_html(theme=theme, inline_styles=True, code_format=form)


async def draw(browser: str, pages: Mapping[Path, str]) -> None:
    """Write a picture of each page to its file."""
    async with tab_of(browser) as tab:
        for path, page in pages.items():
            path.write_bytes(await _picture(tab, page))


async def _picture(tab: Tab, page: str) -> bytes:
    encoded = base64.b64encode(page.encode()).decode()
    window = {"deviceScaleFactor": 1, "mobile": False}
    await tab.call("Emulation.setDeviceMetricsOverride", width=200, height=100, **window)
    await tab.open(f"data:text/html;base64,{encoded}")
    answer = await tab.call("Runtime.evaluate", expression=SIZE, returnByValue=True)
    width, height = answer["result"]["value"]
    await tab.call("Emulation.setDeviceMetricsOverride", width=width, height=height, **window)
    return base64.b64decode((await tab.call("Page.captureScreenshot", format="png"))["data"])


def main() -> None:
    """Draw the command that is named after `--`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    parser.add_argument("--out", type=Path, required=True, help="folder for pictures")
    parser.add_argument("--name", default="terminal", help="how names of pictures begin")
    parser.add_argument("--columns", type=int, nargs="+", default=COLUMNS)
    parser.add_argument("--browser", help=f"program; {', '.join(BROWSERS)} are tried without")
    arguments = parser.parse_args()
    browser = arguments.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"expected one of {', '.join(BROWSERS)} on PATH, found none; type: apt install chromium"
        )
    arguments.out.mkdir(parents=True, exist_ok=True)
    pages, has_failed = {}, False
    for columns in arguments.columns:
        lines, status = printed(arguments.command, columns)
        if status:
            print(f"{columns} columns: the command ended with status {status}")
            has_failed = True
        for line in lines:
            if (length := cell_len(line.plain)) > columns:
                print(f"{columns} columns: a line of {length}: {line.plain}")
        for scheme, theme in THEMES.items():
            path = arguments.out / f"{arguments.name}-{columns}-{scheme}.png"
            pages[path] = page_of(lines, columns, theme)
    asyncio.run(draw(browser, pages))
    print(f"drew {len(pages)} pictures into {arguments.out}")
    sys.exit(has_failed)


if __name__ == "__main__":
    main()

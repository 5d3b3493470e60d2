"""Look at the built pages in headless Chromium, on a desktop and on a phone, light and dark.

    make docs && python tools/look_at_pages.py --out screenshots

It exits with status 1 if a page is wider than its window, if an element reaches out of the window
where nothing scrolls, if a picture is missing, or if the browser reports an error.  `--out` keeps a
picture of every page in each of the four looks.  It needs Chromium and aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import itertools
import json
import shutil
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp

SITE = Path(__file__).parents[1] / "site"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
START_SECONDS, ANSWER_SECONDS, SETTLE_SECONDS = 60.0, 60.0, 0.3
TRIES = 10
OTHER_COLOURS = "the colours of the other scheme"
HIGHEST = 16000
"""Pixels of a picture; Chromium draws nothing below that."""

PROBLEMS = """
(() => {
  const found = [], width = WIDTH;
  if ((document.body.dataset.mdColorScheme === "slate") !== DARK) found.push(OTHER);
  const root = document.scrollingElement;
  if (root.scrollWidth > width) found.push(`the page has ${root.scrollWidth} px for ${width}`);
  const scrolls = element => {
    for (; element && element !== document.body; element = element.parentElement)
      if (/auto|scroll|hidden/.test(getComputedStyle(element).overflowX)) return true;
    return false;
  };
  const article = document.querySelector("article");
  for (const element of article.querySelectorAll("*")) {
    const box = element.getBoundingClientRect();
    if (box.width && box.right > width + 1 && !scrolls(element))
      found.push(`<${element.tagName.toLowerCase()}> reaches ${Math.round(box.right - width)} px `
        + `beyond the window: ${element.textContent.trim().slice(0, 60)}`);
  }
  for (const picture of article.querySelectorAll("img"))
    if (!picture.complete || !picture.naturalWidth) found.push(`no picture ${picture.src}`);
  return {found, height: root.scrollHeight};
})()
"""


@dataclass(frozen=True)
class Look:
    """A window and a colour scheme."""

    device: str
    width: int
    scheme: str

    def __str__(self) -> str:
        return f"{self.device}-{self.scheme}"


LOOKS = tuple(
    Look(device, width, scheme)
    for (device, width), scheme in itertools.product(
        (("desktop", 1280), ("phone", 390)), ("light", "dark")
    )
)
HEIGHT = 900


@dataclass
class Tab:
    """A tab of the browser, by the DevTools protocol."""

    socket: aiohttp.ClientWebSocketResponse
    errors: list[str] = field(default_factory=list)
    """Reports of the browser since the page was opened."""
    _number: int = 0
    _is_loaded: bool = False

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and wait for its answer."""
        self._number += 1
        await self.socket.send_json({"id": self._number, "method": method, "params": parameters})
        async with asyncio.timeout(ANSWER_SECONDS):
            while True:
                message = await self._message()
                if message.get("id") == self._number:
                    if "error" in message:
                        raise RuntimeError(f"{method}: {message['error']}")
                    return dict(message["result"])

    async def open(self, address: str) -> None:
        """Open a page, and wait until it is loaded."""
        self._is_loaded = False
        await self.call("Page.navigate", url=address)
        async with asyncio.timeout(ANSWER_SECONDS):
            while not self._is_loaded:
                await self._message()

    async def _message(self) -> dict[str, Any]:
        message: dict[str, Any] = await self.socket.receive_json()
        self._is_loaded |= message.get("method") == "Page.loadEventFired"
        if message.get("method") == "Runtime.exceptionThrown":
            self.errors.append(message["params"]["exceptionDetails"]["text"])
        if message.get("method") == "Log.entryAdded":
            entry = message["params"]["entry"]
            if entry["level"] == "error":
                self.errors.append(f"{entry['text']} {entry.get('url', '')}")
        return message


@asynccontextmanager
async def tab_of(browser: str) -> AsyncIterator[Tab]:
    """A tab of a browser that is started for it and ended with it."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = await asyncio.create_subprocess_exec(
            browser, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
            "--remote-debugging-port=0", f"--user-data-dir={profile}", "about:blank",
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        try:
            port_file = Path(profile) / "DevToolsActivePort"
            async with asyncio.timeout(START_SECONDS):
                while not (port_file.exists() and port_file.read_text().count("\n")):
                    if process.returncode is not None:
                        raise RuntimeError(f"{browser} ended with {process.returncode}")
                    await asyncio.sleep(0.1)
            port = port_file.read_text().splitlines()[0]
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json") as answer:
                    (target,) = [one for one in await answer.json() if one["type"] == "page"]
                address = target["webSocketDebuggerUrl"]
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    tab = Tab(socket)
                    for domain in ("Page", "Runtime", "Log"):
                        await tab.call(f"{domain}.enable")
                    yield tab
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


class Handler(SimpleHTTPRequestHandler):
    """Serves the site, without a line for every request."""

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def served() -> Iterator[str]:
    """Address of the site: as files, its search could not be loaded."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(SITE)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


async def look_at(tab: Tab, site: str, page: Path, look: Look, out: Path | None) -> list[str]:
    """Problems of one page in one look; keeps a picture of it."""
    await tab.open("about:blank")
    size = {"width": look.width, "deviceScaleFactor": 1, "mobile": look.device == "phone"}
    await tab.call("Emulation.setDeviceMetricsOverride", height=HEIGHT, **size)
    scheme = {"name": "prefers-color-scheme", "value": look.scheme}
    await tab.call("Emulation.setEmulatedMedia", features=[scheme])
    # The theme keeps the scheme of the first page, and of any page that is open.
    await tab.call("Storage.clearDataForOrigin", origin=site, storageTypes="local_storage")
    tab.errors.clear()
    await tab.open(f"{site}/{page.relative_to(SITE).parent}/")
    expression = PROBLEMS.replace("WIDTH", str(look.width))
    expression = expression.replace("DARK", json.dumps(look.scheme == "dark"))
    expression = expression.replace("OTHER", json.dumps(OTHER_COLOURS))
    for _ in range(TRIES):
        await asyncio.sleep(SETTLE_SECONDS)
        answer = await tab.call("Runtime.evaluate", expression=expression, returnByValue=True)
        value = answer["result"].get("value")
        if value is None:
            return [f"cannot be looked at: {answer['result'].get('description')}"]
        # The theme may learn of the scheme after it has drawn the page.
        if OTHER_COLOURS not in value["found"]:
            break
    if out:
        height = min(value["height"], HIGHEST)
        await tab.call("Emulation.setDeviceMetricsOverride", height=height, **size)
        picture = await tab.call("Page.captureScreenshot", format="png")
        name = "-".join(page.parent.relative_to(SITE).parts) or "index"
        (out / f"{name}-{look}.png").write_bytes(base64.b64decode(picture["data"]))
    return [*value["found"], *tab.errors]


async def look_at_all(browser: str, pages: Sequence[Path], out: Path | None) -> int:
    """Print what is wrong, and return how many pages and looks that concerns."""
    wrong = 0
    with served() as site:
        async with tab_of(browser) as tab:
            for page, look in itertools.product(pages, LOOKS):
                found = await look_at(tab, site, page, look, out)
                wrong += bool(found)
                for problem in found:
                    print(f"{page.relative_to(SITE)} {look}: {problem}")
    return wrong


def main() -> None:
    """Look at the pages that are named, or at all of them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="pages, such as tuning; all without")
    parser.add_argument("--out", type=Path, help="folder for pictures")
    parser.add_argument("--browser", help=f"program; {', '.join(BROWSERS)} are tried without")
    arguments = parser.parse_args()
    browser = arguments.browser or next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        sys.exit(
            f"expected one of {', '.join(BROWSERS)} on PATH, found none; type: apt install chromium"
        )
    pages = sorted(SITE.rglob("index.html"))
    if arguments.names:
        pages = [SITE / name.removesuffix("index") / "index.html" for name in arguments.names]
    if not pages or not all(page.exists() for page in pages):
        sys.exit(f"expected the built pages in {SITE}; type: make docs")
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    wrong = asyncio.run(look_at_all(browser, pages, arguments.out))
    print(f"looked at {len(pages)} pages, each in {len(LOOKS)} looks; {wrong} have problems")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()

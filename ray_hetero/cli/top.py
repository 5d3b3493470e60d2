"""`ray-hetero top`: one page in the terminal of what the engines of this host do now."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from placement.words import duration
from ray_hetero.errors import StartupError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from ray_hetero.cli.serving.comparison import Totals
    from ray_hetero.observability.status import EngineStatus, RankStatus

BAR = 20
"""Characters of the bar of a step's shares."""
KINDS = (("█", "busy_s"), ("▒", "exchange_s"), ("░", "waiting_s"))
"""Character of each share, and the sum of the step clock that it shows."""
GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_share",
    "vllm:prefix_cache_queries_total": "looked_up",
    "vllm:prefix_cache_hits_total": "hits",
}
"""Names of vLLM's metrics, and the field of `Requests` that each of them is."""


@dataclass(frozen=True)
class Requests:
    """Requests of a server at one moment, over all of its engines."""

    running: float
    waiting: float
    kv_share: float
    """Part of the KV cache that is in use; the sum over engines."""
    looked_up: float
    """Tokens that were looked up in the prefix cache since the server's start."""
    hits: float
    """Tokens of these that were there."""


def top(
    url: Annotated[
        str | None,
        typer.Option(help="Server whose requests are shown, like http://localhost:8000."),
    ] = None,
    interval: Annotated[
        float, typer.Option(min=0.5, max=3600, help="Seconds between two pages.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one page and end.")] = False,
) -> None:
    """Show ranks, layers, shares of a step, link and requests, until Ctrl-C.

    Engines are those of `ray-hetero status`. Without a terminal, one page is shown.
    """
    from rich.console import Console
    from rich.live import Live

    from ray_hetero.cli import connection

    console = Console(highlight=False)
    address = address_of_engines()
    with connection.cluster(address):
        pages = pages_of(address, url, interval)
        if once or not console.is_terminal:
            console.print(next(pages))
            return
        with Live(next(pages), console=console, auto_refresh=False, screen=True) as live:
            try:
                for page in pages:
                    live.update(page, refresh=True)
            except KeyboardInterrupt:
                return


def address_of_engines() -> str:
    """Address of the first Ray on which an engine runs; of the first that answers if none does.

    Raises:
        StartupError: none of several answers.

    """
    from ray_hetero.cli import connection

    asked = connection.addresses()
    if len(asked) == 1:
        return asked[0]
    answering, refusal = [], ""
    for address in asked:
        try:
            with connection.cluster(address):
                from ray_hetero.observability.status import running_engines

                if running_engines():
                    return address
        except StartupError as error:
            refusal = str(error)
        else:
            answering.append(address)
    if not answering:
        raise StartupError(refusal)
    return answering[0]


def pages_of(ray: str, url: str | None, interval: float) -> Iterator[RenderableType]:
    """Pages until Ctrl-C, or until Ray ends.

    Args:
        ray: address of the Ray that this process is connected to.
        url: of the server whose requests are shown.
        interval: seconds between two pages.

    Raises:
        StartupError: the server does not answer, or Ray has ended.

    """
    from ray_hetero.cli.serving.comparison import ask_totals, read_totals
    from ray_hetero.cli.serving.server_process import fetched
    from ray_hetero.observability.status import running_engines
    from ray_hetero.runtime.ray_address import is_listening

    address = None if url is None else url.rstrip("/")
    before = None if address is None else ask_totals(address)
    asked = time.monotonic()
    while True:
        lines = []
        if address is not None:
            # The first page already has speeds.
            time.sleep(interval)
            text = fetched(f"{address}/metrics")
            if text is None:
                raise StartupError(f"--url {address}: no answer from {address}/metrics")
            now, seconds = read_totals(text.decode()), time.monotonic() - asked
            since = now - before if before is not None else None
            lines = [request_line(read_requests(text.decode())), *speed_lines(since, seconds)]
            before, asked = now, asked + seconds
        # Ray itself would end this process, the terminal as it is, a minute after its head.
        if not is_listening(ray):
            raise StartupError(f"the Ray at {ray} has ended, and with it the engines that it ran")
        yield page_of(running_engines(), lines)
        if address is None:
            time.sleep(interval)


def read_requests(text: str) -> Requests:
    """Requests in the text of `/metrics`.

    Args:
        text: in Prometheus' format; a metric that is missing counts as 0.

    """
    from ray_hetero.cli.serving.comparison import sums_of

    return Requests(**sums_of(text, GAUGES))


def request_line(now: Requests) -> str:
    """Requests in one line."""
    line = f"requests: {now.running:.0f} running, {now.waiting:.0f} waiting"
    line += f"; KV cache {now.kv_share:.0%}"
    if now.looked_up:
        line += f"; prefix cache hit {now.hits / now.looked_up:.0%}"
    return line


def speed_lines(since: Totals | None, seconds: float) -> Iterator[str]:
    """Speed of the last seconds in one line; nothing where nothing was generated."""
    if since is None or since.generated <= 0:
        return
    line = f"speed: {since.generated / seconds:.1f} tokens/s in all"
    if since.between_s > 0:
        line += f", {since.generated / since.between_s:.1f} each"
    if since.firsts > 0:
        line += f"; first token after {duration(since.first_s / since.firsts)}"
    yield line


def page_of(engines: Sequence[EngineStatus], lines: Sequence[str]) -> RenderableType:
    """All engines, one row a rank, below lines about requests; at most 80 columns wide."""
    from rich.console import Group
    from rich.text import Text

    parts: list[RenderableType] = [Text(line) for line in lines]
    for engine in engines:
        parts += [Text(_heading(engine), overflow="ellipsis", no_wrap=True), _table(engine)]
        if engine.slots:
            parts.append(Text(engine.slots))
    if engines:
        parts.append(Text("step: █ computing  ▒ link  ░ waiting; means of the last seconds"))
    else:
        parts.append(Text("no engine of ray_hetero runs on this Ray"))
    return Group(*parts)


def _heading(engine: EngineStatus) -> str:
    info = engine.content.info
    return f"{engine.content.state} {info.model}, engine {info.engine}"


def _table(engine: EngineStatus) -> RenderableType:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("rank", justify="right", no_wrap=True)
    for column, width in (("device", 14), ("layers", 11)):
        table.add_column(column, max_width=width, no_wrap=True, overflow="ellipsis")
    for column in ("ms", "planned", "KiB/step"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("step", width=BAR, no_wrap=True)
    for rank in engine.ranks:
        style = "" if rank.health in ("ok", "starting") else "bold red"
        table.add_row(*map(Text, _row(rank)), style=style)
    return table


def _row(rank: RankStatus) -> tuple[str, ...]:
    from ray_hetero.observability.world_table import layer_span

    info = rank.info
    planned = "" if info.predicted_ms is None else f"{info.predicted_ms:.1f}"
    device = info.device.partition(" (")[0]
    # An expert rank is of no stage.
    span = layer_span(info.first_layer, info.layers)
    where = (str(info.rank), device, f"x {span}" if info.stage is None else span)
    if rank.health != "ok" or rank.news is None:
        return (*where, "", planned, "", rank.health)
    recent = rank.news.recent
    if not recent.steps:
        return (*where, "", planned, "", "idle")
    busy_ms = 1e3 * recent.busy_s / recent.steps
    kib = (recent.received_bytes + recent.sent_bytes) / 1024 / recent.steps
    shares = [float(getattr(recent, name)) for _, name in KINDS]
    return (*where, f"{busy_ms:.1f}", planned, f"{kib:,.0f}", bar(shares))


def bar(shares: Sequence[float]) -> str:
    """Bar of the shares of a step, of BAR characters in all.

    Args:
        shares: seconds of each of `KINDS`.

    """
    total, done, text = sum(shares), 0.0, ""
    if total <= 0:
        return ""
    for (letter, _), seconds in zip(KINDS, shares, strict=True):
        done += seconds
        text += letter * (round(BAR * done / total) - len(text))
    return text

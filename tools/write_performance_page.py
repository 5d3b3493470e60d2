"""Write the tables of measured figures and their picture, from the raw files.

    python tools/write_performance_page.py

The tables stand in README.md, README.ko.md, docs/performance.md and docs/comparison.md, each
between two marks; the text around them is kept.  Figures come from benchmarks/results/ alone.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from page_blocks import DOCS, replaced, table
from raw_figures import (
    EXPERT_RANKS,
    OURS,
    PREFETCH,
    TWO_RANKS,
    UVA,
    beside_llama,
    decode_step_ms,
    first_token_ms,
    floor_ms,
    handover_us,
    kernel_ms,
    median,
    point,
    prompt_ms,
    raw,
    socket_gb_s,
    step_ms,
)

from placement.plan.picture import KINDS
from placement.plan.svg import FAINT, INK, SOFT, Svg

ROOT = DOCS.parent
PICTURE = DOCS / "performance.svg"
END = "<!-- end of figures -->"

NEWEST = "gpu-host/2026-11-23-half"
NEWEST_PREFETCH = "gpu-host/2026-11-23-prefetch"
DAY_BEFORE = "gpu-host/2026-11-22-two-h200-half"
PROMPTS = "gpu-host/2026-11-28-h200-one-gpu-half"
NEWEST_PROMPTS = "gpu-host/2026-11-29-h200-four-removed"
SMALL_HOST = "gpu-host/2026-11-22-h100-decode-step-half"
EXPERTS = "gpu-host/2026-11-23-h200-14-cores-experts"
EXPERTS_AND_UVA = "gpu-host/2026-11-26-h200-experts16"
FORMATS = {"H200, 30 cores": "gpu-host/2026-11-28-h200-nine-rounds-formats-half",
           "the same, slower memory": "gpu-host/2026-11-28-h200-formats-half",
           "H100, 30 cores": "gpu-host/2026-11-27-h100-formats-half",
           "another H200, 30 cores": "gpu-host/2026-11-26-h200-rows-formats",
           "H100, 14 cores": "gpu-host/2026-11-26-h100-rows-formats"}  # fmt: skip
FAMILIES = "cpu-host/2026-11-25-families-avx2"
BUDGET = "gpu-host/2026-11-25-h200-night-budget"
HANDOVER = "gpu-host/2026-11-23-expert-handover"
CODES = "gpu-host/2026-11-23-h100-codes"
EXPERT_KERNELS = "gpu-host/2026-11-23-experts-128"
IN_FLIGHT = "gpu-host/2026-11-22-shared-memory-in-flight"
BOUNDARY = "gpu-host/2026-11-22-shared-memory-boundary"
CONTROL = {"one rank": "cpu-host/2026-11-22-control-plane",
           "two ranks": "cpu-host/2026-11-22-control-plane-two-ranks"}  # fmt: skip

AVX2 = "cpu-host/2026-11-23-avx2-formats"
AVX512 = "cpu-host/2026-11-24-avx512-formats"

LOADS = ((1, 128), (8, 128), (32, 128), (128, 96), (1, 1024), (8, 1024), (1, 8192))
"""Requests and the tokens of each one's prompt."""
NONE = "–"


def begin(name: str) -> str:
    """The mark before a table."""
    return f"<!-- figures, {name}: written by tools/write_performance_page.py -->"


def ms(value: float | None) -> str:
    """Milliseconds with three digits or more."""
    if value is None:
        return NONE
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def ratio(slow: float | None, fast: float | None) -> str:
    """How many times as fast."""
    return NONE if slow is None or fast is None else f"{slow / fast:.2f}"


def load(batch: int, prompt: int) -> str:
    """A load as the reports write it."""
    return f"{batch} × {prompt:,}"


def half_of_8b() -> str:
    """The newest run, and both ways of streaming beside it."""
    return table(
        ("requests × prompt", "step, ms", "prefetching", "times as fast", "UVA, the day before",
         "first token, ms", "prefetching", "UVA, the day before"),
        (
            (
                load(*one),
                f"**{ms(step_ms(NEWEST, OURS, *one))}**",
                ms(step_ms(NEWEST_PREFETCH, PREFETCH, *one)),
                ratio(step_ms(NEWEST_PREFETCH, PREFETCH, *one), step_ms(NEWEST, OURS, *one)),
                ms(step_ms(DAY_BEFORE, UVA, *one)),
                ms(first_token_ms(NEWEST, OURS, *one)),
                ms(first_token_ms(NEWEST_PREFETCH, PREFETCH, *one)),
                ms(first_token_ms(DAY_BEFORE, UVA, *one)),
            )
            for one in LOADS
        ),
    )  # fmt: skip


def first_tokens() -> str:
    """First tokens with one CPU rank and with two, beside prefetching, all in one run."""

    def seconds(value: float | None) -> str:
        return NONE if value is None else f"{value / 1000:.3f}"

    rows = []
    for batch, prompt in ((1, 128), (1, 512), (1, 1024), (8, 1024), (1, 8192), (1, 32768)):
        one, two, prefetch = (
            prompt_ms(PROMPTS, way, batch, prompt) for way in (OURS, TWO_RANKS, PREFETCH)
        )
        rows.append(
            (load(batch, prompt), f"**{seconds(one)}**", seconds(two), seconds(prefetch),
             ratio(one, prefetch), ratio(two, prefetch))
        )  # fmt: skip
    return table(
        ("requests × prompt", "one CPU rank, s", "two, s", "prefetching, s",
         "one ÷ prefetching", "two ÷ prefetching"),
        rows,
    )  # fmt: skip


def day_before() -> str:
    """All three on one machine, on the day before: where many requests decode."""
    return table(
        ("requests × prompt × answer", "step, ms", "prefetching", "UVA", "tokens/s, end to end",
         "prefetching", "UVA"),
        (
            (
                f"{batch} × {prompt} × {output}",
                *(ms(step_ms(DAY_BEFORE, one, batch, prompt, output))
                  for one in (OURS, PREFETCH, UVA)),
                *(f"{point(DAY_BEFORE, one, batch, prompt, output)['tokens_per_s']:.1f}"
                  for one in (OURS, PREFETCH, UVA)),
            )
            for batch, prompt, output in ((8, 128, 256), (32, 128, 32), (128, 96, 32))
        ),
    )  # fmt: skip


def small_host() -> str:
    """The same shape beside an H100 with fewer cores."""
    return table(
        ("requests × prompt", "step, ms", "prefetching", "times as fast", "first token, ms",
         "prefetching"),
        (
            (
                load(*one),
                f"**{ms(step_ms(SMALL_HOST, OURS, *one))}**",
                ms(step_ms(SMALL_HOST, PREFETCH, *one)),
                ratio(step_ms(SMALL_HOST, PREFETCH, *one), step_ms(SMALL_HOST, OURS, *one)),
                ms(first_token_ms(SMALL_HOST, OURS, *one)),
                ms(first_token_ms(SMALL_HOST, PREFETCH, *one)),
            )
            for one in ((1, 128), (8, 128), (32, 128), (8, 1024))
        ),
    )  # fmt: skip


def floors() -> str:
    """Steps beside what reading alone takes."""
    return table(
        ("machine", "the socket reads, GB/s", "floor, 16 bits, ms", "floor, 12 bits, ms",
         "step of 1, 8, 32 requests ÷ floor of 12 bits"),
        (
            (
                machine,
                f"{socket_gb_s(name):.0f}",
                ms(floor_ms(name, 16)),
                ms(floor_ms(name, 12)),
                ", ".join(
                    ratio(
                        step_ms(name, OURS, batch) or step_ms(name, OURS, batch, output=24),
                        floor_ms(name, 12),
                    )
                    for batch in (1, 8, 32)
                ),
            )
            for machine, name in (
                ("H200, 30 cores", PROMPTS),
                ("another H200, 30 cores", NEWEST),
                ("H100, 14 cores", SMALL_HOST),
            )
        ),
    )  # fmt: skip


def expert_engine() -> str:
    """Experts of half of a mixture's layers on a socket, beside both ways of streaming them."""
    ways = (EXPERT_RANKS, UVA, PREFETCH)
    rows = []
    for batch, prompt, output in ((1, 128, 32), (8, 128, 32), (32, 128, 32), (8, 1024, 1)):
        step, *streamed = (step_ms(EXPERTS_AND_UVA, way, batch, prompt, output) for way in ways)
        known = [one for one in streamed if one is not None]
        first = (first_token_ms(EXPERTS_AND_UVA, way, batch, prompt, output) for way in ways)
        rows.append((
            load(batch, prompt),
            f"**{ms(step)}**" if known else NONE,
            *(ms(one) if known else NONE for one in streamed),
            ratio(min(known, default=None), step),
            *map(ms, first),
        ))  # fmt: skip
    return table(
        ("requests × prompt", "experts on the socket: step, ms", "UVA", "prefetching",
         "times as fast as the faster", "first token, ms", "UVA", "prefetching"),
        rows,
    )  # fmt: skip


def whole_layers() -> str:
    """Experts of half of a mixture's layers on a socket, beside the layers whole."""
    ways, output = (EXPERT_RANKS, OURS), 24
    return table(
        ("requests × prompt", "experts on the socket: step, ms", "whole layers",
         "first token, ms", "whole layers"),
        (
            (
                load(*one),
                *(ms(step_ms(EXPERTS, way, *one, output)) for way in ways),
                *(ms(first_token_ms(EXPERTS, way, *one, output)) for way in ways),
            )
            for one in ((1, 128), (8, 128), (32, 128), (8, 1024))
        ),
    )  # fmt: skip


def budget() -> str:
    """A model with experts of 40 GB in 24 GiB of GPU memory."""
    ways = {"experts on the socket": EXPERT_RANKS, "UVA": UVA, "prefetching": PREFETCH}
    rows = []
    for name, way in ways.items():
        one = point(BUDGET, way, 8, 128, 256)
        first, step = first_token_ms(BUDGET, way, 8, 128, 256), step_ms(BUDGET, way, 8, 128, 256)
        rows.append((name, f"{one['tokens_per_s']:.1f}", ms(step), ms(first)))
    return table(("", "tokens/s, end to end", "step, ms", "first token, ms"), rows)


def families() -> str:
    """Other families beside a Llama of the same linear layers, on one CPU rank."""
    names = {"Mistral": "mistral", "Gemma 2": "gemma2", "Gemma 3": "gemma3"}
    figures = {"decode_ms": "decode step", "prefill_s": "prefill"}
    return table(
        ("time ÷ Llama's", *names),
        (
            (f"{title}, {batch} × 128",
             *(f"{beside_llama(FAMILIES, name, figure, batch):.2f}" for name in names.values()))
            for figure, title in figures.items()
            for batch in (1, 8)
        ),
    )  # fmt: skip


def handovers() -> str:
    """The handover of one layer by itself."""
    tokens = (1, 8, 32)
    return table(
        ("", *(f"{count} token{'s' if count > 1 else ''}" for count in tokens)),
        (
            (
                f"{mode}, {ranks} expert rank{'s' if ranks > 1 else ''}, µs",
                *(f"{handover_us(HANDOVER, mode, ranks, count):.1f}" for count in tokens),
            )
            for mode in ("memory operations", "host functions")
            for ranks in (1, 2)
        ),
    )


def two_ranks() -> str:
    """Steps with one CPU rank and with two over the same cores."""
    rows = []
    for one in ((1, 128), (8, 128), (128, 96)):
        alone, both = (step_ms(PROMPTS, way, *one) for way in (OURS, TWO_RANKS))
        rows.append((load(*one), ms(alone), ms(both), ratio(both, alone)))
    return table(("requests × prompt", "one CPU rank: step, ms", "two", "two ÷ one"), rows)


def formats() -> str:
    """Steps with fewer bits beside compact bf16, on two machines."""
    kinds = {"FP8 in blocks": "fp8", "4 bits in groups of 128": "w4a16"}
    rows = []
    for machine, name in FORMATS.items():
        for batch in (1, 8):
            is_named = f"{OURS} bf16" in raw(name)["contenders"]
            plain = step_ms(name, f"{OURS} bf16" if is_named else OURS, batch)
            cells = []
            for kind in kinds.values():
                step = step_ms(name, f"{OURS} {kind}", batch)
                cells += [ms(step), ratio(step, plain)]
            rows.append((machine, load(batch, 128), ms(plain), *cells))
    heads = [head for kind in kinds for head in (kind, "beside bf16")]
    return table(("machine", "requests × prompt", "compact bf16, ms", *heads), rows)


def codes() -> str:
    """Decode steps by themselves, by how the weights are held."""
    held = {
        "12 bits, without loss": ("compact", {}),
        "FP8 in blocks": ("fp8", {}),
        "8-bit integers, a scale for each output": ("int8", {}),
        "4-bit integers in groups of 128": ("int4", {}),
        "the same with zero points": ("int4-zeros", {}),
        "MXFP4": ("mxfp4", {}),
        # Eight tokens are multiplied as that program did it.
        "NVFP4": ("nvfp4", {8: "now_short"}),
    }
    plain = {requests: decode_step_ms(CODES, "now", "compact", requests) for requests in (1, 8)}
    rows = []
    for name, (kind, programs) in held.items():
        cells = []
        for requests in (1, 8):
            step = decode_step_ms(CODES, programs.get(requests, "now"), kind, requests)
            cells += [ms(step), ratio(step, plain[requests])]
        rows.append((name, *cells))
    return table(
        ("weights", "1 request, ms", "beside 12 bits", "8 requests, ms", "beside 12 bits"), rows
    )


def expert_kernels() -> str:
    """One layer of experts, beside kt-kernel."""
    kernels = ("packed", "compact", "kt-kernel")
    return table(
        ("tokens", "this project, 16 bits", "this project, 12 bits", "kt-kernel 0.7.2, bf16"),
        (
            (f"{tokens:,}", *(f"{kernel_ms(EXPERT_KERNELS, one, tokens):.2f}" for one in kernels))
            for tokens in (1, 8, 32, 128, 1024)
        ),
    )


def in_flight() -> str:
    """Two batches beside one."""
    rows = []
    for batch, prompt, output in ((32, 1024, 16), (32, 128, 32), (2, 128, 128)):
        two, one = (
            point(IN_FLIGHT, f"{number} in flight", batch, prompt, output)["tokens_per_s"]
            for number in (2, 1)
        )
        rows.append((f"{batch} × {prompt:,} × {output}", f"{two:,.0f}", f"{one:,.0f}",
                     ratio(two, one)))  # fmt: skip
    return table(
        ("requests × prompt × answer", "two batches, tokens/s", "one batch of all", "ratio"), rows
    )


def boundary() -> str:
    """The stage boundary by itself."""
    content = raw(BOUNDARY)
    ways = {"shared memory": "shared memory, reading 0 MiB", "Gloo": "gloo, reading 0 MiB"}
    tokens = [one["tokens"] for one in content["gloo, reading 0 MiB"]]
    return table(
        ("tokens", *(f"{count:,}" for count in tokens)),
        (
            (f"{way}, ms", *(f"{one['half_round_ms']:.2f}" for one in content[key]))
            for way, key in ways.items()
        ),
    )


def without_avx512() -> str:
    """One CPU rank with AVX2 beside stock vLLM, in bf16 and in fewer bits."""
    rows = []
    for batch in (1, 8):
        ours, stock = (f"{name} bf16" for name in ("ray_hetero", "vllm"))
        steps = [step_ms(AVX2, one, batch, 16, 8) for one in (ours, stock)]
        firsts = [first_token_ms(AVX2, one, batch, 16, 8) for one in (ours, stock)]
        fewer = [step_ms(AVX2, f"ray_hetero {one}", batch, 16, 8) for one in ("fp8", "w4a16")]
        rows.append((load(batch, 16), *map(ms, steps), ratio(*reversed(steps)), *map(ms, firsts),
                     ratio(*reversed(firsts)), *map(ms, fewer)))  # fmt: skip
    heads = ("stock vLLM", "times as fast")
    return table(
        ("requests × prompt", "bf16: step, ms", *heads, "first token, ms", *heads,
         "FP8: step, ms", "4 bits: step, ms"),
        rows,
    )  # fmt: skip


def with_avx512() -> str:
    """One CPU rank with AVX512-BF16 beside stock vLLM, in bf16 and in fewer bits."""
    rows = []
    loads = (*((batch, 16) for batch in (1, 2, 4, 8, 16, 32)), (1, 128), (1, 512))
    for batch, prompt in loads:
        found = [
            figure(AVX512, f"{name} {kind}", batch, prompt, 12)
            for figure in (step_ms, first_token_ms)
            for kind in ("bf16", "w4a16")
            for name in ("ray_hetero", "vllm")
        ]
        pairs = [found[at : at + 2] for at in range(0, len(found), 2)]
        fp8 = step_ms(AVX512, "ray_hetero fp8", batch, prompt, 12)
        cells = [f"{ms(ours)} ({ours / stock:.2f})" for ours, stock in pairs]
        rows.append((load(batch, prompt), *cells[:2], ms(fp8), *cells[2:]))
    return table(
        ("requests × prompt", "bf16: step, ms", "4 bits: step, ms", "FP8: step, ms",
         "bf16: first token, ms", "4 bits: first token, ms"),
        rows,
    )  # fmt: skip


def beside_mp() -> str:
    """Costs of a step in which there is nothing to compute."""
    rows = []
    for ranks, name in CONTROL.items():
        for figure in ("step at batch 1, ms", "step at batch 32, ms"):
            ours, theirs = (median(name, one, figure) for one in ("ray_hetero", "mp"))
            rows.append((f"{ranks}, {figure.removesuffix(', ms')}", f"{ours:.2f}",
                         f"{theirs:.2f}", f"{ours / theirs:.2f}"))  # fmt: skip
    return table(("", "this project, ms", "vLLM's `mp`, ms", "ratio"), rows)


def ways_of_streaming() -> str:
    """Rows of the comparison about vLLM's own backends."""
    rows: list[tuple[str, ...]] = []
    for text, batch, prompt in (("1 sequence", 1, 128), ("8 sequences", 8, 128)):
        rows.append((
            f"decode step, {text}",
            f"**{ms(step_ms(NEWEST, OURS, batch, prompt))} ms**",
            f"{ms(step_ms(NEWEST_PREFETCH, PREFETCH, batch, prompt))} ms",
            f"{ms(step_ms(DAY_BEFORE, UVA, batch, prompt))} ms",
        ))  # fmt: skip
    rows.append((
        "decode step, 128 sequences",
        f"**{ms(step_ms(PROMPTS, OURS, 128, 96))} ms**",
        f"{ms(step_ms(PROMPTS, PREFETCH, 128, 96))} ms",
        f"{ms(step_ms(DAY_BEFORE, UVA, 128, 96))} ms",
    ))  # fmt: skip
    for text, batch, prompt in (("8 prompts of 1,024 tokens", 8, 1024),
                                ("1 prompt of 8,192 tokens", 1, 8192)):  # fmt: skip
        rows.append((
            text,
            f"**{ms(prompt_ms(NEWEST_PROMPTS, OURS, batch, prompt))} ms**",
            f"{ms(prompt_ms(NEWEST_PROMPTS, PREFETCH, batch, prompt))} ms",
            f"{ms(first_token_ms(DAY_BEFORE, UVA, batch, prompt))} ms",
        ))  # fmt: skip
    return table(("", "this project", "prefetching", "UVA"), rows)


def kernels_compared() -> str:
    """Rows of the comparison about kt-kernel."""
    return table(
        ("tokens", "this project, 12 bits", "kt-kernel 0.7.2, bf16"),
        (
            (f"{tokens:,}", f"{kernel_ms(EXPERT_KERNELS, 'compact', tokens):.2f}",
             f"{kernel_ms(EXPERT_KERNELS, 'kt-kernel', tokens):.2f}")
            for tokens in (1, 32, 1024)
        ),
    )  # fmt: skip


HEADS = {
    "README.md": (
        "model and machine", "this project", "prefetch", "UVA",
        ("**8B, dense,** 16 of 32 layers outside",
         "**30B-A3B** cut to 16 layers, the experts of 8 outside"),
        "{}, {} cores",
    ),
    "README.ko.md": (
        "모델과 머신", "이 프로젝트", "prefetch", "UVA",
        ("**8B, dense**, 32개 레이어 중 16개가 GPU 밖",
         "16개 레이어로 줄인 **30B-A3B**, 8개 레이어의 전문가가 GPU 밖"),
        "{}, 코어 {}개",
    ),
}  # fmt: skip


def hosts(page: str) -> str:
    """The one table of a README: shapes, hosts and decode steps of 1, 8 and 32 sequences."""
    *head, (dense, mixture), machine = HEADS[page]

    def steps(name: str, contender: str) -> str:
        found = (step_ms(name, contender, batch, 128, 32) for batch in (1, 8, 32))
        return " / ".join(map(ms, found))

    def row(model: str, gpu: str, cores: int, *columns: str) -> tuple[str, ...]:
        return (f"{model}; {machine.format(gpu, cores)}", f"**{columns[0]}**", *columns[1:])

    return table(
        tuple(str(one) for one in head),
        (
            row(dense, "H200", 30, steps(NEWEST, OURS), steps(NEWEST_PREFETCH, PREFETCH),
                steps(DAY_BEFORE, UVA)),
            row(dense, "H100", 14, steps(SMALL_HOST, OURS), steps(SMALL_HOST, PREFETCH), NONE),
            row(mixture, "H200", 24, steps(EXPERTS_AND_UVA, EXPERT_RANKS),
                steps(EXPERTS_AND_UVA, PREFETCH), steps(EXPERTS_AND_UVA, UVA)),
        ),
    )  # fmt: skip


TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"hosts": lambda: hosts("README.md")},
    "README.ko.md": {"hosts": lambda: hosts("README.ko.md")},
    "docs/performance.md": {
        "half of 8B": half_of_8b,
        "first tokens": first_tokens,
        "day before": day_before,
        "small host": small_host,
        "floors": floors,
        "experts": expert_engine,
        "whole layers": whole_layers,
        "budget": budget,
        "handover": handovers,
        "expert kernels": expert_kernels,
        "two ranks": two_ranks,
        "formats": formats,
        "codes": codes,
        "families": families,
        "in flight": in_flight,
        "boundary": boundary,
        "beside mp": beside_mp,
        "without AVX-512": without_avx512,
        "AVX512-BF16": with_avx512,
    },
    "docs/comparison.md": {"streaming": ways_of_streaming, "kernels": kernels_compared},
}


def written(page: str, text: str) -> str:
    """A page with all of its tables."""
    for name, content in TABLES[page].items():
        text = replaced(text, begin(name), END, content())
    return text


WIDTH, LEFT, ROW, BAR = 600, 20, 66, 17
ON_ONE_DAY = (NEWEST, NEWEST_PREFETCH)
IN_ONE_RUN = (PROMPTS, PROMPTS)
IN_THE_NEWEST_RUN = (NEWEST_PROMPTS, NEWEST_PROMPTS)
FIGURES = (
    ("one token of 1 sequence", step_ms, ON_ONE_DAY, 1, 128),
    ("one token of 8 sequences", step_ms, ON_ONE_DAY, 8, 128),
    ("one token of 128 sequences", step_ms, IN_ONE_RUN, 128, 96),
    ("first token, 1 prompt × 128", prompt_ms, IN_THE_NEWEST_RUN, 1, 128),
    ("first token, 8 prompts × 1,024", prompt_ms, IN_THE_NEWEST_RUN, 8, 1024),
    ("first token, 1 prompt × 8,192", prompt_ms, IN_THE_NEWEST_RUN, 1, 8192),
)
"""Rows of the picture: name, function that takes it from which runs, requests, prompt tokens."""


def picture() -> str:
    """Bars beside prefetching, in milliseconds: shorter is better."""
    drawn, y = Svg(WIDTH), 34.0
    drawn.text(LEFT, y, "Half of an 8B model (bf16) outside an H200", 19, INK, bold=True)
    for line in ("milliseconds, shorter is better; the GPU may use 14 to 16 GiB,",
                 "30 cores of a Xeon with AMX compute the rest, 16 in the last three rows;",
                 "2026-11-23, 28 and 29"):  # fmt: skip
        y += 22
        drawn.text(LEFT, y, line, 15, SOFT)
    y += 16
    values = []
    for text, take, (ours, theirs), batch, prompt in FIGURES:
        pair = (take(ours, OURS, batch, prompt), take(theirs, PREFETCH, batch, prompt))
        values.append((text, tuple(value or 0 for value in pair)))
    longest = max(value for _, pair in values for value in pair)
    scale = (WIDTH - LEFT - 70) / longest
    for text, pair in values:
        drawn.text(LEFT, y + 16, text, 15, INK)
        for place, (value, colour) in enumerate(zip(pair, (KINDS["cpu"], FAINT), strict=True)):
            top = y + 22 + place * (BAR + 2)
            drawn.box(LEFT, top, value * scale, BAR, colour, radius=2)
            drawn.text(LEFT + value * scale + 7, top + 14, ms(value), 15, INK, bold=place == 0)
        y += ROW
    for colour, text in ((KINDS["cpu"], "this project: a CPU socket computes the layers"),
                         (FAINT, "vLLM, prefetching them over PCIe")):  # fmt: skip
        y += 24
        drawn.box(LEFT, y - 12, 13, 13, colour, radius=2)
        drawn.text(LEFT + 22, y, text, 15, SOFT)
    return drawn.render(int(y) + 18)


def write(path: Path) -> None:
    """Write one page anew."""
    text = path.read_text(encoding="utf-8")
    path.write_text(written(str(path.relative_to(ROOT)), text), encoding="utf-8")


if __name__ == "__main__":
    for name in TABLES:
        write(ROOT / name)
    PICTURE.write_text(picture(), encoding="utf-8")

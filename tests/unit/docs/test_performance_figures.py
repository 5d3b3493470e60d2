"""Every measured figure of README, Performance and Comparison is that of a raw file."""

from __future__ import annotations

import json
import re
import statistics
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT / "tools"))

import raw_figures as figures  # noqa: E402
import write_benchmarks_page as benchmarks  # noqa: E402
import write_performance_page as pages  # noqa: E402
import write_speculation_page as drafts  # noqa: E402
from raw_figures import OURS, PREFETCH  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "gpu-host"
LIKE = "type: python tools/write_performance_page.py"


def text_of(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


@pytest.mark.parametrize("page", pages.TABLES)
def test_the_tables_are_those_of_the_raw_files(page: str) -> None:
    assert pages.written(page, text_of(page)) == text_of(page), LIKE


def test_the_picture_is_that_of_the_raw_files() -> None:
    assert pages.picture() == pages.PICTURE.read_text(encoding="utf-8"), LIKE


def test_a_changed_figure_is_noticed() -> None:
    page = text_of("README.md")
    assert pages.written("README.md", page.replace("36.7, 38.3", "26.7, 38.3")) == page


def test_figures_are_read_from_where_they_stand() -> None:
    """Without the tool's own way of reading."""
    ours = json.loads((RESULTS / "2026-11-23-half.json").read_text())
    (one,) = (p for p in ours["contenders"]["ray_hetero cpu-gpu"]["points"]
              if (p["batch"], p["prompt"]) == (8, 1024))  # fmt: skip
    assert figures.step_ms(pages.NEWEST, OURS, 8, 1024) == one["step_ms"]
    assert figures.first_token_ms(pages.NEWEST, OURS, 8, 1024) == 1e3 * one["prefill_s"]
    assert figures.step_ms(pages.NEWEST_PREFETCH, PREFETCH, 32) is None
    assert figures.kernel_ms(pages.EXPERT_KERNELS, "compact", 8) == 3.189
    # 16 layers of 436 MB at 178.9 GB/s, the rest at 4,254 GB/s.
    assert figures.floor_ms(pages.NEWEST, 16) == pytest.approx(6979.6 / 178.94 + 1.89, abs=0.02)
    assert figures.floor_ms(pages.NEWEST, 12) < figures.floor_ms(pages.NEWEST, 16)


def test_no_table_of_figures_stands_outside_the_marks() -> None:
    for page in ("README.md", "README.ko.md", "docs/performance.md"):
        rest = re.sub(r"<!-- figures,.*?<!-- end of figures -->", "", text_of(page), flags=re.S)
        rows = [line for line in rest.splitlines() if line.startswith("|")]
        assert [row for row in rows if re.search(r"\d\.\d|\d ms", row)] == []


def ratio(slow: float | None, fast: float | None) -> str:
    assert slow is not None
    assert fast is not None
    return f"{slow / fast:.1f}"


def first_tokens(name: str, *loads: tuple[int, int]) -> list[float]:
    """Times of first tokens in parts of those with prefetching, by requests and prompt tokens."""
    return [
        figures.prompt_ms(name, OURS, *load) / figures.prompt_ms(name, PREFETCH, *load)  # type: ignore[operator]
        for load in loads
    ]


def test_figures_in_sentences_are_those_of_the_raw_files() -> None:
    eight, many = (
        ratio(figures.step_ms(theirs, PREFETCH, *load), figures.step_ms(ours, OURS, *load))
        for ours, theirs, load in (
            (pages.NEWEST, pages.NEWEST_PREFETCH, (8, 128)),
            (pages.PROMPTS, pages.PROMPTS, (128, 96)),
        )
    )
    assert f"{eight} times at 8 sequences, {many} times at 128" in text_of("README.md")
    assert f"8개에서 {eight}배, 128개에서 {many}배" in text_of("README.ko.md")
    page = " ".join(text_of("docs/performance.md").split())
    assert f"{eight} times as fast as with weights that are streamed over PCIe for 8" in page
    assert f"and {many} times for 128, on a socket of 30 cores" in page
    small = [
        ratio(figures.step_ms(pages.SMALL_HOST, PREFETCH, batch),
              figures.step_ms(pages.SMALL_HOST, OURS, batch))
        for batch in (8, 32)
    ]  # fmt: skip
    assert f"With 14 cores it is {small[0]} times for 8, and {small[1]} times for 32" in page
    one, eight_of, long, longest = first_tokens(
        pages.PROMPTS, (1, 128), (8, 1024), (1, 8192), (1, 32768)
    )
    both_long = figures.prompt_ms(pages.PROMPTS, pages.TWO_RANKS, 1, 8192)
    theirs = figures.prompt_ms(pages.PROMPTS, PREFETCH, 1, 8192)
    said = (
        f"by {1 - one:.0%} for one of 128 and by {1 - eight_of:.0%} for eight of 1,024, and "
        f"{1 - long:.0%} earlier for 8,192 and {1 - longest:.0%} for 32,768 tokens; with two CPU "
        f"ranks, {1 - both_long / theirs:.0%} earlier for 8,192 tokens."  # type: ignore[operator]
    )
    assert said.replace("%", " %") in page
    served = figures.point(pages.NEWEST, OURS, 128, 96)["tokens_per_s"]
    assert f"the same load gives {served:,.0f} tokens/s" in page
    both = [figures.point(pages.PROMPTS, one, 128, 96)["tokens_per_s"] for one in (OURS, PREFETCH)]
    assert "it gave {:,.0f} tokens/s, and prefetching {:,.0f}".format(*both) in page
    probes = [
        probe["socket"] / 1e9
        for name in (pages.NEWEST, pages.SMALL_HOST)
        for probe in figures.raw(name)["contenders"][OURS]["bandwidths"]
    ]
    assert "reads {:.0f} to {:.0f} GB/s, the link".format(*probes[:2]) in page
    assert "reads {:.0f} to {:.0f} GB/s. Medians".format(*probes[2:]) in page


def test_the_model_that_the_readme_names_ran_as_fast() -> None:
    raw = json.loads((RESULTS / "2026-11-29-h200-one-flag.json").read_text(encoding="utf-8"))
    found = raw["gpt-oss"]
    step, planned = (found["step_1"][name] for name in ("measured_ms", "predicted_ms"))
    layers = re.findall(r"experts of (\d+) layers", found["chosen"])[0]
    text = " ".join(text_of("README.md").split())
    assert (
        f"took {step:.1f} ms per step beside one H200 with the experts of {layers} layers" in text
    )
    assert f"{1e3 / step:.0f} tokens per second for one user" in text
    assert f"the plan had said {1e3 / planned:.0f}" in text
    korean = " ".join(text_of("README.ko.md").split())
    assert f"전문가 {layers}개 레이어를 맡은 소켓에서 스텝이 {step:.1f} ms" in korean
    assert f"초당 {1e3 / step:.0f} 토큰이고, 예측은 {1e3 / planned:.0f} 토큰" in korean


def test_shared_decode_steps_are_those_of_the_raw_file() -> None:
    lines = (RESULTS / "2026-11-26-columns-in-turns.txt").read_text(encoding="utf-8").splitlines()
    found = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    assert [one["batch"] for one in found] == [1, 8, 32]
    for one in found:
        shared, alone = (statistics.median(one[name]) for name in ("shared_ms", "alone_ms"))
        assert one["ratio"] == pytest.approx(shared / alone, abs=0.001)
    one, eight, many = (f"{each['ratio']:.2f}" for each in found)
    page = " ".join(text_of("docs/performance.md").split())
    assert f"steps of 1, 8 and 32 requests took {one}, {eight} and {many} of the time" in page
    assert f"1 and 32 requests took [{one} and {many} of the time" in " ".join(
        text_of("docs/tuning.md").split()
    )


@pytest.mark.parametrize(
    ("name", "contender", "runs"),
    [(pages.NEWEST, OURS, {3}), (pages.NEWEST_PREFETCH, PREFETCH, {2}),
     (pages.DAY_BEFORE, figures.UVA, {5}), (pages.SMALL_HOST, OURS, {4, 5})],
)  # fmt: skip
def test_as_many_runs_as_the_page_says(name: str, contender: str, runs: set[int]) -> None:
    points = figures.raw(name)["contenders"][contender]["points"]
    assert {len(point["decode_ms_all"]) for point in points} == runs


def test_the_page_of_drafts_is_that_of_the_raw_files() -> None:
    page = text_of("docs/speculation.md")
    assert drafts.written(page) == page, "type: python tools/write_speculation_page.py"


def test_the_tables_of_benchmarks_are_those_of_the_raw_files() -> None:
    page = benchmarks.PAGE.read_text(encoding="utf-8")
    assert benchmarks.written(page) == page, "type: python tools/write_benchmarks_page.py"


def test_published_likelihoods_are_within_the_bound_that_stock_sets() -> None:
    rows = figures.raw(benchmarks.QUALITY)["rows"]
    quality = benchmarks.quality
    (stock,) = (row for row in rows if quality.is_of(row, *quality.STOCK))
    assert {row["format"] for row in rows if row["way"] == "pipeline"} == quality.formats().keys()
    for row in rows:
        own, wanted = row["continued"], stock["continued"]
        assert abs(row["difference"]) < quality.bound(stock, quality.WINDOWS), row
        assert abs(own["difference"]) < quality.bound(wanted, quality.WINDOWS, 6), row
        if row["format"] == "bf16":
            assert abs(row["engine"] - stock["engine"]) < 0.002


def test_a_likelihood_that_is_biased_is_out_of_bounds() -> None:
    quality = benchmarks.quality
    windows = [([-2.0, -1.0], [-2.1 + 0.2 * (at % 2), -0.9 - 0.2 * (at % 2)]) for at in range(14)]
    fair = quality.figures(windows)
    assert (fair["engine"], fair["difference"]) == pytest.approx((1.5, 0))
    stock = {"between_windows": 0.003}
    assert abs(fair["difference"]) < quality.bound(stock, 14) == pytest.approx(0.0032, abs=1e-4)
    biased = [([x + 0.01 for x in ours], theirs) for ours, theirs in windows]
    assert quality.figures(biased)["difference"] == pytest.approx(-0.01)

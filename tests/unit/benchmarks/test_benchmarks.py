"""The arithmetic behind the benchmarks' figures; what runs engines is not run here."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from native_module import LEVELS, needs_compiler, needs_native, run_program

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from compact_shares import random_matrices, shares  # noqa: E402
from contender_process import in_turns, run  # noqa: E402
from contenders import (  # noqa: E402
    Contender,
    Split,
    drafting,
    formats,
    in_flight,
    with_gpu,
)
from engine_run import Point, Timeline, figures, forced_drafts  # noqa: E402
from expert_slots import ROUTINGS, of_text, replayed  # noqa: E402
from expert_weights import VARIANTS, BlockScaled, Shape, fp8_experts_of  # noqa: E402
from family_steps import ratios  # noqa: E402
from floor import cpu_ticks, stolen_share  # noqa: E402
from forced_drafter import ForcedDrafter  # noqa: E402
from heavy_tailed import CIRCLE, DEGREES, SPREAD, write_checkpoint  # noqa: E402
from planner_check import Planner, fits, verdict  # noqa: E402
from shapes import (  # noqa: E402
    FAMILIES,
    QUANTISED,
    SHAPES,
    head_bytes,
    layer_bytes,
    more_norm_bytes,
    write_shape,
)
from side_by_side import budget_share, gpus_of, merged, together  # noqa: E402
from side_by_side_report import arrivals, crossing_of, floor_ms, notes, table  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402
from utilisation import shares_between  # noqa: E402

from placement.model.reading import shape_of  # noqa: E402
from ray_hetero.observability.route_trace import RouteWriter, TracedLayer  # noqa: E402


@pytest.mark.parametrize("name", SHAPES)
def test_bytes_of_a_shape_are_those_that_the_planner_counts(name: str) -> None:
    shape = shape_of(write_shape(name))
    expected = layer_bytes(SHAPES[name]) + more_norm_bytes(name)
    assert sum(tensor.rank_bytes(1) for tensor in shape.layers[0].tensors) == expected
    assert sum(t.rank_bytes(1) for t in shape.output_matrix if t.role != "norm") >= head_bytes(
        SHAPES[name]
    )


def test_shapes_of_other_families_read_what_llamas_does() -> None:
    for name in FAMILIES:
        assert layer_bytes(SHAPES[name]) == layer_bytes(SHAPES["1b-4"])
        assert more_norm_bytes(name) < layer_bytes(SHAPES[name]) / 10_000


def test_a_familys_time_is_compared_with_llamas_of_the_same_round() -> None:
    times = {"1b-4": [10.0, 20.0, 30.0], "1b-4-gemma2": [10.5, 20.0, 36.0]}
    rows = {
        name: [{"batch": 8, "decode_ms": value} for value in values]
        for name, values in times.items()
    }
    assert ratios(rows, "decode_ms", 8) == {"1b-4-gemma2": [1.05, 1.0, 1.2]}


def test_a_decode_step_is_the_time_of_one_token_of_each_request() -> None:
    # Eight requests get 31 more tokens each in 3.1 s.
    line = Timeline(all_started=1.0, first_ended=4.1, full_tokens=8 * 31, ended=4.1)
    assert line.decode_ms(8) == pytest.approx(100)
    result = figures(Point(8, 128, 32), [line])
    assert (result["prefill_s"], result["decode_ms"]) == (1.0, 100.0)
    assert result["tokens_per_s"] == pytest.approx(8 * 32 / 4.1, abs=0.01)


def test_a_step_that_others_have_taken_the_processors_in_does_not_move_the_median() -> None:
    between = (0.1,) * 20 + (0.4,)
    line = Timeline(1.0, 3.4, 8 * 21, 3.4, full_steps=21, between_steps=between)
    found = figures(Point(8, 128, 22), [line, line])
    assert found["median_step_ms"] == 100
    assert found["step_ms"] == pytest.approx(2400 / 21, abs=0.001)


def test_without_a_moment_of_a_full_batch_there_is_no_decode_step() -> None:
    line = Timeline(all_started=4.0, first_ended=4.0, full_tokens=0, ended=5.0)
    assert figures(Point(2, 128, 2), [line])["decode_ms"] is None


def test_a_step_that_verifies_drafts_brings_several_tokens() -> None:
    # Eight requests, 20 steps in 1 s: the tokens of 50 without drafts.
    line = Timeline(1.0, 2.0, full_tokens=8 * 50, ended=2.0, full_steps=20)
    found = figures(Point(8, 128, 51), [line])
    assert (found["step_ms"], found["decode_ms"], found["tokens_a_step"]) == (50.0, 20.0, 2.5)


def test_drafts_are_forced_on_every_request_that_decodes() -> None:
    given = forced_drafts(3, 0.5)
    assert given["synthetic_acceptance_rates"] == [0.5, 0.25, 0.125]
    known = np.array([[3, 9, 5, 6], [3, 9, 0, 0], [1, 9, 7, 0]])
    drafts = ForcedDrafter(None).propose([[5, 6], [], [7]], None, known, slot_mappings=None)
    assert drafts == [[6, 6, 6], [], [7]]


def test_drafts_are_compared_over_one_split() -> None:
    for sockets, layers in ((None, [16, 16]), (1, [11, 11])):
        split = Split("8b", 16) if sockets is None else Split("1b", 22)
        made = drafting(split, sockets=sockets)
        # The drafting model has the 8B shape's vocabulary.
        forced = [f"forced {count}" for count in (1, 3, 7)]
        names = ["no drafts", *forced, "n-grams", *([] if sockets else ["draft model"])]
        assert [one.name for one in made] == names
        for one in made:
            config = json.loads(one.command[one.command.index("--config") + 1])
            assert config["layers"] == layers
    for one, method in zip(drafting(Split("8b", 16), sockets=None)[-2:], ("ngram", "draft_model"),
                           strict=True):  # fmt: skip
        engine = json.loads(one.command[one.command.index("--engine") + 1])
        assert engine["speculative_config"]["method"] == method


def test_a_point_may_have_an_output_of_its_own() -> None:
    assert Point.parse("8x128", 32) == Point(batch=8, prompt=128, output=32)
    assert Point.parse("8x128x256", 32) == Point(batch=8, prompt=128, output=256)
    some = Point.parse("5x128x16-24", 32)
    assert (some, str(some)) == (Point(5, 128, 24, least=16), "5x128x16-24")
    assert some.outputs == [24, 22, 20, 18, 16]
    assert Point(2, 128, 7).outputs == [7, 7]
    assert Point(1, 128, 7, least=3).outputs == [7]


def test_contenders_share_a_gpu_as_far_as_it_has_room_for_them() -> None:
    options, gpu = Namespace(case="half", gpu_budget_gib=16), {"memory_bytes": 80 << 30}
    share = budget_share(options, gpu)
    assert gpus_of(4, ["2", "5"], share) == ["2", "2", "2", "5"]
    assert gpus_of(7, ["2", "5"], share) == ["2", "2", "2", "5", "5", "5", "2"]
    options.gpu_budget_gib = 60
    assert gpus_of(3, ["2", "5"], budget_share(options, gpu)) == ["2", "5", "2"]
    # Without a budget nobody knows how many there is room for; without a GPU there is one place.
    options.gpu_budget_gib = None
    assert gpus_of(3, ["2", "5"], budget_share(options, gpu)) == ["2", "5", "2"]
    options.gpu_budget_gib = 16
    assert gpus_of(2, [""], budget_share(options, None)) == ["", ""]
    # This case has a budget of its own.
    options = Namespace(case="budget", gpu_budget_gib=None)
    assert gpus_of(3, ["2", "5"], budget_share(options, gpu)) == ["2", "2", "5"]


def test_answers_of_several_lengths_are_all_counted() -> None:
    line = Timeline(1.0, 1.3, 2 * 3, 2.0, full_steps=3, between_steps=(0.1,) * 3,
                    later_steps=(0.05, 0.04))  # fmt: skip
    found = figures(Point(2, 128, 6, least=4), [line, line])
    assert (found["median_step_ms"], found["tokens_per_s"]) == (100, 5)
    assert found["steps_ms_all"] == [[100, 100, 100, 50, 40]] * 2
    assert found["least"] == 4
    assert Point.parse("8x128x256", 32).tokens == 384


def run_of(**contenders: dict[str, Any]) -> dict[str, Any]:
    """Results of a run: 16 of 32 layers of 0.5 GB outside, output matrix of 1 GB."""
    return {
        "shape": "8b", "case": "half", "layers": 32, "layers_outside": 16, "points_left_out": [],
        "layer_bytes": 500_000_000, "head_bytes": 1_000_000_000, "contenders": contenders,
        "gpu": {"name": "GPU", "copy_bytes_per_s": 4.5e12, "link_bytes_per_s": 50e9},
    }  # fmt: skip


def outcome(reads: str, *points: dict[str, Any], status: int = 0) -> dict[str, Any]:
    return {
        "status": status, "reads": reads, "points": list(points), "memory": None,
        "bandwidths": [{"socket": 150e9}, {"socket": 170e9}],
    }  # fmt: skip


def point(batch: int, prompt: int, decode_ms: float, prefill_s: float) -> dict[str, Any]:
    return {"batch": batch, "prompt": prompt, "output": 32, "decode_ms": decode_ms,
            "prefill_s": prefill_s, "tokens_per_s": 1.0}  # fmt: skip


@pytest.mark.parametrize(
    ("reads", "expected"),
    [
        # 8 GB at 160 GB/s, then 9 GB at 4.5 TB/s.
        ("socket", 50 + 2),
        # The link takes 160 ms, and the GPU's own 2 ms can pass meanwhile.
        ("link", 160),
        ("gpu", 1000 * 17e9 / 4.5e12),
    ],
)
def test_the_floor_is_bytes_over_the_bandwidth_of_where_they_are(
    reads: str, expected: float
) -> None:
    assert floor_ms(run_of(), outcome(reads)) == pytest.approx(expected)


def test_the_table_shows_contenders_that_failed_and_where_streaming_overtakes() -> None:
    found = run_of(
        **{
            "ray_hetero cpu-gpu": outcome("socket", point(1, 128, 60, 0.2), point(8, 128, 60, 0.8)),
            "vllm prefetch": outcome("link", point(1, 128, 160, 0.16), point(8, 128, 160, 0.2)),
            "accelerate": outcome("link", status=1),
        }
    )
    shown = table(found, width=130)
    assert "failed: 1" in shown
    # From 60 : 160 ms at 8 tokens to 0.2 : 0.16 s at 128, the logarithms in proportion.
    assert "vllm prefetch is faster than ray_hetero cpu-gpu above 77 tokens a step" in shown


def test_curves_that_do_not_meet_have_no_crossing() -> None:
    assert crossing_of([(1, 1.0), (8, 1.0)], [(1, 2.0), (8, 3.0)]) is None
    assert crossing_of([(1, 1.0), (100, 2.0)], [(1, 2.0), (100, 1.0)]) == pytest.approx(10)


def test_a_later_run_replaces_its_points_and_keeps_the_others() -> None:
    first = outcome("link", point(1, 128, 1, 1), point(8, 128, 2, 2))
    both = merged(first, outcome("link", point(8, 128, 3, 3), point(8, 1024, 4, 4)))
    assert [(p["batch"], p["prompt"], p["decode_ms"]) for p in both["points"]] == [
        (1, 128, 1), (8, 128, 3), (8, 1024, 4),
    ]  # fmt: skip
    assert len(both["bandwidths"]) == 4


def test_a_report_warns_of_processors_that_were_stolen() -> None:
    before, after = {"all": 1000, "stolen": 10}, {"all": 2000, "stolen": 94}
    assert stolen_share(before, after) == pytest.approx(0.084)
    assert stolen_share(after, after) == 0
    assert set(cpu_ticks()) == {"all", "stolen"}
    quiet = run_of(a=outcome("link"))
    assert not any("stolen" in line for line in notes(quiet))
    stolen = {"a": outcome("link") | {"stolen_shares": [0.001, 0.084]}}
    assert "up to 8.4% of the processors' time" in " ".join(notes(run_of(**stolen)))


def test_all_contenders_hold_the_same_layers_outside() -> None:
    commands = {
        contender.name: list(contender.command)
        for contender in with_gpu(Split("20b", 24), share=0.17, engine={}, prefetch_step=1)
    }

    def given(name: str, option: str) -> dict[str, Any]:
        command = commands[name]
        return dict(json.loads(command[command.index(option) + 1]))

    assert given("ray_hetero cpu-gpu", "--config")["layers"] == [24, 24]
    assert given("vllm uva", "--engine")["cpu_offload_gb"] * 2**30 == 24 * layer_bytes(
        SHAPES["20b"]
    )
    prefetch = given("vllm prefetch", "--engine")
    assert (prefetch["offload_group_size"], prefetch["offload_num_in_group"]) == (2, 1)
    assert commands["accelerate"][-2:] == ["--outside", "24"]
    assert given("ray_hetero gpu-cpu", "--config")["gpu"] == {"memory_utilization": 0.17}
    assert "gpu_memory_utilization" not in given("all on gpu", "--engine")


def test_experts_beside_a_gpu_are_compared_where_a_shape_has_some() -> None:
    there = {one.name: one for one in with_gpu(Split("30b-a3b-16", 8), share=None, engine={},
                                               prefetch_step=1)}  # fmt: skip
    command = there["ray_hetero experts"].command
    assert json.loads(command[command.index("--layout") + 1]) == [["gpu"]]
    config = json.loads(command[command.index("--config") + 1])
    assert config["experts"] == {"ranks": 1, "layers": 8}


def test_formats_are_compared_over_one_split_and_each_beside_prefetching() -> None:
    made = formats(Split("8b", 16), share=0.1, engine={}, prefetch_step=2)
    kinds = [one.command[one.command.index("--stored") + 1] if "--stored" in one.command else None
             for one in made]  # fmt: skip
    assert kinds == [kind for kind in (None, *QUANTISED) for _ in range(2)]
    assert [one.reads for one in made] == ["socket", "link"] * (1 + len(QUANTISED))


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_a_heavy_tailed_checkpoint_is_one_that_transformers_reads(
    name: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(name, tmp_path / "checkpoint")
    model, loading = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    first, second = (layer.self_attn.o_proj.weight for layer in model.model.layers[:2])
    assert not torch.equal(first, second)
    values = first.detach().float() / SPREAD
    assert values.std().item() == pytest.approx((DEGREES / (DEGREES - 2)) ** 0.5, rel=0.05)
    # Of evenly spread or normal weights none would be so far out.
    assert values.abs().max() > 8
    # A folder that holds it already is left as it is.
    before = (folder / "layer-0.safetensors").stat().st_mtime_ns
    write_checkpoint(name, folder)
    assert (folder / "layer-0.safetensors").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["tiny", "tiny-moe"])
def test_greedy_text_of_a_heavy_tailed_checkpoint_repeats_itself(name: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(write_checkpoint(name, tmp_path / "checkpoint"))
    prompt = torch.tensor([[3, 10, 17, 24, 31]])
    given = {"max_new_tokens": 3 * CIRCLE, "do_sample": False, "eos_token_id": None}
    text = model.generate(prompt, **given)[0, prompt.shape[1] :].tolist()
    assert len(set(text[:CIRCLE])) == CIRCLE
    assert text == text[:CIRCLE] * 3


def test_rounds_of_a_point_are_put_together() -> None:
    rounds = tuple(
        point(8, 128, ms, 1.0) | {"decode_ms_all": [ms], "step_ms": None} for ms in (3.0, 9.0, 4.0)
    )
    found = together(rounds)
    assert (found["batch"], found["decode_ms"], found["step_ms"]) == (8, 4.0, None)
    assert found["decode_ms_all"] == [3.0, 9.0, 4.0]


def test_a_contender_that_is_late_is_stopped_with_what_it_has_started(tmp_path: Path) -> None:
    code = (
        "import subprocess, sys; "
        "p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
        "print('RESULT {\"pid\": %d}' % p.pid, flush=True); p.wait()"
    )
    found = run([sys.executable, "-c", code], {}, tmp_path / "log", timeout_s=5)
    assert found.status == "not done in 5 s"
    (answer,) = found.answers("RESULT ")
    # A process that is gone, or at most not yet reaped.
    state = subprocess.run(
        ["ps", "-o", "stat=", "-p", str(answer["pid"])], capture_output=True, text=True, check=False
    ).stdout.strip()
    assert state in ("", "Z") or state.startswith("Z")


def test_a_contender_measures_when_it_is_told(tmp_path: Path) -> None:
    code = (
        "import sys; print('ready'); print('DONE {}', flush=True)\n"
        "for n, line in enumerate(sys.stdin): "
        "print('RESULT {\"n\": %d}' % n); print('DONE {}', flush=True)"
    )
    with in_turns([sys.executable, "-c", code], {}, tmp_path / "log", timeout_s=20) as turns:
        assert turns.next().answers("RESULT ") == [{"n": 0}]
        assert turns.next().answers("RESULT ") == [{"n": 1}]


def test_a_contender_that_ends_before_its_turn_is_told_with_what_it_said(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "raise SystemExit('no room')"]
    with (
        pytest.raises(SystemExit, match="no room"),
        in_turns(command, {}, tmp_path / "log", timeout_s=20),
    ):
        pass


def test_batches_in_flight_are_measured_with_the_same_split() -> None:
    def layout_and_points(contender: Contender) -> tuple[Any, Any, str | None]:
        command = list(contender.command)
        config = json.loads(command[command.index("--config") + 1])
        layout = json.loads(command[command.index("--layout") + 1])
        return layout, config["layers"], contender.points

    point = Point(32, 1024, 16)
    two, one = in_flight(Split("8b", 2), [point], sockets=None)
    assert layout_and_points(two) == ([["cpu"], ["gpu"]], [2, 30], "32x1024x16")
    assert layout_and_points(one) == ([["cpu"], ["gpu"]], [2, 30], "16x1024x16,32x1024x16")
    two, one = in_flight(Split("1b", 22), [point], sockets=1)
    assert layout_and_points(two)[:2] == layout_and_points(one)[:2] == ([["cpu"]] * 2, [11, 11])


def test_batches_in_flight_have_steps_of_the_same_size() -> None:
    def engine(contender: Contender) -> dict[str, Any]:
        command = list(contender.command)
        return json.loads(command[command.index("--engine") + 1])

    points = [Point(2, 128, 64), Point(32, 1024, 16)]
    two, one = in_flight(Split("8b", 2), points, sockets=None)
    assert (two.points, one.points) == (
        "2x128x64,32x1024x16", "1x128x64,16x1024x16,2x128x64,32x1024x16"
    )  # fmt: skip
    assert engine(two) == engine(one) == {
        "max_num_batched_tokens": 4096,
        "compilation_config": {"cudagraph_capture_sizes": [1, 2, 16, 32]},
    }  # fmt: skip
    two, one = in_flight(Split("1b", 22), points, sockets=1, step_tokens=512)
    assert engine(two) == engine(one) == {"max_num_batched_tokens": 512}


def split(layers: list[int], measured: float, stages: list[float]) -> dict[str, Any]:
    return {"layers": layers, "measured_ms": measured, "measured_stage_ms": stages,
            "predicted_stage_ms": [2.0 * n for n in layers]}  # fmt: skip


def test_the_planner_is_asked_what_the_executor_would_ask() -> None:
    config = {"cpu": {"ranks_per_socket": 2, "bandwidth_gb_s": 10}}
    options = Namespace(
        shape="1b", layout='[["cpu"], ["cpu"]]', config=json.dumps(config), max_num_seqs=2,
        gpu_share=0.9, eager=True,
    )  # fmt: skip
    planner = Planner(options)
    assert planner.split(22).layers == (11, 11)
    found = planner.split(22, [4, 18])
    assert found.layers == (4, 18)
    # 4 layers at 10 GB/s, and what stands beside the reads.
    reads = 4 * layer_bytes(SHAPES["1b"]) / 10e9
    assert reads < found.stages[0].decode.seconds < reads + 10e-3


SPLITS = [split([1, 3], 13.0, [3.0, 10.0]), split([2, 2], 12.0, [5.0, 7.0]),
          split([3, 1], 11.0, [7.0, 4.0])]  # fmt: skip


@pytest.mark.parametrize(
    ("objective", "layers", "expected"),
    [
        ("latency", [2, 2], "12.00 ms; best of 3 measured is [3, 1], 11.00 ms; ratio 1.091 (NOT"),
        ("throughput", [3, 1], "7.00 ms; best of 3 measured is [2, 2], 7.00 ms; ratio 1.000 (wit"),
    ],
)
def test_the_planners_choice_beside_the_best(
    objective: str, layers: list[int], expected: str
) -> None:
    assert expected in verdict(SPLITS, objective, layers)


def test_stages_are_fitted_by_what_a_layer_and_a_step_cost() -> None:
    first, _ = fits(SPLITS)
    assert first == (
        "stage 0: predicted 0.00 ms + 2.000 ms a layer, measured 1.00 ms + 2.000 ms a layer"
    )


@needs_native
@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "arguments", "lines"),
    [
        ("streaming_linear", ["1", "1"], ["outputs are those of plain sums", "1 tokens, compact"]),
        (
            "decode_step",
            ["1/2", "1x128", "4x300"],
            ["sums of 32 × 4096 over 2 ranks", "1x128", "4x300"],
        ),
    ],
)
def test_programs_without_python_can_be_built_and_run(
    program: str, arguments: list[str], lines: list[str], tmp_path: Path
) -> None:
    options = ("-O2", f"-I{BENCHMARKS.parent / 'csrc'}")
    printed = run_program(
        BENCHMARKS / f"{program}.cpp", tmp_path, *options, arguments=arguments, level=LEVELS[-1]
    )
    assert all(line in printed for line in lines), printed


def test_a_stage_is_as_busy_as_its_busiest_rank() -> None:
    def rank(busy: float) -> dict[str, float]:
        return {"busy": busy, "waiting": 4.0, "exchange": 0.5}

    before = {("0", "0"): rank(10), ("0", "1"): rank(10), ("1", "2"): rank(0)}
    after = {("0", "0"): rank(10.5), ("0", "1"): rank(11.5), ("1", "2"): rank(1)}
    shares = shares_between(before, after, seconds=2)
    assert {stage: found["busy"] for stage, found in shares.items()} == {"0": 0.75, "1": 0.5}
    assert shares["0"]["waiting"] == 0


@needs_native
def test_outliers_are_those_of_the_compact_weight() -> None:
    from ray_hetero import _streaming_linear as native
    from ray_hetero.kernels.formats.base import pack
    from ray_hetero.kernels.formats.compact import CompactWeight

    weights = {name: weight[:256, :512] for name, weight in random_matrices()}
    for name in ("normal", "Laplace"):
        weight = weights[name].to(torch.bfloat16).contiguous()
        held = CompactWeight.made(pack(weight), native)
        assert held is not None
        found = shares(weight)
        in_blocks = 1 - found["packed_blocks"]
        kept = found["outliers"] if in_blocks == 1 else None
        assert len(held.encoding.packed_blocks) == round(found["packed_blocks"] * 8)
        if kept is not None:
            assert held.encoding.outliers_count == round(kept * weight.numel())
    assert CompactWeight.made(pack(weights["any bits"].contiguous()), native) is None
    assert shares(weights["any bits"])["packed_blocks"] == 1


def test_a_block_of_fp8_has_the_scale_that_its_largest_weight_needs() -> None:
    weight = torch.randn(256, 384).bfloat16()
    weight[130, 5] = 50.0
    held = BlockScaled.of(weight)
    assert held.scales.shape == (2, 3)
    assert held.codes[130, 5].item() == 448
    assert held.scales[1, 0].item() == pytest.approx(50 / 448)
    # Half of the last of three bits, or of the smallest code.
    room = torch.maximum(weight.float().abs() / 16, of_outputs(held.scales) * 2**-10)
    assert ((widened(held) - weight.float()).abs() <= room * 1.001).all()
    with pytest.raises(ValueError, match="multiples of 128, got 128 and 96"):
        BlockScaled.of(weight[:128, :96])


def of_outputs(scales: torch.Tensor) -> torch.Tensor:
    """A scale for each weight."""
    return scales.repeat_interleave(128, 0).repeat_interleave(128, 1)


def widened(weight: BlockScaled) -> torch.Tensor:
    return weight.codes.float() * of_outputs(weight.scales)


@needs_native
def test_fp8_experts_that_are_timed_compute_what_their_codes_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Imported, the benchmark says so to all that this process starts.
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    from experts import fp8_layer

    from ray_hetero import _streaming_linear as native

    shape = Shape(experts=6, hidden=256, inner=128, chosen=2)
    layer = fp8_layer(shape, native.levels()[-1])
    # A byte each, and a scale for each output and 128 inputs.
    assert layer.expert_bytes == pytest.approx(shape.weights * (1 + 4 / 128), rel=0.01)
    gate_ups, downs = fp8_experts_of(shape)
    for tokens in (1, 40):
        x, weights = torch.randn(tokens, shape.hidden).bfloat16(), torch.rand(tokens, shape.chosen)
        ids = shape.route(tokens)
        expected = torch.zeros(tokens, shape.hidden)
        for token, chosen in itertools.product(range(tokens), range(shape.chosen)):
            number = int(ids[token, chosen]) % VARIANTS
            gate, up = (widened(gate_ups[number]) @ x[token].float()).chunk(2)
            between = torch.nn.functional.silu(gate) * up
            expected[token] += weights[token, chosen] * (widened(downs[number]) @ between)
        found = layer.compute(x, weights, ids).float()
        assert (found - expected).norm() < 0.01 * expected.norm()


@needs_native
def test_fp8_experts_that_are_timed_are_held_as_a_rank_holds_a_checkpoints(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Imported, the benchmark says so to all that this process starts.
    monkeypatch.setenv("VLLM_TARGET_DEVICE", "cpu")
    pytest.importorskip("vllm")
    from experts import fp8_weight

    from ray_hetero import _streaming_linear as native
    from ray_hetero.compat.models.quantised_experts import StoredExperts
    from ray_hetero.kernels.experts.activations import Order
    from ray_hetero.kernels.experts.quantised_experts import held

    both = fp8_experts_of(Shape(experts=6, hidden=256, inner=128, chosen=2))
    weights, scales = (
        [torch.stack([getattr(one, part) for one in few]) for few in both]
        for part in ("codes", "scales")
    )
    stored = StoredExperts("fp8", *weights, *scales, block=(128, 128))
    pairs = list(held(stored, native, Order.HALVES))
    for i, (few, is_gate_up) in enumerate(zip(both, (True, False), strict=True)):
        for weight, pair in zip(few, pairs, strict=True):
            found = fp8_weight(weight, is_gate_up=is_gate_up)
            assert torch.equal(found.data, pair[i].data)
            assert (found.shape, found.layout) == (pair[i].shape, pair[i].layout)


def test_gaps_of_an_arriving_prompt_are_those_of_the_middle_round() -> None:
    rounds = [
        {"usual_ms": 40.0, "longest_ms": longest, "gaps_ms": [50.0, longest, 40.0]}
        for longest in (300.0, 100.0, 200.0)
    ]
    found = {
        "contenders": {
            "ours": {"arrivals": [{"rounds": [one]} for one in rounds]}, "others": {"arrivals": []}
        }
    }  # fmt: skip
    ((name, (usual, gaps)),) = arrivals(found).items()
    assert (name, usual) == ("ours", 40.0)
    assert [ms for _, ms in gaps] == [50.0, 200.0, 40.0]
    assert [end for end, _ in gaps] == pytest.approx([0.05, 0.25, 0.29])


def test_made_up_routing_is_as_uneven_as_it_says() -> None:
    options = Namespace(experts=64, chosen=4, layers=2, steps=300, exponent=1.2, stay=0.9, memory=2)
    found = {name: replayed(made(options, 1), [64, 64]) for name, made in ROUTINGS.items()}
    for row in found.values():
        assert (row["steps_of_layers"], row["read"]) == (600, 4)
    # A quarter of the experts; what is chosen again and again, or mostly, is found more often.
    assert 0.15 < found["even"]["held_25"] < 0.3
    assert found["zipf"]["held_25"] > 0.5
    assert found["sticky"]["held_25"] > 0.6
    assert found["sticky"]["copies_25"] < found["even"]["copies_25"]


def test_requests_of_a_text_continue_its_parts() -> None:
    routing = np.arange(24).reshape(2, 6, 2)
    steps = [(layer, chosen.tolist()) for layer, chosen in of_text(routing, 2)]
    assert steps[:2] == [(0, [[0, 1], [6, 7]]), (1, [[12, 13], [18, 19]])]
    assert len(steps) == 6


def test_steps_with_slots_are_compared_with_the_better_and_with_whole_layers() -> None:
    from slot_steps import summed_up, whole_layers

    def points(requests: int, **ms: float) -> list[dict[str, Any]]:
        return [
            {
                "routing": "even",
                "requests": requests,
                "mode": mode.replace("_", " "),
                "step_ms": one,
            }
            for mode, one in ms.items()
        ]

    found = summed_up(
        [
            *points(1, off=10.0, always=4.0, auto=4.1, layers=8.0, off_again=10.2),
            *points(32, off=10.0, always=12.5, auto=10.1, layers=8.0, off_again=9.9),
        ]
    )
    names = ("always_over_off", "auto_over_better", "layers_over_always", "off_again_over_off")
    assert [[one[name] for name in names] for one in found] == [
        [0.4, 1.025, 2.0, 1.02], [1.263, 1.02, 0.64, 0.99],
    ]  # fmt: skip
    assert [whole_layers(16, percent) for percent in (5, 12.5, 25)] == [1, 2, 4]


def test_traces_are_replayed_by_several_requests(tmp_path: Path) -> None:
    from slot_steps import of_trace

    layers = [TracedLayer(name, 16, 2) for name in "ab"]
    writer = RouteWriter(tmp_path / "routes", layers, 1 << 20)
    tokens = np.stack([np.arange(20) % 16, (np.arange(20) + 3) % 16], axis=1)
    for at in range(0, 20, 2):
        for layer in range(2):
            rows = np.array([layer, 2, *((tokens[at : at + 2] + layer) % 16).flat], dtype="<u2")
            writer.add(rows.tobytes(), 0)
    found = of_trace(tmp_path / "routes", 2, 12, 2)
    assert found.shape == (12, 2, 2, 2)
    for step, (first, second) in enumerate(found):
        # Two requests, which begin half of the trace apart.
        assert first.tolist() == tokens[[step % 20, (step + 10) % 20]].tolist()
        assert (second == (first + 1) % 16).all()

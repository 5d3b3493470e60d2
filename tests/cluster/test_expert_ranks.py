"""Experts on sockets beside stages of GPUs; the GPUs are pretended, as in test_kinds."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engines import (
    IN_THIS_PROCESS,
    START_SECONDS,
    STOP_SECONDS,
    TOTALS,
    Json,
    Model,
    batch,
    compared_until_near_ties,
    engine,
    hetero,
    long_prompt,
    prompts,
    run_engines,
    start,
    tokens,
)
from faulty_server import Client, FaultyServer, errors_of
from image_model import write_image_model
from leftovers import Scene
from lora_adapters import write_adapter, write_merged
from transformers import PreTrainedTokenizerFast

from ray_hetero.cli.demo.model import DemoShape
from ray_hetero.observability.route_trace import RouteTrace

pytestmark = pytest.mark.timeout(1800)

RAY: Json = {
    "num_cpus": 2, "num_gpus": 4, "object_store_memory": 100 << 20, "include_dashboard": False
}  # fmt: skip
STARTS = 10
ROOT = Path(__file__).parents[2]
TRAINING = ROOT / "benchmarks" / "train_mixture.py"
LICENCE = ROOT / "LICENSE"
PRETENDED = {"RAY_HETERO_PRETEND_GPU": "1"}
LONGER: Json = {"prefill_step_tokens": 512}
ONE = [["gpu"]]
LAYOUTS: dict[str, tuple[str, list[list[str]], Json, tuple[int, ...]]] = {
    "experts of some layers": ("qwen3_moe", ONE, {"ranks": 2, "layers": 2}, (2,)),
    # By stage: all four layers, or the last two, of each those that it has.
    "two stages": ("mixtral", [["gpu"], ["gpu"]], {"ranks": 1}, (2, 2)),
    "a stage without": ("mixtral", [["gpu"], ["gpu"]], {"ranks": 1, "layers": 2}, (0, 2)),
    "tensor parallel": ("mixtral", [["gpu", "gpu"]], {"ranks": 1}, (4,)),
}
"""Model, stages, expert ranks, and the layers of each stage that these compute."""
FAMILIES = {
    # The first layer of these has no experts.
    "qwen3_moe": 3,
    "glm4_moe": 3,
    "deepseek_v2": 3,
    "deepseek_v3": 3,
    "qwen2_moe": 4,
    "gpt_oss": 4,
}
"""Layers with experts.  All is in float32: in bfloat16 a router that sees two experts nearly equal
may take either."""


def arguments(model: Path, layout: list[list[str]], experts: Json, **more: Any) -> Json:
    keys = {
        "layout": layout, "experts": experts, "cpu": {"ranks_per_socket": experts["ranks"]},
        "warmup": {"step_timeout_s": 60},
    }  # fmt: skip
    sizes = (len(layout), len(layout[0]))
    return engine(model, *sizes, **{"dtype": "float32", **hetero(**keys), **more})


def compared(
    scene: Scene, directory: Path, model: Path, runs: list[Json]
) -> tuple[list[Json], list[list[Json]], str]:
    """What stock vLLM answers, what these engines do, and all that was logged."""
    asked = [batch(prompts())]
    made = [engine(model, dtype="float32"), *runs]
    (expected,), *found = run_engines(
        scene, directory, [(one, asked) for one in made], ray=RAY, extra=PRETENDED
    )
    return expected, [one for (one,) in found], (directory / "log").read_text()


def test_greedy_tokens_are_those_of_stock(
    scene: Scene, logs: Path, model: Model, tmp_path: Path
) -> None:
    path, routes = model("mixtral", "f32"), tmp_path / "routes"
    runs = [arguments(path, ONE, {"ranks": 2, "trace": str(routes)})]
    expected, (ours,), log = compared(scene, logs / "mixtral", path, runs)
    assert tokens(ours) == tokens(expected)
    assert "experts of 4 layers are computed by rank 1 (experts, socket" in log
    for rank in (1, 2):
        assert re.search(
            rf"experts rank {rank}: [\d.]+% of \d+ MiB of its memory on its own NUMA", log
        )
    # The last seconds may be missing.
    trace = RouteTrace.read(routes)
    assert [(layer.experts, layer.chosen) for layer in trace.layers] == [(8, 2)] * 4
    assert all(layer == at % 4 for at, (layer, _) in enumerate(trace.records))
    assert all(rows.max() < trace.layers[0].experts for _, rows in trace.records)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_answer_what_stock_does(name: str, scene: Scene, logs: Path, model: Model) -> None:
    architecture, layout, experts, layers = LAYOUTS[name]
    path = model(architecture, "f32")
    runs = [arguments(path, layout, experts)]
    expected, (ours,), log = compared(scene, logs / name.replace(" ", "-"), path, runs)
    assert tokens(ours) == tokens(expected)
    for count in layers:
        assert f"experts of {count} layers are computed by" in log


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_families_answer_what_stock_does(name: str, scene: Scene, logs: Path, model: Model) -> None:
    path = model(name, "f32")
    latent, turned = {}, {}
    if name.startswith("deepseek"):
        # vLLM's backend of latent attention for AMX computes no float32.
        latent = {"attention_backend": "CPU_MLA"}
        # vLLM's operator for CPUs leaves most heads of its queries as they are (`turn_all_heads`).
        turned = {"compilation_config": {"custom_ops": ["-rotary_embedding"]}}
    asked = [batch(prompts())]
    made = [
        engine(path, dtype="float32", **latent, **turned),
        arguments(path, ONE, {"ranks": 2}, **latent),
        engine(path, 2, dtype="float32", **latent),
    ]
    (expected,), (beside_gpu,), (of_stages,) = run_engines(
        scene,
        logs / name,
        [(one, asked) for one in made],
        ray=RAY,
        extra=PRETENDED | IN_THIS_PROCESS,
    )
    log = (logs / name / "log").read_text()
    assert tokens(beside_gpu) == tokens(expected)
    assert f"experts of {FAMILIES[name]} layers are computed by" in log
    assert tokens(of_stages) == tokens(expected)


@pytest.mark.slow
def test_a_trained_mixture_answers_what_stock_does(
    scene: Scene, logs: Path, tmp_path: Path
) -> None:
    command = [sys.executable, str(TRAINING), "--tiny", "--minutes", "0.5", "--out", str(tmp_path)]
    assert start(scene, command, tmp_path / "log").wait(START_SECONDS) == 0
    path = tmp_path / "checkpoint"
    ids = PreTrainedTokenizerFast.from_pretrained(path)(LICENCE.read_text()).input_ids
    # So little training makes every answer the same; likelihoods differ from token to token.
    asked = [batch([ids[at : at + 200] for at in range(0, 1600, 100)], prompt_logprobs=0)]
    made = [engine(path, dtype="float32"), arguments(path, ONE, {"ranks": 2})]
    runs = [(one, asked) for one in made]
    (expected,), (ours,) = run_engines(scene, logs / "trained", runs, ray=RAY, extra=PRETENDED)
    for mine, theirs in zip(ours, expected, strict=True):
        for one, other in zip(mine["prompt_logprobs"], theirs["prompt_logprobs"], strict=True):
            assert one == pytest.approx(other, abs=1e-3)
    seen = [value for one in expected for at in one["prompt_logprobs"] for value in at.values()]
    assert len(seen) == 16 * 199
    assert np.std(seen) > 1
    routing = np.load(tmp_path / "routing.npz")["experts"]
    assert routing.shape == (4, 1024, 4)
    assert all(len(np.unique(layer)) > routing.shape[2] for layer in routing)
    found = json.loads((tmp_path / "training.json").read_text())
    assert found["held_out_loss"] < found["losses"][0]["loss"]


@pytest.mark.slow
def test_a_prompt_beyond_a_steps_tokens_is_one_step_while_no_request_decodes(
    scene: Scene, logs: Path, model: Model
) -> None:
    path = model("mixtral", "f32")
    alone = batch([long_prompt(300)], max_tokens=1)
    limit = {"max_num_batched_tokens": 64, "max_num_seqs": 16, "enable_prefix_caching": False}
    runs = [
        (engine(path, dtype="float32"), [alone, batch(prompts())]),
        *(
            (arguments(path, ONE, {"ranks": 1, **longer}, **limit),
             [alone, TOTALS, batch(prompts()), TOTALS])
            for longer in ({}, {"prefill_step_tokens": 512})
        ),
    ]  # fmt: skip
    stock, *found = run_engines(
        scene, logs / "longer", runs, ray=RAY, extra=PRETENDED | IN_THIS_PROCESS
    )
    steps = []
    for first, (before, *_), many, (behind, *_) in found:
        assert [tokens(first), tokens(many)] == [tokens(one) for one in stock]
        steps.append((before["steps"], behind["steps"] - before["steps"]))
    (chunks, _), (one, _) = steps
    assert one == chunks - 4  # 300 tokens in steps of 64
    assert (
        "steps have up to 512 tokens while no request decodes"
        in (logs / "longer" / "log").read_text()
    )


@pytest.mark.slow
def test_a_connector_of_kv_blocks_works_beside_them(
    scene: Scene, logs: Path, model: Model, tmp_path: Path
) -> None:
    path = model("mixtral", "f32")
    connector = {
        "kv_connector": "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(tmp_path)},
    }
    # What has been computed is found by the connector only.
    given = {"enable_prefix_caching": False, "kv_transfer_config": connector, "block_size": 32}
    # It keeps whole blocks of a prompt.
    asked = [batch([(one * 100)[: 70 + at] for at, one in enumerate(prompts(8))])]
    (expected,), (first, again) = run_engines(
        scene,
        logs / "connector",
        [
            (engine(path, dtype="float32"), asked),
            (arguments(path, ONE, {"ranks": 1}, **given), asked * 2),
        ],
        ray=RAY,
        extra=PRETENDED,
    )
    assert tokens(first) == tokens(again) == tokens(expected)
    assert list(tmp_path.rglob("*.safetensors"))
    assert "External Cache Hit!" in (logs / "connector" / "log").read_text()


@pytest.mark.slow
def test_a_model_that_reads_images_answers_what_stock_does(
    scene: Scene, logs: Path, tmp_path: Path
) -> None:
    path = write_image_model(tmp_path / "images")
    image: int = json.loads((path / "config.json").read_text())["image_token_index"]
    plain = prompts(6)
    # Some with one image, after their first token; others without.
    given = [[*one[:1], image, *one[1:]] if place % 3 else one for place, one in enumerate(plain)]
    seeds = [place if place % 3 else None for place in range(len(given))]
    # The second time other images come with the same text.
    others = [None if seed is None else 100 + seed for seed in seeds]
    asked = [batch(given) | {"images": of_each} for of_each in (seeds, others)]
    common = {"skip_tokenizer_init": False, "max_num_batched_tokens": 512}
    # Fewer tokens beside requests that decode than an image has.
    longer = {"max_num_batched_tokens": 16, "max_num_seqs": 16, "disable_chunked_mm_input": True}
    expected, ours = run_engines(
        scene,
        logs / "images",
        [
            (engine(path, dtype="float32", **common), asked),
            (arguments(path, ONE, {"ranks": 2, **LONGER}, **common | longer), asked),
        ],
        ray=RAY,
        extra=PRETENDED | IN_THIS_PROCESS,
    )
    assert [tokens(one) for one in ours] == [tokens(one) for one in expected]
    first, second = (tokens(one) for one in expected)
    differing = [left != right for left, right in zip(first, second, strict=True)]
    assert differing == [seed is not None for seed in seeds]
    assert "experts of 4 layers are computed by" in (logs / "images" / "log").read_text()


@pytest.mark.slow
def test_adapters_of_attention_work_beside_them(
    scene: Scene, logs: Path, model: Model, tmp_path: Path
) -> None:
    path = model("mixtral", "f32")
    modules = ("q_proj", "k_proj", "v_proj", "o_proj")
    adapter = write_adapter(
        tmp_path / "adapter-1", DemoShape(), rank=8, modules=modules, scale=0.05
    )
    # Stock vLLM has no experts on CPUs beside adapters: it gets weights that hold the adapter.
    merged = write_merged(path, adapter, tmp_path / "merged")
    # Tokens without an adapter get what is in the last slot of vLLM's; here nothing ever is.
    given = {"enable_lora": True, "max_loras": 4, "lora_target_modules": list(modules)}
    short = {"max_num_batched_tokens": 64, "max_num_seqs": 16}
    asked = batch(prompts(9))
    of_each = [str(adapter) if place % 2 else None for place in range(9)]
    (plain,), (adapted,), (without, mixed) = run_engines(
        scene,
        logs / "adapters",
        [
            (engine(path, dtype="float32"), [asked]),
            (engine(merged, dtype="float32"), [asked]),
            (
                arguments(path, ONE, {"ranks": 1, **LONGER}, **given, **short),
                [asked, asked | {"adapters": of_each}],
            ),
        ],
        ray=RAY,
        extra=PRETENDED | IN_THIS_PROCESS,
    )
    assert tokens(without) == tokens(plain)
    both = zip(tokens(plain), tokens(adapted), of_each, strict=True)
    assert tokens(mixed) == [one if name is None else other for one, other, name in both]
    changed = [one != other for one, other in zip(tokens(plain), tokens(adapted), strict=True)]
    assert sum(changed[1::2]) >= 2
    assert "experts of 4 layers are computed by" in (logs / "adapters" / "log").read_text()


LINK_TOKENS = 64
SLOTS_GIB, SLOTS = 0.0674, 5
"""Memory for slots, and how many experts of a layer of `qwen3_moe` there is room for."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_prompts_of_many_tokens_read_the_experts_over_the_link(
    name: str, scene: Scene, logs: Path, model: Model
) -> None:
    path = model(name)
    common = {"dtype": "bfloat16", "max_num_batched_tokens": 256}
    streaming = {"ranks_per_socket": 2, "linear_kernel": "streaming", "compact_weights": True}
    link = {"prefill_on_gpu": True, "prefill_on_gpu_tokens": LINK_TOKENS}
    runs = []
    for keys in ({"prefill_on_gpu": False}, link, {**link, "prefill_gpu_share": 0.4}):
        given = arguments(path, ONE, {"ranks": 2, **keys}, **common)
        given["additional_config"]["ray_hetero"]["cpu"] |= streaming
        # One prompt at a time, so that each is by itself on one side.
        asked = [batch([one], logprobs=2) for one in prompts(12)]
        runs.append((given, [*asked, TOTALS]))
    (*cores, (neither,)), (*linked, (totals,)), (*split, (both,)) = run_engines(
        scene, logs / f"link-{name}", runs, ray=RAY, extra=PRETENDED
    )
    layers = FAMILIES[name]
    over_link = [len(one) for one in prompts(12) if len(one) >= LINK_TOKENS]
    assert neither["linked_expert_tokens"] == 0
    assert totals["linked_expert_tokens"] == layers * sum(over_link)
    assert both["linked_expert_tokens"] == totals["linked_expert_tokens"]
    log = (logs / f"link-{name}" / "log").read_text()
    assert log.count(f"experts of steps of {LINK_TOKENS} tokens and more") == 2
    assert log.count(f"of 16 experts of a layer 6 in steps of {LINK_TOKENS}") == 1
    lengths = [len(one) for one in prompts(12)]
    assert min(lengths) < LINK_TOKENS < max(lengths)
    for length, (left,), *others in zip(lengths, cores, linked, split, strict=True):
        for (right,) in others:
            same = compared_until_near_ties(left, right)
            assert left["tokens"] == right["tokens"] if length < LINK_TOKENS else same


@pytest.mark.slow
@pytest.mark.parametrize("name", ["qwen3_moe"])
def test_experts_in_slots_answer_what_the_sockets_do(
    name: str, scene: Scene, logs: Path, model: Model
) -> None:
    path = model(name)
    common = {"dtype": "bfloat16", "max_num_batched_tokens": 256}
    streaming = {"ranks_per_socket": 2, "linear_kernel": "streaming", "compact_weights": True}
    slots = {"slots_gib": SLOTS_GIB, "slots": "fixed"}
    kinds: list[Json] = [{}, slots, slots, {**slots, "slots": "always"}]
    runs = []
    for keys in kinds:
        given = arguments(path, ONE, {"ranks": 2, "prefill_on_gpu": False, **keys}, **common)
        given["additional_config"]["ray_hetero"]["cpu"] |= streaming
        # Alone, and several of them together, of which a step has as many as have come.
        asked = [batch(some, logprobs=2) for some in (*([one] for one in prompts(3)), prompts(4))]
        runs.append((given, [*asked, TOTALS]))
    (*sockets, (none,)), (*fixed, (filled,)), (*again, _), (*moving, (totals,)) = run_engines(
        scene, logs / f"slots-{name}", runs, ray=RAY, extra=PRETENDED
    )
    # What never changes computes the same bit for bit.
    assert fixed[:-1] == again[:-1]
    for left, *others in zip(sockets, fixed, again, moving, strict=True):
        for right in others:
            for one, other in zip(left, right, strict=True):
                assert compared_until_near_ties(one, other)
    log = (logs / f"slots-{name}" / "log").read_text()
    assert log.count(f"slots for {SLOTS} of 16 experts of each of {FAMILIES[name]} layers") == 3
    assert none["slot_copied"] == 0
    assert filled["slot_copied"] == SLOTS * FAMILIES[name]
    assert totals["slot_copied"] >= SLOTS


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_engines_start_and_end_one_after_the_other(scene: Scene, logs: Path, model: Model) -> None:
    runs = [
        (arguments(model("mixtral", "f32"), ONE, {"ranks": 2}), [batch(prompts(4))])
        for _ in range(STARTS)
    ]
    found = run_engines(scene, logs / "starts", runs, ray=RAY, extra=PRETENDED)
    assert len({str(tokens(one)) for (one,) in found}) == 1
    scene.assert_clean()


LIMIT_S = 8


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_expert_rank_that_ends_or_stops_ends_the_engine_and_is_named(
    number: signal.Signals, scene: Scene, logs: Path, model: Model
) -> None:
    layout = [["gpu"]]
    server = FaultyServer(
        scene, logs / f"fault-{number.name}", model("mixtral"), sizes=(1, 1),
        extra=PRETENDED | {"RAY_OVERRIDE_RESOURCES": '{"GPU": 1}'},
        layout=layout, experts={"ranks": 2}, cpu={"ranks_per_socket": 2},
        exchange={"timeout_s": LIMIT_S},
    )  # fmt: skip
    clients = server.wait_until_in("decode")
    pid = server.send(number, 2)
    if number is signal.SIGSTOP:
        clients.append(Client(server.server, {"prompt": prompts()[1], "max_tokens": 4}))
    assert server.server.child.wait(STOP_SECONDS) == 1
    assert errors_of(clients)
    assert "rank 2 (experts, socket 1" in server.last_line()
    if number is signal.SIGKILL:
        assert f"pid {pid}" in server.last_line()
    else:
        limit = f"did not compute a layer's experts in {LIMIT_S} s (exchange.timeout_s)"
        assert limit in server.last_line()
    server.scene.assert_clean()

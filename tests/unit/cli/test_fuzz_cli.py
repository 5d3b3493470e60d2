"""Whatever is typed after `ray-hetero`, or stands in its files: an answer to that, or an error.

A few hundred inputs here, thousands with `make fuzz`.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from fuzzing import JSON, damaged, scratched
from hypothesis import event, example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

from placement.errors import PlacementError
from placement.model.config import DTYPE_BYTES
from placement.model.reading import UnknownModelError
from placement.plan.parts import known_parts
from ray_hetero.cli.main import commands
from ray_hetero.errors import RayHeteroError

LONGEST_MESSAGE = 20_000


@dataclass(frozen=True)
class Answer:
    """What a command printed, and its exit status."""

    status: int
    output: str
    error: str


def run(*arguments: str) -> Answer:
    """Run the command; any exception but those that it reports itself fails the test."""
    result = CliRunner().invoke(commands, arguments)
    problem = result.exception
    if isinstance(problem, RayHeteroError | PlacementError):
        answer = Answer(1, result.stdout, f"{result.stderr}ray-hetero: {problem}")
    elif problem is None or isinstance(problem, SystemExit):
        answer = Answer(result.exit_code, result.stdout, result.stderr)
    else:
        raise problem
    assert answer.status in (0, 1, 2)
    assert "Traceback" not in answer.output + answer.error
    assert len(answer.error) < LONGEST_MESSAGE
    return answer


@pytest.fixture(scope="module", autouse=True)
def _without_vllm() -> Iterator[None]:
    """No input has a class of vLLM's built, which takes seconds each."""

    def not_built(*given: object, **more: object) -> NoReturn:
        raise UnknownModelError("vLLM cannot build it")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ray_hetero.planning.sizes.model_sizes.built_shape", not_built)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the files of all inputs are written."""
    directory = tmp_path_factory.mktemp("cli")
    (directory / "config.json").write_text(json.dumps(LLAMA))
    (directory / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    return directory


LLAMA = {
    "model_type": "llama", "num_hidden_layers": 12, "hidden_size": 512, "intermediate_size": 1024,
    "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1000, "dtype": "bfloat16",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 64}
MODELS: list[dict[str, Any]] = [
    LLAMA,
    {**LLAMA, "model_type": "qwen3", "head_dim": 64, "sliding_window": 128,
     "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"] * 6},
    {**LLAMA, "model_type": "gemma3_text", "sliding_window": 64, "sliding_window_pattern": 6},
    {**LLAMA, "model_type": "mixtral", "num_local_experts": 8, **EXPERTS},
    {**LLAMA, "model_type": "qwen3_moe", "num_experts": 16, "mlp_only_layers": [0],
     "decoder_sparse_step": 2, **EXPERTS},
    {**LLAMA, "model_type": "deepseek_v3", "n_routed_experts": 16, "n_shared_experts": 1,
     "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 96, "kv_lora_rank": 64,
     "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 64, **EXPERTS},
    {**LLAMA, "model_type": "opt", "ffn_dim": 2048, "word_embed_proj_dim": 256,
     "max_position_embeddings": 2048},
    {**LLAMA, "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    {**LLAMA, "quantization_config": {"quant_method": "awq", "w_bit": 4, "group_size": 64,
                                      "modules_to_not_convert": ["re:.*o_proj", "mlp"]}},
    {**LLAMA, "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128],
                                      "activation_scheme": "static"}},
    {**LLAMA, "quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": {"dynamic": False},
            "weights": {"num_bits": 4, "strategy": "group", "group_size": 128, "symmetric": False,
                        "actorder": "group"}}}}},
]  # fmt: skip
CLUSTER: dict[str, Any] = {
    "links": {"network": {"bandwidth_gb_s": 12.5, "latency_us": 50}},
    "nodes": [
        {"name": "a", "gpus": {"part": "H100 SXM", "count": 2},
         "sockets": {"part": "Xeon 8480+", "count": 2, "cores": 56, "memory_gib": 512}},
        {"name": "b", "count": 2,
         "sockets": {"memory_gib": 64, "read_gb_s": 200, "bf16_tflop_s": 20, "kv_cache_gib": 8,
                     "layer_latency_us": 20, "memory_utilization": 0.8, "runtime_gib": 2}},
    ],
}  # fmt: skip


def section(needed: dict[str, Any], **optional: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.fixed_dictionaries(needed, optional=optional)


FIGURES = {
    "count": st.integers(1, 3),
    "memory_gib": st.floats(0.5, 2000),
    "memory_utilization": st.floats(0.1, 1),
    "read_gb_s": st.floats(1, 10_000),
    "bf16_tflop_s": st.floats(0.1, 5000),
    "layer_latency_us": st.floats(0, 1000),
    "runtime_gib": st.floats(0.1, 8),
}
NODES = st.lists(
    section(
        {},
        gpus=section({"part": st.sampled_from(known_parts("gpu"))}, **FIGURES),
        sockets=section(
            {"part": st.sampled_from(known_parts("cpu"))},
            **FIGURES,
            cores=st.integers(1, 128),
            kv_cache_gib=st.floats(0.1, 100),
        ),
        count=st.integers(1, 2),
    ),
    min_size=1,
    max_size=3,
)
CLUSTERS = NODES.map(
    lambda nodes: {"nodes": [{"name": "abc"[i], **node} for i, node in enumerate(nodes)]}
)
OPTIONS = {
    "--tensor-parallel-size": st.integers(1, 4),
    "--pipeline-parallel-size": st.integers(1, 6),
    "--max-model-len": st.integers(1, 200_000),
    "--batch": st.integers(1, 64),
    "--context": st.integers(1, 20_000),
    "--max-sequences": st.integers(1, 64),
    "--objective": st.sampled_from(["latency", "throughput"]),
    "--layers": st.lists(st.integers(1, 12), min_size=1, max_size=4).map(
        lambda numbers: ",".join(map(str, numbers))
    ),
    "--dtype": st.sampled_from(sorted(DTYPE_BYTES)),
    "--kv-cache-dtype": st.sampled_from(["auto", "fp8", "bfloat16"]),
}
"""Options of `plan` with values that are all right by themselves."""
WORDS = st.text(st.characters(exclude_characters="/\x00", exclude_categories=["Cs"]), max_size=8)
"""No way out of the folder: `demo-model` writes."""
ODD = st.sampled_from(
    [
        "0",
        "-1",
        "1e9",
        "1_0",
        "9" * 30,
        "9" * 5000,
        "nan",
        "",
        " ",
        "auto",
        "1,2",
        "--",
        "٣",
        "\udcff",
    ]
)


def arguments_of(options: dict[str, Any]) -> list[str]:
    return [part for name, value in options.items() for part in (name, str(value))]


def planned(folder: Path, *arguments: str) -> dict[str, Any] | None:
    """The plan as JSON; None where it was refused."""
    answer = run(
        "plan", str(folder), "--topology", str(folder / "cluster.yaml"), "--json", *arguments
    )
    event("refused" if answer.status else "planned")
    if answer.status:
        assert answer.error.startswith(("ray-hetero: ", "Usage: "))
        assert not answer.output
        return None
    plan: dict[str, Any] = json.loads(answer.output)
    return plan


def check_plan(plan: dict[str, Any], layers: int) -> None:
    """Every layer is on one stage, and no rank holds more than its device has."""
    assert plan["layers"] == sum(plan["layer_partition"]) == layers
    assert min(plan["layer_partition"]) >= 1
    ranks = [rank for stage in plan["stages"] for rank in stage["ranks"]]
    assert [rank["rank"] for rank in ranks] == list(range(len(ranks)))
    places = [f"{rank['node']} {rank['device']}" for rank in ranks]
    assert len({*places, *plan["idle"]}) == len(places) + len(plan["idle"])
    assert all(rank["free_bytes"] >= 0 for rank in ranks)
    assert plan["decode_step_s"] > 0


ONE_GPU = {"nodes": [{"name": "a", "gpus": {"part": "H100 SXM", "memory_gib": 1.0}}]}


@given(CLUSTERS, st.sampled_from(MODELS), st.fixed_dictionaries({}, optional=OPTIONS))
# No sequence is shorter than one token.
@example(ONE_GPU, MODELS[0], {"--max-model-len": 1})
def test_a_plan_is_of_what_was_asked(
    folder: Path, cluster: dict[str, Any], model: dict[str, Any], options: dict[str, Any]
) -> None:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(cluster))
    (folder / "config.json").write_text(json.dumps(model))
    plan = planned(folder, *arguments_of(options))
    if plan is None:
        return
    check_plan(plan, model["num_hidden_layers"])
    # vLLM takes 2048 for a model that does not say how long its sequences are, but for Gemma 3.
    own = 131072 if "gemma3" in model["model_type"] else 2048
    longest = options.get("--max-model-len", own)
    asked = {
        "context": options.get("--context", min(4096, longest)),
        "max_model_len": longest,
        "objective": options.get("--objective", "latency"),
    }
    if options.keys() & {"--batch", "--context", "--max-sequences"}:
        asked["batch"] = options.get("--batch", 1)
        asked["max_sequences"] = options.get("--max-sequences", 1)
    assert {key: plan[key] for key in asked} == asked
    if "--layers" in options:
        assert plan["layer_partition"] == [int(part) for part in options["--layers"].split(",")]
    if "--pipeline-parallel-size" in options:
        assert len(plan["stages"]) == options["--pipeline-parallel-size"]
    size = options.get("--tensor-parallel-size", 1)
    # One rank is what nobody has asked for, and stages are chosen.
    if size > 1 or options.keys() & {"--pipeline-parallel-size", "--layers"}:
        assert {len(stage["ranks"]) for stage in plan["stages"]} == {size}
    names = [
        name if node.get("count", 1) == 1 else f"{name}-{number}"
        for node in cluster["nodes"]
        for name in [node["name"]]
        for number in range(node.get("count", 1))
    ]
    used = {rank["node"] for stage in plan["stages"] for rank in stage["ranks"]}
    assert used <= set(names)


@given(damaged(st.sampled_from(MODELS)) | JSON)
@example({**LLAMA, "num_hidden_layers": 10**9})
@example({**LLAMA, "num_attention_heads": 0})
def test_any_model_config_is_planned_or_refused(folder: Path, model: Any) -> None:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "config.json").write_text(json.dumps(model))
    plan = planned(folder)
    if plan is not None:
        check_plan(plan, model["num_hidden_layers"])


@given(scratched(st.sampled_from(MODELS).map(json.dumps)) | st.text(max_size=20))
@example("[" * 100_000)
@example('{"num_hidden_layers": ' + "9" * 5000 + "}")
def test_any_model_file_is_planned_or_refused(folder: Path, text: str) -> None:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    plan = planned(folder)
    if plan is not None:
        check_plan(plan, json.loads(text)["num_hidden_layers"])


@given(damaged(st.just(CLUSTER) | CLUSTERS) | JSON)
@example({"nodes": [{"name": "a", "count": 4096, "sockets": {"part": "H200", "count": 4096}}]})
def test_any_cluster_is_planned_on_or_refused(folder: Path, cluster: Any) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    # JSON is YAML too, and can hold everything that was made here.
    (folder / "cluster.yaml").write_text(json.dumps(cluster), encoding="utf-8")
    plan = planned(folder)
    if plan is not None:
        check_plan(plan, LLAMA["num_hidden_layers"])


@given(scratched(CLUSTERS.map(yaml.safe_dump)))
def test_any_cluster_file_is_planned_on_or_refused(folder: Path, text: str) -> None:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    (folder / "cluster.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    plan = planned(folder)
    if plan is not None:
        check_plan(plan, LLAMA["num_hidden_layers"])


@given(
    st.fixed_dictionaries(
        {}, optional={name: good | ODD | WORDS for name, good in OPTIONS.items()}
    ),
    st.sampled_from(MODELS),
    st.booleans(),
)
def test_any_option_of_plan_is_followed_or_refused(
    folder: Path, options: dict[str, Any], model: dict[str, Any], as_table: bool
) -> None:
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "config.json").write_text(json.dumps(model))
    if as_table:
        picture = folder / "plan.svg"
        run("plan", str(folder), "--topology", str(folder / "cluster.yaml"),
            "--svg", str(picture), *arguments_of(options))  # fmt: skip
        return
    plan = planned(folder, *arguments_of(options))
    if plan is not None:
        check_plan(plan, LLAMA["num_hidden_layers"])
        for name, key in (("--batch", "batch"), ("--context", "context")):
            if name in options:
                assert plan[key] == int(options[name])


HARMLESS = [
    "topology", "plan", "config", "doctor", "ray-args", "install-cpu-kernels", "--version",
    "--help",
]  # fmt: skip
TYPED = st.sampled_from(
    ["--json", "--svg", "--topology", "--layers", "--batch", "-tp", "-pp", "--force", "--wheel",
     "--site", ".", "config.json", "cluster.yaml", "no-such-file", *OPTIONS]
)  # fmt: skip


@given(st.sampled_from(HARMLESS) | WORDS, st.lists(TYPED | ODD | WORDS, max_size=6))
def test_anything_typed_is_done_or_refused(folder: Path, command: str, typed: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        answer = run(command, *typed)
    if answer.status:
        assert answer.error.strip() or answer.output.strip()


@given(
    damaged(st.just({"ray_hetero": {"cpu": {"cores": 2, "env": {"A": "1"}}}})) | JSON, st.booleans()
)
def test_the_configuration_in_force_is_shown_or_refused(given_: Any, as_json: bool) -> None:
    answer = run(
        "config", "--additional-config", json.dumps(given_), *(["--json"] if as_json else [])
    )
    if answer.status:
        assert answer.error.strip()
    elif as_json:
        keys = [row["key"] for row in json.loads(answer.output)["keys"]]
        assert len(keys) == len(set(keys)) > 30


@given(
    section(
        {},
        **{
            "--layers": st.integers(-1, 2) | ODD,
            "--hidden": st.sampled_from([-64, 0, 1, 33, 64, 2**20]) | ODD,
            "--heads": st.integers(-1, 3) | ODD,
            "--seed": st.sampled_from([-(2**63), -1, 7, 2**63 - 1, 2**63]) | ODD,
            "--dtype": st.sampled_from(["bf16", "f32", "fp8"]) | WORDS,
            "--architecture": st.sampled_from(["llama", "opt", "bloom"]) | WORDS,
        },
    )
)
def test_a_demo_model_is_of_what_was_asked_or_refused(
    tmp_path_factory: pytest.TempPathFactory, options: dict[str, Any]
) -> None:
    target = tmp_path_factory.mktemp("demo") / "model"
    usual = {"--layers": 1, "--hidden": 64, "--heads": 2, "--seed": -1}
    answer = run("demo-model", str(target), *arguments_of({**usual, **options}))
    event("refused" if answer.status else "written")
    if answer.status:
        assert answer.error
        assert not target.exists()
        return
    config = json.loads((target / "config.json").read_text())
    assert config["num_hidden_layers"] == int(options.get("--layers", 1))
    assert config["hidden_size"] == int(options.get("--hidden", 64))
    assert config["model_type"] == options.get("--architecture", "llama")
    shutil.rmtree(target)


ROOM = 2 * 512 * 512
HEADER = {
    f"model.layers.{layer}.{name}.weight": {
        "dtype": "BF16", "shape": [512, 512], "data_offsets": [at * ROOM, (at + 1) * ROOM]
    }
    for layer in range(12)
    for at, name in ((2 * layer, "self_attn.q_proj"), (2 * layer + 1, "mlp.up_proj"))
}  # fmt: skip
INDEX = {"weight_map": dict.fromkeys(HEADER, "model.safetensors")}


@given(
    damaged(st.just(HEADER)) | st.just(HEADER),
    st.none() | st.just(INDEX) | damaged(st.just(INDEX)),
    damaged(st.just(LLAMA)) | st.just(LLAMA),
    st.integers(-3, 3),
)
def test_any_checkpoint_is_planned_or_refused(
    tmp_path_factory: pytest.TempPathFactory, header: Any, index: Any, model: Any, longer: int
) -> None:
    folder = tmp_path_factory.mktemp("checkpoint")
    (folder / "cluster.yaml").write_text(yaml.safe_dump(CLUSTER))
    (folder / "config.json").write_text(json.dumps(model))
    text = json.dumps(header).encode()
    length = max(0, len(text) + longer).to_bytes(8, "little")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(length + text)
        file.truncate(8 + len(text) + len(HEADER) * ROOM)
    if index is not None:
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    plan = planned(folder)
    if plan is not None:
        assert plan["sizes_from"] == "safetensors"
        check_plan(plan, model["num_hidden_layers"])

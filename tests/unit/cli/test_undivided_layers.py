"""Stages that divide layers which belong together are refused, and not planned."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from plan_cases import config_of
from typer.testing import CliRunner

from ray_hetero.cli.plan import plan
from ray_hetero.errors import UnsupportedError
from ray_hetero.preflight.refused_stages import refuse_divided_layers

# The last 20 of 35 layers use the caches of layers 13 and 14.
KINDS = (["sliding_attention"] * 4 + ["full_attention"]) * 7
SHARED = {"num_kv_shared_layers": 20, "layer_types": KINDS}
SKIPS = {"bskcn_1": [12, 20], "bskcn_3": [16, 24], "bskcn_2": [20], "bskcn_4": [32]}


def test_keys_and_values_of_another_stage_are_refused() -> None:
    refuse_divided_layers(SHARED, [35])
    refuse_divided_layers(SHARED, [13, 22])
    with pytest.raises(UnsupportedError, match=r"layer 17 .* of layer 13, and stages of 17 \+ 18"):
        refuse_divided_layers(SHARED, [17, 18])
    with pytest.raises(
        UnsupportedError, match=r"layers 13 to 34 on one stage, .* layers: \[13, 22\]"
    ):
        refuse_divided_layers(SHARED, [14, 21])


def test_hidden_states_that_another_stage_has_kept_are_refused() -> None:
    refuse_divided_layers(SKIPS, [12, 36])
    refuse_divided_layers(SKIPS, [33, 15])
    with pytest.raises(UnsupportedError, match="layer 24 of this model uses the kept hidden"):
        refuse_divided_layers(SKIPS, [24, 24])


def test_other_models_may_be_divided_anywhere() -> None:
    refuse_divided_layers({"num_kv_shared_layers": 0, "layer_types": KINDS}, [1, 34])
    refuse_divided_layers({}, [2, 2])


# A 70B model whose layers 21 to 79 use the caches of layers up to 20.
GEMMA_LIKE = config_of(
    "llama", 80, 8192, 28672, (64, 8), 128256, max_position_embeddings=8192,
    num_kv_shared_layers=59, layer_types=["full_attention"] * 80,
)  # fmt: skip
LAST = 20
NODE = {"name": "a", "sockets": {"part": "Xeon 8480+", "cores": 56, "memory_gib": 512, "count": 2}}
ONE_GPU = NODE | {"gpus": {"part": "H100 SXM"}}


def planned(
    folder: Path, node: dict[str, Any], *more: str, config: dict[str, Any] = GEMMA_LIKE
) -> Any:
    app = typer.Typer()
    app.command()(plan)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "cluster.yaml").write_text(json.dumps({"nodes": [node]}))
    words = [str(folder), "--topology", str(folder / "cluster.yaml"), "--json", *more]
    return CliRunner().invoke(app, words)


def cut_of(answer: Any) -> int:
    assert answer.exit_code == 0, answer.stderr
    first, rest = json.loads(answer.stdout)["layer_partition"]
    assert first + rest == 80
    return int(first)


def test_no_split_is_planned_that_the_engine_refuses(tmp_path: Path) -> None:
    usual = {key: value for key, value in GEMMA_LIKE.items() if key != "num_kv_shared_layers"}
    asked = ("--layout", "[[gpu], [cpu]]")
    assert cut_of(planned(tmp_path, ONE_GPU, *asked, config=usual)) > LAST
    assert cut_of(planned(tmp_path, ONE_GPU, *asked)) <= LAST
    # Equal shares are as equal as the model lets them be.
    assert cut_of(planned(tmp_path, NODE, "--layout", "[[cpu], [cpu]]")) == LAST


def test_the_choice_of_stages_leaves_out_what_the_engine_refuses(tmp_path: Path) -> None:
    answer = planned(tmp_path, ONE_GPU, "--compare")
    assert answer.exit_code == 0, answer.stderr
    partition = json.loads(answer.stdout)["layer_partition"]
    assert len(partition) == 1 or partition[0] <= LAST


def test_what_cannot_be_divided_is_said(tmp_path: Path) -> None:
    answer = planned(tmp_path, ONE_GPU, "--layout", "[[gpu], [cpu]]", "--layers", "40,40")
    assert answer.exit_code == 1
    assert "layer 40 of this model uses keys and values of layer 20" in answer.stderr
    whole = GEMMA_LIKE | {"num_kv_shared_layers": 79}
    answer = planned(tmp_path, ONE_GPU, "--layout", "[[gpu], [cpu]]", config=whole)
    assert answer.exit_code == 1
    assert "2 stages are asked for, but layers 0 to 79 of this model" in answer.stderr
    assert "Give --pipeline-parallel-size 1" in answer.stderr
    # Of itself, one stage is taken.
    answer = planned(tmp_path, ONE_GPU, config=whole)
    assert json.loads(answer.stdout)["layer_partition"] == [80]

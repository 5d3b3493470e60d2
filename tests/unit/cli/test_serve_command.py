"""What `ray-hetero plan` says to type serves the model in the way that was planned."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ray_hetero.cli.main import commands
from ray_hetero.cli.serve_command import serve_command, speculative_option

ROOT = Path(__file__).parents[3]
MODEL = str(ROOT / "configs/models/llama-3.1-70b.json")
MACHINE = ("--topology", str(ROOT / "configs/machines/h100-two-8480.yaml"))
BEGIN = "Run: "
ALONE = ["vllm", "serve", "MODEL", "--distributed-executor-backend", "ray_hetero"]


def said(*arguments: str) -> list[str]:
    answer = CliRunner().invoke(commands, ["plan", MODEL, *MACHINE, *arguments])
    assert answer.exit_code == 0, answer.output
    last = answer.output.splitlines()[-1]
    assert last.startswith(BEGIN)
    return shlex.split(last.removeprefix(BEGIN))


def test_what_was_not_asked_for_is_left_to_the_engine() -> None:
    assert said() == ALONE


def test_what_was_asked_for_is_asked_for_again() -> None:
    options = ("--tensor-parallel-size", "2", "--pipeline-parallel-size", "1")
    options += ("--max-model-len", "8192")
    found = said(*options)
    assert found[:5] == ALONE
    pairs = set(zip(found[5::2], found[6::2], strict=True))
    assert pairs == set(zip(options[::2], options[1::2], strict=True))


def test_given_layers_come_with_their_number_of_stages() -> None:
    found = said("--layers", "50,30")
    assert found[5:7] == ["--pipeline-parallel-size", "2"]
    assert json.loads(found[-1]) == {"ray_hetero": {"layers": [50, 30]}}


def test_settings_of_this_backend_are_json() -> None:
    found = said("--layout", "[[cpu],[gpu]]", "--layers", "60,20")
    assert found[:5] == ALONE
    option, settings = found[5:]
    assert option == "--additional-config"
    wanted = {"layout": [["cpu"], ["gpu"]], "layers": [60, 20]}
    assert json.loads(settings) == {"ray_hetero": wanted}


def test_drafts_are_asked_for_as_they_were_planned() -> None:
    *found, config = said("--speculative", "3,0.7")
    assert found == [*ALONE, "--speculative-config"]
    assert json.loads(config) == {"method": "ngram", "num_speculative_tokens": 3}
    draft = str(Path(MODEL).with_name("llama-3.1-8b.json"))
    *_, config = said("--speculative", "2,0.5", "--draft-model", draft)
    assert json.loads(config) == {"model": "DRAFT_MODEL", "num_speculative_tokens": 2}
    asked = json.loads(speculative_option(2, "some/draft"))
    assert asked == {"model": "some/draft", "num_speculative_tokens": 2}


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_folder_is_named_where_it_can_be_served(tmp_path: Path, has_weights: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    if has_weights:
        (tmp_path / "model.safetensors").write_bytes(b"")
    model = str(tmp_path) if has_weights else "MODEL"
    assert shlex.split(serve_command(str(tmp_path), {}, {}))[2] == model


def test_a_name_on_the_hub_is_kept() -> None:
    assert shlex.split(serve_command("some/model", {}, {}))[2] == "some/model"


def test_an_option_without_a_value_is_printed_alone() -> None:
    command = serve_command("a/b", {"--no-enable-prefix-caching": True, "--seed": 3}, {})
    assert shlex.split(command)[-3:] == ["--no-enable-prefix-caching", "--seed", "3"]

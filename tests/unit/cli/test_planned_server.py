"""`ray-hetero serve`: its options, parsers, and the comparison with the plan."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from ray_hetero.cli.main import commands
from ray_hetero.cli.serve import divided
from ray_hetero.cli.serving.comparison import Totals, compared, predicted_rate, read_totals
from ray_hetero.cli.serving.parsers import PARSERS, parser_options
from ray_hetero.cli.serving.server_process import ServerProcess
from ray_hetero.errors import ConfigError, StartupError

USERS = [{"users": 1, "tokens_per_s": 50.0}, {"users": 4, "tokens_per_s": 25.0}]


def test_options_go_to_the_plan_that_knows_them_and_else_to_the_server() -> None:
    given = ["--users", "4", "--port", "8001", "--max-model-len=32k", "--", "-tp", "2", "--seed=3"]
    planned, others = divided(given)
    assert planned == ["--users", "4", "--max-model-len=32k", "-tp", "2"]
    assert others == ["--port", "8001", "--seed=3"]


@pytest.mark.parametrize("option", ["--json", "--topology=x.yaml", "--additional-config={}"])
def test_options_without_a_meaning_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=f"^{option.partition('=')[0]}: expected "):
        divided([option])


def test_a_configuration_without_weights_is_refused() -> None:
    # A model that fits into the memory that other programs leave.
    config = str(Path(__file__).parents[3] / "tests/packaging/config.json")
    answer = CliRunner().invoke(commands, ["serve", config])
    assert isinstance(answer.exception, StartupError)
    assert "found a configuration without weights" in str(answer.exception)


def test_a_model_without_a_plan_ends_as_the_plan_does(tmp_path: Path) -> None:
    assert CliRunner().invoke(commands, ["serve", str(tmp_path / "none")]).exit_code == 1


@pytest.mark.parametrize("model_type", PARSERS)
def test_vllm_knows_the_parsers(model_type: str) -> None:
    tools, reasoning = PARSERS[model_type]
    assert tools or reasoning
    assert not tools or tools in ToolParserManager.list_registered()
    assert not reasoning or reasoning in ReasoningParserManager.list_registered()


def test_parsers_that_the_user_gives_stay() -> None:
    assert parser_options("gpt_oss", []) == [
        "--enable-auto-tool-choice", "--tool-call-parser", "openai",
        "--reasoning-parser", "openai_gptoss",
    ]  # fmt: skip
    assert parser_options("gpt_oss", ["--tool-call-parser=own"])[0] == "--reasoning-parser"
    assert parser_options("llama", []) == []


METRICS = """\
# HELP vllm:generation_tokens_total Number of generation tokens processed.
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="m"} 30.0
vllm:generation_tokens_total{engine="1",model_name="m"} 12.0
# HELP vllm:inter_token_latency_seconds Histogram of inter-token latency in seconds.
# TYPE vllm:inter_token_latency_seconds histogram
vllm:inter_token_latency_seconds_bucket{engine="0",le="0.01",model_name="m"} 3.0
vllm:inter_token_latency_seconds_bucket{engine="0",le="+Inf",model_name="m"} 40.0
vllm:inter_token_latency_seconds_count{engine="0",model_name="m"} 40.0
vllm:inter_token_latency_seconds_sum{engine="0",model_name="m"} 2.5
"""


def test_totals_are_sums_over_engines() -> None:
    assert read_totals(METRICS) == Totals(42.0, 0.0, 2.5, 0.0, 0.0)


@pytest.mark.parametrize(
    ("count", "rate"), [(0.5, 50.0), (1, 50.0), (2.5, 1 / 0.03), (4, 25.0), (99, 25.0)]
)
def test_predictions_are_interpolated_between_numbers_of_users(count: float, rate: float) -> None:
    assert predicted_rate(USERS, count) == pytest.approx(rate)


def test_measured_and_predicted_speed_stand_in_one_line() -> None:
    since = Totals(generated=600, steps=150, between_s=30.0, firsts=3, first_s=0.75)
    assert compared(since, 30.0, USERS) == (
        "4.0 users a step: 20.0 tokens/s each, predicted 25.0; 20.0 tokens/s in all; "
        "first token after 0.25 s"
    )
    assert compared(Totals(0, 0, 0, 0, 0), 30.0, USERS) == ""


def process(code: str, log: Path | None = None) -> ServerProcess:
    return ServerProcess([sys.executable, "-u", "-c", code], log)


def test_the_reason_of_a_start_that_fails_is_told(tmp_path: Path) -> None:
    code = "import sys; print('much'); print('ray_hetero: no GPU is free'); print('x'); sys.exit(3)"
    log = tmp_path / "state" / "log"
    server = process(code, log)
    with pytest.raises(StartupError, match=r"ended with status 3: ray_hetero: no GPU is free$"):
        server.wait_until_healthy()
    assert server.stop() == 3
    assert log.read_text() == "much\nray_hetero: no GPU is free\nx\n"
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_server_that_does_not_end_is_killed_and_named() -> None:
    code = "import signal, time; signal.signal(2, signal.SIG_IGN); print('deaf'); time.sleep(60)"
    server = process(code)
    while "deaf" not in "".join(server._last):
        assert server.process.poll() is None
    with pytest.raises(StartupError, match=r"there 0\.5 s after SIGINT and was killed:\ndeaf"):
        server.stop(timeout_s=0.5)
    assert server.process.wait(10) < 0

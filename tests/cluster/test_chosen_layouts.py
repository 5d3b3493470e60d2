"""The one flag without sizes: the engine asks who will compute, and chooses as the command does.

The model is a name of the hub of which a configuration is in the cache and nothing else.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from engines import (
    START_SECONDS,
    VLLM,
    batch,
    environment_of,
    free_port,
    hetero,
    is_healthy,
    prompts,
    run_engines,
    tokens,
)
from leftovers import Scene, wait_until
from ray_cluster import cluster, wait_until_taken

pytestmark = pytest.mark.timeout(1800)

NAME = "somebody/tiny-llama"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128,
    "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "hidden_act": "silu",
    "tie_word_embeddings": False, "torch_dtype": "float32",
}  # fmt: skip
# Two CPU ranks' worth of devices on any machine.
BACKEND = hetero(cpu={"ranks_per_socket": 2, "reserved_cores": 0})
ENGINE: dict[str, Any] = {
    "model": NAME, "load_format": "dummy", "skip_tokenizer_init": True, "enforce_eager": True,
    "max_num_seqs": 4, "max_num_batched_tokens": 512, **BACKEND,
}  # fmt: skip


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment with a cache of the hub, in which the model's configuration is."""
    home = tmp_path_factory.mktemp("hub")
    folder = home / "hub" / f"models--{NAME.replace('/', '--')}"
    (folder / "snapshots" / "abc").mkdir(parents=True)
    (folder / "snapshots" / "abc" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("abc")
    return {"HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "INFO"}


def planned(scene: Scene, hub: dict[str, str], *words: str, **extra: str) -> str:
    """The layout that the command chooses, in its words."""
    config = json.dumps(BACKEND["additional_config"]["ray_hetero"])
    file = scene.temporary / "config.json"
    file.write_text(config)
    command = str(Path(sys.executable).with_name("ray-hetero"))
    sizes = ("--max-num-seqs", "4", "--max-num-batched-tokens", "512", "--json")
    ran = subprocess.run(
        [command, "plan", NAME, *words, *sizes],
        env=environment_of(scene, {**hub, "RAY_HETERO_CONFIG": str(file), **extra}),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    (line,) = (one for one in json.loads(ran.stdout)["notes"] if one.startswith("Layout (auto"))
    return str(line.removeprefix("Layout (automatic): ").partition(" – ")[0])


def chosen(log: str) -> str:
    """The layout that an engine has chosen, from its log."""
    found = re.findall(r"stages: (.*?) – ", log)
    assert len(found) == 1, log[-3000:]
    return str(found[0])


def test_on_a_cluster_that_was_not_joined_yet(
    scene: Scene, logs: Path, hub: dict[str, str]
) -> None:
    with cluster(scene, logs / "cluster-head") as address:
        expected = planned(scene, hub, "--cluster", RAY_ADDRESS=address)
        answers = run_engines(
            scene, logs / "joins", [(ENGINE, [batch(prompts()[:2], max_tokens=4)])],
            extra={**hub, "RAY_ADDRESS": address},
        )  # fmt: skip
    assert [len(one) for one in tokens(answers[0][0])] == [4, 4]
    log = (logs / "joins" / "log").read_text()
    assert chosen(log) == expected
    assert "stages are not chosen" not in log
    scene.assert_clean()


@pytest.mark.slow
@pytest.mark.parametrize("joined", [None, {"address": "local"}], ids=["alone", "joined before"])
def test_alone_and_in_a_process_that_has_joined(
    joined: dict[str, Any] | None, scene: Scene, logs: Path, hub: dict[str, str]
) -> None:
    expected = planned(scene, hub)
    folder = logs / f"here-{bool(joined)}"
    run_engines(
        scene, folder, [(ENGINE, [batch(prompts()[:1], max_tokens=2)])], extra=hub, ray=joined
    )
    assert chosen((folder / "log").read_text()) == expected
    scene.assert_clean()


@pytest.mark.slow
def test_a_job(scene: Scene, logs: Path, hub: dict[str, str]) -> None:
    port, dashboard = free_port(), free_port()
    options = (
        "--include-dashboard=true", f"--dashboard-port={dashboard}",
        "--dashboard-agent-listen-port=0",
    )  # fmt: skip
    serve = (
        VLLM, "serve", NAME, "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy",
        "--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs", "4",
        "--max-num-batched-tokens", "512", "--distributed-executor-backend", "ray_hetero",
        "--additional-config", json.dumps(BACKEND["additional_config"]),
    )  # fmt: skip

    def job(*words: str) -> subprocess.CompletedProcess[str]:
        ray = str(Path(sys.executable).with_name("ray"))
        at = {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
        return subprocess.run(
            [ray, "job", *words], env=environment_of(scene, at),
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    variables = {**hub, "TMPDIR": str(scene.temporary), "RAY_HETERO_CLAIM_DIR": str(scene.claims)}
    submit = (
        "submit", "--no-wait", "--submission-id", "one-flag",
        "--runtime-env-json", json.dumps({"env_vars": variables}), "--", *serve,
    )  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    with cluster(scene, logs / "job-head", *options) as address:
        expected = planned(scene, hub, "--cluster", RAY_ADDRESS=address)
        wait_until_taken(lambda: job(*submit))
        is_up = wait_until(lambda: is_healthy(url), START_SECONDS, 0.5)
        log = job("logs", "one-flag").stdout
        assert is_up, log
        job("stop", "one-flag")
    assert chosen(log) == expected

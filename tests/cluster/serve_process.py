"""Serve a model with Ray Serve's LLM deployment, ask it once, and stop: MODEL ANSWER.json."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import httpx
from engines import free_port
from ray import serve
from ray.serve.llm import LLMConfig, build_openai_app
from ray.util import placement_group_table

from ray_hetero.observability.status import running_engines
from ray_hetero.runtime import local_ray

QUESTION = {"model": "demo", "max_tokens": 16, "messages": [{"role": "user", "content": "Where?"}]}


def _config(model: str) -> LLMConfig:
    return LLMConfig(
        model_loading_config={"model_id": "demo", "model_source": model},
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}, {"CPU": 1}]},
        deployment_config={
            "autoscaling_config": {"min_replicas": 1, "max_replicas": 1},
            "ray_actor_options": {"num_cpus": 0},
        },
        engine_kwargs={
            "pipeline_parallel_size": 2,
            "max_model_len": 512,
            "enforce_eager": True,
            "additional_config": {"ray_hetero": {"cpu": {"kv_cache_gib": 0.5}}},
        },
        runtime_env={"env_vars": {"RAY_HETERO_INSTEAD_OF": "mp"}},
    )


def _groups() -> dict[str, Any]:
    return {
        group["name"]: group["bundles"]
        for group in placement_group_table().values()
        if group["state"] != "REMOVED"
    }


def main() -> None:
    model, answer = sys.argv[1:]
    local_ray.init_in(
        Path(tempfile.gettempdir()), num_cpus=3, object_store_memory=100 << 20,
        include_dashboard=False,
    )  # fmt: skip
    port = free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(build_openai_app({"llm_configs": [_config(model)]}))
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    said = httpx.post(url, json=QUESTION, trust_env=False, timeout=120).json()
    found = {
        "said": said,
        "engines": [engine.to_dict() for engine in running_engines()],
        "groups": _groups(),
    }
    serve.shutdown()
    found |= {"engines left": len(running_engines()), "groups left": _groups()}
    Path(answer).write_text(json.dumps(found))


if __name__ == "__main__":
    main()

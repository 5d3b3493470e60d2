"""Start engines inside a placement group, as Train, Tune and Serve do: REQUEST.json ANSWER.json."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
from ray.util import placement_group, placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from placement.errors import PlacementError
from ray_hetero.runtime import local_ray

Request = dict[str, Any]


@ray.remote(num_cpus=1)
class Caller:
    """What a trial or a replica is: an actor in bundle 0 of its group."""

    def error_of(self, engine: Request) -> str:
        """What an engine says that cannot start, in this very process."""
        from vllm import LLM

        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        try:
            LLM(**engine)
        except PlacementError as error:
            return str(error)
        finally:
            del os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"]
        return "it started"

    def serve(self, engine: Request, batch: Request) -> dict[str, Any]:
        """Tokens, and the placement groups there are while the engine runs."""
        from vllm import LLM, SamplingParams

        llm = LLM(**engine)
        given = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        outputs = llm.generate(given, SamplingParams(**batch["sampling"]), use_tqdm=False)
        return {
            "tokens": [list(output.outputs[0].token_ids) for output in outputs],
            "groups": groups(),
        }


def groups() -> dict[str, str]:
    """State of every placement group by name."""
    return {group["name"]: group["state"] for group in placement_group_table().values()}


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    local_ray.init_in(Path(tempfile.gettempdir()), **request["ray"])
    group = placement_group(request["bundles"], name="trial")
    assert group.wait(60)
    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0)
    caller = Caller.options(scheduling_strategy=strategy).remote()
    answer = {"errors": [ray.get(caller.error_of.remote(one)) for one in request["wrong"]]}
    answer |= ray.get(caller.serve.remote(request["engine"], request["batch"]))
    ray.kill(caller)
    Path(sys.argv[2]).write_text(json.dumps(answer | {"after": groups()}))


if __name__ == "__main__":
    main()

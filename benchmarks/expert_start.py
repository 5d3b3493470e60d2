"""Time from the start of an expert rank's process until its experts are in memory, by who loads.

    python benchmarks/expert_start.py MODEL [--by files vllm] [--rounds 3]

No Ray and no stage are needed: the process makes the actor's object and loads, which is all of its
start but for the meeting with the stages.  Seconds are those of the clock, and of processors.
"""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast

CHILD = "--child"


def rank_spec(model: Path, by: str) -> Any:
    """The one expert rank beside a pretended stage, with the source of its experts."""
    import json

    from placement.cluster.assignment import Seat
    from placement.cluster.layout import Layout
    from placement.model.config import decoder_section
    from placement.model.expert_tensors import ExpertTensors
    from ray_hetero.config import HeteroConfig
    from ray_hetero.world import EngineSpec, ExpertSource, RankSpec, SharedSettings, World

    config = json.loads((model / "config.json").read_text())
    text = dict(decoder_section(config))
    text["quantization_config"] = config.get("quantization_config")
    tensors = ExpertTensors.of(config["architectures"][0], text)
    layers = int(text["num_hidden_layers"])
    seat = Seat(
        1, 1, 0, "cpu", local_rank=0, serves_experts=True, node_id="n", address="a",
        node_name="n", is_driver_node=True,
    )  # fmt: skip
    keys = {"cpu": {"linear_kernel": "streaming"}, "experts": {"ranks": 1, "prefill_on_gpu": False}}
    world = World(Layout((("gpu",),)), (), (layers,), (seat,), layers)
    return RankSpec(
        world, seat, EngineSpec(cast(Any, None), HeteroConfig.model_validate(keys), None),
        SharedSettings("e", "bfloat16", 128, 16, 0, 32, 8, False, False, False, (), ()), (), (),
        source=None if by == "vllm" or tensors is None
        else ExpertSource(str(model), tensors, layers),
    )  # fmt: skip


def child(model: Path, by: str) -> None:
    """Load as the actor's process does."""
    from ray_hetero.worker.expert_actor import ExpertActor
    from ray_hetero.worker.expert_files import Share

    args = b""
    if by == "vllm":
        from vllm.engine.arg_utils import EngineArgs

        args = pickle.dumps(EngineArgs(model=str(model), skip_tokenizer_init=True))
    actor = ExpertActor(rank_spec(model, by), {}, args)
    actor.prepare()
    held = actor._loaded(Share(0, 1))
    used = sum(os.times()[:2])
    modules = sum(name.partition(".")[0] in ("vllm", "transformers") for name in sys.modules)
    print(f"LOADED {len(held)} {used:.2f} {modules}", flush=True)


def measured(model: Path, by: str) -> tuple[float, float, int]:
    """Seconds of the clock, seconds of processors, and modules of vLLM and Transformers."""
    environment = os.environ | {
        "VLLM_TARGET_DEVICE": "cpu", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"
    }  # fmt: skip
    began = time.monotonic()
    with subprocess.Popen(
        [sys.executable, __file__, str(model), CHILD, "--by", by],
        env=environment, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("LOADED "):
                _, _, used, modules = line.split()
                return time.monotonic() - began, float(used), int(modules)
    raise SystemExit(f"the process ended with {process.returncode}")


def main() -> None:
    """Print a row for each round."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--by", nargs="+", default=["vllm", "files"], choices=["vllm", "files"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(CHILD, action="store_true")
    given = parser.parse_args()
    if given.child:
        child(given.model, given.by[0])
        return
    print("| by | seconds | of processors | modules of vLLM and Transformers |")
    print("| --- | --- | --- | --- |")
    for _ in range(given.rounds):
        for by in given.by:
            took, used, modules = measured(given.model, by)
            print(f"| {by} | {took:.1f} | {used:.1f} | {modules} |", flush=True)


if __name__ == "__main__":
    main()

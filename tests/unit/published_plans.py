"""Plans of published models on five machines, a line each.

    python tests/unit/published_plans.py     writes data/published_plans.txt

Sizes are those of a reader of configurations, or vLLM's own class of the model, whose answers
`tools/write_built_models.py` keeps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from placement.errors import PlacementError
from placement.model.built import shape_from_parts
from placement.model.reading import UnknownModelError, shape_from_config
from placement.model.shape import ModelShape
from placement.plan.described import described
from placement.words import duration
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import RayHeteroError
from ray_hetero.planning.activation_dtype import dtype_of_config
from ray_hetero.planning.engine_facts import EngineOptions, facts_of_checkpoint
from ray_hetero.planning.layout_choice import choose_layout
from ray_hetero.planning.machine import Machine, described_machine
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus

DATA = Path(__file__).parent / "data"
MODELS = DATA / "models"
BUILT = DATA / "built"
PLANS = DATA / "published_plans.txt"
LONGEST = 32768
XEON = {"part": "Xeon 8480+", "cores": 56, "memory_gib": 1024, "count": 2,
        "instruction_sets": ["amx_bf16", "avx512f"]}  # fmt: skip
UNKNOWN_GPU = {"name": "X9", "memory_gib": 48, "read_gb_s": 1200, "bf16_tflop_s": 180}
SMALL_UNKNOWN_GPU = {"name": "X3", "memory_gib": 16, "read_gb_s": 400, "bf16_tflop_s": 60}
MACHINES: dict[str, dict[str, Any]] = {
    "H100, 2 Xeons": {"gpus": {"part": "H100 SXM"}, "sockets": XEON},
    "8 H100, 2 Xeons": {"gpus": {"part": "H100 SXM", "count": 8}, "sockets": XEON},
    "2 Xeons": {"sockets": XEON},
    "unknown GPU of 48 GiB, EPYC": {
        "gpus": UNKNOWN_GPU,
        "sockets": {"cores": 32, "memory_gib": 512, "read_gb_s": 460, "bf16_tflop_s": 2.9},
    },
    "unknown GPU of 16 GiB, desktop": {
        "gpus": SMALL_UNKNOWN_GPU,
        "sockets": {"cores": 8, "memory_gib": 64, "read_gb_s": 70, "bf16_tflop_s": 1},
    },
}


def models() -> list[Path]:
    """Configurations whose sizes a reader tells, or an answer of vLLM's class that was kept."""
    return [path for path in sorted(MODELS.glob("*.json")) if shape_of(path) is not None]


def shape_of(path: Path) -> ModelShape | None:
    """Sizes of a published model; None where neither source has them."""
    config = json.loads(path.read_text())
    try:
        return shape_from_config(config, dtype_of_config(config))
    except UnknownModelError:
        kept = BUILT / path.name
        if not kept.exists():
            return None
        return shape_from_parts(json.loads(kept.read_text()), config)


def machine(name: str) -> Machine:
    """A machine by its name."""
    return described_machine(described({"nodes": [{"name": "host", **MACHINES[name]}]}))


def line_of(path: Path, name: str) -> str:
    """Plan of a model for a machine, or the reason why there is none."""
    config, there = json.loads(path.read_text()), machine(name)
    dtype = dtype_of_config(config)
    try:
        shape = shape_of(path)
        assert shape is not None
        options = EngineOptions(dtype, max_model_len=LONGEST)
        facts = facts_of_checkpoint(config, shape, there.nodes, options)
        checkpoint = CheckpointOnCpus.of_config(config, "auto")
        choice = choose_layout(PlanRequest(HeteroConfig(), there, facts, checkpoint=checkpoint))
    except (PlacementError, RayHeteroError) as error:
        return f"{path.stem} | {name} | refused: {str(error).splitlines()[0]}"
    best = choice.chosen
    return f"{path.stem} | {name} | {best} a step, {duration(best.first_token_s)} first token"


def lines(paths: list[Path]) -> Iterator[str]:
    """Lines of some models on all machines."""
    for path in paths:
        for name in MACHINES:
            yield line_of(path, name)


if __name__ == "__main__":
    PLANS.write_text("\n".join(lines(models())) + "\n", encoding="utf-8")

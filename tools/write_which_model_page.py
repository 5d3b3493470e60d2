"""Write the tables of docs/which-model.md: what `ray-hetero plan` answers for models and machines.

    python tools/write_which_model_page.py

Models are the files of configs/models/, machines those of configs/machines/.  Nothing is loaded or
measured; the text around the tables is kept.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

from page_blocks import DOCS, replaced, rewrite, table

from placement.errors import DoesNotFitError
from placement.model.reading import shape_from_config
from placement.plan.described import read_described
from placement.units import GIB
from ray_hetero.config import HeteroConfig
from ray_hetero.planning.engine_facts import EngineOptions, facts_of_checkpoint
from ray_hetero.planning.machine import Machine, described_machine
from ray_hetero.planning.model_plan import ModelPlan, plan_model
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.quantise_first import FP8_IN_BLOCKS, INTEGERS_OF_4_BITS

ROOT = DOCS.parent
PAGE = DOCS / "which-model.md"
CONFIGS = ROOT / "configs"
END = "<!-- end of plans -->"

LENGTH = 8192
"""Tokens of the longest sequence (--max-model-len)."""
FORMS: Mapping[str, Mapping[str, Any] | None] = {
    "bf16": None,
    "FP8": FP8_IN_BLOCKS,
    "4-bit": INTEGERS_OF_4_BITS,
}
MODELS = {
    "llama-3.1-8b": "Llama 3.1 8B",
    "qwen3-32b": "Qwen3 32B",
    "llama-3.1-70b": "Llama 3.1 70B",
    "mistral-large-123b": "Mistral Large 123B",
    "llama-3.1-405b": "Llama 3.1 405B",
    "qwen3-30b-a3b": "Qwen3 30B-A3B, experts",
    "mixtral-8x22b": "Mixtral 8x22B, experts",
    "qwen3-235b-a22b": "Qwen3 235B-A22B, experts",
    "deepseek-v3": "DeepSeek V3 671B, experts",
}
"""Files of configs/models/ and what the models are called, in the order of the tables."""
MACHINES = ("h100-two-8480", "two-h200-two-8480", "l40s-one-9654", "two-8480")
"""Files of configs/machines/."""
NO_BREAK = "\N{NO-BREAK SPACE}"


def begin(machine: str) -> str:
    """The mark before a machine's table."""
    return f"<!-- plans, {machine}: written by tools/write_which_model_page.py -->"


@cache
def machine_of(name: str) -> Machine:
    """A machine of configs/machines/."""
    return described_machine(read_described(CONFIGS / "machines" / f"{name}.yaml"))


@cache
def config_of(model: str, form: str) -> dict[str, Any]:
    """A model's config.json, with what a checkpoint of that form has beside it."""
    content = json.loads((CONFIGS / "models" / f"{model}.json").read_text(encoding="utf-8"))
    scheme = FORMS[form]
    return content if scheme is None else {**content, "quantization_config": dict(scheme)}


def planned(model: str, form: str, machine: str) -> ModelPlan | None:
    """Plan of `ray-hetero plan`; None where the model does not fit."""
    config, there = config_of(model, form), machine_of(machine)
    facts = facts_of_checkpoint(
        config, shape_from_config(config), there.nodes, EngineOptions(max_model_len=LENGTH)
    )
    try:
        return plan_model(model, PlanRequest(HeteroConfig(), there, facts))
    except DoesNotFitError:
        return None


def where(found: ModelPlan) -> str:
    """The devices in words, stage by stage."""
    split = found.plan.split
    parts = []
    for stage in split.stages:
        noun = "socket" if stage.devices.has_cpu else "GPU"
        size = stage.devices.size
        words = noun if size == 1 else f"{size} {noun}s"
        part = words if len(split.stages) == 1 else f"{words} {stage.layers}"
        parts.append(part.replace(" ", NO_BREAK))
    stages = " → ".join(parts)
    experts = found.plan.experts
    if not experts:
        return stages
    noun = "a socket" if len(experts) == 1 else f"{len(experts)} sockets"
    held = (f"experts of {experts[0].layers}", f"on {noun}")
    return " ".join((f"{stages},", *(words.replace(" ", NO_BREAK) for words in held)))


def cell(found: ModelPlan | None) -> str:
    """Tokens a second of one sequence, and who holds how many layers."""
    if found is None:
        return "does not fit"
    speed = found.plan.split.tokens_per_s
    shown = f"{speed:.0f}" if speed >= 10 else f"{speed:.1f}"
    return f"**{shown}** ({where(found)})"


def rows(machine: str) -> Iterator[tuple[str, ...]]:
    """One row for each model."""
    for model, name in MODELS.items():
        sizes = (shape_from_config(config_of(model, form)).weight_bytes / GIB for form in FORMS)
        yield (
            name,
            f"{NO_BREAK}/{NO_BREAK}".join(f"{size:,.0f}" for size in sizes),
            *(cell(planned(model, form, machine)) for form in FORMS),
        )


def written(page: str) -> str:
    """The page with all tables made anew."""
    for machine in MACHINES:
        head = ("model", "weights, GiB", *FORMS)
        page = replaced(page, begin(machine), END, table(head, rows(machine)))
    return page


if __name__ == "__main__":
    rewrite(PAGE, written)

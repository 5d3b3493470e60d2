"""Write recipes: a page for each model, and a file for `vllm serve --config` per machine.

    python tools/write_recipes.py

Pages are docs/recipes/, files configs/recipes/MODEL/MACHINE.yaml.  Models are published
configurations of tests/unit/data/models/, machines those of configs/machines/.  Nothing is loaded
or measured; everything is what `ray-hetero plan` answers.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from page_blocks import DOCS, table
from write_which_model_page import NO_BREAK, machine_of, where

ROOT = DOCS.parent
sys.path.insert(0, str(ROOT / "tests" / "unit"))

import published_plans  # noqa: E402

from placement.errors import PlacementError  # noqa: E402
from placement.model.reading import shape_from_config  # noqa: E402
from placement.model.shape import ModelShape  # noqa: E402
from placement.units import GIB  # noqa: E402
from ray_hetero.cli.serving.parsers import REASONING, TOOLS, parser_options  # noqa: E402
from ray_hetero.compat.models.fused_architectures import family_of  # noqa: E402
from ray_hetero.config import HeteroConfig  # noqa: E402
from ray_hetero.errors import RayHeteroError  # noqa: E402
from ray_hetero.names import BACKEND  # noqa: E402
from ray_hetero.planning.activation_dtype import dtype_of_config  # noqa: E402
from ray_hetero.planning.engine_facts import EngineOptions, facts_of_checkpoint  # noqa: E402
from ray_hetero.planning.model_plan import ModelPlan, plan_model  # noqa: E402
from ray_hetero.planning.plan_request import PlanRequest  # noqa: E402
from ray_hetero.planning.quantise_first import FP8_IN_BLOCKS, INTEGERS_OF_4_BITS  # noqa: E402
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus  # noqa: E402

PAGES = DOCS / "recipes"
FILES = ROOT / "configs" / "recipes"
MACHINES = {
    "eight-h100-two-8480": "8 × H100, two Xeon 8480+, 1 TiB",
    "h100-two-8480": "1 × H100, two Xeon 8480+, 1 TiB",
    "pro-6000-one-9355": "RTX PRO 6000, EPYC 9355, 768 GiB",
    "rtx-5090-one-9355": "RTX 5090, EPYC 9355, 768 GiB",
}
"""Files of configs/machines/ and what the machines are called, in the order of the pages."""
USERS = (1, 4, 16)
DRAFTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
"""Keys of a config.json that count layers for multi-token prediction."""


@dataclass(frozen=True)
class Recipe:
    """A model and how it is served."""

    name: str
    hub: str
    """The checkpoint's name on the hub."""
    config: str
    """File of tests/unit/data/models/ without its end."""
    scheme: Mapping[str, Any] | None = None
    """`quantization_config` of that checkpoint, where the file is of another one."""
    parsers: tuple[str, str] | None = None
    """Parsers for tool calls and reasoning where they are not those of the model's type."""
    context: int = 65536
    """Value of --max-model-len, where a machine has none of its own."""
    contexts: Mapping[str, int] = field(default_factory=dict)
    """Value of --max-model-len of machines that have one of their own."""
    remark: str = ""
    """Further sentences of its page."""


RECIPES = {
    "deepseek-r1": Recipe(
        "DeepSeek R1", "deepseek-ai/DeepSeek-R1", "deepseek-r1", parsers=("", "deepseek_r1"),
        contexts={"eight-h100-two-8480": 32768},
        remark="Eight H100 have 640 GB, and the weights alone take more: without sockets, the "
        "model does not fit on that server. With the experts of some layers in host memory it "
        "does, and the attention and all other experts stay on the GPUs.",
    ),
    "deepseek-v3.2": Recipe(
        "DeepSeek V3.2", "deepseek-ai/DeepSeek-V3.2", "deepseek-v3.2",
        remark="Its sparse attention needs a GPU, so only experts go to sockets.",
    ),
    "kimi-k2": Recipe("Kimi K2", "moonshotai/Kimi-K2-Instruct", "kimi-k2-instruct"),
    "glm-4.6": Recipe(
        "GLM-4.6", "zai-org/GLM-4.6-FP8", "glm-4.6", FP8_IN_BLOCKS,
        contexts={"rtx-5090-one-9355": 16384},
    ),
    "glm-5": Recipe(
        "GLM-5", "zai-org/GLM-5-FP8", "glm-5-fp8", parsers=("glm47", "glm45"),
        remark="Its sparse attention needs a GPU, so only experts go to sockets.",
    ),
    "gpt-oss-120b": Recipe("gpt-oss-120b", "openai/gpt-oss-120b", "gpt-oss-120b", context=131072),
    "minimax-m2.5": Recipe("MiniMax-M2.5", "MiniMaxAI/MiniMax-M2.5", "minimax-m2.5"),
    "qwen3-235b": Recipe(
        "Qwen3 235B-A22B", "Qwen/Qwen3-235B-A22B-FP8", "qwen3-235b-a22b-fp8", context=32768
    ),
    "qwen3-coder-480b": Recipe(
        "Qwen3 Coder 480B-A35B", "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8", "qwen3-coder-480b",
        FP8_IN_BLOCKS, parsers=("qwen3_coder", ""), context=131072,
        contexts={"rtx-5090-one-9355": 32768},
    ),
    "qwen3-next-80b": Recipe(
        "Qwen3-Next 80B-A3B", "Qwen/Qwen3-Next-80B-A3B-Instruct", "qwen3-next-80b-a3b",
        parsers=("hermes", ""), context=131072,
    ),
    "qwen3.5-397b": Recipe(
        "Qwen3.5 397B-A17B", "Qwen/Qwen3.5-397B-A17B", "qwen3.5-397b-a17b",
        parsers=("qwen3_coder", "qwen3"),
    ),
    "llama-3.3-70b": Recipe(
        "Llama 3.3 70B in 4 bits", "RedHatAI/Llama-3.3-70B-Instruct-quantized.w4a16",
        "llama-3.3-70b", INTEGERS_OF_4_BITS, parsers=("llama3_json", ""), context=16384,
        remark="A dense model: all of its weights are read for every token, so layers on a socket "
        "cost more than experts do.",
    ),
    "gemma-4-26b": Recipe(
        "Gemma 4 26B-A4B", "google/gemma-4-26B-A4B-it", "gemma-4-26b-a4b", context=32768
    ),
}  # fmt: skip
"""Names of pages, in the order of the overview."""


def config_of(recipe: Recipe) -> dict[str, Any]:
    """Content of the checkpoint's config.json, as far as sizes follow from it."""
    path = published_plans.MODELS / f"{recipe.config}.json"
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    if recipe.scheme is not None:
        content["quantization_config"] = dict(recipe.scheme)
    return content


@cache
def shape_of(name: str) -> ModelShape:
    """Sizes of a recipe's model."""
    recipe = RECIPES[name]
    if recipe.scheme is not None:
        config = config_of(recipe)
        return shape_from_config(config, dtype_of_config(config))
    found = published_plans.shape_of(published_plans.MODELS / f"{recipe.config}.json")
    if found is None:
        raise ValueError(f"{name}: type: python tools/write_built_models.py {recipe.config}")
    return found


def context_of(name: str, machine: str) -> int:
    """Value of --max-model-len."""
    return RECIPES[name].contexts.get(machine, RECIPES[name].context)


@cache
def planned(name: str, machine: str) -> ModelPlan | str:
    """Plan of `ray-hetero plan`; reason as text, where the model cannot be served."""
    config, there = config_of(RECIPES[name]), machine_of(machine)
    facts = facts_of_checkpoint(
        config, shape_of(name), there.nodes,
        EngineOptions(dtype_of_config(config), context_of(name, machine)),
    )  # fmt: skip
    try:
        checkpoint = CheckpointOnCpus.of_config(config, "auto")
        return plan_model(name, PlanRequest(HeteroConfig(), there, facts, checkpoint=checkpoint))
    except (PlacementError, RayHeteroError) as error:
        return str(error).splitlines()[0]


def parsers_of(name: str) -> list[str]:
    """Options of vLLM for tool calls and reasoning."""
    recipe = RECIPES[name]
    if recipe.parsers is None:
        return parser_options(str(config_of(recipe)["model_type"]), ())
    tools, reasoning = recipe.parsers
    options = ["--enable-auto-tool-choice", TOOLS, tools] if tools else []
    return options + ([REASONING, reasoning] if reasoning else [])


def command_of(name: str, machine: str) -> list[str]:
    """Words of the command that serves the model."""
    words = ["vllm", "serve", RECIPES[name].hub, "--distributed-executor-backend", BACKEND]
    return [*words, "--max-model-len", str(context_of(name, machine)), *parsers_of(name)]


def file_of(name: str, machine: str) -> str:
    """Content of a recipe's file, whose keys are the options of its command."""
    keys: dict[str, Any] = {"model": RECIPES[name].hub}
    words = command_of(name, machine)[3:]
    while words:
        key = words.pop(0).removeprefix("--")
        is_last = not words or words[0].startswith("--")
        value = "" if is_last else words.pop(0)
        keys[key] = True if is_last else int(value) if value.isdigit() else value
    head = f"# {RECIPES[name].name} on {MACHINES[machine]}: written by tools/write_recipes.py\n"
    return head + yaml.safe_dump(keys, sort_keys=False)


def row_of(name: str, machine: str, first: str) -> tuple[str, ...]:
    """A line of a table: layout, context and predictions."""
    found = planned(name, machine)
    if isinstance(found, str):
        return (first, "does not fit", "", "", "", "")
    prices = {one.users: one for one in found.plan.users}
    if prices[1].context != CONTEXT:
        raise ValueError(f"{name}: expected prices for {CONTEXT} tokens, got {prices[1].context}")
    speeds = [_speed(prices[users].tokens_per_s) for users in USERS if users in prices]
    context = f"{context_of(name, machine):,}"
    room = f"{prices[1].room:,.1f}"
    first_token = prices[1].first_token_s
    seconds = f"{first_token:,.1f}" if first_token >= 1 else f"{first_token:.2f}"
    return (first, f"{NO_BREAK}/{NO_BREAK}".join(speeds), seconds, where(found), context, room)


def _speed(tokens_per_s: float) -> str:
    return f"{tokens_per_s:.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.1f}"


CONTEXT = 4096
"""Tokens of each user's sequence, for which plans are priced."""
HEAD = (
    "tokens/s each, 1 / 4 / 16 users", "first token, s", "layout", "`--max-model-len`",
    f"sequences of {CONTEXT:,} tokens that fit"
)  # fmt: skip


def page_of(name: str) -> str:
    """The page of a model."""
    recipe, shape = RECIPES[name], shape_of(name)
    rows = [row_of(name, machine, title) for machine, title in MACHINES.items()]
    parts = [
        "<!-- written by tools/write_recipes.py -->",
        f"# {recipe.name}",
        f"`{recipe.hub}`: {shape.weight_bytes / GIB:,.0f} GiB of weights. {recipe.remark}".strip(),
        "The figures are **predictions** for an idle machine whose devices reach what "
        "[their datasheets promise, less a share](../placement-and-planning.md), with "
        f"{CONTEXT:,} tokens of context and prompts of as many. On the machine itself, "
        f"`ray-hetero plan {recipe.hub}` measures the devices, and `ray-hetero serve {recipe.hub}` "
        "compares them with the speed that is reached.",
        table(("machine", *HEAD), rows),
        "## Commands",
        *(part for machine in MACHINES for part in _section(name, machine)),
        "## Drafts",
        _drafts(config_of(recipe)),
        "## Tested",
        f"- This family of models: {family_of(shape.model_type)}.\n"
        "- This checkpoint with its weights: **no**. Neither speed nor answers have been compared "
        "on any of these machines.\n"
        "- Options of the commands, by vLLM's parser, and the plans: yes, by "
        "`tests/unit/docs/test_recipes.py`.",
    ]
    return "\n\n".join(parts) + "\n"


def _section(name: str, machine: str) -> Iterator[str]:
    found = planned(name, machine)
    yield f"### {MACHINES[machine]}"
    if isinstance(found, str):
        yield f"`{found}`"
        return
    first, second, *rest = _pairs(command_of(name, machine))
    lines = " \\\n  ".join([f"{first} {second}", *rest])
    yield f"```sh\n{lines}\n```"
    file = (FILES / name / f"{machine}.yaml").relative_to(ROOT)
    yield f"The same as a file: `vllm serve --config {file}`."


def _pairs(words: list[str]) -> list[str]:
    """Words of a command, an option with its value."""
    parts = [shlex.join(words[:3])]
    for word in words[3:]:
        if word.startswith("--"):
            parts.append(word)
        else:
            parts[-1] += f" {shlex.quote(word)}"
    return parts


def _drafts(config: Mapping[str, Any]) -> str:
    inner = config.get("text_config", config)
    layers = next((int(inner[key]) for key in DRAFTS if inner.get(key)), 0)
    more = "[Speculative decoding](../speculation.md) says when drafts pay."
    if not layers:
        return (
            "The checkpoint has no layers for multi-token prediction; n-grams need none: "
            '`--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\'`. '
            "In a mixture, the tokens of drafts read experts of their own. " + more
        )
    return (
        f"The checkpoint's configuration names {layers} layer{'s' if layers > 1 else ''} for "
        "multi-token prediction: "
        '`--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\'`. '
        "This is not in the commands: how many of these drafts are accepted was not measured here, "
        "and in a mixture their tokens read experts of their own. " + more
    )


def overview() -> str:
    """The page that lists all recipes."""
    blocks = []
    for machine, title in MACHINES.items():
        rows = [row_of(name, machine, f"[{one.name}]({name}.md)") for name, one in RECIPES.items()]
        blocks += [f"## {title}", table(("model", *HEAD), rows)]
    first, there = next(iter(RECIPES)), next(iter(MACHINES))
    r1 = planned(first, there)
    if isinstance(r1, str):
        raise ValueError(f"the recipe that comes first is none: {r1}")
    speed = _speed(r1.plan.users[0].tokens_per_s)
    parts = [
        "<!-- written by tools/write_recipes.py -->",
        "# Recipes",
        "Commands for models that are larger than the GPUs' memory, on four machines, with the "
        "layout and the speed that `ray-hetero plan` predicts. **None of these models has been run "
        "with its weights on these machines**; each page says what was tested.",
        "The clearest case is [DeepSeek R1](deepseek-r1.md) on eight H100: its weights do not fit "
        "their 640 GB. With the experts of "
        f"{r1.plan.experts[0].layers} of its layers on the two sockets it fits, and {speed} tokens "
        "per second are predicted for one user.",
        "Users share little of a step: in a mixture, each user's token reads "
        "experts of its own, so the tokens per second of all users together grow slowly, and those "
        "of each user fall. The second column shows it for 1, 4 and 16 users, the third one the "
        f"first token of one user after a prompt of {CONTEXT:,} tokens.",
        *blocks,
    ]
    return "\n\n".join(parts) + "\n"


def written() -> dict[Path, str]:
    """All pages and files with their content."""
    found = {PAGES / "index.md": overview()}
    for name in RECIPES:
        found[PAGES / f"{name}.md"] = page_of(name)
        for machine in MACHINES:
            if not isinstance(planned(name, machine), str):
                found[FILES / name / f"{machine}.yaml"] = file_of(name, machine)
    return found


def main() -> None:
    """Write all pages and files anew; those of recipes that are no more are removed."""
    content = written()
    for path in [*PAGES.glob("*.md"), *FILES.rglob("*.yaml")]:
        if path not in content:
            path.unlink()
    for path, text in content.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

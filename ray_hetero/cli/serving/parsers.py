"""Parsers of vLLM for tool calls and reasoning, by the type of a model."""

from __future__ import annotations

from collections.abc import Sequence

PARSERS: dict[str, tuple[str, str]] = {
    "deepseek_v32": ("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": ("deepseek_v4", "deepseek_v4"),
    "ernie4_5_moe": ("ernie45", "ernie45"),
    "gemma4": ("gemma4", "gemma4"),
    "glm4_moe": ("glm45", "glm45"),
    "gpt_oss": ("openai", "openai_gptoss"),
    "granitemoehybrid": ("granite4", ""),
    "kimi_k2": ("kimi_k2", ""),
    "minimax_m2": ("minimax_m2", "minimax_m2"),
    "nemotron_h": ("", "nemotron_v3"),
    "qwen3": ("hermes", "qwen3"),
    "qwen3_moe": ("hermes", "qwen3"),
    "seed_oss": ("seed_oss", "seed_oss"),
}
"""Values of `--tool-call-parser` and `--reasoning-parser` by `model_type`; empty for none.  A
type whose models were trained for different ones, such as `deepseek_v3`, is not here."""
TOOLS, REASONING = "--tool-call-parser", "--reasoning-parser"


def parser_options(model_type: str, given: Sequence[str]) -> list[str]:
    """Options of vLLM for the parsers of a model, without those that the user has given.

    Args:
        model_type: of the model's `config.json`.
        given: arguments of the user.

    """
    tools, reasoning = PARSERS.get(model_type, ("", ""))
    names = {argument.partition("=")[0] for argument in given}
    options = []
    if tools and TOOLS not in names:
        options += ["--enable-auto-tool-choice", TOOLS, tools]
    if reasoning and REASONING not in names:
        options += [REASONING, reasoning]
    return options

"""Compare planned bytes with those that vLLM allocates, for every architecture of its
registry, and for layers that draft.

    make families-sizes            # all architectures, into tests/families/sizes.json
    make families-sizes ONLY="GptOssForCausalLM Zamba2ForCausalLM"

Each side is a process of its own, because the side that plans replaces parts of vLLM.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from families import sizes  # noqa: E402
from families.configurations import DRAFTER, architectures  # noqa: E402
from ray_hetero.planning.sizes.model_probe import environment  # noqa: E402

RESULTS = HERE / "sizes.json"
TOLERANCE = 0.005
"""Largest relative difference that counts as equal."""
DRAFTING = [
    f"{name}ForCausalLM{DRAFTER}"
    for name in (
        "DeepseekV3", "DeepseekV32", "DeepseekV4", "Ernie4_5_Moe", "ExaoneMoe", "Glm4Moe",
        "Glm4MoeLite", "HYV3", "LongcatFlash", "MiMo", "NemotronH", "PanguUltraMoE", "Qwen3Next",
        "Qwen3_5", "Qwen3_5Moe",
    )
]  # fmt: skip
"""Models whose checkpoints have layers that draft: the bytes of these layers are compared."""
SIDES = {"planned": sizes.planned_sizes, "allocated": sizes.allocated_sizes}


def sizes_of_side(side: str, names: list[str]) -> dict[str, Any]:
    """Sizes of one side, by architecture, found by a process of its own."""
    command = [sys.executable, __file__, side, *names]
    ended = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, check=True)
    lines = (line for line in ended.stdout.decode().splitlines() if line.startswith("{"))
    return {key: value for line in lines for key, value in json.loads(line).items()}


def row(planned: dict[str, Any], allocated: dict[str, Any]) -> dict[str, Any]:
    """Result of an architecture: bytes of both sides, or why there are none."""
    if planned.get("no_config"):
        return {"no_config": planned["problem"]}
    if "bytes" not in allocated:
        return {"not_made": allocated["problem"]}
    if "bytes" not in planned:
        return {"not_planned": planned["problem"], "allocated": allocated["bytes"]}
    return {
        "planned": planned["bytes"],
        "allocated": allocated["bytes"],
        "source": planned["source"],
        "only_made": allocated.get("only_made", False),
    }


def is_equal(one: dict[str, Any]) -> bool:
    """Whether planned bytes are those that vLLM allocates."""
    if "planned" not in one:
        return False
    return bool(abs(one["planned"] / one["allocated"] - 1) <= TOLERANCE)


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Numbers of the results, and the architectures that are not equal."""
    made = {name: one for name, one in rows.items() if "allocated" in one}
    equal = [name for name, one in made.items() if is_equal(one)]
    lines = [
        f"{len(rows)} architectures; vLLM makes a small model of {len(made)}; planned bytes equal "
        f"allocated ones within 0.5 % for {len(equal)} ({len(equal) / max(1, len(made)):.1%})"
    ]
    lines += [f"{name}: {rows[name]}" for name in sorted(set(rows) - set(equal))]
    return "\n".join(lines)


def main() -> None:
    """Compare, print the numbers, and keep the results of a run over all architectures."""
    arguments = sys.argv[1:]
    if arguments[:1] and arguments[0] in SIDES:
        for name, found in sizes.sizes_of_all(arguments[1:], SIDES[arguments[0]]):
            print(json.dumps({name: found}), flush=True)
        return
    names = arguments or [*architectures(), *DRAFTING]
    sides = {side: sizes_of_side(side, names) for side in SIDES}
    rows = {name: row(sides["planned"][name], sides["allocated"][name]) for name in names}
    if not arguments:
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    print(summary(rows))


if __name__ == "__main__":
    main()

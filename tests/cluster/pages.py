"""The blocks of code that README and docs show to a user: which are run, and why not the rest.

`test_pages.py` runs those that start engines, `tests/unit/docs/test_page_commands.py` the others;
`tests/unit/docs/test_page_blocks.py` says when a page has one that is neither run nor listed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
ARCHIVE = ("docs/gpu-host/", "docs/recipes/")
"""Dated reports, whose commands were run for them, and recipes, whose commands
`tests/unit/docs/test_recipes.py` plans and parses."""


def blocks(page: str) -> list[str]:
    """The text of every fenced block of a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S)


def pages() -> tuple[str, ...]:
    """README, CONTRIBUTING and the pages of docs, the archive aside, that have blocks."""
    found = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "docs").rglob("*.md"))]
    listed = ["README.md", "CONTRIBUTING.md", *found]
    return tuple(page for page in listed if not page.startswith(ARCHIVE) and blocks(page))


def commands(text: str) -> list[str]:
    """Lines of a shell without comments, each command whole."""
    whole = re.sub(r" *\\\n *", " ", text)
    lines = re.sub(r" +# .*$", "", whole, flags=re.M).splitlines()
    joined: list[str] = []
    for line in lines:
        if joined and joined[-1].count("'") % 2:
            joined[-1] += f"\n{line}"
        elif line:
            joined.append(line)
    return joined


@dataclass(frozen=True)
class Block:
    """A block, by a part of its text that no other block of the page has."""

    page: str
    part: str

    @property
    def text(self) -> str:
        """The block as it stands."""
        (found,) = [block for block in blocks(self.page) if self.part in block]
        return found

    def filled(self, values: Mapping[str, str]) -> str:
        """The block with values for the page's placeholders, by their names."""
        names = "|".join(rf"\b{name}\b" for name in values)
        return re.sub(names, lambda found: values[found.group()], self.text)

    def commands(self) -> list[str]:
        """Its lines without comments, each command whole."""
        return commands(self.text)


README = "README.md"
INSTALLATION = "docs/installation.md"
SERVE = "docs/quick-start-serve.md"
JOB = "docs/quick-start-job.md"
NOTEBOOK = "docs/quick-start-notebook.md"
CLUSTERS = "docs/clusters.md"
WHICH_MODEL = "docs/which-model.md"
PLANNING = "docs/placement-and-planning.md"
TUNING = "docs/tuning.md"
SPECULATION = "docs/speculation.md"
EXPERTS = "docs/experts.md"
CONFIGURATION = "docs/configuration.md"
DEPLOYMENT = "docs/deployment.md"
MONITORING = "docs/watching.md"
RAY_SERVE = "docs/ray-serve.md"
API = "docs/api.md"
PATCHED = "docs/patched-vllm.md"
SERVE_KOREAN = "docs/quick-start-serve.ko.md"
SERVE_PARTS = (
    "ray-hetero doctor        #", '"ranks_per_socket": 2', "/v1/completions",
    "ray start --head $(ray-hetero ray-args)\n", "export RAY_ADDRESS=FIRST",
)  # fmt: skip
PATCHED_KOREAN = "docs/patched-vllm.ko.md"
BENCHMARKS = "docs/benchmarks/index.md"
NUMA = "docs/numa-qemu.md"

INSTALL = Block(INSTALLATION, "python tools/fix_torchvision.py")
DEMO = Block(README, "make demo")
LOOK_AND_SERVE = Block(SERVE, "ray-hetero doctor        #")
PLACEMENT = Block(SERVE, "┃ rank ┃ stage ┃")
SPLIT_AND_SERVE = Block(SERVE, '"ranks_per_socket": 2')
ASK = Block(SERVE, "/v1/completions")
START_HEAD = Block(SERVE, "ray start --head $(ray-hetero ray-args)\n")
SERVE_ON_CLUSTER = Block(SERVE, "export RAY_ADDRESS=FIRST")
FIRST_ANSWER = Block(SERVE, "$ python3 -m venv")
JOINED = Block(SERVE, "node-b $ ray start")
SUBMIT = Block(JOB, "--submission-id my-engine")
SUBMIT_FOLDER = Block(JOB, "--working-dir .")
CONNECT = Block(NOTEBOOK, "ray.init()")
START = Block(NOTEBOOK, "SamplingParams(max_tokens=24)")
LOOK = Block(NOTEBOOK, "running_engines()[0]")
DROP = Block(NOTEBOOK, "del llm")
END = Block(NOTEBOOK, "engine_core.shutdown()")
FROM_PYTHON = Block(NOTEBOOK, 'llm = LLM(MODEL, distributed_executor_backend="ray_hetero"')
GUARD = Block(NOTEBOOK, "__main__")
SEVERAL_NODES = Block(CLUSTERS, "ray start --head")

# Those above start engines; these do not.
COMPARE = Block(WHICH_MODEL, "plan MODEL --compare")
PLAN_OF_EXPERTS = Block(WHICH_MODEL, "qwen3-235b-a22b.json")
PLAN_OF_README = Block(README, "ray-hetero plan configs/models")
PLANNED_OF_README = Block(README, "GPU, experts of 84 layers")
PLAN = Block(PLANNING, "--svg plan.svg")
PLAN_OF_LONG_CONTEXTS = Block(PLANNING, "--max-sequences 8")
REFUSED = Block(PLANNING, "536.8 GiB short")
DESCRIPTION = Block(PLANNING, "links:")
PLAN_HERE_AND_THERE = Block(TUNING, "--topology cluster.yaml")
CLUSTER = Block(TUNING, "# cluster.yaml")
HUGE_PAGES = Block(TUNING, "THP_MEM_ALLOC_ENABLE")
BUSY = Block(TUNING, "max by (stage)")
PLAN_OF_DRAFTS = Block(SPECULATION, "--speculative 3,0.7")
PLANNED_DRAFTS = Block(SPECULATION, "best here at this acceptance")
CONFIG_FILE = Block(CONFIGURATION, "# RAY_HETERO_CONFIG=/etc/ray_hetero.yaml")
SAME_AS_FILE = Block(CONFIGURATION, '"layers": [20, 60]')
CONFIG_COMMAND = Block(CONFIGURATION, "ray-hetero config")
CONFIG_SHOWN = Block(CONFIGURATION, "key                             value")
ACTORS = Block(MONITORING, "ray_hetero-ENGINE-status")
PYTHON = Block(API, "from vllm import LLM")
DEPLOYMENT_OF_SERVE = Block(RAY_SERVE, "build_openai_app")

SAME = "its commands are those of blocks that are run"
NEEDS_GPU = "needs a GPU"
EXAMPLE = "an example of what is shown; its figures depend on the machine"
NEEDS_ROOT = "needs root and a system that systemd has started"
MEASURES = "measures for minutes or longer; its options are compared with those of the script"
NOT_RUN = {
    Block(README, "ray-hetero install-cpu-kernels"): NEEDS_GPU,
    Block(INSTALLATION, "pip install '.[cuda]'\n"): NEEDS_GPU,
    Block(INSTALLATION, "install-cpu-kernels --build"): (
        "compiles for an hour; tests/unit/compat/test_cpu_site_build.py builds a small wheel so"
    ),
    Block(INSTALLATION, "install-cpu-kernels --in-pytorch"): (
        "needs vLLM 0.33; tests/cluster/test_without_operators.py computes so"
    ),
    Block(INSTALLATION, "ray start --head"): SAME,
    Block(INSTALLATION, "pip wheel"): "fetches the CUDA build of vLLM, some gigabytes",
    Block(INSTALLATION, "pip install --no-index"): NEEDS_GPU,
    Block(INSTALLATION, "pip install 'dist/"): "tests/packaging installs the wheel",
    Block("CONTRIBUTING.md", "make env"): "CI runs these commands",
    Block("docs/contributing.md", "look_at_pages.py"): "needs Chromium",
    Block("docs/index.md", "vllm serve MODEL"): SAME,
    Block(CLUSTERS, "--data-parallel-size 2"): (
        "needs a socket for each engine; tests/cluster/test_data_parallel.py serves so on one"
    ),
    Block(PLANNING, '"layers": [20, 60]'): NEEDS_GPU,
    Block(TUNING, "cpu rank 0: 512 steps"): EXAMPLE,
    Block(TUNING, "measured / predicted"): EXAMPLE,
    Block(TUNING, "waiting for the GPU's columns"): EXAMPLE,
    Block(TUNING, "Start-up: 66.2 s"): EXAMPLE,
    Block(TUNING, "on its own NUMA node 0"): EXAMPLE,
    Block(SPECULATION, "--speculative-config"): (
        "needs two sockets; tests/cluster/test_speculating_server.py serves with drafts on one"
    ),
    Block(SPECULATION, "--case drafts"): MEASURES,
    Block(SPECULATION, "rows cost 1.00"): EXAMPLE,
    Block(SPECULATION, "598 of them verified drafts"): EXAMPLE,
    Block(EXPERTS, "ray_hetero\n"): SAME,
    Block(
        EXPERTS, "expert_slots.py --trace"
    ): "tests/cluster/test_expert_ranks.py writes such a file",
    Block(EXPERTS, "GPU slots for 5, 10, 25 %"): EXAMPLE,
    Block(EXPERTS, '"slots_gib": 8'): NEEDS_GPU,
    Block(EXPERTS, "slot_steps.py --out"): MEASURES,
    Block(EXPERTS, "experts rank 1: 412 steps"): EXAMPLE,
    Block(EXPERTS, "GPU slots for 5, 10, 25 %"): EXAMPLE,
    Block(CONFIGURATION, "yaml-language-server"): "is for an editor",
    Block(DEPLOYMENT, "docker build"): "needs Docker, and a GPU",
    Block(DEPLOYMENT, "systemctl daemon-reload"): NEEDS_ROOT,
    Block(DEPLOYMENT, "upgrade.sh"): "tests/cluster/test_upgrade.py runs the script",
    Block(DEPLOYMENT, "kubectl create secret"): "needs a cluster",
    **{Block(SERVE_KOREAN, text): SAME for text in SERVE_PARTS},
    **{
        Block(SERVE_KOREAN, text): EXAMPLE
        for text in ("┃ rank ┃ stage ┃", "$ python3 -m venv", "node-b $ ray start")
    },
    **{
        Block(page, "opt-125m --distributed-executor-backend ray_hetero" + end): NEEDS_GPU
        for page in (PATCHED, PATCHED_KOREAN)
        for end in ("\n", " \\")
    },
    Block(MONITORING, "serving llama, started"): EXAMPLE,
    Block(MONITORING, "(rank 1 gpu node-a"): EXAMPLE,
    Block(RAY_SERVE, "pip install 'ray[serve]'"): "needs a package index",
    Block(RAY_SERVE, "ValueError"): EXAMPLE,
    Block(BENCHMARKS, "make soak"): MEASURES,
    Block(BENCHMARKS, "benchmarks/many_gpus.py"): NEEDS_GPU,
    Block(BENCHMARKS, "4 GPUs, all links"): EXAMPLE,
    Block(BENCHMARKS, "benchmarks/quality.py"): MEASURES,
    Block(BENCHMARKS, "drafts_on_text.py --model"): MEASURES,
    Block(BENCHMARKS, "real_text_load.py --model"): MEASURES,
    Block(BENCHMARKS, "post_attention.py"): MEASURES,
    Block(BENCHMARKS, "engine_run.py"): MEASURES,
    Block(BENCHMARKS, "side_by_side.py --list"): MEASURES,
    Block(BENCHMARKS, "--points 32x64x16"): MEASURES,
    Block(BENCHMARKS, "utilisation.py"): MEASURES,
    Block(BENCHMARKS, "planner_check.py"): MEASURES,
    Block(BENCHMARKS, "bandwidth_probe.py"): MEASURES,
    Block(BENCHMARKS, "control_plane.py"): MEASURES,
    Block(BENCHMARKS, "2026-11-23-avx2-formats"): MEASURES,
    Block(BENCHMARKS, "against_mp.py"): MEASURES,
    Block(BENCHMARKS, "2026-11-24-avx512-formats"): MEASURES,
    Block(BENCHMARKS, "cpu_linear.py"): MEASURES,
    Block(BENCHMARKS, "compact_shares.py"): MEASURES,
    Block(NUMA, "boot_guest.py"): "needs QEMU, and fetches a kernel",
    Block(NUMA, "ok  topology"): EXAMPLE,
    Block(NUMA, "boot_engine.py"): "needs QEMU, and runs for a quarter of an hour",
    Block(NUMA, "ok  tokens"): EXAMPLE,
}
"""Blocks that no test runs, with the reason."""

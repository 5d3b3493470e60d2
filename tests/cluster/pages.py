"""The blocks of code that README and docs show to a new user: which are run, and why not the rest.

`test_pages.py` runs them; `tests/unit/test_page_blocks.py` says when a page has one that is neither
run nor listed here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = {
    "README.md": "",
    "docs/installation.md": "",
    "docs/quick-start-serve.md": "",
    "docs/quick-start-job.md": "",
    "docs/quick-start-notebook.md": "",
    "docs/clusters.md": "## Several nodes",
}
"""Pages with the heading of their part that is meant, or the whole page."""


def blocks(page: str) -> list[str]:
    """The text of every fenced block of a page, or of its part in `PAGES`."""
    text = (ROOT / page).read_text(encoding="utf-8")
    if heading := PAGES[page]:
        text = text.partition(f"\n{heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"^```\w+\n(.*?)^```$", text, re.M | re.S)


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
        whole = re.sub(r" *\\\n *", " ", self.text)
        return [line for line in re.sub(r" +# .*$", "", whole, flags=re.M).splitlines() if line]


README = "README.md"
INSTALLATION = "docs/installation.md"
SERVE = "docs/quick-start-serve.md"
JOB = "docs/quick-start-job.md"
NOTEBOOK = "docs/quick-start-notebook.md"

INSTALL = Block(INSTALLATION, "python tools/fix_torchvision.py")
DEMO = Block(README, "make demo")
LOOK_AND_SERVE = Block(SERVE, "ray-hetero doctor")
PLACEMENT = Block(SERVE, "┃ rank ┃ stage ┃")
SPLIT_AND_SERVE = Block(SERVE, '"ranks_per_socket": 2')
ASK = Block(SERVE, "curl ")
START_HEAD = Block(SERVE, "ray start --head")
SERVE_ON_CLUSTER = Block(SERVE, "export RAY_ADDRESS=FIRST")
SUBMIT = Block(JOB, "--submission-id my-engine")
SUBMIT_FOLDER = Block(JOB, "--working-dir .")
CONNECT = Block(NOTEBOOK, "ray.init()")
START = Block(NOTEBOOK, "SamplingParams(max_tokens=24)")
LOOK = Block(NOTEBOOK, "running_engines()[0]")
DROP = Block(NOTEBOOK, "del llm")
END = Block(NOTEBOOK, "engine_core.shutdown()")
FROM_PYTHON = Block(NOTEBOOK, 'llm = LLM(MODEL, distributed_executor_backend="ray_hetero"')
GUARD = Block(NOTEBOOK, "__main__")
SEVERAL_NODES = Block("docs/clusters.md", "ray start --head")

SAME = "its commands are those of blocks that are run"
NEEDS_GPU = "needs a GPU"
NOT_RUN = {
    Block(README, "ray-hetero install-cpu-kernels"): NEEDS_GPU,
    Block(INSTALLATION, "pip install '.[cuda]'\n"): NEEDS_GPU,
    Block(INSTALLATION, "ray start --head"): SAME,
    Block(INSTALLATION, "pip wheel"): "fetches the CUDA build of vLLM, some gigabytes",
    Block(INSTALLATION, "pip install 'dist/"): "tests/packaging installs the wheel",
}
"""Blocks that no test runs, with the reason."""

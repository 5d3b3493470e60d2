"""Keep what vLLM answers for published models, as data for tests that do not import vLLM.

    python tools/write_built_models.py [NAME …]

Models are the files of tests/unit/data/models/ whose sizes no reader of config.json knows; answers
are written to tests/unit/data/built/.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from placement.model.config import UnknownModelError
from placement.model.reading import shape_from_config
from ray_hetero.planning.sizes.model_probe import environment

DATA = Path(__file__).parents[1] / "tests" / "unit" / "data"
BUILDING = """
import json, shutil, sys, tempfile
from pathlib import Path
from ray_hetero.planning.sizes.built_model import built

out = Path(sys.argv[1])
for name in sys.argv[2:]:
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(name, Path(folder) / "config.json")
        try:
            found = built(folder)
        except Exception as error:
            found = {"problem": f"{type(error).__name__}: {error}"}
    (out / Path(name).name).write_text(json.dumps(found))
"""
"""Program of a process that imports vLLM once and builds all models of its arguments."""


def unknown_models() -> list[Path]:
    """Published models that no reader of config.json knows."""
    return [path for path in sorted((DATA / "models").glob("*.json")) if not _is_known(path)]


def _is_known(path: Path) -> bool:
    try:
        shape_from_config(json.loads(path.read_text(encoding="utf-8")))
    except UnknownModelError:
        return False
    return True


def answers(models: list[Path]) -> dict[str, dict[str, object]]:
    """Answers of vLLM for models, by name; `problem` where it cannot build one."""
    with tempfile.TemporaryDirectory() as out:
        command = [sys.executable, "-c", BUILDING, out, *map(str, models)]
        subprocess.run(command, check=True, env=environment(), stdin=subprocess.DEVNULL)
        return {
            path.stem: json.loads((Path(out) / path.name).read_text(encoding="utf-8"))
            for path in models
        }


def written(answer: dict[str, object]) -> str:
    """Text of an answer's file: a line for each parameter and cache."""
    lines = []
    for key, value in answer.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            inside = ",\n  ".join(json.dumps(one) for one in value)
            lines.append(f"{json.dumps(key)}: [\n  {inside}\n ]")
        else:
            lines.append(f"{json.dumps(key)}: {json.dumps(value)}")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def main() -> None:
    """Write the files of all models, or of those that are named."""
    names = sys.argv[1:]
    models = [path for path in unknown_models() if not names or path.stem in names]
    out = DATA / "built"
    out.mkdir(exist_ok=True)
    for name, answer in answers(models).items():
        if "problem" in answer:
            print(f"{name}: {answer['problem']}")
            continue
        (out / f"{name}.json").write_text(written(answer), encoding="utf-8")


if __name__ == "__main__":
    main()

"""Order of the rooms, places of unit tests, size of functions, and who writes the environment."""

from __future__ import annotations

import ast
import graphlib
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from ray_hetero.compat.worker import layer_partition

ROOT = Path(__file__).parents[2]
ROOMS = {
    "ray_hetero": (
        "cli", "launch", "executor", "worker", "observability", "distributed", "offload", "kernels",
        "planning", "preflight", "runtime", "compat", "",
    ),
    "placement": ("plan", "cluster", "model", "host", ""),
}  # fmt: skip
"""From the top down; a module imports from its own room and from those below.  The last room are
the modules beside the rooms."""
ENTRY_POINTS = {"ray_hetero.plugin"}
"""Called by vLLM from outside; they import what they start when it is needed."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {
    name_of(path): path for package in ROOMS for path in sorted((ROOT / package).rglob("*.py"))
}


def imported(module: str, *, at_import: bool = False) -> Iterator[str]:
    """Modules of these packages that a module names in imports, inside of functions too."""
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for node in _executed(tree) if at_import else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in MODULES)
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            for alias in node.names:
                below = f"{node.module}.{alias.name}"
                yield below if below in MODULES else str(node.module)


def _executed(tree: ast.Module) -> Iterator[ast.AST]:
    """What runs when the module is imported: not functions, and not what only checkers read."""
    for node in tree.body:
        if isinstance(node, ast.If):
            if ast.unparse(node.test) != "TYPE_CHECKING":
                yield from node.body
        elif isinstance(node, ast.Try):
            yield from node.body
        else:
            yield node


def room_of(module: str) -> tuple[str, str]:
    package, *inside = module.split(".")
    return package, inside[0] if inside and inside[0] in ROOMS[package] else ""


@pytest.mark.parametrize("package", ROOMS)
def test_every_folder_is_a_room(package: str) -> None:
    folders = {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").exists()}
    assert folders == set(ROOMS[package]) - {""}


@pytest.mark.parametrize("module", sorted(MODULES.keys() - ENTRY_POINTS))
def test_a_module_imports_from_its_room_and_from_those_below(module: str) -> None:
    package, room = room_of(module)
    order = ROOMS[package]
    for name in imported(module):
        other, below = room_of(name)
        if other == package:
            assert order.index(below) >= order.index(room), f"{name} is above"
        else:
            assert (package, other) == ("ray_hetero", "placement"), f"{name} is another package's"


def test_no_modules_import_each_other() -> None:
    graph = {module: set(imported(module, at_import=True)) - {module} for module in MODULES}
    graphlib.TopologicalSorter(graph).prepare()
    # Nor for types alone, or within functions.
    mine = [module for module in MODULES if room_of(module)[0] == "ray_hetero"]
    graph = {module: set(imported(module)) - {module} for module in mine}
    graphlib.TopologicalSorter(graph).prepare()


FOLDERS = {
    "ray_hetero.offload": ("", "group", "decode", "prefill", "experts", "weights", "expand"),
    "ray_hetero.kernels": ("layers", "experts", "linear", "formats", ""),
}
"""Folders inside of rooms, from the top down, with the modules beside them as ""."""


def folder_of(module: str, room: str) -> str:
    folder, dot, _ = module.removeprefix(room).removeprefix(".").partition(".")
    return folder if dot or MODULES[module].name == "__init__.py" else ""


@pytest.mark.parametrize("room", FOLDERS)
def test_a_module_imports_from_its_folder_and_from_those_below(room: str) -> None:
    order = FOLDERS[room]
    own = {module for module in MODULES if f"{module}.".startswith(f"{room}.")}
    assert {folder_of(module, room) for module in own} == set(order)
    upward = {
        (module, name)
        for module in own
        for name in imported(module)
        if name in own and order.index(folder_of(name, room)) < order.index(folder_of(module, room))
    }
    assert not upward


def test_kernels_of_the_cores_import_nothing_of_gpus() -> None:
    found = {
        (module, name)
        for module in MODULES
        if room_of(module)[1] == "kernels"
        for name in imported(module)
        if room_of(name)[1] == "offload"
    }
    assert not found


MOST_MODULES = 25


def test_no_folder_has_many_modules() -> None:
    folders = Counter(
        path.parent.relative_to(ROOT).as_posix()
        for path in MODULES.values()
        if path.name != "__init__.py"
    )
    assert len(folders) > 25
    many = {folder: count for folder, count in folders.items() if count > MOST_MODULES}
    assert many == {}, f"more than {MOST_MODULES} modules; make a folder of those with one subject"


MOST_FUNCTION_LINES = 60
LONG_FUNCTIONS = {
    "ray_hetero.compat.models.expert_router.use_routing": 68,
    "ray_hetero.compat.models.remote_experts._remote_method": 79,
    "ray_hetero.compat.worker.spec_decode.pass_hidden_states_on": 61,
    "ray_hetero.launch.prepare.prepare": 66,
    "ray_hetero.offload.expand.triton_kernels.expand_scaled": 70,
    "ray_hetero.worker.rank_actor.start": 90,
}
"""Functions that are longer, and the lines that they may have; the numbers only fall."""


def test_no_function_is_long() -> None:
    lines = {
        f"{module}.{node.name}": 1 + (node.end_lineno or node.lineno) - node.lineno
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert len(lines) > 1500
    long = {
        name: count
        for name, count in lines.items()
        if count > LONG_FUNCTIONS.get(name, MOST_FUNCTION_LINES)
    }
    assert not long, f"more than {MOST_FUNCTION_LINES} lines; split them by what they do"
    assert {name for name in LONG_FUNCTIONS if lines.get(name, 0) <= MOST_FUNCTION_LINES} == set()


MOST_PARAMETERS = 8
FOREIGN_SIGNATURES = {
    "ray_hetero.cli.demo_model.demo_model": "options of a command",
    "ray_hetero.compat.models.cpu_experts.apply_or_leave": "FusedMoEExperts.apply",
    "ray_hetero.compat.models.gated_delta.forward_few": "gdn_attention._spec_forward",
    "ray_hetero.compat.models.mamba2.selective_state_update": "the function of that name",
    "ray_hetero.compat.models.quantised_experts.kept": "convert_to_nvfp4_moe_kernel_format",
    "ray_hetero.compat.models.torch_operators.attend": "_custom_ops.cpu_attention_with_kv_cache",
    "ray_hetero.compat.models.torch_operators.get_scheduler_metadata": "the operator of that name",
    "ray_hetero.compat.models.torch_operators.reshape_and_cache": "the operator of that name",
    **{
        f"ray_hetero.compat.worker.{name}": "the function of that name"
        for name in (
            "v2_kernels.combine_sampled_and_draft_tokens", "v2_kernels.post_update",
            "v2_logits.apply_bad_words", "v2_logits.apply_logit_bias",
            "v2_logits.apply_penalties", "v2_sampling.gumbel_sample",
        )
    },
}  # fmt: skip
"""Functions that others call, and whose signature they have: vLLM's, or a command line's."""


def test_no_function_has_many_parameters() -> None:
    counts = {
        f"{module}.{node.name}": len(given) - (given[:1] in (["self"], ["cls"]))
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        # Triton's language has numbers and pointers only.
        and "triton.jit" not in map(ast.unparse, node.decorator_list)
        for inputs in [node.args]
        for given in [[one.arg for one in (*inputs.posonlyargs, *inputs.args, *inputs.kwonlyargs)]]
    }
    assert len(counts) > 1500
    many = {name for name, count in counts.items() if count > MOST_PARAMETERS}
    assert many == set(FOREIGN_SIGNATURES), (
        f"more than {MOST_PARAMETERS} parameters; give a value that means something"
    )


WRITERS = {
    "ray_hetero.cli.connection": "a token that lies where Ray looks for one",
    "ray_hetero.compat.engine.engine_environment": "variables that vLLM reads, taken back",
    "ray_hetero.compat.worker.layer_partition": "the layers of each stage, for vLLM",
    "ray_hetero.plugin": "a patched vLLM's variable, of which no other process is to speak",
    "ray_hetero.runtime.credentials": "secrets, kept from processes that are being started",
    "ray_hetero.runtime.exit_reason": "where the engine's process leaves why it ended",
    "ray_hetero.runtime.heartbeat": "where a command's engines and API servers meet",
    "ray_hetero.runtime.ray_ahead": "a Ray that was started ahead, which is asked for once",
    "ray_hetero.runtime.ray_connection": "no reports of usage",
    "ray_hetero.runtime.local_ray": "settings and token of a Ray that is started here",
    "ray_hetero.worker.cuda_init": "GPUs, while CUDA's driver is initialised",
    "ray_hetero.worker.process_setup": "a rank's secrets, which its runtime environment has not",
}
"""Modules that write the environment of their process, and what for."""
WRITING = {"pop", "popitem", "setdefault", "update", "clear"}


def writes_environment(tree: ast.AST) -> bool:
    """Whether code changes `os.environ`, or could under another name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
            if ast.unparse(node.value) == "os.environ":
                return True
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            called = ast.unparse(node.func)
            if called in {"os.putenv", "os.unsetenv"}:
                return True
            if ast.unparse(node.func.value) == "os.environ" and node.func.attr in WRITING:
                return True
        elif isinstance(node, ast.AugAssign) and ast.unparse(node.target) == "os.environ":
            return True
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            names = {alias.name for alias in node.names}
            if not names.isdisjoint({"environ", "putenv", "unsetenv"}):
                return True
    return False


def test_few_modules_write_the_environment() -> None:
    writers = {
        module
        for module, path in MODULES.items()
        if writes_environment(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert writers == set(WRITERS)


def test_one_module_tells_vllm_the_layers_of_each_stage() -> None:
    variable = layer_partition.VARIABLE
    tell = {
        module
        for module in WRITERS
        if variable in (text := MODULES[module].read_text(encoding="utf-8"))
        or "layer_partition import" in text
    }
    assert tell == {"ray_hetero.compat.worker.layer_partition"}
    # Nobody has `engine_environment` write it.
    put = {
        ast.unparse(node.args[0])
        for path in MODULES.values()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "engine_environment.put"
    }
    sites = {"AUTH_MODE", "CHOSEN", "RUNNER", "SOCKETS", "START_METHOD", "ray_ahead.VARIABLE"}
    assert put == sites


@pytest.mark.parametrize(
    "code",
    [
        "os.environ['A'] = 'b'",
        "del os.environ['A']",
        "os.environ.pop('A', None)",
        "os.environ.setdefault('A', 'b')",
        "os.environ |= {'A': 'b'}",
        "os.putenv('A', 'b')",
        "from os import environ",
    ],
)
def test_the_search_for_writers_finds_them(code: str) -> None:
    assert writes_environment(ast.parse(code))
    assert not writes_environment(ast.parse("os.environ['A'], os.environ.get('A'), given.pop('A')"))


UNIT = ROOT / "tests/unit"
CODE = {
    "package": "ray_hetero", "placement": "placement",
    **{room: f"ray_hetero.{room}" for room in ROOMS["ray_hetero"] if room},
}  # fmt: skip
"""Folders of unit tests, and the modules that they test: `package` has those beside the rooms."""
OTHERS = {"benchmarks", "csrc", "deploy", "docs", "families", "tools"}
"""Folders of unit tests whose subject is in a folder of that name that has no package."""
OF_ALL = {"test_docstrings", "test_imports", "test_packaging", "test_project"}
"""Tests of the whole tree, which are beside the folders."""
UNIT_TESTS = {path.stem: path for path in sorted(UNIT.rglob("test_*.py"))}


def used_by(path: Path) -> set[str]:
    """Modules of these packages that a file imports, itself or by the helpers that it names."""
    found: set[str] = set()
    text = path.read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
            found.add(str(node.module))
    for name in set(re.findall(r"\w+", text)) - {path.stem}:
        if (helper := UNIT / f"{name}.py").exists():
            found |= used_by(helper)
    return found & MODULES.keys()


def test_every_folder_of_unit_tests_has_a_subject() -> None:
    folders = {path.parent.relative_to(UNIT).as_posix() for path in UNIT_TESTS.values()}
    assert folders == CODE.keys() | OTHERS | {"."}
    assert {name for name, path in UNIT_TESTS.items() if path.parent == UNIT} == OF_ALL


def is_of_room(room: str, name: str) -> bool:
    """Whether a file tests modules of a room: the one of its name, or else what it imports."""
    of_its_name = {
        module for module in MODULES if module.rpartition(".")[2] == name.removeprefix("test_")
    }
    package, _, inside = CODE[room].partition(".")
    return any(
        of == package and (package == "placement" or below == inside)
        for of, below in map(room_of, of_its_name or used_by(UNIT_TESTS[name]))
    )


def test_no_two_files_of_tests_have_one_name() -> None:
    # pytest imports them by their names alone, and collects the first one only.
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_every_unit_test_is_in_the_room_of_what_it_tests() -> None:
    of_code = {name: path.parent.name for name, path in UNIT_TESTS.items() if name not in OF_ALL}
    of_code = {name: room for name, room in of_code.items() if room not in OTHERS}
    assert len(of_code) > 150
    assert {name: room for name, room in of_code.items() if not is_of_room(room, name)} == {}


PRIVATE_LOOKS = 180
"""Looks of unit tests at private names of these packages; the number only falls.  What a step does
is read of its trace (step_traces.py), and what a component is of its public attributes."""


def private_names(tree: ast.AST) -> set[str]:
    """Names with one underscore that code defines: functions, classes, variables, attributes."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return {name for name in found if is_private(name)}


def is_private(name: str) -> bool:
    # Names that end with an underscore too are protocols, as `_repr_html_` is IPython's.
    return name.startswith("_") and not name.startswith("__") and not name.endswith("_")


def private_looks(tree: ast.AST, names: set[str]) -> list[tuple[int, str]]:
    """Line and name of each look at another object's private attribute, or change of it."""
    own, found = private_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) not in {"self", "cls"}:
            found.append((node.lineno, node.attr))
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("setattr", "getattr")):
            found += [
                (node.lineno, str(given.value))
                for given in node.args[1:2]
                if isinstance(given, ast.Constant)
            ]
    return [(line, name) for line, name in found if is_private(name) and name in names - own]


def test_unit_tests_look_at_few_private_names() -> None:
    names = {
        name
        for path in MODULES.values()
        for name in private_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    assert len(names) > 1000
    looks = Counter(
        path.relative_to(UNIT).as_posix()
        for path in sorted(UNIT.rglob("*.py"))
        for _ in private_looks(ast.parse(path.read_text(encoding="utf-8")), names)
    )
    assert looks.total() <= PRIVATE_LOOKS, looks.most_common()


def test_a_private_look_is_found() -> None:
    code = "made._a; self._a; made._c; patch.setattr(made, '_a', 1); getattr(made, '_b')"
    assert private_looks(ast.parse(code), {"_a", "_b"}) == [(1, "_a"), (1, "_a"), (1, "_b")]
    # A test's own helper has names of its own.
    own = "class Own:\n    def __init__(self):\n        self._a = 1\nOwn()._a"
    assert private_looks(ast.parse(own), {"_a", "_b"}) == []

"""README and docs as a new user types them: fresh environment, home and network, without a Ray.

What is typed are the pages' own blocks (`pages.py`), with their placeholders filled in and, on a
machine with one socket, split as the pages say.  Each test leaves all that was typed and shown in
its file `transcript`.  The packages that this one requires are taken from the environment of the
tests; all else that is installed needs a package index.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import textwrap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import pages
import pytest
from engines import HERE, START_SECONDS, STOP_SECONDS, VLLM, Child, start
from leftovers import MARKER, Scene, clean_scene, marked_processes, wait_until
from network import Place, two_places
from server_checks import STEPS

from placement.host.sockets import sockets_of
from placement.host.sysfs import read_host

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow]

TYPE_SECONDS = 120.0
"""Longest wait for a command that starts no engine."""
INSTALL_SECONDS = 1800.0
CONFIG = {"ray_hetero": {"cpu": {"ranks_per_socket": 2}}}
HAS_ONE_SOCKET = len(sockets_of(read_host(gpus=False))) == 1
READY = "Application startup complete"
NO_ENGINE = "no engine of ray_hetero runs on "
ENGINE = ("ray::RankActor", "VLLM::", "vllm serve")
"""What processes of an engine have in their command lines."""


def split(block: str) -> str:
    """The block, as the pages say for a machine with one socket and no GPU."""
    if not HAS_ONE_SOCKET:
        return block
    options = f"--pipeline-parallel-size 2 --additional-config '{json.dumps(CONFIG)}'"
    arguments = f"pipeline_parallel_size=2, additional_config={CONFIG}"
    return block.replace("--pipeline-parallel-size 2", options).replace(
        "pipeline_parallel_size=2", arguments
    )


@dataclass
class Terminal:
    """A shell of the user: a command has the exports of those before it."""

    scene: Scene
    directory: Path
    """For logs; what belongs to the terminal itself is here, too."""
    home: Path
    clone: Path
    """Of the repository, with the environment in `.venv` once that is made."""
    folder: Path
    """Current folder."""
    place: Place | None = None
    is_bound: bool = False
    """Whether it has the cores of its place only, like a machine of its own."""
    typed: list[tuple[str, Child]] = field(default_factory=list)
    """All that was typed, in every terminal of the test."""

    def another(self, **changed: Any) -> Terminal:
        """A new terminal of the same user, at the same or another place."""
        made = Terminal(**{**vars(self), **changed})
        made.directory = self.directory / f"terminal{len(self.typed)}"
        made.directory.mkdir()
        return made

    def begin(self, text: str) -> Child:
        """Type this, and go on while it runs."""
        exports = shlex.quote(str(self.directory / "exports"))
        activate = self.clone / ".venv" / "bin" / "activate"
        before = [
            "set -e",
            f"if [ -e {exports} ]; then . {exports}; fi",
            f"trap 'export -p > {exports}' EXIT",
            f"cd {shlex.quote(str(self.folder))}",
            f". {shlex.quote(str(activate))}" if activate.exists() else "",
        ]
        variables = [f"{name}={value}" for name, value in self._variables().items()]
        command = ["env", "-i", *variables, "bash", "-c", "\n".join([*before, text])]
        if self.place:
            command = self.place.command(command, is_bound=self.is_bound)
        child = start(self.scene, command, self.directory / f"log{len(self.typed)}")
        self.typed.append((text, child))
        return child

    def type(self, text: str, limit_s: float = TYPE_SECONDS) -> str:
        """Type this and wait; what it showed.  Fails the test when the command fails."""
        child = self.begin(text)
        status = child.wait(limit_s)
        assert status == 0, f"$ {text}\nended with {status}:\n{child.tail()}"
        return child.log

    def _variables(self) -> dict[str, str]:
        """A new user's, and what keeps this test apart from others and from the network."""
        temporary = self.scene.temporary / (self.place.name if self.place else "")
        temporary.mkdir(exist_ok=True)
        # The folder of the interpreter that this environment was made with: `python3` is that one.
        own = str(Path(sys.executable).parent)
        path = [f"{sys.base_prefix}/bin", *os.environ["PATH"].split(":")]
        return {
            "HOME": str(self.home),
            "PATH": ":".join(entry for entry in path if entry != own),
            "LANG": "C.UTF-8",
            "TMPDIR": str(temporary),
            MARKER: self.scene.marker,
            "RAY_HETERO_CLAIM_DIR": str(self.scene.claims),
            # As on a real terminal; Python keeps back what it writes into a file.
            "PYTHONUNBUFFERED": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "VLLM_NO_USAGE_STATS": "1",
            **{name: value for name, value in os.environ.items() if name.startswith("PIP_")},
        }

    def write_transcript(self, file: Path) -> None:
        """Write down what was typed, each with its seconds and all that it has shown."""
        parts = []
        for text, child in self.typed:
            times = ", ".join(f"{what} after {s:.1f} s" for what, s in child.seconds.items())
            parts.append(f"$ {text.rstrip()}\n# {times or 'was ended'}\n{child.log.rstrip()}\n")
        file.write_text("\n".join(parts), encoding="utf-8")


@contextmanager
def terminal(directory: Path, clone: Path, **more: Any) -> Iterator[Terminal]:
    """A terminal in a folder with a model; in the end there is a transcript and nothing else."""
    with clean_scene() as scene:
        folder = directory / "folder"
        folder.mkdir(parents=True)
        made = Terminal(scene, directory, clone.parent / "home", clone, folder, **more)
        try:
            yield made
        finally:
            made.write_transcript(directory / "transcript")
        # A host's folder for temporary files is below the scene's own.
        assert list(scene.temporary.glob("*/ray_hetero-*")) == []


def wait_until_ready(child: Child) -> None:
    """Wait until vLLM says that it has started, and look at what the page promises before."""
    assert wait_until(
        lambda: READY in child.log or child.process.poll() is not None, START_SECONDS, 0.5
    ), child.tail()
    assert READY in child.log, child.tail()
    child.saw("ready")
    assert [step for step in STEPS if f"/6] {step}" not in child.log] == []
    cells = pages.PLACEMENT.text.splitlines()[1].split("┃")
    assert re.search("┃".join(rf" *{cell.strip()} *" for cell in cells), child.log)


def ctrl_c(child: Child) -> None:
    """SIGINT to all of the terminal's foreground, as its keyboard sends it."""
    os.killpg(child.process.pid, signal.SIGINT)
    child.wait(STOP_SECONDS)


def ask(terminal: Terminal, model: str) -> None:
    """Type the page's question to the server."""
    answer = terminal.type(pages.ASK.filled({"MODEL": model}))
    said = json.loads(answer[answer.index("{") :])
    assert said["usage"]["completion_tokens"] == 24
    assert len(said["choices"][0]["text"]) > 20


def nodes_of_ranks(terminal: Terminal) -> list[str]:
    """By `ray-hetero status`, where every rank says that it is well."""
    shown = terminal.type("ray-hetero status")
    rows = [re.split(r" *│ *", line) for line in shown.splitlines() if "│" in line]
    assert {row[7] for row in rows} == {"ok"}, shown
    return [row[4] for row in rows]


def assert_engine_gone(terminal: Terminal) -> None:
    """The cluster is there, and nothing of an engine."""

    def left() -> list[str]:
        found = [words for words in processes_at(terminal.place) if any(e in words for e in ENGINE)]
        other = terminal.scene.leftovers()
        return found + [line for line in other if not line.startswith("process ")]

    assert terminal.place is not None
    assert wait_until(lambda: not left(), STOP_SECONDS), left()
    assert NO_ENGINE in terminal.type("ray-hetero status")


def processes_at(place: Place | None) -> list[str]:
    """Command lines of all processes in the place's network."""
    assert place is not None
    listed = subprocess.run(
        ["ip", "netns", "pids", place.namespace], check=True, capture_output=True, text=True
    )
    found = []
    for pid in listed.stdout.split():
        with contextlib.suppress(OSError):  # It may have ended.
            words = (Path("/proc") / pid / "cmdline").read_bytes().replace(b"\0", b" ")
            found.append(words.decode(errors="replace"))
    return found


def end_ray(scene: Scene) -> None:
    """End the scene's clusters in the order of `ray stop`, which would end those of others, too."""

    def end(pids: Iterable[int]) -> None:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def of_nodes() -> list[int]:
        found = marked_processes(scene.marker)
        return [pid for pid, words in found.items() if "/gcs_server " not in f"{words} "]

    # Without the head's server, which is last, a node waits for it instead of ending.
    end(of_nodes())
    assert wait_until(lambda: not of_nodes(), STOP_SECONDS), scene.leftovers()
    end(marked_processes(scene.marker))
    scene.assert_clean()


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clone with the environment that the installation page makes in it."""
    if not Path(VLLM).exists():
        pytest.skip(f"expected the command of vLLM's wheel at {VLLM}; type: make env")
    root = tmp_path_factory.mktemp("user")
    (root / "home").mkdir()
    clone = root / "ray_hetero"
    unwanted = (".?*", "build", "dist", "site", "*.egg-info", "*.so", "__pycache__")
    shutil.copytree(pages.ROOT, clone, ignore=shutil.ignore_patterns(*unwanted))
    with terminal(root / "installation", clone) as user:
        user.folder = clone
        make, rest = pages.INSTALL.text.split("\n", 1)
        user.type(make)
        use_packages_of_tests(clone / ".venv")
        shown = user.type(rest, INSTALL_SECONDS)
        assert ", 0 fail\n" in shown
    return clone


def use_packages_of_tests(environment: Path) -> None:
    """Give a fresh environment what is installed here, some gigabytes that pip would fetch.

    Of `.pth` files only those of the environment itself count, so this package is not among it.
    """
    (packages,) = environment.glob("lib/python3*/site-packages")
    (packages / "required.pth").write_text(sysconfig.get_path("purelib") + "\n")
    for name in ("ray", "vllm"):
        script = Path(sys.executable).with_name(name).read_text().partition("\n")[2]
        command = environment / "bin" / name
        command.write_text(f"#!{environment / 'bin' / 'python'}\n{script}")
        command.chmod(0o755)


@pytest.fixture(scope="module")
def places() -> Iterator[tuple[Place, Place]]:
    """Two hosts where nobody else has the pages' ports; they know no more than each other."""
    with two_places() as made:
        for place in made:
            # Ray and vLLM take the address on the way to the internet for the node's own.
            place.ip("route", "add", "default", "dev", place.device)
        yield made


@pytest.fixture
def user(clone: Path, places: tuple[Place, Place], tmp_path: Path) -> Iterator[Terminal]:
    """A terminal on the first host, where the demo model is."""
    with terminal(tmp_path / "user", clone, place=places[0]) as made:
        made.type("ray-hetero demo-model demo")
        yield made


def test_make_demo_serves_chats_and_stops(user: Terminal, clone: Path) -> None:
    (first, *_) = pages.DEMO.commands()
    # What `make demo` would install first is there.
    (clone / ".venv" / ".installed").touch()
    user.folder = clone
    shown = user.type(first, START_SECONDS + STOP_SECONDS)
    assert shown.count("assistant:") == 3
    assert "Paris" in shown or "goes on with a random model" in shown
    assert shown.rstrip().endswith("stopped with exit status 0")


def test_vllm_serve(user: Terminal) -> None:
    child = user.begin(pages.LOOK_AND_SERVE.filled({"MODEL": "demo"}))
    wait_until_ready(child)
    second = user.another()
    ask(second, "demo")
    ranks = len(nodes_of_ranks(second))
    ctrl_c(child)
    user.scene.assert_clean()
    if HAS_ONE_SOCKET:
        assert ranks == 1
        sizes = " --pipeline-parallel-size 2"
        child = user.begin(pages.LOOK_AND_SERVE.filled({"MODEL": "demo"}).rstrip() + sizes)
        assert child.wait(START_SECONDS) != 0
        last = child.log.rstrip().splitlines()[-1]
        assert last.startswith("ray_hetero: ")
        assert f"--additional-config '{json.dumps(CONFIG)}'" in last
        child = user.begin(pages.SPLIT_AND_SERVE.filled({"MODEL": "demo"}))
        wait_until_ready(child)
        ask(second, "demo")
        assert len(nodes_of_ranks(second)) == 2
        ctrl_c(child)
        user.scene.assert_clean()


def test_ray_job_submit_and_vllm_serve_on_a_cluster(user: Terminal) -> None:
    assert user.place is not None
    # As after an engine with a Ray of its own: the head node has a token.
    user.type("ray get-auth-token --generate")
    user.type(pages.START_HEAD.text)
    values = {
        "MODEL": str(user.folder / "demo"),
        "HEAD": "localhost",
        "FIRST": user.place.address,
    }

    client = user.another()
    client.type(split(pages.SUBMIT.filled(values)))
    log = client.begin("ray job logs my-engine --follow")
    wait_until_ready(log)
    ranks = nodes_of_ranks(user)
    assert set(ranks) == {user.place.name}
    for rank in range(len(ranks)):
        assert re.search(rf"\(rank {rank} cpu {user.place.name} pid=\d+.*\)", log.log)
    assert "RUNNING" in client.type("ray job status my-engine")
    elsewhere = client.begin("ray-hetero status")
    assert elsewhere.wait(TYPE_SECONDS) == 1
    assert "or on one of its nodes: unset RAY_ADDRESS" in elsewhere.log.splitlines()[-1]
    ask(user, values["MODEL"])
    assert "was stopped" in client.type("ray job stop my-engine")
    assert log.wait(STOP_SECONDS) == 0
    assert_engine_gone(user)

    client.folder = user.folder / "project"
    client.folder.mkdir()
    client.type("ray-hetero demo-model model")
    log = client.begin(split(pages.SUBMIT_FOLDER.text))
    wait_until_ready(log)
    ask(user, "./model")
    (job,) = set(re.findall(r"raysubmit_\w+", log.log))
    assert "was stopped" in client.type(f"ray job stop {job}")
    log.wait(STOP_SECONDS)
    assert_engine_gone(user)

    driver = user.another()
    driver.type("export RAY_AUTH_MODE=token")
    server = driver.begin(split(pages.SERVE_ON_CLUSTER.filled(values)))
    wait_until_ready(server)
    ask(user, values["MODEL"])
    ctrl_c(server)
    assert_engine_gone(user)
    end_ray(user.scene)


def run_notebook(user: Terminal, cells: list[str]) -> list[Any]:
    """Run these cells in one kernel of the user's environment; what each has shown."""
    source, done = user.directory / "pages.ipynb", user.directory / "done.ipynb"
    made = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(nbformat.v4.new_notebook(cells=made), source)
    words = [HERE / "notebook_process.py", source, user.folder, done]
    try:
        user.type(f"python {shlex.join(map(str, words))}", 3 * START_SECONDS)
    finally:
        text = done.read_text() if done.exists() else "no cell has ended"
        (user.directory / "cells").write_text(text)
    return [cell.outputs for cell in nbformat.read(done, as_version=4).cells]


def test_notebook(user: Terminal) -> None:
    model = "MODEL = 'demo'"
    engine = split(pages.START.text)
    cells = [
        *(model, pages.CONNECT.text, engine, pages.LOOK.text, pages.DROP.text),
        # Another name, as an exception may be one.
        *("running_engines()", engine, "held = llm", pages.END.text, "running_engines()"),
    ]
    shown = dict(enumerate(run_notebook(user, cells)))

    def value(number: int) -> Any:
        return shown[number][-1].data

    log = "".join(output.text for output in shown[2] if output.output_type == "stream")
    assert [step for step in STEPS if f"/6] {step}" not in log] == []
    assert "[6/6] warm up: 100%|" in log
    for number in (2, 6):
        assert len(value(number)["text/plain"]) > 20
    assert "<svg" in value(3)["text/html"]
    assert "serving demo" in value(3)["text/html"]
    assert value(5)["text/plain"] == "()"
    assert value(9)["text/plain"] == "()"


def test_script(user: Terminal) -> None:
    body = textwrap.indent(split(pages.FROM_PYTHON.text), "    ")
    script = f"MODEL = 'demo'\n\n\ndef main():\n{body}\n\n{pages.GUARD.text}"
    (user.folder / "script.py").write_text(script)
    shown = user.type("cat script.py; python script.py", START_SECONDS)
    assert "[6/6] warm up" in shown
    user.scene.assert_clean()


def test_several_nodes(user: Terminal, places: tuple[Place, Place]) -> None:
    lines = pages.SEVERAL_NODES.filled(
        {"MODEL": str(user.folder / "demo"), "FIRST": places[0].address}
    ).splitlines(keepends=True)
    of = {
        who: "".join(line for line in lines if line.rstrip().endswith(f"# on {who}"))
        for who in ("each of them", "the first", "each of the others")
    }
    serve = "".join(line for line in lines if "# on " not in line)
    assert all(of.values())
    nodes = []
    for place, role in zip(places, ("the first", "each of the others"), strict=True):
        home = user.directory / place.name
        home.mkdir()
        node = user.another(place=place, is_bound=True, home=home)
        assert "Ray runtime started" in node.type(of["each of them"] + of[role])
        nodes.append(node)
    first = nodes[0].another()
    server = first.begin(serve)
    wait_until_ready(server)
    ask(nodes[0], str(user.folder / "demo"))
    assert nodes_of_ranks(nodes[0]) == [place.name for place in places]
    ctrl_c(server)
    for node in nodes:
        assert_engine_gone(node)
    end_ray(user.scene)

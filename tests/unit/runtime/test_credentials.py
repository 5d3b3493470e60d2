"""Which variables hold a secret, who gets them, and what only their user can read."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from vllm import envs

from ray_hetero.errors import StartupError
from ray_hetero.executor import actors
from ray_hetero.preflight.node_software import NodeSoftware
from ray_hetero.runtime import local_ray, private_folder
from ray_hetero.runtime.credentials import is_secret, needed_by_ranks, withheld, without_secrets
from ray_hetero.runtime.openmp_environment import PreloadLibraries
from ray_hetero.runtime.private_folder import PrivateFolder
from ray_hetero.worker.rank_environment import propagated

SECRETS = {
    "HF_TOKEN": "hf_1", "HUGGING_FACE_HUB_TOKEN": "hf_2", "VLLM_API_KEY": "sk-3",
    "HF_MY_SECRET": "4", "VLLM_DB_PASSWORD": "5", "TORCH_CREDENTIALS": "6", "vllm_key": "7",
    "AWS_SECRET_ACCESS_KEY": "8", "S3_ACCESS_KEY_ID": "9", "NCCL_PASSPHRASE": "10",
    "HF_OIDC_ID_TOKEN": "11",
}  # fmt: skip
PLAIN = {
    "HF_HOME": "/hf", "HF_TOKEN_PATH": "/hf/token", "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
    "VLLM_LOGGING_LEVEL": "DEBUG", "TOKENIZERS_PARALLELISM": "false",
    "HF_ENDPOINT": "https://mirror.example:8443/hub",
}  # fmt: skip
PRIVATE_URL = "https://user:pass@mirror.example"


def test_secrets_are_known_by_name_or_by_a_password() -> None:
    assert all(is_secret(*item) for item in SECRETS.items())
    assert not any(is_secret(*item) for item in PLAIN.items())
    assert is_secret("HF_ENDPOINT", PRIVATE_URL)


def test_of_vllms_own_variables_those_are_secret_that_hold_one() -> None:
    found = {name for name in envs.environment_variables if is_secret(name)}
    assert found == {"VLLM_API_KEY", "S3_ACCESS_KEY_ID", "S3_SECRET_ACCESS_KEY"}


def test_no_secret_is_propagated() -> None:
    passed = propagated(SECRETS | PLAIN | {"VLLM_PROXY": PRIVATE_URL})
    assert set(passed) == set(PLAIN) - {"TOKENIZERS_PARALLELISM"}


def test_rays_processes_start_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    rays = {"RAY_AUTH_TOKEN": "r", "HTTPS_PROXY": "http://user:pass@proxy:3128"}
    assert without_secrets(SECRETS | PLAIN | rays) == PLAIN | rays
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    with withheld():
        listed = subprocess.run(["env"], capture_output=True, text=True, check=True).stdout
    assert not any(f"{name}=" in listed for name in SECRETS)
    assert all(os.environ[name] == value for name, value in SECRETS.items())


@pytest.mark.parametrize(
    ("models", "more", "needed"),
    [
        (["org/model"], {}, {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}),
        (["."], {}, set()),
        ([".", "org/drafter"], {}, {"HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"}),
        (["org/model"], {"HF_HUB_OFFLINE": "1"}, set()),
        (["s3://bucket/model"], {}, {"AWS_SECRET_ACCESS_KEY", "S3_ACCESS_KEY_ID"}),
    ],
)
def test_ranks_get_what_they_need(models: list[str], more: Any, needed: set[str]) -> None:
    assert set(needed_by_ranks(models, SECRETS | PLAIN | more)) == needed


class Created:
    """What Ray is asked for when an actor is created."""

    options: dict[str, Any]
    arguments: tuple[Any, ...]

    def remote(self, *arguments: Any) -> None:
        Created.arguments = arguments


def test_ray_is_told_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    def options(**given: Any) -> Created:
        Created.options = given
        return Created()

    monkeypatch.setattr(ray, "remote", lambda actor: SimpleNamespace(options=options))
    monkeypatch.setattr(actors, "PlacementGroupSchedulingStrategy", SimpleNamespace)
    for name, value in (SECRETS | PLAIN).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HF_ENDPOINT", PRIVATE_URL)
    seat = SimpleNamespace(
        kind="gpu", rank=0, serves_experts=False, bundle_cpus=1, stage=0, tensor_rank=0,
        address="a", socket=None, local_rank=0,
    )  # fmt: skip
    config = SimpleNamespace(
        gpu=SimpleNamespace(env={"MY_KEY": "12", "MINE": "13"}),
        exchange=SimpleNamespace(interface="auto"),
    )
    arguments = {"model": "org/model", "tokenizer": None, "hf_config_path": None}
    arguments |= {"speculative_config": None, "enable_lora": False}
    engine = SimpleNamespace(config=config, engine_args=SimpleNamespace(**arguments))
    rank: Any = SimpleNamespace(seat=seat, engine=engine, shared=SimpleNamespace(instance_id="i"))
    software = NodeSoftware(PreloadLibraries(), None, {})
    reservation: Any = SimpleNamespace(is_own=True, group=None, bundles=[0])
    actors._create(rank, reservation, actors.environment_of(rank, software))
    passed = Created.options["runtime_env"]["env_vars"]
    assert passed["MINE"] == "13"
    assert not any(is_secret(*item) for item in passed.items())
    told, secrets = Created.arguments
    assert told is rank
    hub = {name: SECRETS[name] for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")}
    assert secrets == hub | {"MY_KEY": "12"}


def test_the_hubs_library_finds_a_token_that_comes_late() -> None:
    program = (
        "import vllm.envs, huggingface_hub\n"
        "from types import SimpleNamespace\n"
        "from ray_hetero.worker import process_setup\n"
        "process_setup.take_cores = lambda *cpus: None\n"
        "rank = SimpleNamespace(threads=(), own=(), spare=())\n"
        "process_setup.settle(rank, {'HF_TOKEN': 'hf_late'})\n"
        "print(huggingface_hub.get_token())"
    )
    environment = {name: value for name, value in os.environ.items() if "TOKEN" not in name}
    ran = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True, text=True, check=True, timeout=120, env=environment,
    )  # fmt: skip
    assert ran.stdout.splitlines()[-1] == "hf_late"


# --- Ray's token -------------------------------------------------------------------------------


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in (local_ray.MODE, *local_ray.ELSEWHERE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local_ray, "Config", SimpleNamespace(initialize=lambda text: None))
    return tmp_path


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_a_new_token_can_be_read_by_its_user_only(home: Path) -> None:
    before = os.umask(0)
    try:
        local_ray.ask_for_token()
    finally:
        os.umask(before)
    token = home / ".ray" / "auth_token"
    assert (mode_of(token.parent), mode_of(token)) == (0o700, 0o600)
    assert [path.name for path in token.parent.iterdir()] == ["auth_token"]
    first = token.read_text()
    assert len(first) == 2 * local_ray.TOKEN_BYTES
    local_ray.ask_for_token()
    assert token.read_text() == first
    assert os.environ[local_ray.MODE] == "token"


@pytest.mark.parametrize(
    ("name", "value"), [("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN", "x" * 64)]
)
def test_what_the_user_has_set_stays(
    home: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    local_ray.ask_for_token()
    assert os.environ[name] == value
    assert not (home / ".ray").exists()


def test_a_token_that_others_can_read_is_named(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    local_ray.ask_for_token()
    token = home / ".ray" / "auth_token"
    assert caplog.text == ""
    token.chmod(0o644)
    token.parent.chmod(0o755)
    local_ray.logger.addHandler(caplog.handler)
    try:
        local_ray.ask_for_token()
    finally:
        local_ray.logger.removeHandler(caplog.handler)
    assert f"chmod go= {token.parent} {token}" in caplog.text


def test_a_home_without_room_for_a_token_is_told(home: Path) -> None:
    (home / ".ray").write_text("a file")
    with pytest.raises(StartupError, match=r"auth_token, found: .*RAY_AUTH_TOKEN=\$"):
        local_ray.ask_for_token()


# --- folders -----------------------------------------------------------------------------------


@pytest.fixture
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    monkeypatch.setattr(private_folder, "LONGEST_PARENT", 200)
    return tmp_path


def test_a_folder_is_private_and_goes(parent: Path) -> None:
    made = PrivateFolder()
    assert made.path.parent == parent
    assert mode_of(made.path) == 0o700
    (made.path / "logs").mkdir()
    made.remove()
    made.remove()
    assert list(parent.iterdir()) == []


def test_an_abandoned_folder_is_removed_by_the_next(parent: Path) -> None:
    held, abandoned, young = PrivateFolder(), PrivateFolder(), PrivateFolder()
    others = parent / f"{private_folder.PREFIX}others"
    others.mkdir(0o755)
    for made in (abandoned, young):
        # As if its process had been killed.
        os.close(made._lock)
    past = time.time() - 2 * private_folder.ABANDONED_SECONDS
    for path in (held.path, abandoned.path, others):
        os.utime(path, (past, past))
    last = PrivateFolder()
    assert set(parent.iterdir()) == {held.path, young.path, others, last.path}
    held.remove()
    last.remove()


def test_sockets_below_it_have_names_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", "/" + "x" * private_folder.LONGEST_PARENT)
    assert private_folder._parent() == Path("/tmp")
    session = "r/session_2026-11-28_22-32-07_152025_4194304/sockets/plasma_store"
    name = f"{private_folder.PREFIX}{'x' * 8}/{session}"
    assert private_folder.LONGEST_PARENT + len(f"/{name}") <= 107

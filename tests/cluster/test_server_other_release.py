"""`vllm serve` of a release that is supported and not installed answers as its stock server does.

Python files of that release run on the compiled operators of the installed one, which these models
call with the same arguments in both (docs/upgrading-vllm.md).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import NAME, Model, Server, backend, prompts
from leftovers import Scene
from quiet import noise
from server_checks import (  # noqa: F401
    Pair,
    assert_placed,
    beside_stock,
    stop,
    test_64_at_once,
    test_a_client_that_leaves_in_the_middle,
    test_a_streamed_chat_is_the_whole_one,
    test_chunked_prefill,
    test_logprobs,
    test_logprobs_of_the_prompt,
    test_prefix_caching,
    test_several_seeded_samples,
    test_stop_strings,
    test_structured_output,
)

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))

import vllm_release  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module", params=vllm_release.others())
def release(request: pytest.FixtureRequest) -> Iterator[str]:
    """A release whose Python files all processes of this module import."""
    try:
        folder = vllm_release.with_operators(request.param)
    except SystemExit as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patched:
        inherited = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
        patched.setenv("PYTHONPATH", os.pathsep.join([str(folder), str(ROOT), *inherited]))
        yield request.param


@pytest.fixture(scope="module")
def servers(release: str, scene: Scene, logs: Path, model: Model) -> Iterator[Pair]:
    folder = logs / release
    folder.mkdir()
    with beside_stock(scene, folder, model("llama", "f32"), *backend(2)) as pair:
        yield pair


def test_both_are_of_that_release(servers: Pair, release: str) -> None:
    for server in (servers.ours, servers.stock):
        assert server.get("/version").json() == {"version": release}
    assert_placed(servers.ours.child.log, "[cpu] → [cpu]", "0-1 (2)", "2-3 (2)")


def _tokens(server: Server) -> list[list[int]]:
    with server.client() as client:
        answer = client.completions.create(
            model=NAME, prompt=prompts(), temperature=0, max_tokens=24,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
    return [choice.token_ids for choice in answer.choices]


def test_sixteen_prompts_have_the_tokens_of_stock(servers: Pair) -> None:
    ours = _tokens(servers.ours)
    assert [len(one) for one in ours] == [24] * 16
    assert ours == _tokens(servers.stock)


def test_sigterm_ends_the_server_as_normal_and_leaves_nothing(servers: Pair, scene: Scene) -> None:
    assert servers.ours.get("/health").status_code == 200
    assert stop(servers.ours, servers.stock) == {0}
    assert noise(servers.ours.child.log) == []
    scene.assert_clean()

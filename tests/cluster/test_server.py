"""`vllm serve` over a pipeline of two CPU ranks answers as stock `vllm serve` does."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from conftest import Model
from engines import (
    NAME,
    STOP_SECONDS,
    Server,
    backend,
    prompts,
    serve,
    wait_until_healthy,
)
from leftovers import Scene, wait_until

pytestmark = pytest.mark.timeout(600)

CHUNK = 64
"""Most tokens of one step: longer prompts are computed in chunks."""
BLOCK = 32
OPTIONS = (
    "--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", str(CHUNK),
    "--max-num-seqs", "48", "--block-size", str(BLOCK), "--enable-prompt-tokens-details",
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip


@dataclass
class Pair:
    """Two servers of one checkpoint, asked the same."""

    ours: Server
    stock: Server

    def complete(self, **request: Any) -> tuple[Any, Any]:
        """The answers of both to a text completion, ours first."""
        return _complete(self.ours, **request), _complete(self.stock, **request)


def _complete(server: Server, **request: Any) -> Any:
    greedy = {"model": NAME, "temperature": 0, "max_tokens": 24}
    with server.client() as client:
        return client.completions.create(**{**greedy, **request})


def _texts(answer: Any) -> list[str]:
    return [choice.text for choice in answer.choices]


def _long(tokens: int, seed: int = 1) -> list[int]:
    return [(31 * at * seed + 17 * seed) % 600 + 8 for at in range(tokens)]


@pytest.fixture(scope="module")
def servers(scene: Scene, logs: Path, model: Model) -> Iterator[Pair]:
    checkpoint = model("llama", "f32")
    ours = serve(scene, logs / "ours", checkpoint, *OPTIONS, *backend(2))
    stock = serve(scene, logs / "stock", checkpoint, *OPTIONS)
    wait_until_healthy(ours)
    wait_until_healthy(stock)
    yield Pair(ours, stock)
    for server in (ours, stock):
        if server.child.process.poll() is None:
            server.child.signal(signal.SIGTERM)
            server.child.wait(STOP_SECONDS)


def test_the_log_shows_the_six_steps_and_the_placement(servers: Pair) -> None:
    log = servers.ours.child.log
    steps = ("discover", "plan", "reserve", "spawn", "connect", "warm up")
    places = [log.index(f"[{number}/6] {step}") for number, step in enumerate(steps, start=1)]
    assert places == sorted(places)
    assert "[cpu] → [cpu]" in log
    assert "0-1 (2)" in log
    assert "2-3 (2)" in log


def test_chunked_prefill(servers: Pair) -> None:
    for length in (CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK + 5):
        ours, stock = servers.complete(prompt=_long(length))
        assert ours.usage.prompt_tokens == length
        assert _texts(ours) == _texts(stock)
        assert len(_texts(ours)[0]) > 20


def test_prefix_caching(servers: Pair) -> None:
    shared = _long(7 * BLOCK, seed=3)
    first = _complete(servers.ours, prompt=[*shared, 100, 101])
    again, stock = servers.complete(prompt=[*shared, 100, 101])
    other, stock_other = servers.complete(prompt=[*shared, 300, 301, 302])
    assert _texts(first) == _texts(again) == _texts(stock)
    assert _texts(other) == _texts(stock_other) != _texts(first)
    assert not first.usage.prompt_tokens_details.cached_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == 7 * BLOCK
    assert other.usage.prompt_tokens_details.cached_tokens == 7 * BLOCK


def test_logprobs(servers: Pair) -> None:
    ours, stock = servers.complete(prompt=_long(40, seed=5), logprobs=5, max_tokens=32)
    mine, theirs = ours.choices[0].logprobs, stock.choices[0].logprobs
    assert mine.tokens == theirs.tokens
    assert len(mine.tokens) == 32
    assert mine.token_logprobs == pytest.approx(theirs.token_logprobs, abs=1e-2)
    for top, wanted in zip(mine.top_logprobs, theirs.top_logprobs, strict=True):
        assert top == pytest.approx(wanted, abs=1e-2)


def test_logprobs_of_the_prompt(servers: Pair) -> None:
    prompt = _long(3 * CHUNK, seed=7)
    ours, stock = servers.complete(prompt=prompt, logprobs=1, echo=True, max_tokens=4)
    mine, theirs = (a.choices[0].logprobs.token_logprobs for a in (ours, stock))
    assert len(mine) == len(prompt) + 4
    assert mine[0] is theirs[0] is None
    assert mine[1:] == pytest.approx(theirs[1:], abs=1e-2)


def test_several_seeded_samples(servers: Pair) -> None:
    # Short enough for one step: vLLM 0.32 on CPUs ends when it computes a seeded request in chunks.
    request = {"prompt": _long(15, seed=9), "n": 3, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    ours, stock = servers.complete(**request)
    assert _texts(ours) == _texts(stock)
    assert len(set(_texts(ours))) == 3
    assert _texts(_complete(servers.ours, **{**request, "seed": 12})) != _texts(ours)


def test_stop_strings(servers: Pair) -> None:
    prompt = _long(30, seed=13)
    words = _texts(_complete(servers.stock, prompt=prompt, max_tokens=40))[0].split()
    stop = next(word for word in words[5:] if word not in words[:5])
    ours, stock = servers.complete(prompt=prompt, max_tokens=40, stop=[stop])
    assert ours.choices[0].finish_reason == stock.choices[0].finish_reason == "stop"
    assert _texts(ours) == _texts(stock)
    assert stop not in _texts(ours)[0]
    assert len(_texts(ours)[0].split()) >= 5


def test_structured_output(servers: Pair) -> None:
    schema = {
        "type": "object",
        "properties": {
            "name": {"enum": ["harbour", "town", "boat"]},
            "open": {"type": "boolean"},
            "tide": {"type": "array", "items": {"enum": [1, 2, 3]}, "minItems": 2, "maxItems": 4},
        },
        "required": ["name", "open", "tide"],
        "additionalProperties": False,
    }
    request = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Where was the old boat?"}],
        "temperature": 0,
        "max_tokens": 120,
        "response_format": {
            "type": "json_schema", "json_schema": {"name": "harbour", "schema": schema}
        },
    }  # fmt: skip
    said = []
    for server in (servers.ours, servers.stock):
        with server.client() as client:
            said.append(client.chat.completions.create(**request).choices[0].message.content)
    assert said[0] == said[1]
    answer = json.loads(said[0])
    assert set(answer) == {"name", "open", "tide"}
    assert answer["name"] in ("harbour", "town", "boat")
    assert isinstance(answer["open"], bool)
    assert 2 <= len(answer["tide"]) <= 4
    assert set(answer["tide"]) <= {1, 2, 3}


def test_a_streamed_chat_is_the_whole_one(servers: Pair) -> None:
    request: dict[str, Any] = {
        "model": NAME,
        "messages": [{"role": "user", "content": "Who brought the bread?"}],
        "temperature": 0,
        "max_tokens": 40,
    }
    with servers.ours.client() as client, servers.stock.client() as other:
        chunks = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**request, stream=True)
        ]
        whole = other.chat.completions.create(**request).choices[0].message.content
    assert len([chunk for chunk in chunks if chunk]) > 10
    assert "".join(chunks) == whole


def test_a_client_that_leaves_in_the_middle(servers: Pair) -> None:
    with servers.ours.client() as client:
        stream = client.completions.create(
            model=NAME, prompt=_long(20), max_tokens=900, stream=True,
            extra_body={"ignore_eos": True},
        )  # fmt: skip
        next(iter(stream))
        assert servers.ours.running == 1
        stream.close()
    assert wait_until(lambda: servers.ours.running == 0, 10)
    ours, stock = servers.complete(prompt=_long(20), max_tokens=8)
    assert _texts(ours) == _texts(stock)


def test_64_at_once(servers: Pair) -> None:
    given = [[*prompt, 20 + number] for number in range(4) for prompt in prompts()]
    with ThreadPoolExecutor(64) as pool:
        ours = pool.map(lambda prompt: _texts(_complete(servers.ours, prompt=prompt)), given)
        stock = pool.map(lambda prompt: _texts(_complete(servers.stock, prompt=prompt)), given)
        answers = list(ours)
        assert answers == list(stock)
    assert len(answers) == 64
    assert len({text for (text,) in answers}) > 48


def test_sigterm_ends_the_server_and_leaves_nothing(servers: Pair, scene: Scene) -> None:
    assert servers.ours.get("/health").status_code == 200
    for server in (servers.ours, servers.stock):
        server.child.signal(signal.SIGTERM)
    assert servers.ours.child.wait(STOP_SECONDS) == servers.stock.child.wait(STOP_SECONDS)
    scene.assert_clean()

"""What a server must be able to do, asked of one over several ranks and of a stock one.

A test module of two servers imports these tests and gives them a fixture `servers`.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
from engines import NAME, STOP_SECONDS, Server, prompts, serve, wait_until_healthy
from leftovers import Scene, wait_until

CHUNK = 64
"""Most tokens of one step: longer prompts are computed in chunks."""
BLOCK = 32
OPTIONS = (
    "--dtype", "float32", "--max-model-len", "1024", "--max-num-batched-tokens", str(CHUNK),
    "--max-num-seqs", "48", "--block-size", str(BLOCK), "--enable-prompt-tokens-details",
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip
STEPS = ("discover", "plan", "reserve", "spawn", "connect", "warm up")


@dataclass
class Pair:
    """Two servers of one checkpoint, asked the same."""

    ours: Server
    stock: Server
    tolerance: float = 0.01
    """How far apart the two may be in the logprob of a token."""
    is_same_kind: bool = True
    """Whether both compute on one kind of device: then their tokens are the same, near-ties too,
    and their samplers draw the same numbers."""

    def complete(self, **request: Any) -> tuple[Any, Any]:
        """The answers of both to a text completion, ours first."""
        return complete(self.ours, **request), complete(self.stock, **request)

    def assert_same(self, ours: Any, stock: Any) -> None:
        """The same text; on devices of two kinds a near-tie may have another winner."""
        for mine, theirs in zip(ours.choices, stock.choices, strict=True):
            if self.is_same_kind:
                assert mine.text == theirs.text
            elif mine.text != theirs.text:
                assert _gap(mine.logprobs, theirs.logprobs) < self.tolerance


def _gap(mine: Any, theirs: Any) -> float:
    """How far apart the two likeliest tokens are where two answers part."""
    pairs = zip(mine.tokens, theirs.tokens, strict=False)
    at = next(at for at, (left, right) in enumerate(pairs) if left != right)
    first, second = sorted(theirs.top_logprobs[at].values(), reverse=True)[:2]
    return float(first - second)


@contextmanager
def beside_stock(
    scene: Scene,
    logs: Path,
    checkpoint: Path,
    *options: str,
    extra: Mapping[str, str] | None = None,
) -> Iterator[Pair]:
    """A server with these options, and a stock one, from their start to their end.

    Args:
        scene: where the servers belong.
        logs: directory for what they write.
        checkpoint: that both serve.
        options: of the one over several ranks.
        extra: added to its environment.

    """
    ours = serve(scene, logs / "ours", checkpoint, *OPTIONS, *options, extra=extra)
    stock = serve(scene, logs / "stock", checkpoint, *OPTIONS)
    for server in (ours, stock):
        wait_until_healthy(server)
    yield Pair(ours, stock)
    stop(ours, stock)


def stop(*servers: Server) -> set[int]:
    """Send SIGTERM to those that still run; the exit statuses of all."""
    for server in servers:
        if server.child.process.poll() is None:
            server.child.signal(signal.SIGTERM)
    return {server.child.wait(STOP_SECONDS) for server in servers}


def complete(server: Server, **request: Any) -> Any:
    """A server's answer to a text completion, greedy unless said otherwise."""
    with server.client() as client:
        return ask(client, **request)


def ask(client: openai.OpenAI, **request: Any) -> Any:
    """The answer to a text completion of a client that there is, greedy unless said otherwise."""
    greedy = {"model": NAME, "temperature": 0, "max_tokens": 24, "logprobs": 2}
    return client.completions.create(**{**greedy, **request})


def texts(answer: Any) -> list[str]:
    """The text of every sample."""
    return [choice.text for choice in answer.choices]


def long(tokens: int, seed: int = 1) -> list[int]:
    """A prompt of so many tokens."""
    return [(31 * at * seed + 17 * seed) % 600 + 8 for at in range(tokens)]


def assert_placed(log: str, *said: str) -> None:
    """The log shows the six steps of start-up in their order, and the placement."""
    places = [log.index(f"[{number}/6] {step}") for number, step in enumerate(STEPS, start=1)]
    assert places == sorted(places)
    for line in said:
        assert line in log


def test_chunked_prefill(servers: Pair) -> None:
    for length in (CHUNK - 1, CHUNK, CHUNK + 1, 10 * CHUNK + 5):
        ours, stock = servers.complete(prompt=long(length))
        assert ours.usage.prompt_tokens == length
        servers.assert_same(ours, stock)
        assert len(texts(ours)[0]) > 20


def test_prefix_caching(servers: Pair) -> None:
    shared = long(7 * BLOCK, seed=3)
    first = complete(servers.ours, prompt=[*shared, 100, 101])
    again, stock = servers.complete(prompt=[*shared, 100, 101])
    other, stock_other = servers.complete(prompt=[*shared, 300, 301, 302])
    servers.assert_same(first, again)
    servers.assert_same(again, stock)
    servers.assert_same(other, stock_other)
    assert texts(other) != texts(first)
    assert not first.usage.prompt_tokens_details.cached_tokens
    assert again.usage.prompt_tokens_details.cached_tokens == 7 * BLOCK
    assert other.usage.prompt_tokens_details.cached_tokens == 7 * BLOCK


def test_logprobs(servers: Pair) -> None:
    ours, stock = servers.complete(prompt=long(40, seed=5), logprobs=5, max_tokens=32)
    mine, theirs = ours.choices[0].logprobs, stock.choices[0].logprobs
    assert mine.tokens == theirs.tokens
    assert len(mine.tokens) == 32
    assert mine.token_logprobs == pytest.approx(theirs.token_logprobs, abs=servers.tolerance)
    for top, wanted in zip(mine.top_logprobs, theirs.top_logprobs, strict=True):
        # The last of the five may be another token.
        both = top.keys() & wanted.keys()
        assert len(both) >= 4
        for token in both:
            assert top[token] == pytest.approx(wanted[token], abs=servers.tolerance)


def test_logprobs_of_the_prompt(servers: Pair) -> None:
    prompt = long(3 * CHUNK, seed=7)
    ours, stock = servers.complete(prompt=prompt, logprobs=1, echo=True, max_tokens=4)
    mine, theirs = (a.choices[0].logprobs.token_logprobs for a in (ours, stock))
    assert len(mine) == len(prompt) + 4
    assert mine[0] is theirs[0] is None
    # The four last ones are of tokens that each server has chosen.
    count = len(prompt)
    assert mine[1:count] == pytest.approx(theirs[1:count], abs=servers.tolerance)


def test_several_seeded_samples(servers: Pair) -> None:
    prompt = long(3 * CHUNK + 5, seed=9)
    request = {"prompt": prompt, "n": 3, "temperature": 0.9, "top_p": 0.9, "seed": 11}
    ours = complete(servers.ours, **request)
    # vLLM 0.32 on CPUs ends when it computes a seeded request in chunks: stock is left with one.
    whole = servers.stock if servers.is_same_kind else servers.ours
    first = complete(whole, prompt=prompt, max_tokens=1)
    other = complete(whole, **request)
    assert first.usage.prompt_tokens == len(prompt) > CHUNK
    assert other.usage.prompt_tokens_details.cached_tokens == 3 * CHUNK
    assert texts(ours) == texts(other)
    assert len(set(texts(ours))) == 3
    assert texts(complete(servers.ours, **{**request, "seed": 12})) != texts(ours)


def test_stop_strings(servers: Pair) -> None:
    prompt = long(30, seed=13)
    words = texts(complete(servers.ours, prompt=prompt, max_tokens=40))[0].split()
    stop = next(word for word in words[5:] if word not in words[:5])
    ours, stock = servers.complete(prompt=prompt, max_tokens=40, stop=[stop])
    assert ours.choices[0].finish_reason == "stop"
    servers.assert_same(ours, stock)
    assert stop not in texts(ours)[0]
    assert len(texts(ours)[0].split()) >= 5


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
    whole_from = servers.stock if servers.is_same_kind else servers.ours
    with servers.ours.client() as client, whole_from.client() as other:
        chunks = [
            chunk.choices[0].delta.content or ""
            for chunk in client.chat.completions.create(**request, stream=True)
        ]
        whole = other.chat.completions.create(**request).choices[0].message.content
    assert len([chunk for chunk in chunks if chunk]) > 10
    assert "".join(chunks) == whole


def test_a_client_that_leaves_in_the_middle(servers: Pair) -> None:
    with servers.ours.client() as client:
        # Figures of a step are there a moment after its tokens, and a busy host may look at them
        # when all tokens have come: then another client leaves.
        for _ in range(40):
            stream = client.completions.create(
                model=NAME, prompt=long(20), max_tokens=900, stream=True,
                extra_body={"ignore_eos": True},
            )  # fmt: skip
            next(iter(stream))
            is_running = wait_until(lambda: servers.ours.running == 1, 3, 0.02)
            stream.close()
            if is_running:
                break
        assert is_running
    assert wait_until(lambda: servers.ours.running == 0, STOP_SECONDS)
    servers.assert_same(*servers.complete(prompt=long(20), max_tokens=8))


def test_64_at_once(servers: Pair) -> None:
    given = [[*prompt, 20 + number] for number in range(4) for prompt in prompts()]
    with ThreadPoolExecutor(64) as pool:
        ours = list(pool.map(lambda prompt: complete(servers.ours, prompt=prompt), given))
        stock = list(pool.map(lambda prompt: complete(servers.stock, prompt=prompt), given))
    for mine, theirs in zip(ours, stock, strict=True):
        servers.assert_same(mine, theirs)
    assert len(ours) == 64
    assert len({texts(answer)[0] for answer in ours}) > 48

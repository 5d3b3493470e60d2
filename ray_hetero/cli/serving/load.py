"""Speed of a running server under a load of so many users, measured by streamed answers."""

from __future__ import annotations

import http.client
import json
import os
import random
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from ray_hetero.cli.serving.comparison import interpolated, predicted_rate
from ray_hetero.errors import ConfigError, StartupError

ANSWER_S = 600.0
"""Longest wait for the next token of an answer, in seconds."""
IDS = range(5, 100)
"""Tokens of prompts: every vocabulary has them, and none is likely to be special."""


@dataclass(frozen=True)
class Answer:
    """Times of one streamed answer, in seconds since the requests were sent."""

    first_s: float
    last_s: float


@dataclass(frozen=True)
class Measured:
    """Speed of a server for so many users at the same time."""

    users: int
    step_s: float
    """Median over the users of the time between two tokens."""
    first_token_s: float
    """Median over the users."""
    last_first_token_s: float
    """Time of the user whose first token came last."""
    total_per_s: float
    """Tokens per second of all users, the time for prompts included."""
    predicted_per_s: float | None = None
    """Tokens per second of each user that a plan predicts."""
    predicted_first_s: float | None = None
    """Time of the last first token that a plan predicts; None for prompts of another length."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of each user, once its answer has begun."""
        return 1 / self.step_s

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON: seconds, and tokens per second."""
        return asdict(self) | {"tokens_per_s": self.tokens_per_s}


class Server:
    """A server of vLLM that runs already.

    Args:
        url: of the server, such as http://localhost:8000.

    Raises:
        ConfigError: the URL has no host.
        StartupError: no server of vLLM answers there.

    """

    def __init__(self, url: str) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url: expected one like http://localhost:8000, got {url!r}")
        self.address = f"{parts.scheme}://{parts.netloc}"
        self._host, self._port, self._is_tls = parts.hostname, parts.port, parts.scheme == "https"
        try:
            self.model = self._models()
        except ConnectionRefusedError:
            raise StartupError(
                f"{self.address}: no server listens there. `ray-hetero serve MODEL` starts one; "
                "without --url, ray-hetero bench measures this host"
            ) from None
        except (OSError, http.client.HTTPException, ValueError, LookupError) as error:
            raise StartupError(
                f"{self.address}: expected vLLM's list of models at /v1/models, got "
                f"{str(error) or type(error).__name__}"
            ) from None

    def _models(self) -> Mapping[str, Any]:
        connection = self._connection()
        connection.request("GET", "/v1/models", headers=_headers())
        answer = connection.getresponse()
        body = answer.read()
        if answer.status != http.client.OK:
            raise ValueError(f"status {answer.status}")
        found: Mapping[str, Any] = json.loads(body)["data"][0]
        return found

    def _connection(self) -> http.client.HTTPConnection:
        kind = http.client.HTTPSConnection if self._is_tls else http.client.HTTPConnection
        return kind(self._host, self._port, timeout=ANSWER_S)

    def check_room(self, prompt_tokens: int, tokens: int) -> None:
        """Refuse lengths that the server does.

        Raises:
            ConfigError: a request would be longer than the server's longest sequence.

        """
        most = self.model.get("max_model_len")
        if most is not None and prompt_tokens + tokens > most:
            raise ConfigError(
                f"--prompt-tokens {prompt_tokens} + --tokens {tokens} = {prompt_tokens + tokens}, "
                f"but {self.address} serves sequences of at most {most} tokens"
            )

    def measure(self, users: int, prompt_tokens: int, tokens: int) -> Measured:
        """Send a request of each user at once, and wait for all answers.

        Args:
            users: requests.
            prompt_tokens: of each prompt; no two prompts begin alike.
            tokens: of each answer, at least 2.

        Raises:
            StartupError: a request fails.

        """
        draws = random.Random()  # noqa: S311
        prompts = [draws.choices(IDS, k=prompt_tokens) for _ in range(users)]
        start = time.monotonic()

        def ask(prompt: Sequence[int]) -> Answer:
            try:
                return self._stream(prompt, tokens, start)
            except (OSError, http.client.HTTPException, ValueError) as error:
                raise StartupError(
                    f"{self.address}: a request of {users} users at once failed: "
                    f"{str(error) or type(error).__name__}"
                ) from None

        with ThreadPoolExecutor(users) as pool:
            answers = list(pool.map(ask, prompts))
        firsts = [one.first_s for one in answers]
        return Measured(
            users,
            step_s=median((one.last_s - one.first_s) / (tokens - 1) for one in answers),
            first_token_s=median(firsts),
            last_first_token_s=max(firsts),
            total_per_s=users * tokens / max(one.last_s for one in answers),
        )

    def _stream(self, prompt: Sequence[int], tokens: int, start: float) -> Answer:
        body = {
            "model": self.model["id"], "prompt": list(prompt), "max_tokens": tokens,
            "min_tokens": tokens, "ignore_eos": True, "temperature": 0, "stream": True,
        }  # fmt: skip
        connection = self._connection()
        connection.request("POST", "/v1/completions", json.dumps(body), _headers())
        answer = connection.getresponse()
        if answer.status != http.client.OK:
            said = answer.read(500).decode(errors="replace")
            raise ValueError(f"status {answer.status}: {said}")
        times = []
        for line in answer:
            if line.startswith(b"data: [DONE]"):
                break
            if line.startswith(b'data: {"error"'):
                raise ValueError(line.decode(errors="replace").strip())
            if line.startswith(b"data: "):
                times.append(time.monotonic() - start)
        connection.close()
        if not times:
            raise ValueError("expected tokens, got an empty answer")
        return Answer(times[0], times[-1])


def _headers() -> dict[str, str]:
    key = os.environ.get("VLLM_API_KEY")
    headers = {"Content-Type": "application/json"}
    return headers | ({"Authorization": f"Bearer {key}"} if key else {})


def beside(measured: Measured, users: Sequence[Mapping[str, Any]], prompt_tokens: int) -> Measured:
    """Add the predictions of a plan to a measured speed.

    Args:
        measured: without predictions.
        users: the entries `users` of `ray-hetero plan --json`, the fewest users first.
        prompt_tokens: of each prompt; a first token is compared where the plan has this context.

    """
    first = None
    if all(row["context"] == prompt_tokens for row in users):
        first = _between(users, measured.users)
    return replace(
        measured,
        predicted_per_s=predicted_rate(users, measured.users),
        predicted_first_s=first,
    )


def _between(users: Sequence[Mapping[str, Any]], count: int) -> float | None:
    """Seconds until the last first token; None for more or fewer users than a plan has."""
    points = [(float(row["users"]), float(row["first_token_s"])) for row in users]
    if not points or not points[0][0] <= count <= points[-1][0]:
        return None
    return interpolated(points, count)

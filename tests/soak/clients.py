"""Clients of a soak: requests with known answers, some of which are left in the middle."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import openai
from any_request import any_request
from engines import NAME, Server

Json = dict[str, Any]
OURS = ("max_tokens", "temperature", "seed", "top_p", "presence_penalty", "frequency_penalty",
        "logit_bias", "logprobs")  # fmt: skip
"""Parameters of the official client; others are vLLM's own."""


@dataclass
class Findings:
    """What clients have seen; `violations` ought to be empty."""

    outcomes: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def saw(self, kind: str, violation: str = "", reason: str = "") -> None:
        """Note one answer."""
        with self.lock:
            self.outcomes[kind] += 1
            if violation:
                self.violations.append(violation)
            if reason:
                self.reasons[reason[:160]] += 1


def requests(seed: int, count: int) -> list[Json]:
    """Requests that a seed gives."""
    draw = random.Random(seed)
    return [any_request(draw) for _ in range(count)]


def ask(server: Server, request: Json, limit_s: float, leave_after: int = 0) -> list[int] | None:
    """Token ids of an answer; None for a client that has left."""
    sampling = request["sampling"]
    own = {name: sampling[name] for name in OURS if name in sampling}
    if "logit_bias" in own:
        own["logit_bias"] = {str(token): bias for token, bias in own["logit_bias"].items()}
    more = {name: value for name, value in sampling.items() if name not in OURS}
    with server.client().with_options(max_retries=0, timeout=limit_s) as client:
        answer: Any = client.completions.create(
            model=NAME, prompt=request["prompt"], stream=bool(leave_after), **own,
            extra_body={**more, "return_token_ids": True},
        )  # fmt: skip
        if not leave_after:
            choice = answer.choices[0]
            if choice.finish_reason not in ("stop", "length"):
                raise InterruptedError(f"finish reason {choice.finish_reason}")
            found: list[int] = choice.token_ids
            return found
        for number, _ in enumerate(answer, 1):
            if number == leave_after:
                answer.close()
                break
    return None


class Clients:
    """Clients at work until they are stopped.

    Args:
        server: it may end at any time.
        asked: requests.
        answers: what each has to be answered with.
        findings: where outcomes go.
        limit_s: of one request.
        count: of clients.
        seed: of their choices.

    """

    def __init__(
        self, server: Server, asked: list[Json], answers: list[list[int]], findings: Findings,
        *, limit_s: float, count: int, seed: int,
    ) -> None:  # fmt: skip
        self._server, self._asked, self._answers = server, asked, answers
        self._findings, self._limit_s = findings, limit_s
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(seed + number,)) for number in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End them; each has an answer or an error within the limit of a request."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._limit_s + 30)
            if thread.is_alive():
                self._findings.saw("waiting", "a client waits beyond its limit")

    def _work(self, seed: int) -> None:
        draw = random.Random(seed)
        while not self._stop.is_set():
            which = draw.randrange(len(self._asked))
            leave = draw.randrange(1, 6) if draw.random() < 0.2 else 0
            start = time.monotonic()
            try:
                found = ask(self._server, self._asked[which], self._limit_s, leave)
            except openai.APITimeoutError:
                took = time.monotonic() - start
                self._findings.saw("late", f"request {which}: no answer in {took:.0f} s")
            except openai.APIStatusError as error:
                said = str(error.message)
                lacks = "" if len(said) > 20 else f"request {which}: an error without a reason"
                self._findings.saw(f"status {error.status_code}", lacks, said)
                self._stop.wait(1)
            except (openai.APIError, InterruptedError) as error:
                # The connection of a server that ends, or an engine's end inside a stream.
                self._findings.saw(type(error).__name__, "", str(error))
                self._stop.wait(1)
            else:
                if found is None:
                    self._findings.saw("left")
                elif found == self._answers[which]:
                    self._findings.saw("equal")
                else:
                    wanted = self._answers[which]
                    self._findings.saw("wrong", f"request {which}: {found}, expected {wanted}")

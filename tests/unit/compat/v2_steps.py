"""Steps of vLLM's V2 model runner with random requests: KERNELS RESULTS.pt.

KERNELS is `ours`, or `stock` for vLLM's own in Triton's interpreter.  Both are processes of their
own: which of them vLLM has is decided when it is imported.
"""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

if sys.argv[1] == "stock":
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    # vLLM asks for a backend of this name only; the interpreter needs none.
    backends["cpu"] = SimpleNamespace(driver=SimpleNamespace(is_active=lambda: True))

import numpy as np
import torch
import vllm.v1.worker.cpu.shm  # noqa: F401
from vllm.triton_utils import HAS_TRITON
from vllm.v1.worker.gpu import model_runner
from vllm.v1.worker.gpu.block_table import BlockTables
from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor
from vllm.v1.worker.gpu.sample import (
    bad_words,
    logit_bias,
    penalties,
    prompt_logprob,
    sampler,
    states,
)
from vllm.v1.worker.gpu.sample.logprob import LogprobTokenIdsState

from ray_hetero.compat.worker import v2_kernels

REQUESTS, LONGEST, MOST_TOKENS, VOCABULARY = 9, 300, 512, 1700
"""Rows of the runner's states, tokens of a request and of a step, tokens of the vocabulary."""
Results = dict[str, torch.Tensor]


def _whole(given: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(given, dtype=dtype)


class Steps:
    """Requests of one step: prompts from the beginning and in chunks, and some that decode."""

    def __init__(self, seed: int) -> None:
        self.random = random = np.random.default_rng(seed)
        requests = int(random.integers(1, REQUESTS))
        self.indices = _whole(random.permutation(REQUESTS)[:requests], torch.int64)
        self.prompts = _whole(random.integers(2, 200, REQUESTS))
        self.computed = torch.zeros(REQUESTS, dtype=torch.int32)
        counts = np.ones(requests, np.int32)
        for row, index in enumerate(self.indices.tolist()):
            prompt = int(self.prompts[index])
            if random.random() < 0.5:
                self.computed[index] = prompt + random.integers(0, 40)
            else:
                self.computed[index] = random.integers(0, prompt)
                counts[row] = min(random.integers(1, 60), prompt - int(self.computed[index]))
        self.starts = _whole(np.concatenate([[0], counts.cumsum()]))
        self.tokens = _whole(random.integers(0, VOCABULARY, (REQUESTS, LONGEST)))
        self.logits = torch.tensor(random.normal(0, 3, (requests, VOCABULARY)), dtype=torch.float32)

    def tables(self) -> Results:
        """Changes of tables, and what the model reads of them."""
        device = torch.device("cpu")
        rows = StagedWriteTensor((REQUESTS, 40), dtype=torch.int32, device=device)
        numbers = StagedWriteTensor(REQUESTS, dtype=torch.float32, device=device)
        for index in self.random.permutation(REQUESTS)[:5].tolist():
            rows.stage_write(index, 3, self.random.integers(0, 99, index + 1).tolist())
            numbers.stage_write_elem(index, 0.5 * index)
        rows.apply_write()
        numbers.apply_write()
        rows.apply_write()
        blocks = BlockTables(
            [32, 16],
            REQUESTS,
            MOST_TOKENS,
            [16, 32],
            device,
            slot_mapping_enabled=[True, self.random.random() < 0.7],
        )
        for index in range(REQUESTS):
            ids = tuple(self.random.permutation(900)[:count].tolist() for count in (16, 32))
            blocks.append_block_ids(index, ids, overwrite=True)
        for one in blocks.block_tables:
            one.apply_write()
        blocks.num_blocks.copy_to_uva()
        read = blocks.gather_block_tables(self.indices, len(self.indices) + 1)
        positions = self.lengths()["positions"]
        slots = blocks.compute_slot_mappings(self.indices, self.starts, positions, MOST_TOKENS)
        return {
            "rows": rows.gpu,
            "numbers": numbers.gpu,
            "read 0": read[0],
            "read 1": read[1],
            "slots": slots,
        }

    def lengths(self) -> Results:
        """Positions and lengths."""
        positions = torch.full((MOST_TOKENS,), 7, dtype=torch.int64)
        lengths = torch.full((REQUESTS,), 7, dtype=torch.int32)
        model_runner.prepare_pos_seq_lens(
            self.indices, self.starts, self.computed, positions, lengths
        )
        return {"positions": positions, "lengths": lengths}

    def inputs(self) -> Results:
        """Tokens that the model is given, and rows of logits."""
        ids = torch.full((MOST_TOKENS,), 7, dtype=torch.int32)
        ahead = torch.full((2, REQUESTS), 7, dtype=torch.int32)
        model_runner.prepare_prefill_inputs(
            ids, ahead, self.indices, self.starts, self.tokens, self.prompts, self.computed
        )
        requests = len(self.indices)
        rows = model_runner.combine_sampled_and_draft_tokens(
            ids, self.indices, _whole(self.random.integers(0, 99, (REQUESTS, 1)), torch.int64),
            self.starts, self.lengths()["lengths"], self.prompts,
            torch.zeros(REQUESTS, 0, dtype=torch.int64),
            torch.arange(requests + 1, dtype=torch.int32), requests,
        )  # fmt: skip
        return {"ids": ids, "ahead": ahead, "rows": rows}

    def updates(self) -> Results:
        """States behind a step, on the stage that samples and on earlier ones."""
        requests, lengths = len(self.indices), self.lengths()["lengths"]
        kept, dropped = sampler.get_num_sampled_and_rejected(
            torch.ones(requests, dtype=torch.int32), lengths,
            torch.arange(requests + 1, dtype=torch.int32), self.indices, self.prompts,
        )  # fmt: skip
        found = {"kept": kept, "dropped": dropped}
        sampled = _whole(self.random.integers(0, VOCABULARY, (requests, 1)), torch.int64)
        left_out = self.indices.clone()
        left_out[self.random.integers(0, requests)] = -1
        for where, indices, starts in (
            ("last", self.indices, self.starts), ("earlier", left_out, None),
        ):  # fmt: skip
            computed, totals = self.computed.clone(), self.computed + 1
            last = torch.zeros(REQUESTS, 1, dtype=torch.int64)
            tokens = self.tokens.clone()
            counts = torch.zeros(REQUESTS, VOCABULARY, dtype=torch.int32)
            model_runner.post_update(
                indices, computed, last, counts if starts is not None else None, sampled, kept,
                dropped, starts, tokens, totals,
            )  # fmt: skip
            found |= {
                f"{where} computed": computed, f"{where} totals": totals, f"{where} last": last,
                f"{where} tokens": tokens, f"{where} counts": counts,
            }  # fmt: skip
        computed = self.computed.clone()
        model_runner.post_update_num_computed_tokens(self.indices, computed, self.starts)
        return found | {"computed": computed}

    def samples(self) -> Results:
        """Likeliest and random tokens, and logprobs."""
        warmth = torch.tensor(self.random.choice([0.0, 0.7, 1.0], REQUESTS), dtype=torch.float32)
        shares = torch.tensor(self.random.choice([0.0, 0.05], REQUESTS), dtype=torch.float32)
        seeds = _whole(self.random.integers(-(2**62), 2**62, REQUESTS), torch.int64)
        positions = _whole(self.random.integers(0, 500, len(self.indices)), torch.int64)
        tokens = {}
        for name, temperature in (("greedy", torch.zeros(REQUESTS)), ("random", warmth)):
            tokens[name] = sampler.gumbel_sample(
                self.logits.clone(), self.indices, temperature, seeds, positions,
                apply_temperature=False, is_drafting=False,
            )  # fmt: skip
        cooler = self.logits.clone()
        states.apply_temperature(cooler, self.indices, warmth)
        fewer = self.logits.clone()
        states.apply_min_p(fewer, self.indices, shares)
        return tokens | {"cooler": cooler, "fewer": fewer} | self._scores(tokens["random"])

    def _scores(self, tokens: torch.Tensor) -> Results:
        """Logprobs, of the likeliest tokens and of named ones."""
        named = LogprobTokenIdsState(REQUESTS, torch.device("cpu"))
        for index in range(REQUESTS):
            ids = self.random.integers(0, VOCABULARY, self.random.integers(0, 9)).tolist()
            named.add_request(index, SimpleNamespace(logprob_token_ids=ids))
        named.apply_staged_writes()
        found = {}
        for name, given in {
            "likeliest": {},
            "logits": {"logits_mode": True},
            "named": {
                "logprob_token_ids_state": named, "expanded_idx_mapping": self.indices,
                "max_per_req_token_ids": named.max_num_token_ids(self.indices.numpy()),
            },
        }.items():  # fmt: skip
            for count in (0, 4):
                scores = sampler.compute_topk_scores(self.logits, count, tokens, **given)
                found |= {
                    f"{name} {count} {part}": getattr(scores, part)
                    for part in ("logprob_token_ids", "logprobs", "selected_token_ranks")
                }
        found["behind"] = prompt_logprob.get_prompt_logprobs_token_ids(
            int(self.starts[-1]), self.starts, self.indices, self.computed, self.tokens
        )
        return found

    def penalties(self) -> Results:
        """Penalties of tokens that are there already."""
        begun = self.prompts + _whole(self.random.integers(0, 50, REQUESTS))
        words = torch.full((REQUESTS, -(-VOCABULARY // 32)), 5, dtype=torch.int32)
        counts = torch.full((REQUESTS, VOCABULARY), 5, dtype=torch.int32)
        penalties.bincount(
            self.indices, self.tokens, self.prompts, begun, words, counts, int(begun.max())
        )
        chosen = [
            torch.tensor(self.random.choice(values, REQUESTS), dtype=torch.float32)
            for values in ([1.0, 1.3], [0.0, 0.4], [0.0, 0.6])
        ]
        logits = self.logits.clone()
        positions = torch.zeros(len(logits), dtype=torch.int32)
        penalties.apply_penalties(
            logits, self.indices, self.tokens[0], positions, *chosen, words, counts
        )
        return {"words": words[self.indices], "counts": counts[self.indices], "logits": logits}

    def biases(self) -> Results:
        """Allowed tokens, biases, and tokens with which requests do not stop yet."""
        random = self.random

        def ids(most: int) -> tuple[torch.Tensor, torch.Tensor]:
            rows = [random.permutation(VOCABULARY)[:16] for _ in range(REQUESTS)]
            return _whole(random.integers(0, most, REQUESTS)), _whole(np.array(rows))

        allowed, biased, stopping = ids(3), ids(16), ids(5)
        # Some may only stop.
        allowed[1][::2, :5] = stopping[1][::2, :5]
        adds = torch.tensor(random.normal(0, 5, (REQUESTS, 16)), dtype=torch.float32)
        least = _whole(random.choice([1, 1000], REQUESTS))
        at = torch.full((len(self.logits),), 50, dtype=torch.int64)
        found = {}
        for check in (False, True):
            logits = self.logits.clone()
            logit_bias.apply_logit_bias(
                logits, self.indices, at, *allowed, *biased, adds, least, stopping[0],
                _whole([1] * REQUESTS), stopping[1], check,
            )  # fmt: skip
            found[f"logits {check}"] = logits
        return found

    def words(self) -> Results:
        """Forbidden words."""
        totals = self.prompts + 20
        tokens, offsets, numbers = [], [], []
        for index in range(REQUESTS):
            sampled = self.tokens[index, self.prompts[index] : totals[index]].tolist()
            # One token, the last ones and another, others, and more than there are.
            given = [[5], [*sampled[-3:], 6], [*sampled[-4:-1], 7], [*sampled, *sampled, 8]]
            flat = [token for word in given for token in word]
            tokens.append(flat + [0] * (60 - len(flat)))
            offsets.append([0, *np.cumsum([len(word) for word in given])])
            numbers.append(int(self.random.integers(0, 5)))
        logits = self.logits.clone()
        positions = torch.zeros(len(logits), dtype=torch.int32)
        bad_words.apply_bad_words(
            logits, self.indices, _whole(tokens), _whole(offsets), _whole(numbers), self.tokens,
            self.prompts, totals, self.tokens[0], positions, 4,
        )  # fmt: skip
        return {"words": logits}


PARTS = ("tables", "lengths", "inputs", "updates", "samples", "penalties", "biases", "words")


def main() -> None:
    """Compute all steps and write their results."""
    kernels, path = sys.argv[1:]
    assert (kernels == "stock") == HAS_TRITON
    if kernels == "ours":
        v2_kernels.put_in_place()
    results = {}
    for seed in range(12):
        for part in PARTS:
            found = getattr(Steps(seed), part)()
            results |= {f"{part} {seed} {name}": value.clone() for name, value in found.items()}
    torch.save(results, path)


if __name__ == "__main__":
    main()

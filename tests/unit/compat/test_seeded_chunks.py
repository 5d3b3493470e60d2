"""Seeded requests whose prompts come in chunks draw as those whose prompts come whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("vllm")

from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from ray_hetero.compat.worker import model_runner

WORDS = 64
SEED = 7


class Runner:
    """vLLM's runner as far as it samples tokens and keeps or drops them."""

    use_async_scheduling = False
    max_model_len = 32

    def __init__(self, *seeds: int | None) -> None:
        count = len(seeds)
        self.requests = {str(at): SimpleNamespace(output_token_ids=[]) for at in range(count)}
        self.discard_request_mask = SimpleNamespace(np=np.zeros(count + 2, dtype=bool))
        # vLLM leaves what it said of requests that have gone.
        self.discard_request_mask.np[count:] = True
        self.input_batch = SimpleNamespace(
            generators={
                at: torch.Generator().manual_seed(seed)
                for at, seed in enumerate(seeds)
                if seed is not None
            },
            num_reqs=count,
            req_ids=list(self.requests),
            req_id_to_index={name: at for at, name in enumerate(self.requests)},
            num_tokens_no_spec=np.zeros(count, dtype=int),
            token_ids_cpu=np.zeros((count, self.max_model_len), dtype=int),
            is_token_ids=np.zeros((count, self.max_model_len), dtype=bool),
            vocab_size=WORDS,
        )

    def _to_list(self, tokens: torch.Tensor) -> list[list[int]]:
        return tokens.tolist()  # type: ignore[no-any-return]

    def _get_prompt_logprobs_dict(self, *args: Any) -> dict[str, Any]:
        return {}

    def sample_tokens(self, logits: torch.Tensor) -> list[list[int]]:
        """Sample with vLLM's sampler for CPUs, and do with it what its runner does."""
        tokens, _ = TopKTopPSampler().forward_cpu(logits, self.input_batch.generators, None, None)
        sampled = SimpleNamespace(sampled_token_ids=tokens.view(-1, 1), logprobs_tensors=None)
        kept = GPUModelRunner._bookkeeping_sync(
            self,  # type: ignore[arg-type]
            SimpleNamespace(num_scheduled_tokens={}),  # type: ignore[arg-type]
            sampled, logits, logits, 0,  # type: ignore[arg-type]
        )  # fmt: skip
        found: list[list[int]] = kept[3]
        return found

    def step(self, *drops: bool) -> list[list[int]]:
        """One step of all requests, of which some drop their token."""
        self.discard_request_mask.np[: len(drops)] = drops
        return self.sample_tokens(torch.zeros(len(drops), WORDS))


def made(*seeds: int | None) -> Runner:
    runner = Runner(*seeds)
    model_runner.draw_for_kept_tokens_only(runner)
    return runner


def test_vllm_ends_with_a_seeded_request_in_chunks() -> None:
    """If it does not any longer, the patch can go."""
    with pytest.raises(RuntimeError, match="offset"):
        Runner(SEED).step(True)


@pytest.mark.parametrize("chunks", [1, 2, 5])
def test_tokens_are_those_of_one_chunk(chunks: int) -> None:
    whole, chunked = made(SEED, SEED + 1), made(SEED + 1, SEED)
    for _ in range(chunks - 1):
        # The other request decodes while the prompt goes on.
        assert chunked.step(False, True)[1] == []
    expected = [whole.step(False, False)[0] for _ in range(6)]
    assert [chunked.step(False, False)[1] for _ in range(6)] == expected
    assert len({token for (token,) in expected}) > 1
    assert len(chunked.requests["0"].output_token_ids) == 6 + chunks - 1


def test_requests_without_a_seed_stand_beside_it() -> None:
    alone = made(SEED)
    expected = [alone.step(False)[0] for _ in range(4)]
    beside = made(None, SEED, None)
    beside.step(False, True, True)
    generator = beside.input_batch.generators[1]
    assert [beside.step(True, False, False)[1] for _ in range(4)] == expected
    assert beside.input_batch.generators == {1: generator}


def test_an_error_leaves_the_generators_where_they_are() -> None:
    runner = made(SEED)
    runner.discard_request_mask.np[0] = True
    generator = runner.input_batch.generators[0]
    with pytest.raises(AttributeError):
        runner.sample_tokens(None)  # type: ignore[arg-type]
    assert runner.input_batch.generators == {0: generator}

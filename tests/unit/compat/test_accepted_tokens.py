"""Ranks and drafts: earlier stages learn the accepted ones, the last knows their temperatures."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from vllm.sampling_params import SamplingParams  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData  # noqa: E402
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch  # noqa: E402

from ray_hetero.compat.worker.spec_decode import expanded, learn_accepted_tokens  # noqa: E402

PROMPT = [11, 12, 13]
SAID = 14
DRAFTS = [15, 16, 17]


def runner_with_a_request() -> tuple[Any, list[list[int]]]:
    """What is used of a model runner, with a request whose drafts are being verified; and what it
    knew of the request's tokens whenever vLLM went on."""
    batch = InputBatch(
        max_num_reqs=2, max_model_len=32, max_num_batched_tokens=32, device=torch.device("cpu"),
        vocab_size=64, block_sizes=[16], max_num_blocks_per_req=[2], num_spec_tokens=3,
    )  # fmt: skip
    request = CachedRequestState(
        req_id="one", prompt_token_ids=list(PROMPT), mm_features=[],
        sampling_params=SamplingParams(temperature=0.0), generator=None, block_ids=([0],),
        num_computed_tokens=3, output_token_ids=[SAID],
    )  # fmt: skip
    batch.add_request(request)
    batch.update_req_spec_token_ids(request, {"one": DRAFTS})
    known: list[list[int]] = []
    runner = SimpleNamespace(
        input_batch=batch,
        requests={"one": request},
        _update_states=lambda _: known.append(list(request.output_token_ids)),
    )
    learn_accepted_tokens(runner)
    return runner, known


def sent(computed: int, tokens: list[int], everything: list[int] | None = None) -> Any:
    """A scheduler's output with the request."""
    return SimpleNamespace(
        scheduled_cached_reqs=CachedRequestData(
            req_ids=["one"], resumed_req_ids=set(), new_token_ids=[tokens],
            all_token_ids={} if everything is None else {"one": everything},
            new_block_ids=[None], num_computed_tokens=[computed], num_output_tokens=[1],
        )
    )  # fmt: skip


@pytest.mark.parametrize("accepted", range(4))
def test_they_are_the_drafts_that_it_has_computed(accepted: int) -> None:
    runner, known = runner_with_a_request()
    computed = len(PROMPT) + 1 + accepted
    runner._update_states(sent(computed, [20]))
    assert known == [[SAID, *DRAFTS[:accepted]]]
    assert runner.input_batch.num_tokens_no_spec[0] == computed
    assert runner.input_batch.token_ids_cpu[0, :computed].tolist() == [
        *PROMPT, SAID, *DRAFTS[:accepted]
    ]  # fmt: skip


def test_a_request_that_was_left_out_of_a_step_brings_them_along() -> None:
    runner, known = runner_with_a_request()
    runner.input_batch.remove_request("one")
    runner._update_states(sent(6, [20], [*PROMPT, SAID, 15, 16, 20]))
    assert known == [[SAID, 15, 16]]


def test_a_prompt_that_is_still_read_has_none() -> None:
    runner, known = runner_with_a_request()
    runner._update_states(sent(2, [13]))
    assert known == [[SAID]]


def test_every_draft_has_the_temperature_of_its_request() -> None:
    temperatures, until = torch.tensor([0.7, 0.0, 1.3]), torch.tensor([2, 2, 5], dtype=torch.int32)
    found = expanded(temperatures, until, 5)
    assert found.dtype == torch.float32
    assert found.tolist() == temperatures[[0, 0, 2, 2, 2]].tolist()
    assert expanded(torch.tensor([0.0, 0.5]), torch.tensor([1, 2]), 2, 0, 1).tolist() == [1.0, 0.5]

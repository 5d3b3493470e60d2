"""Kernels of vLLM's V2 model runner on a CPU rank, in PyTorch and NumPy in the place of Triton.

vLLM computes them one program a request on a GPU.  On a CPU they are a few operations on the arrays
of a step.  A number of a request's row in the runner's states is its index; a step's requests are
given by their indices (`idx_mapping`), and their tokens by where each request's begin
(`query_start_loc`).  Drafts, context parallelism and several logits of a request are refused
before ranks start.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from ray_hetero.compat.patching import replace
from ray_hetero.compat.worker import v2_logits, v2_sampling


def put_in_place() -> None:
    """In the process of a CPU rank: replace all kernels that requests without drafts need.

    Replaces: `StagedWriteTensor.apply_write`, `BlockTables.gather_block_tables`,
    `BlockTables.compute_slot_mappings`, `model_runner.prepare_prefill_inputs`,
    `model_runner.prepare_pos_seq_lens`, `model_runner.combine_sampled_and_draft_tokens`,
    `model_runner.post_update`, `model_runner.post_update_num_computed_tokens`,
    `sampler.get_num_sampled_and_rejected`, `sampler.gumbel_sample`, `sampler.compute_topk_scores`,
    `states.apply_temperature`, `states.apply_min_p`, `penalties.bincount`,
    `penalties.apply_penalties`, `logit_bias.apply_logit_bias`, `bad_words.apply_bad_words`,
    `StructuredOutputsWorker.apply_grammar_bitmask`, `prompt_logprob.compute_topk_scores`,
    `prompt_logprob.compute_token_logprobs`, `prompt_logprob.get_prompt_logprobs_token_ids`; all of
    vllm.v1.worker.gpu.
    Uses: `StagedWriteTensor._staged_write_indices`, `StagedWriteTensor._staged_write_starts`,
    `StagedWriteTensor._staged_write_contents`, `StagedWriteTensor._staged_write_cu_lens`,
    `BlockTables.block_tables`, `BlockTables.input_block_tables`, `BlockTables.block_sizes`,
    `BlockTables.slot_mappings`.
    Why: they are Triton kernels, and there is no Triton for CPUs on the index.
    Can go when: vLLM's V2 runner has forms of these kernels for CPUs.
    """
    for owner, name, form in forms():
        replace(owner, name, partial(_in_place, form))


def forms() -> tuple[tuple[Any, str, Callable[..., Any]], ...]:
    """Modules and classes of vLLM's, the functions in them that Triton computes, and our forms."""
    import vllm.v1.worker.cpu.shm  # noqa: F401  # as vLLM's CPU worker does, before all that is V2
    from vllm.v1.worker.gpu import block_table, buffer_utils, model_runner, structured_outputs
    from vllm.v1.worker.gpu.sample import (
        bad_words,
        logit_bias,
        penalties,
        prompt_logprob,
        sampler,
        states,
    )

    return (
        (buffer_utils.StagedWriteTensor, "apply_write", apply_write),
        (block_table.BlockTables, "gather_block_tables", gather_block_tables),
        (block_table.BlockTables, "compute_slot_mappings", compute_slot_mappings),
        (model_runner, "prepare_prefill_inputs", prepare_prefill_inputs),
        (model_runner, "prepare_pos_seq_lens", prepare_pos_seq_lens),
        (model_runner, "combine_sampled_and_draft_tokens", combine_sampled_and_draft_tokens),
        (model_runner, "post_update", post_update),
        (model_runner, "post_update_num_computed_tokens", post_update_num_computed_tokens),
        (sampler, "get_num_sampled_and_rejected", get_num_sampled_and_rejected),
        (sampler, "gumbel_sample", v2_sampling.gumbel_sample),
        (sampler, "compute_topk_scores", v2_sampling.compute_topk_scores),
        (states, "apply_temperature", v2_logits.apply_temperature),
        (states, "apply_min_p", v2_logits.apply_min_p),
        (penalties, "bincount", v2_logits.bincount),
        (penalties, "apply_penalties", v2_logits.apply_penalties),
        (logit_bias, "apply_logit_bias", v2_logits.apply_logit_bias),
        (bad_words, "apply_bad_words", v2_logits.apply_bad_words),
        (
            structured_outputs.StructuredOutputsWorker,
            "apply_grammar_bitmask",
            v2_logits.apply_grammar_bitmask,
        ),
        (prompt_logprob, "compute_topk_scores", v2_sampling.compute_topk_scores),
        (prompt_logprob, "compute_token_logprobs", v2_sampling.compute_token_logprobs),
        (
            prompt_logprob,
            "get_prompt_logprobs_token_ids",
            v2_sampling.get_prompt_logprobs_token_ids,
        ),
    )


def _in_place(form: Callable[..., Any], stock: object) -> Callable[..., Any]:
    return form


def apply_write(self: Any) -> None:
    """Write what the scheduler has changed into rows of a table, as `StagedWriteTensor` has it.

    Args:
        self: vLLM's table, one number or one row a request; its list of changes is emptied.

    """
    flat, row = self.gpu.numpy().reshape(-1), self.gpu.stride(0)
    contents, begin = self._staged_write_contents, 0
    for index, start, end in zip(
        self._staged_write_indices,
        self._staged_write_starts,
        self._staged_write_cu_lens,
        strict=True,
    ):
        first = index * row + start
        flat[first : first + end - begin] = contents[begin:end]
        begin = end
    self.clear_staged_writes()


def gather_block_tables(
    self: Any,
    idx_mapping: torch.Tensor,
    num_reqs_padded: int,
    out: tuple[torch.Tensor, ...] | None = None,
    out_ptrs: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """The numbers of the KV blocks of a step's requests, in their order.

    Args:
        self: vLLM's `BlockTables`.
        idx_mapping: [requests], indices.
        num_reqs_padded: rows that are wanted; those without a request become 0.
        out: [requests, blocks] for each group of layers; by default those that the model reads.
        out_ptrs: addresses of these, not used here.

    """
    requests = len(idx_mapping)
    tables = tuple(self.input_block_tables) if out is None else out
    for table, rows in zip(self.block_tables, tables, strict=True):
        torch.index_select(table.gpu, 0, idx_mapping, out=rows[:requests])
        rows[requests:num_reqs_padded].zero_()
    return tuple(rows[:num_reqs_padded] for rows in tables)


def compute_slot_mappings(
    self: Any,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    positions: torch.Tensor,
    num_tokens_padded: int,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """The places of a step's tokens in the KV cache.

    Args:
        self: vLLM's `BlockTables`.
        idx_mapping: [requests], indices; -1 of a request that has no blocks.
        query_start_loc: [requests + 1].
        positions: [tokens] of the tokens in their requests.
        num_tokens_padded: places that are wanted; those behind the tokens are vLLM's `PAD_SLOT_ID`.
        out: [groups of layers, most tokens of a step]; by default the table that the model reads.

    Returns:
        [groups of layers, tokens wanted].

    """
    from vllm.v1.attention.backends.utils import PAD_SLOT_ID

    slots = self.slot_mappings if out is None else out
    counts = _counts(idx_mapping, query_start_loc)
    owners = idx_mapping.numpy().repeat(counts)
    at = positions.numpy()[: len(owners)]
    for group, (table, size) in enumerate(zip(self.block_tables, self.block_sizes, strict=True)):
        row = slots[group].numpy()
        row[len(owners) :] = PAD_SLOT_ID
        if not self._slot_mapping_enabled[group]:
            row[: len(owners)] = PAD_SLOT_ID
            continue
        block, offset = np.divmod(at, size)
        row[: len(owners)] = table.gpu.numpy()[owners, block] * np.int64(size) + offset
        row[: len(owners)][owners < 0] = PAD_SLOT_ID
    return slots[:, :num_tokens_padded]


def prepare_prefill_inputs(
    input_ids: torch.Tensor,
    next_prefill_tokens: torch.Tensor,
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    all_token_ids: torch.Tensor,
    prefill_len: torch.Tensor,
    num_computed_tokens: torch.Tensor,
) -> None:
    """Put the tokens of prompts into a step's inputs.

    Args:
        input_ids: [most tokens of a step], is written.
        next_prefill_tokens: [tokens ahead, all requests], is written: those behind the step's.
        idx_mapping: [requests], indices.
        query_start_loc: [requests + 1].
        all_token_ids: [all requests, longest request].
        prefill_len: [all requests], tokens that requests have begun with.
        num_computed_tokens: [all requests].

    """
    starts, ahead = query_start_loc.numpy(), next_prefill_tokens.numpy()
    inputs, tokens = input_ids.numpy(), all_token_ids.numpy()
    for row, index in enumerate(idx_mapping.tolist()):
        begin, most = int(num_computed_tokens[index]), int(prefill_len[index])
        if begin >= most:
            continue
        first, last = starts[row], starts[row + 1]
        end = begin + last - first
        inputs[first:last] = tokens[index, begin:end]
        behind = tokens[index, end : min(end + len(ahead), most)]
        ahead[:, index] = 0
        ahead[: len(behind), index] = behind


def prepare_pos_seq_lens(
    idx_mapping: torch.Tensor,
    query_start_loc: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    pos: torch.Tensor,
    seq_lens: torch.Tensor,
) -> None:
    """Write the positions of a step's tokens, and how long its requests are with them.

    Args:
        idx_mapping: [requests], indices.
        query_start_loc: [requests + 1].
        num_computed_tokens: [all requests].
        pos: [most tokens of a step], is written.
        seq_lens: [most requests], is written; 0 behind the step's.

    """
    counts, starts = _counts(idx_mapping, query_start_loc), query_start_loc.numpy()
    computed = num_computed_tokens.numpy()[idx_mapping.numpy()]
    lengths = seq_lens.numpy()
    lengths[: len(counts)] = computed + counts
    lengths[len(counts) :] = 0
    first, last = starts[0], starts[len(counts)]
    before = (computed - starts[: len(counts)]).repeat(counts)
    pos.numpy()[first:last] = np.arange(first, last) + before


def combine_sampled_and_draft_tokens(
    input_ids: torch.Tensor,
    idx_mapping: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    prefill_len: torch.Tensor,
    draft_tokens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    num_logits: int,
    num_new_sampled_tokens: int = 1,
) -> torch.Tensor:
    """Put each decoding request's last token into a step's inputs.

    Args:
        input_ids: [most tokens of a step], is written.
        idx_mapping: [requests], indices.
        last_sampled_tokens: [all requests, 1].
        query_start_loc: [requests + 1].
        seq_lens: [most requests], with the step's tokens.
        prefill_len: [all requests].
        draft_tokens: [all requests, 0].
        cu_num_logits: [requests + 1], not used: every request has one row of logits.
        num_logits: requests.
        num_new_sampled_tokens: 1.

    Returns:
        [requests], the row of each request's last token, of which its logits are.

    """
    requests = len(idx_mapping)
    assert num_logits == requests, "one row of logits a request: drafts are refused"
    assert num_new_sampled_tokens == 1, "models that sample no token of their own are refused"
    last, indices = query_start_loc.numpy()[1 : requests + 1] - 1, idx_mapping.numpy()
    is_decoding = seq_lens.numpy()[:requests] > prefill_len.numpy()[indices]
    tokens = last_sampled_tokens.numpy()[indices[is_decoding], 0]
    input_ids.numpy()[last[is_decoding]] = tokens
    return torch.from_numpy(last.astype(np.int64))


def get_num_sampled_and_rejected(
    num_sampled: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_num_logits: torch.Tensor,
    idx_mapping: torch.Tensor,
    prefill_len: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of tokens of a step that are kept and dropped.

    Args:
        num_sampled: [requests], is written: 0 where the prompt goes on.
        seq_lens: [most requests], with the step's tokens.
        cu_num_logits: [requests + 1], where each request's rows of logits begin.
        idx_mapping: [requests], indices.
        prefill_len: [all requests].

    Returns:
        `num_sampled`, and [requests] of the rows of logits that gave no token.

    """
    is_chunk = seq_lens[: len(idx_mapping)] < prefill_len[idx_mapping]
    num_sampled.masked_fill_(is_chunk, 0)
    logits = cu_num_logits[1 : len(idx_mapping) + 1] - cu_num_logits[: len(idx_mapping)]
    return num_sampled, (logits - num_sampled).masked_fill_(is_chunk, 0).to(num_sampled.dtype)


def post_update(
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    last_sampled_tokens: torch.Tensor,
    output_bin_counts: torch.Tensor | None,
    sampled_tokens: torch.Tensor,
    num_sampled: torch.Tensor,
    num_rejected: torch.Tensor,
    query_start_loc: torch.Tensor | None,
    all_token_ids: torch.Tensor,
    total_len: torch.Tensor,
) -> None:
    """Bring the states of requests behind a step up to date.

    Args:
        idx_mapping: [requests], indices; -1 of one that is left out.
        num_computed_tokens: [all requests], is written.
        last_sampled_tokens: [all requests, 1], is written.
        output_bin_counts: [all requests, vocabulary], is written: how often each token was
            sampled; None on a rank that does not sample.
        sampled_tokens: [requests, 1].
        num_sampled: [requests], 1 where the token counts.
        num_rejected: [requests].
        query_start_loc: [requests + 1]; None where `num_computed_tokens` knows the step already.
        all_token_ids: [all requests, longest request], is written.
        total_len: [all requests], is written.

    """
    assert sampled_tokens.shape[1] == 1, "one token a request: drafts are refused"
    indices, kept = idx_mapping.numpy(), num_sampled.numpy() > 0
    is_meant = indices >= 0
    counts = np.zeros_like(indices)
    if query_start_loc is not None:
        counts = _counts(idx_mapping, query_start_loc)
    computed, totals = num_computed_tokens.numpy(), total_len.numpy()
    computed[indices[is_meant]] += (counts - num_rejected.numpy())[is_meant]
    given = is_meant & kept
    indices, tokens = indices[given], sampled_tokens.numpy()[given, 0]
    all_token_ids.numpy()[indices, totals[indices]] = tokens
    totals[indices] += 1
    last_sampled_tokens.numpy()[indices, 0] = tokens
    if output_bin_counts is not None:
        output_bin_counts.numpy()[indices, tokens] += 1


def post_update_num_computed_tokens(
    idx_mapping: torch.Tensor, num_computed_tokens: torch.Tensor, query_start_loc: torch.Tensor
) -> None:
    """Count a step's tokens as computed, on a stage that does not sample.

    Args:
        idx_mapping: [requests], indices.
        num_computed_tokens: [all requests], is written.
        query_start_loc: [requests + 1].

    """
    counts = _counts(idx_mapping, query_start_loc)
    num_computed_tokens.numpy()[idx_mapping.numpy()] += counts


def _counts(idx_mapping: torch.Tensor, query_start_loc: torch.Tensor) -> Any:
    """Tokens of each of a step's requests."""
    return np.diff(query_start_loc.numpy()[: len(idx_mapping) + 1])

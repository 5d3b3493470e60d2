"""Changes of requests' logits in vLLM's V2 model runner, in the place of its Triton kernels.

One row of logits is of one request, whose row in the runner's states is its index.  Rows are
changed in place.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch


def apply_temperature(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, temperature: torch.Tensor
) -> None:
    """Divide rows of logits by the temperature of their requests.

    Args:
        logits: [rows, vocabulary].
        expanded_idx_mapping: [rows], indices.
        temperature: [all requests]; 0 leaves a row as it is.

    """
    by = temperature[expanded_idx_mapping]
    logits.div_(torch.where(by == 0, 1, by).unsqueeze(1))


def apply_min_p(
    logits: torch.Tensor, expanded_idx_mapping: torch.Tensor, min_p: torch.Tensor
) -> None:
    """Leave out tokens that are less likely than a share of the likeliest one.

    Args:
        logits: [rows, vocabulary].
        expanded_idx_mapping: [rows], indices.
        min_p: [all requests], the share; 0 leaves none out.

    """
    least = logits.amax(dim=-1, keepdim=True) + min_p[expanded_idx_mapping].log().unsqueeze(1)
    logits.masked_fill_(logits < least, -torch.inf)


def bincount(
    expanded_idx_mapping: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    prefill_len: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
    max_prefill_len: int,
) -> None:
    """Count the tokens of requests that have begun, for their penalties.

    Args:
        expanded_idx_mapping: [requests], indices.
        all_token_ids: [all requests, longest request].
        prompt_len: [all requests].
        prefill_len: [all requests], with tokens that were sampled before the request was preempted.
        prompt_bin_mask: [all requests, words of 32 bits], is written: a bit for each token of the
            vocabulary that is in the prompt.
        output_bin_counts: [all requests, vocabulary], is written: how often each was sampled.
        max_prefill_len: not used.

    """
    for index in expanded_idx_mapping.tolist():
        prompt, whole = int(prompt_len[index]), int(prefill_len[index])
        tokens = all_token_ids[index].numpy()
        words = prompt_bin_mask[index].numpy().view(np.uint32)
        words[:] = 0
        bits = np.uint32(1) << (tokens[:prompt] % 32).astype(np.uint32)
        np.bitwise_or.at(words, tokens[:prompt] // 32, bits)
        counts = output_bin_counts[index].numpy()
        counts[:] = 0
        np.add.at(counts, tokens[prompt:whole], 1)


def apply_penalties(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    token_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    repetition_penalty: torch.Tensor,
    frequency_penalty: torch.Tensor,
    presence_penalty: torch.Tensor,
    prompt_bin_mask: torch.Tensor,
    output_bin_counts: torch.Tensor,
) -> None:
    """Make tokens that are there already less likely.

    Args:
        logits: [rows, vocabulary], 32 bits.
        expanded_idx_mapping: [rows], indices.
        token_ids: not used, as the next: it is for drafts.
        expanded_local_pos: [rows].
        repetition_penalty: [all requests]; 1 is none.
        frequency_penalty: [all requests]; 0 is none.
        presence_penalty: [all requests]; 0 is none.
        prompt_bin_mask: [all requests, words], as `bincount` writes it.
        output_bin_counts: [all requests, vocabulary].

    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        repeated, often, there = (
            float(one[index]) for one in (repetition_penalty, frequency_penalty, presence_penalty)
        )
        counts, own = output_bin_counts[index], logits[row]
        is_sampled = counts > 0
        if repeated != 1:
            in_prompt = _bits(prompt_bin_mask[index], len(own))
            # A number of 32 bits, as the kernel has it.
            scale = torch.where(in_prompt | is_sampled, repetition_penalty[index], 1)
            own *= torch.where(own > 0, 1 / scale, scale)
        if often:
            own -= frequency_penalty[index] * counts
        if there:
            own -= presence_penalty[index] * is_sampled


def apply_logit_bias(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    pos: torch.Tensor,
    num_allowed_token_ids: torch.Tensor,
    allowed_token_ids: torch.Tensor,
    num_logit_bias: torch.Tensor,
    logit_bias_token_ids: torch.Tensor,
    logit_bias: torch.Tensor,
    min_lens: torch.Tensor,
    num_stop_token_ids: torch.Tensor,
    restore_when_all_masked: torch.Tensor,
    stop_token_ids: torch.Tensor,
    check_all_masked_rows: bool = False,
) -> None:
    """Leave out tokens that are not allowed, add biases, and let no request stop too early.

    Args:
        logits: [rows, vocabulary].
        expanded_idx_mapping: [rows], indices.
        pos: [rows], positions of the tokens before those that are sampled.
        num_allowed_token_ids: [all requests]; 0 allows all.
        allowed_token_ids: [all requests, most of them].
        num_logit_bias: [all requests].
        logit_bias_token_ids: [all requests, most of them].
        logit_bias: the same, what is added to the logits of these tokens.
        min_lens: [all requests], tokens before which a request does not stop.
        num_stop_token_ids: [all requests].
        restore_when_all_masked: [all requests], whether a request may stop where no other token is
            left.
        stop_token_ids: [all requests, most of them].
        check_all_masked_rows: whether `restore_when_all_masked` counts.

    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        own = logits[row]
        allowed = allowed_token_ids[index, : num_allowed_token_ids[index]].long()
        if len(allowed):
            kept = own[allowed]
            own.fill_(-torch.inf)
            own[allowed] = kept
        biased = logit_bias_token_ids[index, : num_logit_bias[index]].long()
        own[biased] += logit_bias[index, : len(biased)].to(own.dtype)
        stops = stop_token_ids[index, : num_stop_token_ids[index]].long()
        if not len(stops) or pos[row] + 1 >= min_lens[index]:
            continue
        before = own[stops]
        own[stops] = -torch.inf
        may_stop = check_all_masked_rows and bool(restore_when_all_masked[index])
        if may_stop and own.max() == -torch.inf:
            own[stops] = torch.where(before.isfinite(), before, -torch.inf)


def apply_bad_words(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    bad_word_token_ids: torch.Tensor,
    bad_word_offsets: torch.Tensor,
    num_bad_words: torch.Tensor,
    all_token_ids: torch.Tensor,
    prompt_len: torch.Tensor,
    total_len: torch.Tensor,
    input_ids: torch.Tensor,
    expanded_local_pos: torch.Tensor,
    max_num_bad_words: int,
) -> None:
    """Leave out the last token of a forbidden word whose others have just been sampled.

    Args:
        logits: [rows, vocabulary].
        expanded_idx_mapping: [rows], indices.
        bad_word_token_ids: [all requests, tokens of all words of a request].
        bad_word_offsets: [all requests, words + 1], where each word begins.
        num_bad_words: [all requests].
        all_token_ids: [all requests, longest request].
        prompt_len: [all requests].
        total_len: [all requests].
        input_ids: not used, as the next two: it is for drafts.
        expanded_local_pos: [rows].
        max_num_bad_words: most words of one request.

    """
    for row, index in enumerate(expanded_idx_mapping.tolist()):
        sampled = all_token_ids[index, prompt_len[index] : total_len[index]].tolist()
        given = bad_word_token_ids[index].tolist()
        offsets = bad_word_offsets[index, : num_bad_words[index] + 1].tolist()
        for begin, end in pairwise(offsets):
            *before, last = given[begin:end]
            if sampled[len(sampled) - len(before) :] == before and len(before) <= len(sampled):
                logits[row, last] = -torch.inf


def apply_grammar_bitmask(
    self: Any,
    logits: torch.Tensor,
    input_batch: Any,
    grammar_req_ids: Sequence[str],
    grammar_bitmask: np.ndarray[Any, Any],
) -> None:
    """Leave out the tokens that the grammars of requests do not allow.

    Args:
        self: vLLM's `StructuredOutputsWorker`.
        logits: [requests, vocabulary].
        input_batch: vLLM's `InputBatch` of the step.
        grammar_req_ids: requests with a grammar.
        grammar_bitmask: [these, words of 32 bits], a bit for each token that is allowed.

    """
    rows = {request: row for row, request in enumerate(input_batch.req_ids)}
    for request, words in zip(grammar_req_ids, grammar_bitmask, strict=True):
        own = logits[rows[request]]
        own.masked_fill_(~_bits(torch.from_numpy(words.copy()), len(own)), -torch.inf)


def _bits(words: torch.Tensor, count: int) -> torch.Tensor:
    """The first bits of words of 32, the lowest of each word first."""
    found = np.unpackbits(words.numpy().view(np.uint8), count=count, bitorder="little")
    return torch.from_numpy(found).bool()

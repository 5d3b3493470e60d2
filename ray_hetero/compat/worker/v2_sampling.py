"""Sampling of vLLM's V2 model runner, in PyTorch and NumPy in the place of its Triton kernels.

Random tokens are those of vLLM's kernel: noise of a token is a hash (MurmurHash3) of the request's
seed, the position and the token, so that a seed gives the tokens that it gives on a GPU, up to
rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_SERIES = 0.25
"""Uniform numbers below it are near enough to 0 for a series of log(1 - u)."""
TERMS = 8


def gumbel_sample(
    logits: torch.Tensor,
    expanded_idx_mapping: torch.Tensor,
    temperature: torch.Tensor,
    seed: torch.Tensor,
    pos: torch.Tensor,
    apply_temperature: bool,
    is_drafting: bool,
    logits_cache: torch.Tensor | None = None,
    logits_cache_col: torch.Tensor | None = None,
    use_fp64: bool = False,
    logits_cache_source: torch.Tensor | None = None,
) -> torch.Tensor:
    """The token that each row of logits gives: the likeliest, or a random one.

    Args:
        logits: [rows, vocabulary].
        expanded_idx_mapping: [rows], indices of the requests.
        temperature: [all requests]; 0 takes the likeliest token.
        seed: [all requests].
        pos: [rows], the position of the row's token.
        apply_temperature: whether logits are still to be divided by it; False.
        is_drafting: False.
        logits_cache: None, as all that drafts would need.
        logits_cache_col: None.
        use_fp64: False; `--use-fp64-gumbel` is refused.
        logits_cache_source: None.

    Returns:
        [rows], int64.

    """
    assert True not in (apply_temperature, is_drafting, use_fp64), "drafts are refused"
    assert logits_cache is logits_cache_col is logits_cache_source is None, "drafts are refused"
    # The operator that V1 takes too; torch's own is slow in bfloat16.
    likeliest: torch.Tensor = torch.ops._C.greedy_argmax(logits.float())
    indices = expanded_idx_mapping.tolist()
    for row in (temperature[expanded_idx_mapping] != 0).nonzero().flatten().tolist():
        own = logits[row].float().numpy()
        # Top-k and top-p leave few.
        (tokens,) = (own > -np.inf).nonzero()
        noise = gumbel_noise(int(seed[indices[row]]), int(pos[row]), tokens)
        if len(tokens):
            likeliest[row] = int(tokens[(own[tokens] + noise).argmax()])
    return likeliest


def gumbel_noise(seed: int, position: int, tokens: NDArray[Any]) -> NDArray[np.float32]:
    """Noise of each of some tokens, which makes the likeliest token a random one.

    Args:
        seed: of the request, 64 bits.
        position: of the row's token in its request.
        tokens: their numbers in the vocabulary.

    """
    words = (seed, seed >> 32, position)
    prefix = np.zeros(1, np.uint32)
    for word in words:
        prefix = _mixed(prefix, np.array([word & 0xFFFFFFFF], np.uint32))
    hashed = _finished(_mixed(prefix, tokens.astype(np.uint32)) ^ np.uint32(16))
    # Halves of 16 bits are exact in 32-bit floats: the smallest numbers keep all of their bits.
    high, low = (hashed >> np.uint32(16)).astype(np.float32), hashed & np.uint32(0xFFFF)
    uniform = high * np.float32(2**-16) + (low.astype(np.float32) + np.float32(0.5)) * np.float32(
        2**-32
    )
    noise: NDArray[np.float32] = -np.log(-_log_of_rest(uniform))
    return noise


def _rotated(value: NDArray[np.uint32], bits: int) -> NDArray[np.uint32]:
    return (value << np.uint32(bits)) | (value >> np.uint32(32 - bits))


def _mixed(state: NDArray[np.uint32], word: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """MurmurHash3 of one more word of 32 bits."""
    word = _rotated(word * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
    return _rotated(state ^ word, 13) * np.uint32(5) + np.uint32(0xE6546B64)


def _finished(state: NDArray[np.uint32]) -> NDArray[np.uint32]:
    state = (state ^ (state >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    state = (state ^ (state >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return state ^ (state >> np.uint32(16))


def _log_of_rest(uniform: NDArray[np.float32]) -> NDArray[np.float32]:
    """log(1 - u) in 32 bits, as vLLM's kernel has it."""
    series = np.zeros_like(uniform)
    for term in range(TERMS, 0, -1):
        series = np.float32(1 / term) + uniform * series
    direct = np.log(np.maximum(np.float32(1) - uniform, np.float32(2**-24)))
    return np.where(uniform < np.float32(MOST_SERIES), -uniform * series, direct)


def compute_topk_scores(
    logits: torch.Tensor,
    num_logprobs: int,
    sampled_token_ids: torch.Tensor,
    cu_num_logits: Any = None,
    logprob_token_ids_state: Any = None,
    expanded_idx_mapping: torch.Tensor | None = None,
    max_per_req_token_ids: int = 0,
    logits_mode: bool = False,
) -> Any:
    """Logprobs of sampled tokens, and of the likeliest ones or of those that requests name.

    Args:
        logits: [rows, vocabulary].
        num_logprobs: number of likeliest tokens.
        sampled_token_ids: [rows].
        cu_num_logits: where each request's rows begin; None where each has one.
        logprob_token_ids_state: vLLM's, with the tokens that requests name.
        expanded_idx_mapping: [rows], indices of the requests; None where no request names tokens.
        max_per_req_token_ids: most tokens that one names.
        logits_mode: whether logits themselves are wanted.

    Returns:
        vLLM's `LogprobsTensors`: the sampled token first, with its rank.

    """
    from vllm.v1.outputs import LogprobsTensors

    own = sampled_token_ids.long().unsqueeze(1)
    columns = max(num_logprobs, max_per_req_token_ids)
    tokens = torch.cat((own, own.new_zeros(len(own), columns)), dim=1)
    tokens[:, 1 : num_logprobs + 1] = logits.topk(num_logprobs, dim=-1).indices
    is_asked = torch.arange(columns + 1).expand_as(tokens) <= num_logprobs
    if max_per_req_token_ids and expanded_idx_mapping is not None:
        is_asked = is_asked.clone()
        for row, index in enumerate(expanded_idx_mapping.tolist()):
            named = int(logprob_token_ids_state.num_token_ids.np[index])
            if named:
                tokens[row, 1:] = 0
                tokens[row, 1 : named + 1] = logprob_token_ids_state.token_ids.gpu[index, :named]
                is_asked[row] = torch.arange(columns + 1) <= named
    if logits_mode:
        scores = logits.gather(1, tokens).float()
    else:
        scores = compute_token_logprobs(logits, tokens)
    is_tensor = isinstance(cu_num_logits, torch.Tensor)
    return LogprobsTensors(
        logprob_token_ids=tokens,
        logprobs=scores.masked_fill(~is_asked, -torch.inf),
        selected_token_ranks=(logits >= logits.gather(1, own)).sum(dim=-1),
        cu_num_generated_tokens=None if is_tensor else cu_num_logits,
        cu_num_generated_tokens_tensor=cu_num_logits if is_tensor else None,
    )


def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Logprobs of some tokens.

    Args:
        logits: [rows, vocabulary].
        token_ids: [rows, tokens].

    Returns:
        [rows, tokens], 32 bits.

    """
    found = logits.gather(1, token_ids.long()).float()
    return found - logits.float().logsumexp(dim=-1, keepdim=True)


def get_prompt_logprobs_token_ids(
    num_tokens: int,
    query_start_loc: torch.Tensor,
    idx_mapping: torch.Tensor,
    num_computed_tokens: torch.Tensor,
    all_token_ids: torch.Tensor,
) -> torch.Tensor:
    """The token behind each of a step's tokens, for logprobs of prompts.

    Args:
        num_tokens: of the step.
        query_start_loc: [requests + 1].
        idx_mapping: [requests], indices.
        num_computed_tokens: [all requests].
        all_token_ids: [all requests, longest request].

    Returns:
        [tokens]; 0 behind the last token of the longest request.

    """
    found, starts = torch.zeros(num_tokens, dtype=torch.int64), query_start_loc.tolist()
    for row, index in enumerate(idx_mapping.tolist()):
        first = int(num_computed_tokens[index]) + 1
        behind = all_token_ids[index, first : first + starts[row + 1] - starts[row]]
        found[starts[row] : starts[row] + len(behind)] = behind
    return found

"""Forward passes of a model: how many tokens they have, and what these look at."""

from __future__ import annotations

from dataclasses import dataclass

from placement.model.tensors import KvCache


@dataclass(frozen=True)
class Pass:
    """One forward pass."""

    tokens: int
    """Tokens that pass, all sequences together."""
    sequences: int
    context: int
    """Tokens that a query looks at."""
    outputs: int
    """Tokens that the output matrix is multiplied with."""
    cached: int = 0
    """Tokens of each sequence that passes before have computed."""

    @property
    def is_prompt(self) -> bool:
        """Whether most of its tokens are read only."""
        return self.tokens > self.outputs

    @property
    def drafts(self) -> int:
        """Drafts of each sequence."""
        return self.outputs // self.sequences - 1

    def pairs(self, kv: KvCache) -> int:
        """(query, key) pairs of attention."""
        return self.tokens * kv.seen(self.context)


def decode_pass(batch: int, context: int, drafts: int = 0) -> Pass:
    """One token, and drafts to verify, for each of `batch` sequences of `context` tokens."""
    tokens = batch * (1 + drafts)
    return Pass(tokens, batch, context, tokens)


def prefill_pass(tokens: int, cached: int = 0) -> Pass:
    """One prompt in one pass; a token of it looks at half of them on average.

    Args:
        tokens: of the pass.
        cached: of the prompt, computed in passes before, which all of them look at.

    """
    return Pass(tokens, 1, cached + max(1, tokens // 2), 1, cached)


def prefill_passes(tokens: int, chunk: int) -> tuple[tuple[int, Pass], ...]:
    """One prompt in passes of at most `chunk` tokens: how often each kind of pass.

    All whole chunks are priced as their mean.
    """
    number, rest = divmod(tokens, chunk)
    whole = (number, prefill_pass(chunk, (number - 1) * chunk // 2)) if number else None
    last = (1, prefill_pass(rest, number * chunk)) if rest else None
    return tuple(one for one in (whole, last) if one is not None)


def prompts_passes(prompts: int, tokens: int, chunk: int) -> tuple[tuple[int, Pass], ...]:
    """Prompts that arrive at once, each of so many tokens: how often each kind of pass.

    As many whole prompts as a pass has room for are in one; longer ones come one after another.
    """
    together = min(prompts, chunk // tokens)
    if together < 2:
        return tuple((prompts * times, run) for times, run in prefill_passes(tokens, chunk))
    number, rest = divmod(prompts, together)
    passes = ((number, together), (1, rest))
    return tuple(
        (times, Pass(some * tokens, some, max(1, tokens // 2), some))
        for times, some in passes
        if some
    )

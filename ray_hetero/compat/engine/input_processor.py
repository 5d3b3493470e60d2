"""vLLM's input processor: prompts that no rank can compute are refused before they are requests."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

from ray_hetero.compat.patching import replace

if TYPE_CHECKING:
    import torch


def refuse_prompts_that_end_ranks() -> None:
    """In the user's process: refuse tokens and embeddings with which a rank would end.

    Replaces: `InputProcessor._validate_model_input`.
    Uses: `InputProcessor.model_config`.
    Why: without a tokenizer, vLLM compares no token of a prompt with the vocabulary, and with one
    it takes the larger of both vocabularies; embeddings that a program hands in are not looked at.
    A rank ends with such a prompt, and with it the engine and the requests of all others.
    Can go when: `_validate_model_input` compares prompts with the model's own sizes.
    """
    from vllm.exceptions import VLLMValidationError
    from vllm.v1.engine.input_processor import InputProcessor

    def make(stock: Any) -> Any:
        @wraps(stock)
        def validate(self: InputProcessor, prompt_input: Any, prompt_type: Any) -> None:
            stock(self, prompt_input, prompt_type)
            if prompt_type != "decoder":
                return  # an encoder may have another vocabulary
            model = self.model_config
            tokens = prompt_input.get("prompt_token_ids") or ()
            problem = None
            if prompt_input["type"] == "embeds":
                embeddings = prompt_input["prompt_embeds"]
                problem = problem_of_embeddings(embeddings, model.get_hidden_size())
                are_tokens = prompt_input.get("is_token_ids") or ()
                tokens = [
                    token for token, is_one in zip(tokens, are_tokens, strict=False) if is_one
                ]
            # A token that stands for a part of an image is looked up in no embedding.
            is_plain = prompt_input["type"] != "multimodal" and not model.is_multimodal_model
            problem = problem or problem_of_tokens(
                tokens, model.get_vocab_size() if is_plain else None
            )
            if problem is not None:
                raise VLLMValidationError(problem)

        return validate

    replace(InputProcessor, "_validate_model_input", make)


def problem_of_tokens(tokens: Sequence[int], vocabulary: int | None) -> str | None:
    """Why no rank can look up a prompt's tokens; None if ranks can.

    Args:
        tokens: of the prompt.
        vocabulary: number of tokens that the model knows; None where the prompt may have others.

    """
    if not tokens:
        return None
    least, most = min(tokens), max(tokens)
    if least >= 0 and (vocabulary is None or most < vocabulary):
        return None
    wrong = least if least < 0 else most
    known = "from 0 on" if vocabulary is None else f"from 0 to {vocabulary - 1}"
    return f"Token id {wrong} is out of vocabulary: this model's tokens are {known}."


def problem_of_embeddings(embeddings: torch.Tensor, hidden: int) -> str | None:
    """Why no rank can compute a prompt's embeddings; None if ranks can.

    Args:
        embeddings: of the prompt.
        hidden: size of a token in the model.

    """
    shape = tuple(embeddings.shape)
    if len(shape) != 2 or shape[1] != hidden:
        return f"prompt_embeds: expected a tensor [tokens, {hidden}] for this model, got {shape}."
    if not embeddings.is_floating_point():
        return f"prompt_embeds: expected floating-point numbers, got {embeddings.dtype}."
    wrong = int((~embeddings.isfinite()).sum())
    if wrong:
        return f"prompt_embeds: {wrong} of {embeddings.numel()} numbers are NaN or infinite."
    return None

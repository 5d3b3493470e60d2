"""vLLM's V2 model runner on CPU ranks: the check for Triton, and tokens of earlier stages."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch

from ray_hetero.compat.patching import original, replace
from ray_hetero.supported import installed_vllm, is_since

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def other_release() -> str | None:
    """The installed release of vLLM, if its V2 runner calls what stands for its kernels in another
    way; None if it does not.
    """
    return installed_vllm() if is_since("0.33") else None


def run_without_triton(is_ours: Callable[[VllmConfig], bool]) -> None:
    """Let a configuration have the V2 model runner where there is no Triton.

    Replaces: `VllmConfig._validate_v2_model_runner`.
    Uses: `VllmConfig._get_v2_model_runner_unsupported_features`.
    Why: it refuses the runner without Triton, whose kernels `v2_kernels` takes the place of.
    Can go when: vLLM's V2 runner has forms of its kernels for CPUs.

    Args:
        is_ours: whether a configuration is of an engine whose ranks have these kernels; others are
            checked as before.

    """
    from vllm.config import VllmConfig

    features = original(VllmConfig, "_get_v2_model_runner_unsupported_features")

    def make(stock: Any) -> Any:
        @wraps(stock)
        def validate(self: VllmConfig) -> None:
            if not is_ours(self):
                stock(self)
            elif unsupported := features(self):
                raise ValueError(f"Model Runner V2 does not support: {', '.join(unsupported)}")

        return validate

    replace(VllmConfig, "_validate_v2_model_runner", make)


def take_tokens_from_driver() -> None:
    """In the process of a CPU rank: let earlier stages of a pipeline take tokens from the driver.

    Replaces: `PPHandler` in `vllm.v1.worker.gpu.model_runner`.
    Uses: `PPHandler.get_prev_sampled_outputs`, `PPHandler.receive`, `PPHandler.broadcast`,
    `PPHandler.broadcast_drafts`, `PPHandler.on_req_idx_freed`, `PPHandler.relay_aux_hidden_states`,
    `PPHandler.configure_aux_hidden_state_relay`.
    Why: PPHandler broadcasts the tokens of a step from the last stage on a CUDA stream, over a
    second communicator of NCCL.  The driver's scheduler knows them before it schedules the next
    step of their requests, and tells them with it, as it does with the V1 runner.
    Can go when: PPHandler has a form for CPUs.
    """
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.pp_utils import PPHandler

    for name in vars(DriverTokens):
        if not name.startswith("_") and name not in ("attach", "begin_step"):
            original(PPHandler, name)
    replace(model_runner, "PPHandler", lambda stock: DriverTokens)


class DriverTokens:
    """Tokens that requests of a step begin with, on a stage before the last one.

    Args:
        max_num_reqs: not used, as all three; vLLM's runner makes it.
        num_speculative_steps: 0, drafts are refused.
        device: CPU.

    """

    def __init__(self, max_num_reqs: int, num_speculative_steps: int, device: torch.device) -> None:
        assert num_speculative_steps == 0, "drafts are refused"
        self._states: Any = None
        self._found: dict[int, int] = {}
        """Tokens of the step that begins, by the index of their request."""

    def attach(self, runner: Any) -> None:
        """Learn whose tokens these are.

        Uses: `GPUModelRunner.req_states`, `RequestState.req_id_to_index`,
        `RequestState.prefill_len`.
        """
        self._states = original(runner, "req_states")

    def begin_step(self, scheduler_output: Any) -> None:
        """Take the tokens of a step from what the driver says of it.

        Args:
            scheduler_output: vLLM's `SchedulerOutput`.

        """
        states, cached = self._states, scheduler_output.scheduled_cached_reqs
        prompts = states.prefill_len.np
        for request, computed, tokens in zip(
            cached.req_ids, cached.num_computed_tokens, cached.new_token_ids, strict=True
        ):
            index = states.req_id_to_index[request]
            # Tokens of a prompt that goes on are there from its beginning.
            if computed >= prompts[index]:
                (self._found[index],) = tokens

    def get_prev_sampled_outputs(
        self, draft_tokens_to_update: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor] | None:
        """Tokens to bring states up to date with; None if no request of the step decodes."""
        found, self._found = self._found, {}
        if not found:
            return None
        ones = torch.ones(len(found), dtype=torch.int32)
        return {
            "sampled_tokens": torch.tensor(list(found.values())).unsqueeze(1),
            "num_sampled": ones,
            "num_rejected": torch.zeros_like(ones),
            "idx_mapping": torch.tensor(list(found)),
        }

    def receive(self, input_batch: Any) -> bool:
        """Wait for nothing; whether all requests of the step get a token is not known here."""
        return False

    def broadcast(
        self, sampled_token_ids: torch.Tensor, num_sampled: torch.Tensor,
        num_rejected: torch.Tensor, input_batch: Any,
    ) -> None:  # fmt: skip
        """Send nothing: the rank's answer to the driver has the tokens."""

    def broadcast_drafts(self, draft_tokens: torch.Tensor, input_batch: Any) -> None:
        """Send nothing: there are no drafts."""

    def on_req_idx_freed(self, req_idx: int) -> None:
        """Forget nothing: tokens come with the step that they are of."""

    def relay_aux_hidden_states(self, intermediate_tensors: Any, output: Any) -> Any:
        """Hand a stage's output on as it is: no drafter reads from between its layers."""
        return output

    def configure_aux_hidden_state_relay(self, model: torch.nn.Module) -> None:
        """Do nothing, for the same reason."""

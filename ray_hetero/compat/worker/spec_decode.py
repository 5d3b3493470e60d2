"""vLLM's V1 model runner with speculative decoding: what is left to each stage of a pipeline.

Drafts are made, and verified, on the last stage.  vLLM's V1 runner makes the drafter there, and
asks for it everywhere.
"""

from __future__ import annotations

import copy
import functools
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from ray_hetero.compat.patching import original, replace
from ray_hetero.compat.worker.layer_partition import without_partition
from ray_hetero.errors import UnsupportedError


class OneStage:
    """A pipeline group of this rank alone, for models that no pipeline divides."""

    world_size = 1
    rank_in_group = 0
    is_first_rank = True
    is_last_rank = True


@contextmanager
def _one_stage() -> Iterator[None]:
    """Show vLLM a pipeline of one stage, and no division of its layers."""
    from vllm.distributed import parallel_state

    pipeline = original(parallel_state, "_PP")
    parallel_state._PP = OneStage()
    try:
        with without_partition():
            yield
    finally:
        parallel_state._PP = pipeline


def keep_drafter_whole() -> None:
    """In a process of the last stage: load and run the whole draft model there.

    Replaces: `SpecDecodeBaseProposer._get_model`, `SpecDecodeBaseProposer.propose`,
    `SpecDecodeBaseProposer.dummy_run`, `SpecDecodeBaseProposer._create_draft_vllm_config`,
    `SpecDecodeBaseProposer._maybe_share_embeddings`, `DraftModelProposer._get_model`.
    Why: SpecDecodeBaseProposer builds draft models, and EAGLE heads, of vLLM's ordinary parts.
    These ask for the pipeline group, take the target's division of layers for their own, expect
    the hidden states of an earlier stage, and number their layers behind those of this stage only.
    Can go when: the V1 runner's drafters build their models with a pipeline size of 1.
    """
    from vllm.v1.spec_decode.draft_model import DraftModelProposer
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Drafter

    for name in ("_get_model", "propose", "dummy_run"):
        replace(Drafter, name, _in_one_stage)
    replace(DraftModelProposer, "_get_model", _in_one_stage)
    replace(Drafter, "_create_draft_vllm_config", _of_one_stage)
    replace(Drafter, "_maybe_share_embeddings", _where_they_are)


def _in_one_stage(stock: Any) -> Any:
    @functools.wraps(stock)
    def run_in_one_stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _one_stage():
            return stock(self, *args, **kwargs)

    return run_in_one_stage


def _of_one_stage(configure: Any) -> Any:
    @functools.wraps(configure)
    def configure_one_stage(self: Any) -> Any:
        config = copy.copy(configure(self))
        config.parallel_config = copy.copy(config.parallel_config)
        config.parallel_config.pipeline_parallel_size = 1
        return config

    return configure_one_stage


def _where_they_are(share: Any) -> Any:
    @functools.wraps(share)
    def share_what_is_here(self: Any, target: Any) -> None:
        # In a pipeline the target's embedding is on the last stage for some methods only.
        here = getattr(getattr(target, "model", None), "embed_tokens", None)
        if not isinstance(getattr(here, "weight", None), torch.Tensor):
            share(self, target)
            return
        with _one_stage():
            share(self, target)

    return share_what_is_here


def draft_model(runner: Any) -> torch.nn.Module | None:
    """The model that drafts, its weights loaded; None for heads, n-grams, and without a drafter.

    Uses: `GPUModelRunner.drafter`, `SpecDecodeBaseProposer.model`.
    """
    from vllm.v1.spec_decode.draft_model import DraftModelProposer

    drafter = getattr(runner, "drafter", None)
    return drafter.model if isinstance(drafter, DraftModelProposer) else None


def keep_own_output_matrix() -> None:
    """On a CPU rank: let a drafter that has an output matrix of its own keep it.

    Replaces: `SpecDecodeBaseProposer._maybe_share_lm_head`.
    Why: SpecDecodeBaseProposer compares it with the target's, and takes the target's if they are
    equal.  What is packed for multiplication leaves an empty tensor behind, and empty tensors are
    all equal.
    Can go when: packed weights are compared, or not compared.
    """
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Drafter

    def make(share: Any) -> Any:
        @functools.wraps(share)
        def share_unless_packed(self: Any, target: Any) -> None:
            own = getattr(getattr(self.model, "lm_head", None), "weight", None)
            has_own = getattr(self.model, "has_own_lm_head", False)
            if not (has_own and isinstance(own, torch.Tensor) and own.numel() == 0):
                share(self, target)

        return share_unless_packed

    replace(Drafter, "_maybe_share_lm_head", make)


def expand_to_drafts() -> None:
    """On a CPU rank: give a request's drafts its temperature, top-k and top-p.

    Replaces: `rejection_sampler.expand_batch_to_tokens`.
    Why: the kernel that does it on CPUs (cpu_triton_utils._expand_kernel_impl) writes into a copy
    of its output, in integers.  What the sampler reads then is whatever the memory held: drafts are
    accepted, and tokens drawn, at another temperature.
    Can go when: that kernel writes into what it is given.
    """
    from vllm.v1.sample import rejection_sampler

    replace(rejection_sampler, "expand_batch_to_tokens", lambda _stock: expanded)


def expanded(
    x: torch.Tensor, cu_num_tokens: torch.Tensor, num_tokens: int,
    replace_from: int = 0, replace_to: int = 0,
) -> torch.Tensor:  # fmt: skip
    """One value a token, of its request; as `rejection_sampler.expand_batch_to_tokens`.

    Args:
        x: [requests].
        cu_num_tokens: [requests], tokens of each and of all before it.
        num_tokens: of all requests.
        replace_from: a value that none is to have.
        replace_to: what stands in its place.

    """
    tokens = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1).long())
    of_tokens = x.repeat_interleave(tokens, output_size=num_tokens)
    if replace_from == replace_to:
        return of_tokens
    return of_tokens.masked_fill(of_tokens == replace_from, replace_to)


def share_drafts() -> None:
    """In a process of a mixed group: let tensor-parallel rank 0 decide what the drafter drafts.

    Replaces: `SpecDecodeBaseProposer._sample_draft_tokens`.
    Why: every rank samples its drafts for itself (SpecDecodeBaseProposer._sample_draft_tokens) and
    drafts on from them; GPU and CPU differ in random numbers and in which of two equals is largest.
    Can go when: vLLM broadcasts draft tokens inside a tensor-parallel group.
    """
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer as Drafter

    def make(sample: Any) -> Any:
        @functools.wraps(sample)
        def sample_and_share(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
            tokens, probabilities = sample(self, *args, **kwargs)
            return get_tp_group().broadcast(tokens), probabilities

        return sample_and_share

    replace(Drafter, "_sample_draft_tokens", make)


def leave_drafts_to_last_stage(runner: Any) -> None:
    """On a rank of an earlier stage, its weights being loaded: neither draft nor verify.

    Replaces: `speculative_config` of the model runner, on earlier stages.
    Why: GPUModelRunner makes a drafter on the last stage only, and asks for it wherever there is a
    speculative configuration: in _dummy_run, _build_attention_metadata and initialize_attn_backend.
    How many tokens a request has in a step it keeps in fields of their own, which stay.
    Can go when: the V1 runner asks for the drafter on the last stage only.
    """
    original(runner, "speculative_config")
    runner.speculative_config = None
    learn_accepted_tokens(runner)
    embed_places_of_drafts(runner)


def embed_places_of_drafts(runner: Any) -> None:
    """On a rank of an earlier stage: take any token where drafts have places only.

    Replaces: `GPUModelRunner._preprocess`, on earlier stages.
    Why: the scheduler sends -1 for drafts that there are none of, as of a prompt whose last token
    alone is left to compute, and GPUModelRunner._preprocess makes 0 of it only where there is a
    speculative configuration.  What is computed there is refused by the last stage.
    Can go when: `leave_drafts_to_last_stage` can.
    """

    def make(preprocess: Any) -> Any:
        def preprocess_tokens(scheduler_output: Any, num_input_tokens: int, *args: Any) -> Any:
            original(runner, "input_ids").gpu[:num_input_tokens].clamp_(min=0)
            return preprocess(scheduler_output, num_input_tokens, *args)

        return preprocess_tokens

    replace(runner, "_preprocess", make)


def learn_accepted_tokens(runner: Any) -> None:
    """On a rank of an earlier stage: know the tokens of its requests, accepted drafts too.

    Replaces: `GPUModelRunner._update_states`, on earlier stages.
    Why: Scheduler._make_cached_request_data sends an earlier stage the tokens that a step is to
    compute, and GPUModelRunner._update_states takes whatever is missing from their end.  With
    speculation a step leaves several tokens behind, of which the next one computes the last; the
    others were drafts, which this rank has.  Without them it computes wrong tokens for a request
    that is left out of a step, or preempted, and comes back.
    Can go when: the scheduler sends all tokens that a step has left behind.
    """

    def make(update: Any) -> Any:
        def update_with_accepted(scheduler_output: Any) -> Any:
            _add_accepted(runner, scheduler_output.scheduled_cached_reqs)
            return update(scheduler_output)

        return update_with_accepted

    replace(runner, "_update_states", make)


def _add_accepted(runner: Any, cached: Any) -> None:
    batch = runner.input_batch
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        request = runner.requests[request_id]
        known = request.num_tokens
        if known >= computed:
            continue
        # The scheduler sends all tokens of requests that were not in the step before.
        if request_id in cached.all_token_ids:
            accepted = cached.all_token_ids[request_id][known:computed]
        else:
            row = batch.req_id_to_index[request_id]
            accepted = batch.token_ids_cpu[row, known:computed].tolist()
            batch.is_token_ids[row, known:computed] = True
            batch.num_tokens_no_spec[row] = computed
        request.output_token_ids.extend(accepted)


def pass_hidden_states_on(runner: Any, layers: Sequence[int]) -> None:
    """On a rank of a pipeline, its weights being loaded: reserve places in what stages exchange for
    the hidden states between layers that an EAGLE-3 drafter reads, and fill them.

    Replaces: `make_empty_intermediate_tensors` of the model, and
    `GPUModelRunner._model_forward`.
    Why: LlamaModel adds those of its own layers to the IntermediateTensors and expects all on the
    last stage, but make_empty_intermediate_tensors leaves them out, and stages in between do not
    hand on what they receive.
    Can go when: the V1 runner reserves them.

    Args:
        runner: vLLM's.
        layers: of each stage.

    Raises:
        UnsupportedError: the model's class adds none.

    """
    from vllm.distributed.parallel_state import get_pp_group

    model = runner.model
    inner = getattr(model, "model", model)
    if not getattr(inner, "supports_aux_hidden_states_over_pp", False):
        raise UnsupportedError(
            f"--speculative-config with the method eagle3 does not work with a pipeline here: "
            f"{type(model).__name__} does not pass the hidden states of its layers on to the next "
            "stage in this vLLM. Use a layout of one stage, or the method eagle."
        )
    wanted = runner._get_eagle3_aux_layers_from_config()
    wanted = wanted or original(model, "get_eagle3_default_aux_hidden_state_layers")()
    model.set_aux_hidden_state_layers(wanted)
    crossing = bisect_right(sorted(set(wanted)), sum(layers[:-1]))
    names = [f"{original(inner, 'AUX_HIDDEN_STATE_KEY')}{place}" for place in range(crossing)]

    def make_empty_with_places(make_empty: Any) -> Any:
        def make_and_add_places(*args: Any, **kwargs: Any) -> Any:
            made = make_empty(*args, **kwargs)
            made.tensors |= {name: torch.zeros_like(made["hidden_states"]) for name in names}
            return made

        return make_and_add_places

    def pass_on(forward: Any) -> Any:
        def forward_and_pass_on(*args: Any, **kwargs: Any) -> Any:
            made = forward(*args, **kwargs)
            received = kwargs.get("intermediate_tensors")
            for name in names:
                if name not in made.tensors:
                    # The first stage has received none: any tensor keeps the place of a later
                    # layer's.
                    made.tensors[name] = (
                        made["hidden_states"] if received is None else received[name]
                    )
            return made

        return forward_and_pass_on

    replace(model, "make_empty_intermediate_tensors", make_empty_with_places)
    if not get_pp_group().is_last_rank:
        replace(runner, "_model_forward", pass_on)

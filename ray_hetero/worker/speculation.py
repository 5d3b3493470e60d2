"""Speculative decoding in a rank, by its stage and the kinds in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from ray_hetero.compat.engine.draft_methods import reads_layers
from ray_hetero.compat.models import gated_delta, mamba2
from ray_hetero.compat.worker import aligned_states, spec_decode

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from placement.cluster.assignment import Seat
    from ray_hetero.world import World


@dataclass(frozen=True)
class Speculation:
    """The part of one rank: drafts are made and verified on the last stage, by all of its ranks."""

    world: World
    seat: Seat
    has_own_model: bool
    """Whether drafts come from a model, an EAGLE head among them; else from the tokens so far."""
    reads_layers: bool
    """Whether the drafter reads hidden states from between the target's layers (EAGLE-3)."""

    @classmethod
    def of(cls, vllm_config: VllmConfig, world: World, seat: Seat) -> Speculation | None:
        """None without speculation, and in worlds of vLLM's own, whose runner knows what to do."""
        config = vllm_config.speculative_config
        if config is None or world.is_stock:
            return None
        return cls(world, seat, config.uses_draft_kv_cache(), reads_layers(config))

    @property
    def _is_last(self) -> bool:
        return self.seat.stage == len(self.world.layout.stages) - 1

    @property
    def _is_pipeline(self) -> bool:
        return len(self.world.layout.stages) > 1

    def before_loading(self) -> None:
        """Prepare this process, before vLLM makes its model runner."""
        if current_platform.is_cpu():
            gated_delta.verify_few_drafts()
            mamba2.verify_drafts()
            aligned_states.copy_states_without_triton()
        if self._is_last and self.seat.kind == "cpu":
            spec_decode.expand_to_drafts()
        if not (self._is_last and self.has_own_model):
            return
        # In a single stage too: the layers of the target are not those of the drafter.
        spec_decode.keep_drafter_whole()
        if self.seat.kind == "cpu":
            spec_decode.keep_own_output_matrix()
        if self.world.layout.is_mixed(self.seat.stage):
            spec_decode.share_drafts()

    def loaded(self, runner: Any) -> None:
        """Finish the model runner, whose weights are loaded."""
        if not self._is_pipeline:
            return
        if self.reads_layers:
            spec_decode.pass_hidden_states_on(runner, self.world.layers)
        if not self._is_last:
            spec_decode.leave_drafts_to_last_stage(runner)


def models_of(vllm_config: VllmConfig) -> list[ModelConfig]:
    """The model that is served, and the one that drafts for it, if there is one."""
    speculative = vllm_config.speculative_config
    models = [vllm_config.model_config]
    if speculative is not None and speculative.uses_draft_kv_cache():
        models.append(speculative.draft_model_config)
    return models


def rows_to_verified(scheduler_output: Any) -> int:
    """Distance between two rows of a step that are no drafts; 0 where it differs.

    Rows of a request are neighbours, its drafts behind its token; the order of requests is the
    runner's, so that only requests of equally many rows have their drafts in known places.
    """
    drafts = scheduler_output.scheduled_spec_decode_tokens
    if not drafts:
        return 1
    counts = scheduler_output.num_scheduled_tokens
    rows = {count - len(drafts.get(request, ())) for request, count in counts.items()}
    distances = set(counts.values())
    return distances.pop() if rows == {1} and len(distances) == 1 else 0

"""A stage whose model leaves a tensor unread that the stage before sends is refused."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from torch import nn  # noqa: E402
from vllm.config import VllmConfig  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.forward_context import get_forward_context, set_forward_context  # noqa: E402
from vllm.sequence import IntermediateTensors  # noqa: E402

from ray_hetero.compat.worker.received_tensors import NotedTensors, unread_names  # noqa: E402
from ray_hetero.errors import UnsupportedError  # noqa: E402
from ray_hetero.worker import warmup_actions  # noqa: E402

NAMES = ("hidden_states", "per_layer_inputs", "residual")


def noted() -> NotedTensors:
    """Tensors of four tokens."""
    return NotedTensors({name: torch.ones(4, 2) for name in NAMES})


@pytest.mark.parametrize(
    ("read", "unread"),
    [
        (lambda given: given["residual"], ("hidden_states", "per_layer_inputs")),
        (lambda given: given.tensors["residual"], ("hidden_states", "per_layer_inputs")),
        (lambda given: given.tensors.get("residual"), ("hidden_states", "per_layer_inputs")),
        (lambda given: given.tensors.pop("residual"), ("hidden_states", "per_layer_inputs")),
        (lambda given: given[1:3]["residual"], ("hidden_states", "per_layer_inputs")),
        (lambda given: [*given.items()], ()),
        (lambda given: [*given.tensors.values()], ()),
        (lambda given: {**given.tensors}, ()),
        (lambda given: dict(given.tensors), ()),
        (lambda given: given[:2], NAMES),
        (lambda given: ["residual" in given.tensors, len(given), [*given.tensors]], NAMES),
        (lambda given: given.tensors.get("position"), NAMES),
    ],
)
def test_whoever_takes_a_tensor_has_read_it(
    read: Callable[[NotedTensors], Any], unread: tuple[str, ...]
) -> None:
    given = noted()
    read(given)
    assert given.unread == unread


def test_rows_of_noted_tensors_are_the_rows() -> None:
    rows = noted()[1:3]
    assert isinstance(rows, IntermediateTensors)
    assert {name: tuple(tensor.shape) for name, tensor in rows.items()} == dict.fromkeys(
        NAMES, (2, 2)
    )


class Layers(nn.Module):
    """A model that reads these of what it is given, and no others."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.names = names
        self.passes: list[bool] = []

    def forward(
        self, input_ids: Any, positions: Any, intermediate_tensors: Any, inputs_embeds: Any = None
    ) -> Any:
        self.passes.append(get_forward_context().skip_compiled)
        return sum(intermediate_tensors[name] for name in self.names)


class Runner:
    """A rank's runner, as far as it makes a dummy pass."""

    speculative_config: Any = "drafts"
    vllm_config = SimpleNamespace(use_v2_model_runner=False)

    def __init__(self, model: nn.Module, names: tuple[str, ...] = NAMES) -> None:
        self.model, self.names = model, names

    def get_model(self) -> nn.Module:
        return self.model

    def _dummy_run(
        self, tokens: int, *, is_profile: bool, skip_eplb: bool, skip_attn: bool = False
    ) -> None:
        assert is_profile
        assert skip_attn == self.vllm_config.use_v2_model_runner
        assert skip_eplb
        assert self.speculative_config is None
        given = IntermediateTensors({name: torch.ones(tokens, 2) for name in self.names})
        with set_forward_context(None, VllmConfig(), num_tokens=tokens):
            self.model(
                input_ids=None, positions=None, intermediate_tensors=given, inputs_embeds=None
            )


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Make this process one of a stage of a pipeline."""

    def make(number: int, stages: int) -> None:
        group = SimpleNamespace(
            is_first_rank=number == 0, is_last_rank=number == stages - 1, boundary=object()
        )
        monkeypatch.setattr(parallel_state, "_PP", group)

    return make


def test_names_that_a_model_does_not_read_are_found_in_a_pass_that_is_not_compiled(
    stage: Callable[[int, int], None],
) -> None:
    stage(1, 2)
    model = Layers("hidden_states", "residual")
    runner = Runner(model)
    assert unread_names(runner) == ("per_layer_inputs",)
    assert (runner.model, runner.speculative_config) == (model, "drafts")
    assert model.passes == [True]
    assert unread_names(Runner(Layers(*NAMES))) == ()


def test_a_first_stage_makes_no_pass_for_it(stage: Callable[[int, int], None]) -> None:
    stage(0, 2)
    model = Layers()
    assert unread_names(Runner(model)) == ()
    assert model.passes == []


def test_the_model_is_the_runners_again_where_the_pass_fails(
    stage: Callable[[int, int], None],
) -> None:
    stage(1, 2)
    runner = Runner(Layers("absent"))
    model = runner.model
    with pytest.raises(KeyError, match="absent"):
        unread_names(runner)
    assert runner.model is model


def test_what_a_stage_in_between_hands_on_for_an_eagle_head_need_not_be_read(
    stage: Callable[[int, int], None],
) -> None:
    model = Layers("hidden_states")
    model.AUX_HIDDEN_STATE_KEY = "aux_hidden_states_"
    runner = Runner(model, ("hidden_states", "aux_hidden_states_0"))
    stage(1, 3)
    assert unread_names(runner) == ()
    stage(2, 3)
    assert unread_names(runner) == ("aux_hidden_states_0",)


def test_the_refusal_names_model_tensor_and_rank(stage: Callable[[int, int], None]) -> None:
    stage(1, 2)
    worker = SimpleNamespace(model_runner=Runner(Layers("hidden_states", "residual")))
    context = warmup_actions.RankContext(1, "cpu", None, 1)
    with pytest.raises(
        UnsupportedError,
        match=r"^Layers does not read per_layer_inputs behind a stage boundary: the stage before "
        r"sends that to cpu rank 1, .* Write a layout of one stage\.$",
    ):
        warmup_actions.check_what_is_read(worker, context)


def test_stages_of_gpus_alone_are_left_to_vllm(
    stage: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage(1, 2)
    monkeypatch.setattr(parallel_state.get_pp_group(), "boundary", None)
    model = Layers("hidden_states")
    context = warmup_actions.RankContext(1, "gpu", None, 1)
    warmup_actions.check_what_is_read(SimpleNamespace(model_runner=Runner(model)), context)
    assert model.passes == []


def test_the_v2_runner_makes_the_pass_without_attention(
    stage: Callable[[int, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Runner, "vllm_config", SimpleNamespace(use_v2_model_runner=True))
    stage(1, 2)
    assert unread_names(Runner(Layers(*NAMES))) == ()

"""Options that do not work are refused by name, each with its reason and what to do instead."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from placement.cluster.layout import Kind, Layout
from ray_hetero.cli.demo.model import DemoShape, write_demo_model
from ray_hetero.compat.worker import v2_runner
from ray_hetero.compat.worker.late_tokens import schedule_ahead
from ray_hetero.config import HeteroConfig
from ray_hetero.errors import ConfigError, UnsupportedError
from ray_hetero.preflight import unsupported_drafters
from ray_hetero.preflight.refusal import refuse_first
from ray_hetero.preflight.refusals import (
    ALWAYS,
    DRAFTING_OF_CPU_RANKS,
    ENGINES_OF_CPU_RANKS,
    REFUSALS,
    SCHEDULING_OF_CPU_RANKS,
    WITH_CPU_RANKS,
    WITH_EXPERT_RANKS,
    WITH_RESTARTS,
    refuse_unsupported,
)
from ray_hetero.preflight.refused_models import (
    DRAFTED_MODELS,
    MODELS_OF_CPU_GROUPS,
    MODELS_OF_CPU_RANKS,
    MODELS_OF_EXPERT_RANKS,
    refuse_drafts,
)
from ray_hetero.preflight.unsupported_drafters import METHODS, Drafting
from ray_hetero.preflight.unsupported_runner import RANKS_OF_V2_RUNNER, WITH_V2_RUNNER, RunBy
from ray_hetero.preflight.unsupported_scheduling import Scheduling, obstacle

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from write_compatibility_page import PAGE, written

IN_EVERY_WORLD: dict[str, dict[str, Any]] = {
    "--nnodes": {"nnodes": 2},
    "--device-ids": {"device_ids": [0]},
    "--numa-bind": {"numa_bind": True},
    "--prefill-context-parallel-size": {"prefill_context_parallel_size": 2},
}
BESIDE_CPU_RANKS: dict[str, dict[str, Any]] = {
    "--speculative-config with the method {found}": {"speculative_config": {"method": "medusa"}},
    "--speculative-config without the package {found}": {
        "speculative_config": {"method": "suffix"}
    },
    "--enable-sleep-mode": {"enable_sleep_mode": True},
    "--decode-context-parallel-size": {"decode_context_parallel_size": 2},
    "--kv-transfer-config": {"kv_transfer_config": {"kv_connector": "x", "kv_role": "kv_both"}},
    "--kv-offloading-size": {"kv_offloading_size": 4.0},
    "VLLM_USE_V2_MODEL_RUNNER=1": {},
    "--watermark-config": {"watermark_config": {"x": 1}},
    "--enable-trace-replay": {"enable_trace_replay": True},
    "--return-sampling-mask": {"return_sampling_mask": True},
    "--enable-return-routed-experts": {"enable_return_routed_experts": True},
    "--enable-batch-sharded-sampling": {"enable_batch_sharded_sampling": True},
    "--enable-expert-parallel": {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    "--enable-eplb": {"enable_eplb": True},
    "--enable-dbo": {"enable_dbo": True},
}


def _asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str) -> Any:
    """vLLM's arguments with one option that is refused."""
    variable, _, value = option.partition("=")
    if value:
        monkeypatch.setenv(variable, value)
    # As where none of the packages is installed.
    monkeypatch.setattr(unsupported_drafters, "find_spec", lambda package: None)
    args = EngineArgs(model=str(tmp_path))
    for name, given in (IN_EVERY_WORLD | BESIDE_CPU_RANKS)[option].items():
        # vLLM turns some values into objects of its own, which are beside the point.
        assert hasattr(args, name)
        setattr(args, name, given)
    return args


def test_every_refusal_is_tested() -> None:
    assert {refusal.option for refusal in ALWAYS} == set(IN_EVERY_WORLD)
    assert {refusal.option for refusal in WITH_CPU_RANKS} == set(BESIDE_CPU_RANKS)


def test_every_row_is_in_one_table() -> None:
    tables = (
        ALWAYS, WITH_CPU_RANKS, WITH_RESTARTS, MODELS_OF_CPU_RANKS, ENGINES_OF_CPU_RANKS,
        DRAFTING_OF_CPU_RANKS, SCHEDULING_OF_CPU_RANKS, MODELS_OF_CPU_GROUPS,
        WITH_EXPERT_RANKS, MODELS_OF_EXPERT_RANKS, DRAFTED_MODELS, WITH_V2_RUNNER,
        RANKS_OF_V2_RUNNER,
    )  # fmt: skip
    options = [refusal.option for rows in REFUSALS.values() for refusal in rows]
    assert sorted(options) == sorted(refusal.option for table in tables for refusal in table)
    assert len(set(options)) == len(options)


@pytest.mark.parametrize("option", [*IN_EVERY_WORLD, *BESIDE_CPU_RANKS])
def test_it_is_named_with_a_reason_and_a_remedy(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _asked(tmp_path, monkeypatch, option)
    found = "arctic-inference" if "package" in option else "medusa"
    named = re.escape(option.format(found=found))
    said = rf"{named} does not work with ray_hetero: [^.]+\. (Leave it out|Unset it)"
    with pytest.raises(UnsupportedError, match=said):
        refuse_unsupported(args, HeteroConfig(), is_stock=False)


BESIDE_EXPERT_RANKS: dict[str, Any] = {
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
    "enable_eplb": True,
    "enable_dbo": True,
    "enable_lora": True,
    "enable_sleep_mode": True,
}


@pytest.mark.parametrize("name", BESIDE_EXPERT_RANKS)
def test_what_expert_ranks_cannot_do_is_refused_beside_them_only(name: str, tmp_path: Path) -> None:
    assert len(BESIDE_EXPERT_RANKS) == len(WITH_EXPERT_RANKS)
    args = EngineArgs(model=str(tmp_path))
    setattr(args, name, BESIDE_EXPERT_RANKS[name])
    gpus = {"layout": [["gpu"]]}
    refuse_unsupported(args, HeteroConfig.model_validate(gpus), is_stock=True)
    config = HeteroConfig.model_validate(gpus | {"experts": {"ranks": 2}})
    option = "--" + name.replace("_", "-")
    with pytest.raises(UnsupportedError, match=rf"experts.ranks beside {option}.* does not work"):
        refuse_unsupported(args, config, is_stock=True)


BESIDE_V2_RUNNER: dict[str, Any] = {
    "speculative_config": {"method": "ngram"},
    "enable_lora": True,
    "enable_prompt_embeds": True,
    "logits_processors": ["some.Processor"],
    "reasoning_parser": "qwen3",
    "use_fp64_gumbel": True,
    "kv_sharing_fast_prefill": True,
    "data_parallel_size": 2,
}


@pytest.mark.parametrize("name", BESIDE_V2_RUNNER)
def test_what_the_v2_runner_has_not_yet_is_refused_beside_it_only(
    name: str, tmp_path: Path
) -> None:
    assert len(BESIDE_V2_RUNNER) == len(WITH_V2_RUNNER)
    args = EngineArgs(model=str(tmp_path))
    setattr(args, name, BESIDE_V2_RUNNER[name])
    cpus = {"layout": [["cpu"]]}
    refuse_unsupported(args, HeteroConfig.model_validate(cpus), is_stock=False)
    config = HeteroConfig.model_validate(cpus | {"cpu": {"model_runner": "v2"}})
    option = "--" + name.replace("_", "-")
    said = rf"cpu.model_runner v2 beside {option}.* does not work"
    with pytest.raises(UnsupportedError, match=said):
        refuse_unsupported(args, config, is_stock=False)


def test_the_v2_runner_is_for_cpu_ranks_and_dense_models(tmp_path: Path) -> None:
    model = _vllm_config(tmp_path).model_config
    stages = Layout((("cpu",), ("cpu", "cpu")))
    refuse_first(RANKS_OF_V2_RUNNER, RunBy(model, stages))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(v2_runner, "is_since", lambda minor: minor == "0.33")
        with pytest.raises(UnsupportedError, match=r"v2 with vLLM 0\..* Take vLLM 0\.32"):
            refuse_first(RANKS_OF_V2_RUNNER, RunBy(model, stages))
    for run, found in (
        (RunBy(model, Layout((("gpu", "cpu"),))), "with GPU ranks"),
        (RunBy(model, stages, experts=2), "with expert ranks"),
        (RunBy(_vllm_config(tmp_path / "pooling", runner="pooling").model_config, stages),
         "for a model with --runner pooling"),
    ):  # fmt: skip
        said = rf"cpu.model_runner v2 {found} does not work .* Leave cpu.model_runner out"
        with pytest.raises(UnsupportedError, match=said):
            refuse_first(RANKS_OF_V2_RUNNER, run)


@pytest.mark.parametrize(
    "name",
    [
        "is_multimodal_model", "is_encoder_decoder", "is_diffusion", "is_hybrid",
        "is_attention_free", "use_mla", "is_moe",
    ],
)  # fmt: skip
def test_other_models_are_refused_by_what_they_have(name: str, tmp_path: Path) -> None:
    model = _vllm_config(tmp_path).model_config
    assert getattr(model, name) is False
    kind = type(model)
    with pytest.MonkeyPatch.context() as patched:
        # Some are remembered.
        vars(model).pop(name, None)
        patched.setattr(kind, name, True)
        with pytest.raises(UnsupportedError, match="only dense decoders of text were run"):
            refuse_first(RANKS_OF_V2_RUNNER, RunBy(model, Layout((("cpu",),))))


@pytest.mark.parametrize(
    ("names", "is_refused"),
    [
        (None, True),
        (["experts"], True),
        (["q_proj", "model.layers.3.mlp.experts"], True),
        (["q_proj", "shared_experts"], False),
        (["q_proj", "k_proj", "v_proj", "o_proj"], False),
    ],
)
def test_adapters_of_other_layers_are_no_matter_of_expert_ranks(
    names: list[str] | None, is_refused: bool, tmp_path: Path
) -> None:
    args = EngineArgs(model=str(tmp_path), enable_lora=True, lora_target_modules=names)
    config = HeteroConfig.model_validate({"layout": [["gpu"]], "experts": {"ranks": 2}})
    if not is_refused:
        refuse_unsupported(args, config, is_stock=True)
        return
    with pytest.raises(UnsupportedError, match=r"Name the layers .*--lora-target-modules q_proj"):
        refuse_unsupported(args, config, is_stock=True)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"experts": {"ranks": 2}}, 'Write a layout of GPUs, for example "layout": [["gpu"]]'),
        ({"experts": {"ranks": 0, "layers": 2}}, "there are none; give experts.ranks too"),
    ],
)
def test_expert_ranks_stand_beside_gpus(keys: Any, said: str, tmp_path: Path) -> None:
    config = HeteroConfig.model_validate(keys)
    with pytest.raises(ConfigError, match=re.escape(said)):
        refuse_unsupported(EngineArgs(model=str(tmp_path)), config, is_stock=False)


@pytest.mark.parametrize("method", [*METHODS, "deepseek_mtp"])
def test_drafts_that_work_are_not_refused(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unsupported_drafters, "find_spec", lambda package: package)
    args = EngineArgs(model=str(tmp_path), speculative_config={"method": method})
    refuse_unsupported(args, HeteroConfig(), is_stock=False)


def _vllm_config(tmp_path: Path, **arguments: Any) -> Any:
    """The driver's configuration of a small model."""
    model = write_demo_model(tmp_path / "model", shape=DemoShape(layers=2, hidden=64, heads=2))
    return EngineArgs(model=str(model), max_model_len=128, **arguments).create_engine_config()


def _drafting(
    tmp_path: Path,
    stages: tuple[Kind, ...] = ("gpu", "cpu"),
    in_flight: Any = "auto",
    **changes: Any,
) -> Drafting:
    drafts = {"method": "ngram", "num_speculative_tokens": 2}
    config = _vllm_config(tmp_path, speculative_config=drafts)
    for name, value in changes.items():
        setattr(config.speculative_config, name, value)
    hetero = HeteroConfig.model_validate({"pipeline": {"batches_in_flight": in_flight}})
    return Drafting(config, hetero, Layout(tuple((kind,) for kind in stages)))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"method": "dflash"}, "a drafter of the kind dflash does not work"),
        ({"parallel_drafting": True}, "with parallel_drafting does not work"),
        ({"in_flight": 2}, r"batches_in_flight 2 does not work .* Set it to 1"),
        ({"rejection_sample_method": "synthetic"}, "synthetic, and CPU ranks in the last stage"),
    ],
)
def test_drafting_that_does_not_work_is_refused_with_its_reason(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=said):
        refuse_first(DRAFTING_OF_CPU_RANKS, _drafting(tmp_path, **changes))


def test_drafting_that_works_is_not(tmp_path: Path) -> None:
    refuse_first(DRAFTING_OF_CPU_RANKS, _drafting(tmp_path, in_flight=1))


@pytest.mark.parametrize("stages", [(("cpu",), ("cpu",)), (("cpu",), ("gpu",))], ids=str)
def test_pipelines_verify_no_drafts_behind_states(stages: tuple[tuple[Kind, ...], ...]) -> None:
    with pytest.raises(UnsupportedError, match=r"recurrent states .* Write a layout of one stage"):
        refuse_drafts(Layout(stages), has_states=True)
    refuse_drafts(Layout(stages), has_states=False)


@pytest.mark.parametrize("stage", [("cpu",), ("cpu", "cpu"), ("gpu", "cpu")], ids=str)
def test_single_stages_verify_drafts_behind_states(stage: tuple[Kind, ...]) -> None:
    refuse_drafts(Layout((stage,)), has_states=True)
    with pytest.raises(UnsupportedError, match=r"draft_model .* Take the method ngram"):
        refuse_drafts(Layout((stage,)), has_states=True, has_draft_model=True)
    refuse_drafts(Layout((stage,)), has_states=False, has_draft_model=True)


def test_acceptance_is_made_up_where_gpus_sample(tmp_path: Path) -> None:
    made_up = {"rejection_sample_method": "synthetic"}
    refuse_first(DRAFTING_OF_CPU_RANKS, _drafting(tmp_path, stages=("cpu", "gpu"), **made_up))


def _scheduling(tmp_path: Path, asked: bool | None, **changes: Any) -> Scheduling:
    stages = changes.pop("stages", (("cpu",), ("gpu",)))
    config = HeteroConfig.model_validate(changes.pop("config", {}))
    return Scheduling(_vllm_config(tmp_path, **changes), config, Layout(stages), asked)


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"stages": (("cpu", "cpu"),)}, "a layout of one stage"),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
            "--speculative-config",
        ),
        ({"runner": "pooling"}, "--runner pooling"),
        ({"scheduler_cls": "vllm.v1.core.sched.scheduler.Scheduler"}, "--scheduler-cls"),
        ({"config": {"pipeline": {"batches_in_flight": 2}}}, "pipeline.batches_in_flight 2"),
        ({"config": {"objective": "throughput"}}, "objective throughput"),
        ({"config": {"cpu": {"model_runner": "v2"}}}, "cpu.model_runner v2"),
    ],
)
def test_steps_are_not_scheduled_ahead_where_that_cannot_work(
    changes: dict[str, Any], found: str, tmp_path: Path
) -> None:
    said = f"--async-scheduling with {found} does not work with ray_hetero: "
    asked = _scheduling(tmp_path, True, **changes)
    with pytest.raises(UnsupportedError, match=said):
        refuse_first(SCHEDULING_OF_CPU_RANKS, asked)
    # Where nobody asks for it, it is only left out.
    refuse_first(SCHEDULING_OF_CPU_RANKS, replace(asked, is_asked=None))
    assert obstacle(asked) == found


def test_steps_of_a_pipeline_are_scheduled_ahead(tmp_path: Path) -> None:
    scheduling = _scheduling(tmp_path, True, config={"pipeline": {"batches_in_flight": 1}})
    refuse_first(SCHEDULING_OF_CPU_RANKS, scheduling)
    assert obstacle(scheduling) is None
    vllm_config = scheduling.vllm_config
    schedule_ahead(vllm_config)
    assert vllm_config.scheduler_config.get_scheduler_cls() is AsyncScheduler
    # Its own class is no obstacle, and vLLM checks the configuration again at the end of a start.
    assert obstacle(scheduling) is None
    vllm_config.parallel_config.pipeline_parallel_size = 2
    vllm_config._validate_v1_model_runner()
    vllm_config.scheduler_config.async_scheduling = True
    with pytest.raises(ValueError, match="pipeline parallelism with async scheduling"):
        vllm_config._validate_v1_model_runner()


@pytest.mark.parametrize("option", BESIDE_CPU_RANKS)
def test_without_cpu_ranks_it_is_for_vllm_to_say(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _asked(tmp_path, monkeypatch, option)
    layout = [["gpu"] * args.tensor_parallel_size]
    refuse_unsupported(args, HeteroConfig(layout=layout), is_stock=True)


@pytest.mark.parametrize("option", ["--kv-transfer-config", "--kv-offloading-size"])
def test_connectors_of_gpus_are_not_refused_beside_expert_ranks(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = _asked(tmp_path, monkeypatch, option)
    config = HeteroConfig.model_validate({"layout": [["gpu"]], "experts": {"ranks": 2}})
    refuse_unsupported(args, config, is_stock=True)


@pytest.mark.parametrize("is_stock", [True, False])
def test_what_vllm_does_by_default_is_not_refused(*, is_stock: bool, tmp_path: Path) -> None:
    refuse_unsupported(EngineArgs(model=str(tmp_path)), HeteroConfig(), is_stock=is_stock)


def test_restarts_need_an_engine_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, args = HeteroConfig(max_restarts=2), EngineArgs(model=str(tmp_path))
    refuse_unsupported(args, config, is_stock=False)
    args.data_parallel_size = 2
    refuse_unsupported(args, HeteroConfig(), is_stock=False)
    said = r"^max_restarts beside --data-parallel-size 2 does not work .* step together\. Leave one"
    with pytest.raises(UnsupportedError, match=said):
        refuse_unsupported(args, config, is_stock=False)
    args.data_parallel_size = 1
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    with pytest.raises(UnsupportedError, match=r"MULTIPROCESSING=0 .* of its own\. Unset"):
        refuse_unsupported(args, config, is_stock=False)


def test_the_page_shows_the_tables() -> None:
    text = PAGE.read_text(encoding="utf-8")
    assert written(text) == text, "type: python tools/write_compatibility_page.py"


def test_a_page_without_its_marks_is_not_written() -> None:
    with pytest.raises(ValueError, match="expected the lines"):
        written("# Compatibility\n")

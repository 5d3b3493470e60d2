"""`ray-hetero plan`: what an engine would do with a model, without starting anything."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import typer

from placement.errors import LayoutError, PlacementError
from placement.given import numbers, shown
from placement.model.config import DTYPE_BYTES
from placement.model.reading import UnknownModelError, read_config, shape_from_config
from placement.model.shape import ModelShape
from placement.plan.described import read_described
from placement.plan.drafts import Acceptance, Drafter
from placement.plan.picture import plan_svg
from placement.plan.plan import Plan
from ray_hetero.cli import plan_output
from ray_hetero.cli.plan_options import MOST_TOKENS, PlanOptions, with_options
from ray_hetero.cli.problems import print_problem, write_picture
from ray_hetero.cli.serve_command import serve_command, speculative_option
from ray_hetero.compat.models.fused_architectures import family_of
from ray_hetero.config import HeteroConfig, load_config
from ray_hetero.errors import RayHeteroError
from ray_hetero.planning import machine as machines
from ray_hetero.planning.activation_dtype import dtype_of_config
from ray_hetero.planning.drafters import drafter_of
from ray_hetero.planning.engine_facts import (
    DEFAULT_GPU_SHARE,
    EngineOptions,
    facts_of_checkpoint,
)
from ray_hetero.planning.hub_config import hub_config
from ray_hetero.planning.machine import Machine
from ray_hetero.planning.model_plan import ModelPlan, plan_model
from ray_hetero.planning.plan_request import PlanRequest
from ray_hetero.planning.quantise_first import quantised_forms
from ray_hetero.planning.sizes.hub_headers import hub_model
from ray_hetero.planning.sizes.model_sizes import sizes_of, with_caches
from ray_hetero.preflight.node_software import lacking_kernels
from ray_hetero.preflight.unsupported_checkpoints import CheckpointOnCpus

CLUSTER_TIMEOUT_S = 60.0
AUTO = "auto"
LENGTH_UNITS = {
    "": 1, "k": 1000, "K": 1 << 10, "m": 10**6, "M": 1 << 20, "g": 10**9, "G": 1 << 30
}  # fmt: skip
"""Letters behind a number of tokens, as vLLM reads them."""
MOST_DRAFTED = 64
"""Drafts of a request in a step."""


@with_options
def plan(options: PlanOptions) -> None:
    """Show ranks, layers, budgets and the predicted step of a model, as the engine plans it."""
    try:
        settings = _settings(options)
        config = load_config({"ray_hetero": settings})
        found = _planned(options, config)
        if options.svg is not None:
            write_picture(options.svg, plan_svg(found.plan))
    except (PlacementError, RayHeteroError) as error:
        print_problem(error)
        raise typer.Exit(1) from None
    command = serve_command(options.model, _served_with(options, config, found.plan), settings)
    plan = replace(found.plan, family=family_of(found.plan.shape.model_type))
    shown = found.choice if options.compare else None
    if options.as_json:
        typer.echo(plan_output.as_json(plan, shown, command))
    else:
        plan_output.print_plan(plan, shown, command)


def _planned(options: PlanOptions, config: HeteroConfig) -> ModelPlan:
    _check_dtypes(options)
    if options.topology and options.cluster:
        raise LayoutError("--topology and --cluster: expected one of them, got both")
    path = hub_config(options.model)
    content = read_config(path)
    computed, kv_dtype = dtype_of_config(content, options.dtype), options.kv_cache_dtype
    folder = path if path.is_dir() else None
    hub = None if path == Path(options.model).expanduser() else hub_model(options.model)
    shape = sizes_of(content, folder, dtype=computed, kv_dtype=kv_dtype, hub=hub)
    if options.language_model_only:
        shape = shape.without_encoders()
    drafter, acceptance = _drafter(options.speculative, options.draft_model, shape)
    config.experts.check_limits(
        max_num_batched_tokens=options.max_num_batched_tokens, max_num_seqs=options.max_num_seqs
    )
    checkpoint = CheckpointOnCpus.of_config(content, config.cpu.linear_kernel)
    if not (options.topology or options.cluster):
        checkpoint = replace(checkpoint, lacks_kernels=lacking_kernels())
    with _machine(options.topology, config, cluster=options.cluster) as machine:
        facts = facts_of_checkpoint(
            content,
            shape,
            machine.nodes,
            EngineOptions(
                computed,
                _longest(options.max_model_len),
                options.max_num_seqs,
                config.experts.prefill_step_tokens or options.max_num_batched_tokens,
                options.gpu_memory_utilization,
            ),
            drafter=drafter,
        )
        context = config.workload.context
        if options.context is not None and context != "auto" and context > facts.max_model_len:
            raise LayoutError(
                f"--context: a sequence has at most {facts.max_model_len:,} tokens "
                f"(--max-model-len), got {context:,}"
            )
        stages = options.pipeline_parallel_size or _stages_of(config)
        return plan_model(
            _name(options.model),
            PlanRequest(
                config, machine, facts, stages, options.tensor_parallel_size, checkpoint=checkpoint
            ),
            acceptance=acceptance,
            quantised=quantised_forms(content, computed, kv_dtype),
            in_8_bits=None if kv_dtype != "auto" else _in_8_bits(shape, path, computed),
            is_length_auto=options.max_model_len == AUTO,
        )


def _served_with(options: PlanOptions, config: HeteroConfig, plan: Plan) -> dict[str, object]:
    """vLLM's options for the model as planned, with None for those that are left to vLLM."""
    speculative = options.speculative
    return {
        # Given layers are stages, too, but vLLM has to be told.
        "--pipeline-parallel-size": options.pipeline_parallel_size
        or _unless(1, _stages_of(config)),
        "--tensor-parallel-size": _unless(1, options.tensor_parallel_size),
        "--max-model-len": options.max_model_len,
        "--max-num-seqs": options.max_num_seqs,
        "--max-num-batched-tokens": options.max_num_batched_tokens,
        "--gpu-memory-utilization": _unless(DEFAULT_GPU_SHARE, options.gpu_memory_utilization),
        "--dtype": _unless("auto", options.dtype),
        "--kv-cache-dtype": _unless("auto", options.kv_cache_dtype),
        "--language-model-only": options.language_model_only or None,
        "--speculative-config": speculative
        and speculative_option(int(speculative.partition(",")[0]), options.draft_model),
    }


def _unless(default: object, value: object) -> object:
    return None if value == default else value


def _settings(options: PlanOptions) -> dict[str, Any]:
    """Settings of these options, over the file of RAY_HETERO_CONFIG."""
    objective, experts = options.objective, options.experts
    given: dict[str, Any] = {}
    if objective not in (None, "latency", "throughput"):
        raise LayoutError(f"--objective: expected latency or throughput, got {shown(objective)}")
    if objective is not None:
        given["objective"] = objective
    if (found := _layers(options.layers)) is not None:
        given["layers"] = list(found)
    if options.layout is not None:
        given["layout"] = _stages(options.layout)
    if experts is not None:
        found = numbers(experts)
        if experts != "auto" and (found is None or len(found) != 1):
            raise LayoutError(f"--experts: expected a number or auto, got {shown(experts)}")
        given["experts"] = {"ranks": experts if found is None else found[0]}
    workload = {
        "users": options.users,
        "context": None if options.context is None else _tokens(options.context, "--context"),
        "sequences": options.max_sequences,
    }
    if asked := {key: value for key, value in workload.items() if value is not None}:
        given["workload"] = asked
    return given


def _stages(layout: str) -> list[list[str]]:
    words = layout.replace('"', "").replace("'", "").replace(" ", "")
    if not (words.startswith("[[") and words.endswith("]]")):
        raise LayoutError(
            f"--layout: expected stages like [[cpu, cpu], [gpu]], got {shown(layout)}"
        )
    return [stage.split(",") for stage in words[2:-2].split("],[")]


@contextmanager
def _machine(topology: Path | None, config: HeteroConfig, *, cluster: bool) -> Iterator[Machine]:
    if topology is not None:
        yield machines.described_machine(read_described(topology))
    elif not cluster:
        yield machines.this_host(config.cpu)
    else:
        from ray_hetero.cli import connection

        with connection.cluster():
            from placement.cluster.ray_cluster import discover
            from ray_hetero.planning.cluster_measurements import bandwidth_probe, rows_probe

            cpu = config.cpu
            nodes = discover(
                unit=cpu.unit, shares=cpu.ranks_per_socket, timeout_s=CLUSTER_TIMEOUT_S
            )
            yield Machine(
                nodes,
                bandwidth_probe(nodes, CLUSTER_TIMEOUT_S),
                measure_rows=rows_probe(nodes, cpu, CLUSTER_TIMEOUT_S),
            )


def _in_8_bits(shape: ModelShape, path: Path, dtype: str) -> ModelShape | None:
    """The model with keys and values in 8 bits; None where only vLLM's class tells these."""
    try:
        found = shape_from_config(read_config(path), dtype, "fp8")
    except UnknownModelError:
        return None
    return with_caches(shape, found)


def _check_dtypes(options: PlanOptions) -> None:
    """Refuse types that no source of sizes knows, before vLLM is asked."""
    for flag, name, least in (
        ("--dtype", options.dtype, 2),
        ("--kv-cache-dtype", options.kv_cache_dtype, 1),
    ):
        known = [AUTO, *(one for one, width in DTYPE_BYTES.items() if width >= least)]
        if name.removeprefix("torch.") not in known:
            raise LayoutError(f"{flag}: expected one of {', '.join(known)}; got {shown(name)}")


def _longest(text: str | None) -> int | None:
    """Tokens that --max-model-len asks for; None for the model's own length, and for auto."""
    return None if text is None or text == AUTO else _tokens(text, "--max-model-len", ", or auto")


def _tokens(text: str, flag: str, otherwise: str = "") -> int:
    """A number of tokens: vLLM reads 1k as 1,000 and 1K as 1,024."""
    found = re.fullmatch(r"([0-9]{1,10})([kKmMgG]?)", text)
    tokens = int(found[1]) * LENGTH_UNITS[found[2]] if found else 0
    if not 1 <= tokens <= MOST_TOKENS:
        raise LayoutError(
            f"{flag}: expected a number from 1 to {MOST_TOKENS:,}, like 32768 or 32k{otherwise}; "
            f"got {shown(text)}"
        )
    return tokens


def _drafter(
    speculative: str | None, model: str | None, target: ModelShape
) -> tuple[Drafter | None, Acceptance | None]:
    """The drafter of --speculative and --draft-model, and how often its drafts are accepted."""
    if speculative is None:
        if model is not None:
            raise LayoutError("--draft-model: expected --speculative with it, like 3,0.7")
        return None, None
    drafts, *parts = speculative.split(",")
    found = numbers(drafts)
    try:
        acceptance = Acceptance(*map(float, parts))
    except (TypeError, ValueError):
        acceptance = Acceptance(-1)
    is_possible = 0 <= acceptance.chance <= 1 and 0 <= acceptance.share <= 1
    if not found or not 1 <= found[0] <= MOST_DRAFTED or not is_possible:
        raise LayoutError(
            f"--speculative: expected drafts from 1 to {MOST_DRAFTED}, a chance from 0 to 1, like "
            "3,0.7, and, where not every step has drafts, the share of steps that have, like "
            f"3,0.7,0.2; got {shown(speculative)}"
        )
    path = None if model is None else hub_config(model)
    if path is not None:
        # One of unknown sizes would be planned as if drafts cost nothing.
        sizes_of(read_config(path), path if path.is_dir() else None)
    return drafter_of(None if path else "ngram", found[0], path, target), acceptance


def _name(model: str) -> str:
    path = Path(model).resolve()
    if path.name == "config.json":
        path = path.parent
    name = path.stem if path.suffix == ".json" else path.name
    # A folder may be called anything; a picture must not.
    return "".join(
        letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in name
    )


def _stages_of(config: HeteroConfig) -> int:
    """Stages where none are asked for: as many as the layers that are given."""
    return 1 if config.layers == "auto" or config.layout != "auto" else len(config.layers)


def _layers(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    found = numbers(text)
    if found is None:
        raise LayoutError(f"--layers: expected numbers with commas, like 20,60; got {shown(text)}")
    return found

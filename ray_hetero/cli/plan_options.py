"""Options of `ray-hetero plan`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from ray_hetero.planning.engine_facts import DEFAULT_GPU_SHARE

MOST_TOKENS = 1_000_000_000
MOST_SEQUENCES = 1_000_000
SPECULATIVE = (
    "Drafts of a request in a step, the chance that one is accepted, like 3,0.7, and the share of "
    "steps that have drafts where not all do, like 3,0.7,0.2."
)
"""Help for --speculative."""


@dataclass(frozen=True)
class PlanOptions:
    """Options as they were typed."""

    model: Annotated[
        str,
        typer.Argument(
            help="Checkpoint directory, config.json or a directory with one, or a name on the hub."
        ),
    ]
    topology: Annotated[
        Path | None,
        typer.Option(
            "--topology", help="YAML file that describes a cluster, in place of this host."
        ),
    ] = None
    cluster: Annotated[
        bool, typer.Option("--cluster", help="The Ray cluster that runs, in place of this host.")
    ] = False
    tensor_parallel_size: Annotated[
        int,
        typer.Option("--tensor-parallel-size", "-tp", min=1, max=4096, help="Ranks in a stage."),
    ] = 1
    pipeline_parallel_size: Annotated[
        int | None,
        typer.Option(
            "--pipeline-parallel-size",
            "-pp",
            min=1,
            max=4096,
            help="Stages; without sizes they are chosen as the engine does.",
        ),
    ] = None
    max_model_len: Annotated[
        str | None,
        typer.Option(
            help="Longest sequence in tokens, like 32768 or 32k; auto is the longest that fits. "
            "Default is the model's own."
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None, typer.Option(min=1, max=MOST_SEQUENCES, help="vLLM's --max-num-seqs.")
    ] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=MOST_TOKENS, help="vLLM's --max-num-batched-tokens.")
    ] = None
    gpu_memory_utilization: Annotated[
        float, typer.Option(min=0.01, max=1, help="vLLM's --gpu-memory-utilization.")
    ] = DEFAULT_GPU_SHARE
    users: Annotated[
        int | None,
        typer.Option(
            "--users",
            "--batch",
            min=1,
            max=MOST_SEQUENCES,
            help="Sequences that are decoded together (workload.users).",
        ),
    ] = None
    context: Annotated[
        str | None,
        typer.Option(help="Tokens of each of them, like 32768 or 32k (workload.context)."),
    ] = None
    max_sequences: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=MOST_SEQUENCES,
            help="Sequences of the longest length that must fit (workload.sequences).",
        ),
    ] = None
    objective: Annotated[
        str | None,
        typer.Option(help="latency: shortest step; throughput: shortest slowest stage."),
    ] = None
    layers: Annotated[str | None, typer.Option(help="Your own layers per stage, like 20,60.")] = (
        None
    )
    layout: Annotated[
        str | None, typer.Option(help="Your own stages, like [[cpu, cpu], [gpu]].")
    ] = None
    experts: Annotated[
        str | None,
        typer.Option(help="Expert ranks beside stages of GPUs (experts.ranks): a number, or auto."),
    ] = None
    dtype: Annotated[str, typer.Option(help="vLLM's --dtype.")] = "auto"
    kv_cache_dtype: Annotated[str, typer.Option(help="vLLM's --kv-cache-dtype.")] = "auto"
    language_model_only: Annotated[
        bool,
        typer.Option(
            "--language-model-only",
            help="vLLM's --language-model-only: no encoders of images, video or sound.",
        ),
    ] = False
    speculative: Annotated[str | None, typer.Option(help=SPECULATIVE)] = None
    draft_model: Annotated[
        str | None,
        typer.Option(
            help="A draft model's checkpoint or config.json; without, drafts cost nothing."
        ),
    ] = None
    compare: Annotated[
        bool, typer.Option("--compare", help="Show every layout that was looked at.")
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Machine-readable output, in bytes and seconds.")
    ] = False
    svg: Annotated[Path | None, typer.Option("--svg", help="Write a picture to this file.")] = None


def with_options(function: Callable[[PlanOptions], None]) -> Callable[..., None]:
    """A function as Typer takes it: each field of the options is a parameter of its own."""
    types = get_type_hints(PlanOptions, include_extras=True)

    def command(**options: Any) -> None:
        function(PlanOptions(**options))

    command.__name__, command.__doc__ = function.__name__, function.__doc__
    command.__annotations__ = types
    command.__signature__ = inspect.Signature([  # type: ignore[attr-defined]
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=types[field.name],
        )
        for field in fields(PlanOptions)
    ])  # fmt: skip
    return command

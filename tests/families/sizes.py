"""Bytes of small models of all architectures: those that are planned, and those of vLLM's own
parameters in memory.

Each model is built in a process that is forked after vLLM has been imported, with a time limit.
"""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from families.configurations import DRAFTER, small_config

LIMIT_S = 180.0
"""Seconds that one model may take."""

DTYPE = "bfloat16"
OF_THE_TARGET = re.compile(r"(embed_tokens|embeddings|lm_head|shared_head\.head)\.")
"""Parameters of a drafter that vLLM replaces by those of the model that it drafts for."""

Sizes = dict[str, Any]


def planned_sizes(folder: Path, *, of_drafter: bool = False) -> Sizes:
    """Bytes that `ray-hetero plan` plans with, and the source that it has them from."""
    from placement.model.built import shape_from_parts
    from placement.model.config import UnknownModelError
    from placement.model.reading import shape_from_config
    from placement.plan.drafts import Drafter, Source
    from ray_hetero.planning.sizes.built_model import built

    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    try:
        shape = shape_from_config(config, DTYPE)
    except UnknownModelError:
        # As `planning.sizes.model_probe` does, which has a process of its own for it.
        shape = shape_from_parts(built(str(folder), DTYPE), config)
    # The first stage is the last one, whose embedding both use.
    of_drafts = Drafter.of(Source.TARGET, 1, None, shape).weights(1, is_first=True)
    return {
        "bytes": of_drafts if of_drafter else shape.weight_bytes,
        "source": shape.source,
        "divides": shape.divides,
        "vocabulary_everywhere": shape.vocabulary_everywhere,
    }


def allocated_sizes(folder: Path, *, of_drafter: bool = False) -> Sizes:
    """Bytes of the parameters of vLLM's model, made in memory on its CPU platform.

    `only_made` says that vLLM as it is cannot make it there, because no CPU computes it.
    """
    try:
        return _allocated(folder, of_drafter=of_drafter)
    except Exception:  # noqa: BLE001
        from ray_hetero.compat.models.meta_model import make_without_kernels

        make_without_kernels()
        return _allocated(folder, of_drafter=of_drafter) | {"only_made": True}


def _allocated(folder: Path, *, of_drafter: bool) -> Sizes:
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    from ray_hetero.compat.models.model_registry import (
        inspect_here,
        load_models_without_torchvision,
    )

    inspect_here()
    load_models_without_torchvision()
    args = EngineArgs(
        model=str(folder), dtype=DTYPE, load_format="dummy", skip_tokenizer_init=True,
        enforce_eager=True, max_model_len=256, max_num_seqs=1, kv_cache_memory_bytes=1 << 30,
        enable_prefix_caching=False,
        speculative_config={"method": "mtp", "num_speculative_tokens": 1} if of_drafter else None,
    )  # fmt: skip
    vllm_config = args.create_engine_config()
    with set_current_vllm_config(vllm_config):
        if not torch.distributed.is_initialized():
            store = torch.distributed.HashStore()
            torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
            parallel_state.init_distributed_environment(1, 0, "env://", 0, "gloo")
            parallel_state.ensure_model_parallel_initialized(1, 1)
        with set_default_torch_dtype(vllm_config.model_config.dtype):
            asked = vllm_config.model_config
            if of_drafter:
                asked = vllm_config.speculative_config.draft_model_config
            model = initialize_model(vllm_config, model_config=asked)
    named = {id(one): (name, one) for name, one in model.named_parameters()}.values()
    parameters = [one for name, one in named if not (of_drafter and OF_THE_TARGET.search(name))]
    assert all(one.device.type == "cpu" for one in parameters)
    return {"bytes": sum(one.numel() * one.element_size() for one in parameters)}


def sizes_of_all(
    architectures: Iterable[str], measure: Callable[..., Sizes]
) -> Iterator[tuple[str, Sizes]]:
    """Sizes of each architecture's small model, or `problem` with the reason why there are none."""
    # Imported here once, for all processes.
    import vllm.engine.arg_utils
    import vllm.model_executor.model_loader.utils  # noqa: F401

    for name in architectures:
        config = small_config(name)
        if isinstance(config, str):
            yield name, {"problem": config, "no_config": True}
            continue
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(config), encoding="utf-8")
            of_drafter = name.endswith(DRAFTER)
            measured = functools.partial(measure, of_drafter=of_drafter)
            yield name, _forked(measured, Path(folder))


def _forked(measure: Callable[[Path], Sizes], folder: Path) -> Sizes:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    process = context.Process(target=_measured, args=(measure, folder, there))
    process.start()
    there.close()
    try:
        found: Sizes = (
            here.recv() if here.poll(LIMIT_S) else {"problem": f"took more than {LIMIT_S:.0f} s"}
        )
    except EOFError:
        found = {"problem": "its process died"}
    process.kill()
    process.join()
    return found


def _measured(measure: Callable[[Path], Sizes], folder: Path, there: Connection) -> None:
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = measure(folder)
    except Exception as error:  # noqa: BLE001
        lines = str(error).strip().splitlines()
        found = {"problem": f"{type(error).__name__}: {' '.join(lines[:2])[:200]}"}
    there.send(found)

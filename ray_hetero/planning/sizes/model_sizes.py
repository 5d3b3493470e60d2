"""The sizes of a model, from the first source that knows them: headers of its safetensors files, on
this disk or on the hub; a reader of its config.json; vLLM's own class of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from placement.model.built import decoder_config
from placement.model.caches import caches_only_vllm_knows
from placement.model.checkpoint import read_headers
from placement.model.config import DamagedCheckpointError, UnknownModelError
from placement.model.reading import (
    shape_from_config,
    shape_from_headers,
    shape_from_safetensors,
)
from placement.model.shape import ModelShape
from ray_hetero.log import logger
from ray_hetero.planning.sizes.hub_headers import HubError, HubModel, headers_on_hub
from ray_hetero.planning.sizes.model_probe import built_shape


def sizes_of(
    config: Mapping[str, Any],
    folder: Path | None = None,
    *,
    dtype: str = "auto",
    kv_dtype: str | None = None,
    layers: int | None = None,
    hub: HubModel | None = None,
    trust_remote_code: bool = False,
) -> ModelShape:
    """Sizes of a model.

    Args:
        config: content of config.json, as vLLM takes it.
        folder: of the checkpoint; None where only its configuration is here.
        dtype: vLLM's --dtype.
        kv_dtype: vLLM's --kv-cache-dtype.
        layers: decoder layers that the model must have; a source with another number does not
            count, because `--hf-overrides` may have changed it.  None takes any.
        hub: the model on the hub; None where it has none, or has a folder.
        trust_remote_code: vLLM's --trust-remote-code.

    Raises:
        DamagedCheckpointError: the files of the checkpoint are no whole one.
        UnknownModelError: no source knows them; it says why of each.

    """
    problems = []
    headers: ModelShape | None = None
    for is_exact, read in _sources(config, folder, hub, dtype, kv_dtype, trust_remote_code):
        try:
            found = read()
        except HubError as error:
            logger.warning("sizes are those of the model's configuration. %s", error)
            continue
        except DamagedCheckpointError:
            raise
        except UnknownModelError as error:
            problems.append(str(error))
            continue
        if layers not in (None, len(found.layers)):
            problems.append(f"{found.source} has {len(found.layers)} layers, vLLM counts {layers}")
        elif is_exact:
            return found if headers is None else _completed(headers, found)
        else:
            headers = found
    if headers is None:
        raise UnknownModelError(". ".join(problems))
    logger.warning(
        "every layer is planned with keys and values of the whole context, for it is not known %s "
        "(%s)", caches_only_vllm_knows(decoder_config(config)), ". ".join(problems),
    )  # fmt: skip
    return headers


def _sources(
    config: Mapping[str, Any],
    folder: Path | None,
    hub: HubModel | None,
    dtype: str,
    kv_dtype: str | None,
    trust_remote_code: bool,
) -> Iterator[tuple[bool, Any]]:
    """Functions that read the sizes, the fastest first, each with whether it knows the caches."""
    if folder is not None and any(folder.glob("*.safetensors")):
        yield _knows_caches(config), lambda: shape_from_safetensors(folder, dtype, kv_dtype)
    elif hub is not None:
        yield _knows_caches(config), lambda: _shape_on_hub(config, hub, dtype, kv_dtype)
    yield True, lambda: shape_from_config(config, dtype, kv_dtype)
    yield (
        True,
        lambda: built_shape(
            config, folder, dtype=dtype, kv_dtype=kv_dtype, trust_remote_code=trust_remote_code
        ),
    )


def _knows_caches(config: Mapping[str, Any]) -> bool:
    return not caches_only_vllm_knows(decoder_config(config))


def _shape_on_hub(
    config: Mapping[str, Any], hub: HubModel, dtype: str, kv_dtype: str | None
) -> ModelShape:
    """Sizes by the files in the hub's cache; by the hub's headers while these are not whole."""
    try:
        headers = read_headers(hub.folder)
    except UnknownModelError:
        headers = headers_on_hub(hub)
    return shape_from_headers(headers, config, hub.name, dtype, kv_dtype)


def _completed(headers: ModelShape, built: ModelShape) -> ModelShape:
    """Weights as the files have them, with what only vLLM knows of caches and of stages."""
    return replace(
        with_caches(headers, built),
        divides=built.divides,
        vocabulary_everywhere=built.vocabulary_everywhere,
    )


def with_caches(shape: ModelShape, other: ModelShape) -> ModelShape:
    """Weights of one source, with what another says that the layers cache."""
    layers = (
        replace(layer, kv=one.kv) for layer, one in zip(shape.layers, other.layers, strict=True)
    )
    return replace(shape, layers=tuple(layers))

"""Run engines one after the other and write down what they answered: REQUEST.json ANSWER.json."""

from __future__ import annotations

import gc
import itertools
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image
from vllm import LLM, SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.sampling_params import StructuredOutputsParams

from ray_hetero.runtime import local_ray

LEFT: list[LLM] = []
"""Engines that nobody shuts down."""


def _values(at: Any) -> dict[int, float]:
    return {token: entry.logprob for token, entry in (at or {}).items()}


def _adapters(paths: list[str | None]) -> list[LoRARequest | None]:
    """Each prompt's adapter, whose name is its folder's; such a name ends with its number."""
    names = [None if path is None else Path(path).name for path in paths]
    return [
        None if name is None else LoRARequest(name, int(name.split("-")[-1]), path)
        for name, path in zip(names, paths, strict=True)
    ]


def _image(seed: int) -> Image.Image:
    """An image of random colours."""
    pixels = np.random.default_rng(seed).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def _share_columns(worker: Any, parts: int) -> int:
    """In a rank: have a GPU compute parts of all columns in decode steps; of how many layers it
    has computed some up to now."""
    from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
    from ray_hetero.kernels.layers.fused_modules import registered
    from ray_hetero.offload.decode.share_choice import Share, Shares

    found = [run.shared for run in registered(DecoderLayers) if run.shared is not None]
    for shared in found:
        shared.shares = Shares((Share(1, columns=parts),))
    return sum(shared._columns.steps * shared._count for shared in found)


def _has_prompts_ahead(worker: Any) -> bool:
    """In a rank: whether pieces that a prompt begins with are on the way to a GPU, or there."""
    from ray_hetero.kernels.layers.decoder_layers import DecoderLayers
    from ray_hetero.kernels.layers.fused_modules import registered

    gpus = [run.gpu for run in registered(DecoderLayers) if run.gpu is not None]
    return any(gpu.reader._buffers[1].piece in gpu.order_of_prompts._after for gpu in gpus)


def _each_by_itself(engine: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Requests with parameters of their own, all at once; some are aborted behind a token or step,
    whatever has been computed of them by then.
    """
    steps = engine.llm_engine
    for number, one in enumerate(requests):
        given = dict(one["sampling"])
        if "logit_bias" in given:
            # JSON has no numbers as keys.
            given["logit_bias"] = {int(token): bias for token, bias in given["logit_bias"].items()}
        if "choices" in one:
            given["structured_outputs"] = StructuredOutputsParams(choice=one["choices"])
        sampling = SamplingParams(**given, detokenize="choices" in one)
        prompt = {"prompt_token_ids": one["prompt"]}
        steps.add_request(str(number), prompt, sampling, priority=one.get("priority", 0))
    found = {str(number): {"tokens": [[]], "reason": None} for number in range(len(requests))}
    for taken in itertools.count():
        leaving = [at for at, one in enumerate(requests) if one.get("leave_at_step") == taken]
        steps.abort_request([str(number) for number in leaving])
        if not steps.has_unfinished_requests():
            break
        for output in steps.step():
            (sample,) = output.outputs
            tokens, reason = list(sample.token_ids), sample.finish_reason
            found[output.request_id] = {"tokens": [tokens], "reason": reason}
            leave_after = requests[int(output.request_id)].get("leave_after", len(tokens) + 1)
            if reason is None and len(tokens) >= leave_after:
                steps.abort_request([output.request_id])
    return [found[str(number)] for number in range(len(requests))]


def _answers(engine: Any, batch: dict[str, Any]) -> list[dict[str, Any]]:
    if "ahead" in batch:
        # The engine's last step, without tokens, may come after a call.
        for _ in range(100):
            found: list[bool] = engine.collective_rpc(_has_prompts_ahead)
            if any(found):
                break
            time.sleep(0.1)
        return [{"ahead": one} for one in found]
    if "columns" in batch:
        layers: list[int] = engine.collective_rpc(_share_columns, args=(batch["columns"],))
        return [{"layers": count} for count in layers]
    if "refused" in batch:
        left = []
        for token in batch["refused"]:
            given = [{"prompt_token_ids": one} for one in ([8, 9], [8, token, 9], [9, 8])]
            with pytest.raises(VLLMValidationError, match="out of vocabulary"):
                engine.generate(given, SamplingParams(max_tokens=2), use_tqdm=False)
            left.append({"requests": engine.llm_engine.get_num_unfinished_requests()})
        return left
    if wanted := batch.get("metrics"):
        return [
            {metric.name: getattr(metric, "value", None) or getattr(metric, "values", 0)}
            for metric in engine.get_metrics()
            if metric.name.startswith(wanted)
        ]
    if batch.get("totals"):
        totals: list[dict[str, Any]] = engine.collective_rpc("step_totals")
        return totals
    if "requests" in batch:
        return _each_by_itself(engine, batch["requests"])
    given: list[dict[str, Any]] = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
    for prompt, seed in zip(given, batch.get("images", ()), strict=False):
        if seed is not None:
            prompt["multi_modal_data"] = {"image": _image(seed)}
    if batch.get("embeds"):
        found = engine.embed(given, use_tqdm=False)
        return [{"embedding": list(output.outputs.embedding)} for output in found]
    if batch.get("missing_adapter"):
        # Every rank fails to read it, and answers so.
        with pytest.raises(Exception, match=r"add_lora.*fail"):
            engine.llm_engine.add_lora(LoRARequest("missing", 2, batch["missing_adapter"]))
    adapter = _adapters(batch["adapters"]) if batch.get("adapters") else None
    if batch.get("adapter"):
        adapter = LoRARequest("adapter", 1, batch["adapter"])
    sampling = SamplingParams(**batch["sampling"])
    outputs = engine.generate(given, sampling, use_tqdm=False, lora_request=adapter)
    return [
        {
            "tokens": [list(sample.token_ids) for sample in output.outputs],
            "logprobs": [
                [_values(at) for at in sample.logprobs]
                for sample in output.outputs
                if sample.logprobs
            ],
            "prompt_logprobs": [_values(at) for at in output.prompt_logprobs or ()],
        }
        for output in outputs
    ]


def _run(run: dict[str, Any]) -> list[Any]:
    # Imported above: the frame in which vLLM is first imported is never freed, nor an engine in it.
    fails = run["engine"].pop("fails", False)
    is_left = run["engine"].pop("left", False)
    try:
        engine = LLM(**run["engine"])
    except RuntimeError as error:
        if not fails:
            raise
        return [{"error": str(error), "left": _own_ray_processes()}]
    assert not fails, "this engine was expected not to start"
    if is_left:
        LEFT.append(engine)
    return [_answers(engine, batch) for batch in run["batches"]]


def _own_ray_processes() -> list[str]:
    names = (process.name() for process in psutil.Process().children(recursive=True))
    return [name for name in names if name.startswith(("ray", "gcs_server"))]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    if request["ray"] is not None:
        local_ray.init_in(Path(tempfile.gettempdir()), **request["ray"])
    answers = []
    for run in request["runs"]:
        answers.append(_run(run))
        # What a notebook's user does before the next engine: drop the last one.
        gc.collect()
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()

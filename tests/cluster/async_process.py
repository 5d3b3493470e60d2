"""Serve some prompts with AsyncLLM and write their tokens down: REQUEST.json ANSWER.json."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM


async def _tokens(engine: AsyncLLM, number: int, prompt: list[int], sampling: Any) -> list[int]:
    found: list[int] = []
    async for output in engine.generate(
        {"prompt_token_ids": prompt}, SamplingParams(**sampling), request_id=str(number)
    ):
        found = list(output.outputs[0].token_ids)
    return found


async def _run(request: dict[str, Any]) -> list[list[int]]:
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**request["engine"]))
    batch = request["batch"]
    try:
        asked = [
            asyncio.create_task(_tokens(engine, number, prompt, batch["sampling"]))
            for number, prompt in enumerate(batch["prompts"])
        ]
        for after, leaving in enumerate(batch.get("leaving", [])):
            # Later and later: while they wait, in the middle of a step, between two.
            await asyncio.sleep(0.02 * after)
            asked[leaving].cancel()
        found = await asyncio.gather(*asked, return_exceptions=True)
        for one in found:
            if isinstance(one, Exception):
                raise one
        return [[] if isinstance(one, asyncio.CancelledError) else one for one in found]
    finally:
        engine.shutdown()


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(asyncio.run(_run(request))))


if __name__ == "__main__":
    main()

"""vLLM's engine as its own server drives it, in this process: python vllm_engine.py MODEL THREADS. See lines.py."""

import asyncio
import os
import sys
import time

os.environ["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"] = "86400"  # a step may be under way when all of it is stopped

from lines import Lines
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM


async def main() -> None:
    lines = Lines()
    arguments = AsyncEngineArgs(model=sys.argv[1], dtype="bfloat16")
    engine = AsyncLLM.from_engine_args(arguments)
    runs = 0

    async def play_one(name: str, due_s: float, prompt: list[int], max_tokens: int) -> tuple[list[float], list[int]]:
        await asyncio.sleep(max(0.0, due_s - time.perf_counter()))
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, temperature=0.0, output_kind=RequestOutputKind.DELTA
        )
        times_s: list[float] = []
        tokens: list[int] = []
        async for output in engine.generate({"prompt_token_ids": prompt}, sampling, request_id=name):
            tokens += output.outputs[0].token_ids
            times_s += [time.perf_counter()] * (len(tokens) - len(times_s))
        return times_s, tokens

    async for _ in engine.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(max_tokens=4), request_id="first"):
        pass
    lines.ready()
    while (requests := await asyncio.to_thread(lines.asked)) is not None:
        runs += 1
        began_s = time.perf_counter()
        played = [
            play_one(f"{runs}-{i}", began_s + at_s, prompt, count) for i, (at_s, prompt, count) in enumerate(requests)
        ]
        lines.played(began_s, await asyncio.gather(*played))


if __name__ == "__main__":
    asyncio.run(main())

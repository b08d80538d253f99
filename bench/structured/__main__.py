"""What forms of answers cost, and whether they hold where workers are killed in the middle of them.

    python -m bench.structured [--quick]

*Served*: a thousand random JSON Schemas (schemas.py), each asked of a tiny random model at temperature 1, through a
prefill and two decode workers, one of which is killed (SIGKILL) now and then. Every answer that ends is parsed and
validated by jsonschema; those that were computed again are asked for once more in peace, and must have the same tokens.
*Cost*: a decode step of the 124.7M model with and without a form, in turns, at batch 1, 8 and 32. *Libraries*:
llguidance and xgrammar, as vLLM's environment has both (bench/peers), are given the same schemas and answers: how many
each can keep, and what a grammar and the tokens that may follow take. Writes bench/results/structured.json. Exit code 1
where an answer broke its form, or came out otherwise the second time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from decimal import Decimal
from statistics import median
from typing import Any

import jsonschema
import torch

from bench.common import about, demo_model, save
from bench.e2e import cluster, console, spec
from bench.engine import GREEDY, PAGE_SIZE, prompts
from bench.moves import DECODE, kill
from bench.peers.install import CHILDREN, installed
from bench.rounds import spread
from bench.structured.schemas import FORMATS_CHECKED, schema_of
from engine.engine import Engine
from engine.options import EngineOptions
from engine.process import set_environment
from engine.sampling.structured import Constraint, grammar_of
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError

AT_ONCE = 24
MAX_TOKENS = 1500
KILL_AFTER_S = 1.0
BATCHES = (1, 8, 32)
PROMPT_TOKENS, TURN_TOKENS = 128, 24
LIBRARIES = CHILDREN / "grammars.py"
ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["name", "n"],
}
ENDLESS = json.dumps({"type": "array", "items": ITEM, "minItems": 10_000})


async def served(endpoint: str, count: int) -> dict[str, Any]:
    """What came of each schema, and of the answers that were computed again."""
    kills, places = 0, asyncio.Semaphore(AT_ONCE)
    async with AsyncClient(endpoint) as client:

        async def ask(seed: int) -> Completion | KvrelayError:
            async with places:
                try:
                    return await client.generate(
                        f"Record {seed}:", json_schema=schema_of(seed), seed=seed, max_tokens=MAX_TOKENS, timeout_s=600
                    )
                except KvrelayError as error:
                    return error

        async def disturb() -> None:
            nonlocal kills
            while True:
                await asyncio.sleep(KILL_AFTER_S)
                await kill(client, DECODE[kills % len(DECODE)])
                kills += 1

        disturbing = asyncio.create_task(disturb())
        answers = await asyncio.gather(*map(ask, range(count)))
        disturbing.cancel()
        await asyncio.gather(disturbing, return_exceptions=True)
        whole = {seed: answer for seed, answer in enumerate(answers) if isinstance(answer, Completion)}
        again = [seed for seed, each in whole.items() if each.timeline and each.timeline.attempts > 1]
        second = await asyncio.gather(*map(ask, again))
    same = [
        isinstance(e, Completion) and e.token_ids == whole[seed].token_ids
        for seed, e in zip(again, second, strict=True)
    ]
    return {
        "outcomes": dict(Counter(outcome(schema_of(seed), answer) for seed, answer in enumerate(answers))),
        "kills": kills,
        "computed_again": len(again),
        "with_the_same_tokens": sum(same),
        "answers": [[seed, list(each.token_ids)] for seed, each in whole.items() if _is_whole(each)],
    }


def _is_whole(answer: Completion) -> bool:
    return answer.finish_reason is not None and answer.finish_reason.value == "stop"


def outcome(schema: dict[str, Any], answer: Completion | KvrelayError) -> str:
    if isinstance(answer, KvrelayError):
        return f"refused: {answer.message.partition(': ')[0]}" if answer.code == "INVALID_ARGUMENT" else answer.code
    if not _is_whole(answer):
        return "cut by max_tokens"
    try:
        asked, found = (json.loads(each, parse_float=Decimal) for each in (json.dumps(schema), answer.text))
        jsonschema.validate(found, asked, format_checker=FORMATS_CHECKED)  # 40.12 is no multiple of 0.01 in binary
    except (ValueError, jsonschema.ValidationError) as error:
        console.print(f"[red]broken: {schema} {answer.text!r}: {error}")
        return "broken"
    return "valid"


def cost(turns: int) -> dict[str, Any]:
    """Of decode steps with a form, over those without, in turns."""
    torch.set_num_threads(2)
    model = str(demo_model("125m"))
    engine = Engine.load(EngineOptions(model=model, dtype="bfloat16", num_pages=2048, page_size=PAGE_SIZE, threads=2))
    grammar = grammar_of("json_schema", ENDLESS)
    rows = {}
    for batch in BATCHES:
        took: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(turns + 1):
            for has_form in (True, False) if turn % 2 else (False, True):
                made = [engine.structured.constraint(grammar) if has_form else None for _ in range(batch)]
                seconds = _decode_s(engine, made, turn)
                if turn:  # the first warms up
                    took[has_form].append(seconds)
        pairs = list(zip(took[True], took[False], strict=True))
        rows[str(batch)] = {
            "with_ms": round(1e3 * median(took[True]), 3),
            "without_ms": round(1e3 * median(took[False]), 3),
            "ratio": spread(pairs),
        }
    return rows


def _decode_s(engine: Engine, constraints: Sequence[Constraint | None], turn: int) -> float:
    """A step's, over TURN_TOKENS of them."""
    asked = prompts(len(constraints), PROMPT_TOKENS, turn)
    pages = -(-(PROMPT_TOKENS + TURN_TOKENS + 1) // PAGE_SIZE)
    output: list[list[int]] = [[] for _ in asked]

    def step(token_ids: Sequence[Sequence[int]], start: int) -> None:
        position = start + len(token_ids[0])
        chunks = [
            Chunk(
                request_id=str(i),
                token_ids=ids,
                start=start,
                block_table=range(i * pages, (i + 1) * pages),
                sample=SampleSpec(
                    params=GREEDY if made is None else SamplingParams(temperature=0.0, grammar="one"),
                    position=position,
                    form=None if made is None else made.after(list(output[i])),
                ),
            )
            for i, (ids, made) in enumerate(zip(token_ids, constraints, strict=True))
        ]
        for i, token in enumerate(engine.step(Step(chunks=chunks))):
            output[i].append(token.token_id)

    step(asked, 0)
    began_s = time.perf_counter()
    for i in range(TURN_TOKENS):
        step([ids[-1:] for ids in output], PROMPT_TOKENS + i)
    return (time.perf_counter() - began_s) / TURN_TOKENS


def libraries(answers: Sequence[Any], say: Callable[[str], None]) -> dict[str, Any]:
    """In vLLM's environment: of each library what grammars.py says."""
    python = installed("vllm", say)
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"model": str(demo_model("tiny")), "asked": [[schema_of(seed), ids] for seed, ids in answers]}, file)
        file.flush()
        done = subprocess.run([python, str(LIBRARIES), file.name], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.structured", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="sixty schemas and fewer turns; writes no file")
    args = parser.parse_args()
    set_environment(2)
    result = about()
    wanted = spec(demo_model("tiny"))
    pools = [{"role": "prefill", "threads": 1}, {"role": "decode", "threads": 1, "replicas": 2}]
    with cluster(wanted | {"max_model_len": 4096, "pools": pools}) as running:
        found = asyncio.run(served(running.endpoint, 60 if args.quick else 1000))
    answers = found.pop("answers")
    console.print(found)
    result |= {"served": found, "cost": cost(3 if args.quick else 15), "libraries": libraries(answers, console.print)}
    console.print(result["cost"], result["libraries"])
    if not args.quick:
        console.print(f"written to {save('structured', result)}")
    is_good = "broken" not in found["outcomes"] and found["computed_again"] == found["with_the_same_tokens"]
    return 0 if is_good else 1


if __name__ == "__main__":
    raise SystemExit(main())

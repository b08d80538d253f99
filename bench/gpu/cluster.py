"""The two-process cluster on one GPU: the same tokens as one engine alone, and what a handoff costs beyond prefill.

    python -m bench.gpu.cluster [--rehearse]

A prefill and a decode worker, each a process of its own, share the GPU; the router is in this one. 200 requests of
mixed lengths, some with a common beginning, greedy, 32 at once. Then the same requests, each by itself, through one
engine with the reference attention on the same GPU. Where the two first differ, the reference's logits say whether the
two tokens were a tie within what bfloat16 can tell; anything else is a wrong result. Last, one prompt of 2048 tokens at
a time: how long after the last layer was computed the decode worker had it all.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu import common as gpu_common
from bench.gpu.common import WorkerProcess, WrongResult, engine_options, processes
from engine.pages.pool import pages_for
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError

PAGE_SIZE = 16
NUM_REQUESTS = 200
CONCURRENCY = 32
TIE_NATS = 0.1  # two tokens whose log-probabilities differ by less are a tie in bfloat16
REFERENCE_BATCH = 40
REFERENCE_CHUNK = 4096
WANTED_EXPOSED_S = 1e-3
REQUEST_TIMEOUT_S = 120.0


@dataclass(frozen=True, slots=True)
class Ask:
    prompt: tuple[int, ...]
    new_tokens: int


def asks(count: int, vocab: int, longest: int, rehearse: bool) -> list[Ask]:
    """Prompts from 8 tokens to `longest`, each length as likely on a logarithmic scale; a third begin alike."""
    rng = random.Random(11)
    common = [rng.randrange(5, vocab) for _ in range(longest // 4)]
    found = []
    for index in range(count):
        length = int(8 * (longest / 8) ** rng.random())
        own = [rng.randrange(5, vocab) for _ in range(length)]
        prompt = (common[: length // 2] + own)[:length] if index % 3 == 0 else own
        found.append(Ask(tuple(prompt), rng.randint(2, 8 if rehearse else 48)))
    return found


# --- the cluster ---


def workers(model: str, rehearse: bool) -> dict[str, WorkerProcess]:
    sizes: dict[str, Any] = {"num_pages": 256} if rehearse else {"kv_bytes": 12 << 30}
    options = engine_options(model, rehearse, **sizes)
    prefill = {} if rehearse else {"max_batch_tokens": 8192, "pack_tokens": 2048, "short_prompt_tokens": 1024}
    decode = {"max_batch_size": 64}
    graphs = {"prefill": 8, "decode": decode["max_batch_size"]}  # a prefill worker seldom decodes: fewer to capture
    return {
        f"{role}-0": WorkerProcess(role=role, engine=options | {"max_graph_batch": graphs[role]}, worker=limits)
        for role, limits in (("prefill", prefill), ("decode", decode))
    }


async def serve(model: str, wanted: Sequence[Ask], rehearse: bool, handoffs: int) -> dict[str, Any]:
    async with processes(workers(model, rehearse)) as endpoint, AsyncClient(endpoint) as client:
        places = asyncio.Semaphore(CONCURRENCY)

        async def one(ask: Ask) -> Completion:
            async with places:
                return await send(client, ask)

        started = time.perf_counter()
        answers = await asyncio.gather(*(one(ask) for ask in wanted))
        took_s = time.perf_counter() - started
        check_receipts(answers, "shared_memory" if rehearse else "cuda_ipc")
        return {
            "tokens": [list(answer.token_ids) for answer in answers],
            "took_s": took_s,
            "handoff": await exposed(client, handoffs, 256 if rehearse else 2048),
        }


async def send(client: AsyncClient, ask: Ask) -> Completion:
    return await client.generate(
        list(ask.prompt), max_tokens=ask.new_tokens, temperature=0.0, ignore_eos=True, timeout_s=REQUEST_TIMEOUT_S
    )


def check_receipts(answers: Sequence[Completion], transport: str) -> None:
    for answer in answers:
        receipt = answer.receipt
        if receipt is None or not receipt.checksums_ok or receipt.recomputed_tokens:
            raise WrongResult(f"request {answer.request_id} came back without a good receipt: {receipt}")
        if receipt.pages and receipt.transport != transport:
            raise WrongResult(f"KV went by {receipt.transport}, not by {transport}")


async def exposed(client: AsyncClient, count: int, prompt_tokens: int) -> dict[str, Any]:
    """Medians over prompts that come one at a time; nothing of them is cached."""
    rng, found = random.Random(5), []
    for _ in range(count + 2):
        ask = Ask(tuple(rng.randrange(5, 1000) for _ in range(prompt_tokens)), 4)
        found.append(await send(client, ask))
    receipts = [answer.receipt for answer in found[2:] if answer.receipt is not None]
    timelines = [answer.timeline for answer in found[2:] if answer.timeline is not None]
    return {
        "prompt_tokens": prompt_tokens,
        "mbytes": receipts[0].bytes / 1e6,
        "exposed_ms": statistics.median(receipt.exposed_s for receipt in receipts) * 1e3,
        "worst_exposed_ms": max(receipt.exposed_s for receipt in receipts) * 1e3,
        "transfer_ms": statistics.median(receipt.transfer_s for receipt in receipts) * 1e3,
        "prefill_ms": statistics.median(timeline.phases_s["prefill"] for timeline in timelines) * 1e3,
        "wanted_exposed_ms": WANTED_EXPOSED_S * 1e3,
    }


# --- one engine alone ---


class Reference:
    """One engine that computes requests by themselves: prompts in chunks, then decode steps of a few together."""

    def __init__(self, model: str, rehearse: bool, pages: int) -> None:
        from engine.engine import Engine
        from engine.options import EngineOptions

        attention = "auto" if rehearse else "torch"
        options = engine_options(model, rehearse, attention=attention, num_pages=pages)
        if not rehearse:
            options["cuda_graphs"] = False
        self.engine = Engine.load(EngineOptions(**options))

    def tokens(self, wanted: Sequence[Ask]) -> list[list[int]]:
        found: list[list[int]] = []
        for begin in range(0, len(wanted), REFERENCE_BATCH):
            found += self._batch(wanted[begin : begin + REFERENCE_BATCH])
        return found

    def _batch(self, wanted: Sequence[Ask]) -> list[list[int]]:
        tables, page = [], 0
        for ask in wanted:
            count = pages_for(len(ask.prompt) + ask.new_tokens, PAGE_SIZE)
            tables.append(range(page, page + count))
            page += count
        outputs = [[self._first(ask.prompt, table, 0).token_id] for ask, table in zip(wanted, tables, strict=True)]
        while open_ones := [i for i, ask in enumerate(wanted) if len(outputs[i]) < ask.new_tokens]:
            chunks = [
                _chunk(str(i), (outputs[i][-1],), len(wanted[i].prompt) + len(outputs[i]) - 1, tables[i])
                for i in open_ones
            ]
            for token in self.engine.step(Step(chunks=chunks)):
                if token.error:
                    raise WrongResult(f"the reference failed: {token.error}")
                outputs[int(token.request_id)].append(token.token_id)
        return outputs

    def _first(self, prompt: Sequence[int], table: range, logprobs: int) -> Any:
        """The token after `prompt`, which is computed into the pages of `table`."""
        for begin in range(0, len(prompt), REFERENCE_CHUNK):
            end = min(begin + REFERENCE_CHUNK, len(prompt))
            is_last = end == len(prompt)
            chunk = _chunk("r", tuple(prompt[begin:end]), begin, table, sample=is_last, logprobs=logprobs)
            sampled = self.engine.step(Step(chunks=[chunk]))
        return sampled[0]

    def gap(self, prompt: Sequence[int], theirs: int) -> float:
        """By how many nats `theirs` is less likely after `prompt` than the likeliest; infinite if far less."""
        token = self._first(prompt, range(pages_for(len(prompt) + 1, PAGE_SIZE)), 20)
        for top in token.top_logprobs:
            if top.token_id == theirs:
                return float(token.top_logprobs[0].logprob - top.logprob)
        return float("inf")


def _chunk(
    name: str, ids: tuple[int, ...], start: int, table: range, *, sample: bool = True, logprobs: int = 0
) -> Chunk:
    end = start + len(ids)
    params = SamplingParams(temperature=0.0, max_tokens=1 << 20, logprobs=logprobs or None)
    spec = SampleSpec(params=params, position=end) if sample else None
    return Chunk(
        request_id=name, token_ids=ids, start=start, block_table=list(table[: pages_for(end, PAGE_SIZE)]), sample=spec
    )


# --- comparison ---


def differences(
    wanted: Sequence[Ask], served: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]
) -> Iterator[tuple[int, int]]:
    """(request, position) of each first difference. Raises WrongResult for answers of other lengths."""
    for index, (ask, ours, reference) in enumerate(zip(wanted, served, alone, strict=True)):
        if not len(ours) == len(reference) == ask.new_tokens:
            raise WrongResult(f"request {index} has {len(ours)} tokens, and {ask.new_tokens} were asked for")
        at = next((i for i, (a, b) in enumerate(zip(ours, reference, strict=True)) if a != b), None)
        if at is not None:
            yield index, at


def compare(
    wanted: Sequence[Ask],
    served: Sequence[Sequence[int]],
    alone: Sequence[Sequence[int]],
    reference: Any,
    tie_nats: float = TIE_NATS,
) -> dict[str, Any]:
    ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for index, at in differences(wanted, served, alone):
        gap = reference.gap([*wanted[index].prompt, *alone[index][:at]], served[index][at])
        row = {
            "request": index,
            "prompt_tokens": len(wanted[index].prompt),
            "position": at,
            "tokens": [served[index][at], alone[index][at]],
            "gap_nats": gap,
        }
        (ties if gap <= tie_nats else wrong).append(row)
    equal = len(wanted) - len(ties) - len(wrong)
    return {"requests": len(wanted), "equal": equal, "ties": ties, "wrong": wrong, "tie_nats": tie_nats}


def bench(model: str, rehearse: bool) -> dict[str, Any]:
    longest, count = (200, 24) if rehearse else (3000, NUM_REQUESTS)
    vocab = 4000 if rehearse else 128000
    wanted = asks(count, vocab, longest, rehearse)
    served = asyncio.run(serve(model, wanted, rehearse, 4 if rehearse else 12))
    most = max(
        sum(pages_for(len(a.prompt) + a.new_tokens, PAGE_SIZE) for a in wanted[i : i + REFERENCE_BATCH])
        for i in range(0, len(wanted), REFERENCE_BATCH)
    )
    reference = Reference(model, rehearse, most + 1)
    started = time.perf_counter()
    compared = compare(wanted, served["tokens"], reference.tokens(wanted), reference)
    took_s = time.perf_counter() - started
    del reference
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return {
        "model": model.rpartition("/")[2],
        "tokens": compared,
        "served_s": served["took_s"],
        "reference_s": took_s,
        "handoff": served["handoff"],
    }


def show(result: dict[str, Any]) -> None:
    console, tokens, handoff = Console(), result["tokens"], result["handoff"]
    table = Table("requests", "equal", "ties", "wrong", "largest tie, nats", "served in s")
    largest = max((row["gap_nats"] for row in tokens["ties"]), default=0.0)
    counts = (tokens["requests"], tokens["equal"], len(tokens["ties"]), len(tokens["wrong"]))
    table.add_row(*map(str, counts), f"{largest:.3f}", f"{result['served_s']:.1f}")
    console.print(table)
    for row in (*tokens["ties"], *tokens["wrong"]):
        console.print(
            f"request {row['request']}, output {row['position']}: {row['tokens'][0]} for {row['tokens'][1]}, "
            f"{row['gap_nats']:.4f} nats apart"
        )
    table = Table(*handoff)
    table.add_row(*(f"{value:.2f}" for value in handoff.values()))
    console.print(table)


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    gpu_common.check_device(arguments.rehearse)
    model = gpu_common.model_dir(arguments.model, arguments.rehearse)
    try:
        result = bench(model, arguments.rehearse)
    except (WrongResult, KvrelayError) as error:
        sys.exit(f"WRONG: {error}")
    show(result)
    print(gpu_common.save("cluster", gpu_common.about(arguments.rehearse) | result, arguments.rehearse, arguments.out))
    if result["tokens"]["wrong"]:
        sys.exit(f"WRONG: {len(result['tokens']['wrong'])} requests differ by more than a tie")


if __name__ == "__main__":
    main()

"""The two-process cluster on one GPU: the same tokens as one engine alone, and what a handoff costs beyond prefill.

    python -m bench.gpu.cluster [--rehearse]

A prefill and a decode worker, each a process of its own, share the GPU; the router is in this one. 200 requests of
mixed lengths, some with a common beginning, greedy, 32 at once. Then one prompt of 2048 tokens at a time: how long
after the last layer was computed the decode worker had it all. Last, one engine with the reference attention on the
same GPU reads each prompt and answer by itself: every token must be the likeliest after those before it, or tie with
it. What bfloat16 can tell is measured: by how much the reference differs from itself when it sums in another order.
"""

from __future__ import annotations

import asyncio
import gc
import random
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu import common as gpu_common
from bench.gpu import weights
from bench.gpu.common import WorkerProcess, WrongResult, engine_options, processes, said
from engine.engine import Engine
from engine.options import EngineOptions
from engine.pages.pool import pages_for
from engine.types import Chunk
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, KvrelayError

PAGE_SIZE = 16
NUM_REQUESTS = 200
CONCURRENCY = 32
# Two tokens tie whose log-probabilities differ by less than SPREAD_FACTOR times what the reference differs from itself,
# for other kernels round at more places; at least and at most so many nats.
SPREAD_FACTOR, LEAST_TIE_NATS, MOST_TIE_NATS = 2.0, 0.1, 0.5
LIKELIEST = 20  # tokens of a row that the spread is taken over
REFERENCE_CHUNK, OTHER_CHUNK = 4096, 61
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
            "handoff": said(await exposed(client, handoffs, 256 if rehearse else 2048)),
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
    """One engine that reads a request by itself, with the plain attention, in chunks."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    @classmethod
    def load(cls, model: str, rehearse: bool, pages: int) -> Reference:
        options = engine_options(model, rehearse, num_pages=pages)
        if not rehearse:
            options |= {"attention": "torch", "cuda_graphs": False}
        return cls(Engine.load(EngineOptions(**options)))

    def gaps(self, ask: Ask, tokens: Sequence[int]) -> torch.Tensor:
        """By how many nats each token is less likely, after the prompt and those before it, than the likeliest."""
        logits = self.logits(ask, tokens, REFERENCE_CHUNK)
        ids = torch.tensor(list(tokens), device=logits.device)
        return (logits.amax(-1) - logits.gather(1, ids[:, None])[:, 0]).cpu()

    def spread(self, ask: Ask, tokens: Sequence[int]) -> float:
        """The most by which the distance of two likely tokens changes when the same is read in shorter chunks."""
        logits, others = (self.logits(ask, tokens, chunk) for chunk in (REFERENCE_CHUNK, OTHER_CHUNK))
        likeliest = logits.topk(LIKELIEST, -1).indices
        change = logits.gather(1, likeliest) - others.gather(1, likeliest)
        return float((change.amax(-1) - change.amin(-1)).max())

    @torch.inference_mode()
    def logits(self, ask: Ask, tokens: Sequence[int], chunk_tokens: int) -> torch.Tensor:
        """[tokens, vocab] in float32: what the reference says before each token."""
        ids, first = (*ask.prompt, *tokens[:-1]), len(ask.prompt) - 1
        found = []
        for begin in range(0, len(ids), chunk_tokens):
            end = min(begin + chunk_tokens, len(ids))
            table = range(pages_for(end, PAGE_SIZE))
            chunk = Chunk(request_id="r", token_ids=list(ids[begin:end]), start=begin, block_table=table)
            rows = [row - begin for row in range(max(begin, first), end)] or [end - begin - 1]
            logits = self._engine.model.forward(self._engine.pages, [chunk], rows)
            if end > first:
                found.append(logits[: len(rows)].float())
        return torch.cat(found)


# --- comparison ---


def compare(
    wanted: Sequence[Ask], served: Sequence[Sequence[int]], reference: Any, tie_nats: float = MOST_TIE_NATS
) -> dict[str, Any]:
    """Raises WrongResult for an answer of another length."""
    ties: list[dict[str, Any]] = []
    wrong: list[dict[str, Any]] = []
    for index, (ask, tokens) in enumerate(zip(wanted, served, strict=True)):
        if len(tokens) != ask.new_tokens:
            raise WrongResult(f"request {index} has {len(tokens)} tokens, and {ask.new_tokens} were asked for")
        gaps = reference.gaps(ask, tokens)
        at = int(gaps.argmax())  # NaN counts as the largest, and is no tie
        gap = float(gaps[at])
        if gap == 0.0:
            continue
        row = {"request": index, "prompt_tokens": len(ask.prompt), "position": at, "token": tokens[at], "gap_nats": gap}
        (ties if gap <= tie_nats else wrong).append(row)
    equal = len(wanted) - len(ties) - len(wrong)
    return {"requests": len(wanted), "equal": equal, "ties": ties, "wrong": wrong, "tie_nats": tie_nats}


def tie_nats(spread: float) -> float:
    return min(max(LEAST_TIE_NATS, SPREAD_FACTOR * spread), MOST_TIE_NATS)


def bench(model: str, rehearse: bool) -> dict[str, Any]:
    longest, count = (200, 24) if rehearse else (3000, NUM_REQUESTS)
    vocab = 4000 if rehearse else 128000
    wanted = asks(count, vocab, longest, rehearse)
    served = asyncio.run(serve(model, wanted, rehearse, 4 if rehearse else 12))
    most = max(pages_for(len(ask.prompt) + ask.new_tokens, PAGE_SIZE) for ask in wanted)
    reference = Reference.load(model, rehearse, most + 1)
    started = time.perf_counter()
    spread = max(reference.spread(ask, tokens) for ask, tokens in list(zip(wanted, served["tokens"], strict=True))[:8])
    compared = compare(wanted, served["tokens"], reference, tie_nats(spread)) | {"spread_nats": spread}
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
    table = Table("requests", "equal", "ties", "wrong", "largest tie, nats", "served in s", "read again in s")
    largest = max((row["gap_nats"] for row in tokens["ties"]), default=0.0)
    counts = (tokens["requests"], tokens["equal"], len(tokens["ties"]), len(tokens["wrong"]))
    table.add_row(*map(str, counts), f"{largest:.3f}", f"{result['served_s']:.1f}", f"{result['reference_s']:.1f}")
    console.print(table)
    console.print(
        f"a tie: {tokens['tie_nats']:.3f} nats; the reference differs from itself by {tokens['spread_nats']:.4f}"
    )
    for row in tokens["wrong"]:
        console.print(
            f"request {row['request']}, output {row['position']}: {row['gap_nats']:.4f} nats from the likeliest"
        )
    table = Table(*handoff)
    table.add_row(*(f"{value:.2f}" for value in handoff.values()))
    console.print(table)


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    gpu_common.check_device(arguments.rehearse)
    model = weights.model_dir(arguments.model, arguments.rehearse)
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

"""What keeping less KV costs in answers and saves in pages: a retrieval task beside all KV, at the same budgets.

    python -m bench.kept_kv [--requests 64] [--quick]

A small Llama is trained (some minutes, kept in .bench/) to find values by their keys: a prompt hides eight pairs of a
key and a value among filler, reads them out once in the order of the keys, goes on with filler for longer than any
window here, and asks again; the answer is the eight values once more, each behind its key, which asks for it. Served
by one prefill and one decode worker with each policy, greedily. The first value is always found: it is drawn from the
prompt, of which all is seen. Writes bench/results/kept_kv.json.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.common import MODELS, about, save
from bench.e2e import console
from cluster.deploy.local import LocalCluster
from cluster.front.server import server_options
from engine.options import EngineOptions
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion
from kvrelay.demo_model import train_tokenizer

ASK, FIRST_KEY, KEYS, VALUES, FILLERS = 3, 8, 8, 32, 32
FIRST_VALUE = FIRST_KEY + KEYS
FIRST_FILLER = FIRST_VALUE + VALUES
VOCAB = FIRST_FILLER + FILLERS
CONTEXT, BETWEEN = 256, 96  # tokens in which the pairs are hidden, and of filler behind the first reading
PAGE_SIZE = 16
STEPS, BATCH, LEARNING_RATE, LEARNT = 1200, 32, 1e-3, 0.02
SHAPE = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
POLICIES: Mapping[str, dict[str, int]] = {  # all, 80 tokens, and 160, by which a window reaches the first reading
    "all": {},
    "window": {"kv_window_tokens": 80},
    "sinks, window": {"kv_window_tokens": 64, "kv_sink_tokens": 16},
    "heavy, window": {"kv_window_tokens": 32, "kv_heavy_tokens": 48},
    "window, twice": {"kv_window_tokens": 160},
    "sinks, window, twice": {"kv_window_tokens": 144, "kv_sink_tokens": 16},
    "heavy, window, twice": {"kv_window_tokens": 32, "kv_heavy_tokens": 128},
}


def example(rng: random.Random, context: int, between: int) -> tuple[list[int], list[int]]:
    """A prompt that ends with the first key asked for again, and the answer behind it."""
    values = [rng.randrange(VALUES) + FIRST_VALUE for _ in range(KEYS)]
    pieces: list[list[int]] = [[FIRST_KEY + key, value] for key, value in enumerate(values)]
    pieces += [[token] for token in _filler(rng, context - 2 * KEYS)]
    rng.shuffle(pieces)
    reading = [token for key, value in enumerate(values) for token in (FIRST_KEY + key, value)]
    told = [token for piece in pieces for token in piece]
    return [*told, ASK, *reading, *_filler(rng, between), ASK, reading[0]], reading[1:]


def _filler(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(FILLERS) + FIRST_FILLER for _ in range(count)]


def trained() -> Path:
    """The model, made once in .bench/."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path = MODELS / "kept-kv"
    if (path / "config.json").exists():
        return path
    torch.manual_seed(0)
    torch.set_num_threads(1)  # of so small a model
    rng = random.Random(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    optimizer = torch.optim.AdamW(model.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        share = min(1.0, 0.1 + 2 * step / STEPS)  # short ones first
        context, between = (int(most * share * rng.uniform(0.5, 1.0)) for most in (CONTEXT, BETWEEN))
        context = max(context, 3 * KEYS)
        whole = [prompt + answer for prompt, answer in (example(rng, context, between) for _ in range(BATCH))]
        tokens = torch.tensor(whole)
        wanted = torch.full_like(tokens, -100)
        for begin in (context + 1, len(whole[0]) - 2 * KEYS):  # the readings: all but their first keys
            wanted[:, begin + 1 : begin + 2 * KEYS] = tokens[:, begin + 1 : begin + 2 * KEYS]
        loss = model(tokens, labels=wanted).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            console.print(f"step {step + 1}: loss {loss.item():.3f}")
            if share == 1.0 and loss.item() < LEARNT:
                break
    model.save_pretrained(path)
    train_tokenizer(512).save_pretrained(path)  # of which nothing is asked
    return path


async def found(model: Path, requests: int) -> list[dict[str, Any]]:
    """Of each policy: values found, pages and bytes that moved, and pages that did not."""
    rng = random.Random(1)
    asked = [example(rng, CONTEXT, BETWEEN) for _ in range(requests)]
    engine = EngineOptions(
        model=str(model), dtype="float32", page_size=PAGE_SIZE, num_pages=1024, threads=1, parity_check=False
    )
    cluster = LocalCluster(str(model), engine=engine, router=server_options())
    async with cluster, AsyncClient(cluster.endpoint) as client:
        rows = []
        for name, policy in POLICIES.items():
            how: dict[str, Any] = {"temperature": 0.0, "max_tokens": 2 * KEYS - 1, "ignore_eos": True, **policy}
            answers = await asyncio.gather(*(client.generate(prompt, **how) for prompt, _ in asked))
            rows.append({"policy": name, **policy, **_told(answers, [answer for _, answer in asked])})
            console.print(rows[-1])
    return rows


def _told(answers: Sequence[Completion], wanted: Sequence[Sequence[int]]) -> dict[str, Any]:
    right = [
        sum(token == want for token, want in zip(answer.token_ids[::2], wants[::2], strict=True)) / KEYS
        for answer, wants in zip(answers, wanted, strict=True)
    ]
    receipts = [answer.receipt for answer in answers if answer.receipt is not None]
    return {
        "values_found": round(sum(right) / len(right), 4),
        "pages_moved": sum(receipt.pages for receipt in receipts) / len(receipts),
        "pages_dropped": sum(receipt.dropped_pages for receipt in receipts) / len(receipts),
        "bytes_moved": sum(receipt.bytes for receipt in receipts) / len(receipts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kept_kv", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--requests", type=int, default=64, metavar="N", help="prompts, with eight values each")
    parser.add_argument("--quick", action="store_true", help="eight prompts; writes no file")
    args = parser.parse_args()
    rows = asyncio.run(found(trained(), 8 if args.quick else args.requests))
    if not args.quick:
        prompt_tokens = CONTEXT + 2 * KEYS + BETWEEN + 3
        head = about() | {"prompt_tokens": prompt_tokens, "page_size": PAGE_SIZE, "requests": args.requests}
        print(f"written to {save('kept_kv', head | {'rows': rows})}")


if __name__ == "__main__":
    main()

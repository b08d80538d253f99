"""What KV pages in int8 cost in accuracy and time on a CPU, and save in bytes, beside pages in the model's own dtype.

    python -m bench.kv_int8 [--rounds 7] [--quick]

Accuracy as in bench.kv_fp8: the same weights over the same tokens, in chunks, so that each reads what was written
before; beside it the same of bfloat16 as a whole against float32. Time: two engines, one with each kind of pages, take
turns; decode steps behind prompts of 128 and of 2,048 tokens, and prefill. Writes bench/results/kv_int8.json.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console

from bench.common import about, demo_model, save
from bench.engine import compared, in_turns, ours
from bench.kv_fp8 import PAGE_SIZE, compare, logits_of
from engine.engine import Engine
from engine.options import EngineOptions
from engine.process import set_environment

STEPS = 8  # of a turn
THREADS = 2
PROMPTS, TOKENS = 4, 512
LONG_TOKENS, LONG_BATCHES = 2048, (1, 8)
NUM_PAGES = 2304
WAYS = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "int8": ("bfloat16", "int8")}


def load(way: str) -> Engine:
    dtype, kv_dtype = WAYS[way]
    return Engine.load(
        EngineOptions(
            model=str(demo_model("125m")),
            dtype=dtype,  # type: ignore[arg-type]
            kv_dtype=kv_dtype,  # type: ignore[arg-type]
            num_pages=NUM_PAGES,
            page_size=PAGE_SIZE,
            threads=THREADS,
            parity_check=False,
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.kv_int8", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="turns of each")
    parser.add_argument("--quick", action="store_true", help="two turns; writes no file")
    args = parser.parse_args()
    set_environment(THREADS)
    torch.set_num_threads(THREADS)
    rounds = 2 if args.quick else args.rounds
    engines = {way: load(way) for way in WAYS}
    vocab_size = engines["int8"].info.vocab_size
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocab_size, (PROMPTS, TOKENS), generator=generator).tolist()
    logits = {way: logits_of(engine, prompts) for way, engine in engines.items()}
    result: dict[str, Any] = about() | {
        "model": engines["int8"].info.name,
        "kv_bytes": {way: engine.layout.page_bytes() / PAGE_SIZE for way, engine in engines.items()},
        "int8_against_bfloat16": asdict(compare(logits["bfloat16"], logits["int8"])),
        "bfloat16_against_float32": asdict(compare(logits["float32"], logits["bfloat16"])),
        "times": {},
    }
    for tokens, batches, prefills in ((128, (1, 8, 32), (128, 512, 2048)), (LONG_TOKENS, LONG_BATCHES, ())):
        contenders = {way: ours(engines[way], STEPS, tokens) for way in ("bfloat16", "int8")}
        for name, by in in_turns(contenders, batches, prefills, rounds).items():
            name = f"{name} behind {tokens:,} tokens" if "decode" in name else name
            result["times"][name] = compared(by, "int8", "bfloat16")
    Console().print(result)
    if not args.quick:
        print(f"written to {save('kv_int8', result)}")


if __name__ == "__main__":
    main()

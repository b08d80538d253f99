"""What weights in int8 save in time and bytes, and cost in accuracy, beside the same weights in bfloat16.

    python -m bench.int8 [--model DIR] [--rounds 9] [--quick]

Both engines are loaded side by side and take turns: decode steps at batch 1, 8 and 32, prefill of 128, 512 and 2,048
tokens. Of accuracy: over the same tokens of a text that ships (docs/architecture.md), each model's perplexity, and what
bench.kv_fp8 tells of logits; bfloat16 beside float32 for a sense of scale. Without --model the models are random ones,
whose perplexity says nothing of the text, but how far apart two of them are is theirs.
Writes bench/results/int8.json, keeping what is there of other models.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import AutoTokenizer

from bench.common import REPO, RESULTS, about, demo_model, save
from bench.engine import PAGE_SIZE, PROMPT_TOKENS, compared, in_turns, ours
from bench.kv_fp8 import compare, logits_of
from bench.speculation import pair
from engine.engine import Engine
from engine.options import EngineOptions
from engine.process import set_environment

TEXT = REPO / "docs" / "architecture.md"
PIECES, PIECE_TOKENS = 4, 512  # of the text
BATCHES, PREFILLS = (1, 8, 32), (128, 512, 2048)
STEPS = 16  # of a turn
THREADS = 2
WAYS = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "int8": {"dtype": "bfloat16", "quantization": "int8"},
}


def engine_of(model: str, way: str) -> Engine:
    longest = max(BATCHES) * (PROMPT_TOKENS + STEPS + 1)
    options = {"num_pages": -(-longest // PAGE_SIZE) + 64, "page_size": PAGE_SIZE, "threads": THREADS}
    return Engine.load(EngineOptions(model=model, parity_check=False, **options, **WAYS[way]))  # type: ignore[arg-type]


def times(engines: dict[str, Engine], rounds: int) -> dict[str, Any]:
    contenders = {way: ours(engine, STEPS) for way, engine in engines.items()}
    return {
        name: compared(ways, "int8", "bfloat16", digits=3)
        for name, ways in in_turns(contenders, BATCHES, PREFILLS, rounds).items()
    }


def accuracy(model: str) -> dict[str, Any]:
    tokens = AutoTokenizer.from_pretrained(model)(TEXT.read_text())["input_ids"]
    length = min(PIECE_TOKENS, len(tokens) // PIECES)
    pieces = [tokens[i * length : (i + 1) * length] for i in range(PIECES)]
    logits = {way: logits_of(engine_of(model, way), pieces) for way in WAYS}
    return {
        "text": str(TEXT.relative_to(REPO)),
        "tokens": PIECES * length,
        "perplexity": {way: perplexity(found, pieces) for way, found in logits.items()},
        "int8_against_bfloat16": asdict(compare(logits["bfloat16"], logits["int8"])),
        "bfloat16_against_float32": asdict(compare(logits["float32"], logits["bfloat16"])),
    }


def perplexity(logits: torch.Tensor, pieces: Sequence[Sequence[int]]) -> float:
    length = len(pieces[0])
    log_p = logits.view(len(pieces), length, -1)[:, :-1].double().log_softmax(-1)
    wanted = torch.tensor([piece[1:] for piece in pieces])
    return float(log_p.gather(2, wanted[..., None]).mean().neg().exp())


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.int8", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory (default: two random ones)")
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each")
    parser.add_argument("--quick", action="store_true", help="two turns; writes no file")
    args = parser.parse_args()
    set_environment(THREADS)
    torch.set_num_threads(THREADS)
    path, result = RESULTS / "int8.json", about()
    models: dict[str, Any] = json.loads(path.read_text())["models"] if path.exists() else {}
    for model in [args.model] if args.model else [str(demo_model("125m")), str(pair()["model"])]:
        engines = {way: engine_of(model, way) for way in ("bfloat16", "int8")}
        row = {
            "commit": result["commit"],
            "weight_mb": {way: round(engine.info.weight_bytes / 1e6, 1) for way, engine in engines.items()},
            "times": times(engines, 2 if args.quick else args.rounds),
        }
        del engines
        models[Path(model).name] = row | accuracy(model)
        Console().print({Path(model).name: models[Path(model).name]})
    if not args.quick:
        print(f"written to {save('int8', result | {'models': models})}")


if __name__ == "__main__":
    main()

"""What LoRA adapters cost: steps whose rows have one each, beside the same steps of the model alone.

    python -m bench.adapters [--rounds 9] [--quick]

One engine, which takes turns with and without: decode steps at batch 1, 8 and 32, prefill of 128 and 512 tokens; with
64 adapters, those of rank 8 on q_proj and v_proj (PEFT's usual ones) and of rank 16 on every Linear. The rows of a step
are of as many adapters as there are rows, one turn's of others than the last one's; and all of one, for comparison.
Tokens a second of a batch are its rows over a step's time. What all adapters of a step hold is read in each step,
beside the model's weights: the floor is the ratio of the bytes. Writes bench/results/adapters.json.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from rich.console import Console
from safetensors.torch import save_file

from bench.common import MODELS, about, demo_model, save
from bench.engine import PAGE_SIZE, PROMPT_TOKENS, in_turns, ours
from bench.rounds import spread
from engine.adapters.files import CONFIG, WEIGHTS, read_adapter
from engine.engine import Engine
from engine.options import EngineOptions
from engine.process import set_environment
from engine.types import Adapter, Chunk, SampledToken, Step

COUNT = 64
BATCHES, PREFILLS = (1, 8, 32), (128, 512)
STEPS = 16  # of a turn
THREADS = 2
KINDS: dict[str, tuple[int, tuple[str, ...]]] = {
    "rank 8, q and v": (8, ("q_proj", "v_proj")),
    "rank 16, all": (16, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")),
}


class Adapted:
    """An engine whose chunks have adapters, as `of` says by their place in the step."""

    def __init__(self, engine: Engine, of: Callable[[int], Adapter | None]) -> None:
        self.info, self.layout = engine.info, engine.layout
        self._engine = engine
        self._of = of

    def step(self, step: Step) -> list[SampledToken]:
        chunks: Sequence[Chunk] = [replace(chunk, adapter=self._of(i)) for i, chunk in enumerate(step.chunks)]
        return self._engine.step(replace(step, chunks=chunks))


def make_adapters(engine: Engine, kind: str, folder: Path) -> list[Adapter]:
    """Random ones, as PEFT saves them."""
    rank, targets = KINDS[kind]
    shutil.rmtree(folder, ignore_errors=True)
    linears = [linear for linear in engine.adapters.linears if linear.name.endswith(targets)]
    adapters = []
    for number in range(COUNT):
        path = folder / str(number)
        path.mkdir(parents=True)
        config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank, "bias": "none"}
        (path / CONFIG).write_text(json.dumps(config))
        weights = {}
        for linear in linears:
            for which, shape in (("A", (rank, linear.in_features)), ("B", (linear.out_features, rank))):
                weights[f"base_model.model.{linear.name}.lora_{which}.weight"] = 0.01 * torch.randn(shape)
        save_file(weights, path / WEIGHTS)
        adapters.append(Adapter(name=str(number), path=str(path), digest=read_adapter(str(path)).digest))
    for adapter in adapters:
        engine.adapters.load(adapter)
    return adapters


def times(engine: Engine, adapters: Sequence[Adapter], rounds: int) -> dict[str, Any]:
    first = 0

    def mixed(place: int) -> Adapter:
        return adapters[(first + place) % COUNT]

    ways: dict[str, Callable[[int], Adapter | None]] = {
        "alone": lambda _: None,
        "each its own": mixed,
        "all the same": lambda _: adapters[first % COUNT],
    }
    contenders = {way: ours(Adapted(engine, of), STEPS) for way, of in ways.items()}  # type: ignore[arg-type]

    def on_round(number: int) -> None:
        nonlocal first
        first = max(BATCHES) * number

    return {
        name: {
            **{f"{way}_ms": round(1e3 * median(seconds), 3) for way, seconds in by_way.items()},
            **{
                f"{way}_speed": spread(list(zip(by_way[way], by_way["alone"], strict=True)))
                for way in ways
                if way != "alone"
            },
        }
        for name, by_way in in_turns(contenders, BATCHES, PREFILLS, rounds, on_round).items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.adapters", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=9, metavar="N", help="turns of each")
    parser.add_argument("--quick", action="store_true", help="two turns; writes no file")
    args = parser.parse_args()
    set_environment(THREADS)
    torch.set_num_threads(THREADS)
    longest = max(BATCHES) * (PROMPT_TOKENS + STEPS + 1)
    pages = -(-longest // PAGE_SIZE) + 64
    engine = Engine.load(
        EngineOptions(
            model=str(demo_model("125m")),
            dtype="bfloat16",
            num_pages=pages,
            page_size=PAGE_SIZE,
            threads=THREADS,
            parity_check=False,
            max_adapters=COUNT,
        )
    )
    result: dict[str, Any] = about() | {"weight_mb": round(engine.info.weight_bytes / 1e6, 1), "kinds": {}}
    for kind in KINDS:
        adapters = make_adapters(engine, kind, MODELS / "adapters")
        size_mb = engine.adapters.load(adapters[0]).num_bytes / 1e6
        row = {"adapter_mb": round(size_mb, 2), "times": times(engine, adapters, 2 if args.quick else args.rounds)}
        result["kinds"][kind] = row
        Console().print({kind: row})
    if not args.quick:
        print(f"written to {save('adapters', result)}")


if __name__ == "__main__":
    main()

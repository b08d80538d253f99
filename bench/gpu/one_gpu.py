"""Disaggregated against colocated serving on one GPU, with the same engine, kernels, requests and arrivals.

    python -m bench.gpu.one_gpu [--rehearse]

*disaggregated*: a prefill and a decode process share the GPU (both hold the weights), a router and gRPC between; each
request's KV goes by cuda_ipc. *colocated*: bench/colocated.py, one process with all of the GPU's memory, chunked
prefill, no router and no network. The two processes take the same arithmetic from one another, so this is for trying
disaggregation, and for seeing what it costs and what it keeps apart: the gaps between tokens while prompts arrive.
Poisson arrivals; P50, P90 and P99 of TTFT, TPOT and of the gaps between tokens, at each rate.
"""

from __future__ import annotations

import asyncio
import gc
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.colocated import Arrival, Colocated
from bench.gpu import common as gpu_common
from bench.gpu import weights
from bench.gpu.cluster import workers
from bench.gpu.common import WrongResult, engine_options, processes
from kvrelay.bench import load
from kvrelay.bench.metrics import Outcome, percentile
from kvrelay.client.client import AsyncClient
from kvrelay.client.messages import build_request
from kvrelay.client.types import KvrelayError

RATES = (2.0, 8.0, 16.0)  # requests/s
SECONDS = 20.0
PROMPTS, OUTPUTS = (256, 2048), (32, 128)
TIMEOUT_S = 120.0


def arrivals(rate: float, seconds: float, prompts: tuple[int, int], outputs: tuple[int, int]) -> list[Arrival]:
    rng, at_s, found = random.Random(f"{rate}"), 0.0, []
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        prompt = [rng.randrange(5, 4000) for _ in range(rng.randint(*prompts))]
        found.append(Arrival(at_s=at_s, prompt=prompt, new_tokens=rng.randint(*outputs)))
    return found


def colocated(model: str, plans: Sequence[Sequence[Arrival]], rehearse: bool) -> list[list[Outcome]]:
    from engine.engine import Engine
    from engine.options import EngineOptions

    sizes: dict[str, Any] = {"num_pages": 512} if rehearse else {"kv_bytes": 24 << 30}
    engine = Engine.load(EngineOptions(**engine_options(model, rehearse, **sizes)))
    limits = (
        {"max_batch_tokens": 512, "max_batch_size": 64}
        if rehearse
        else {"max_batch_tokens": 2048, "max_batch_size": 128}
    )
    Colocated(engine, **limits).play(warm_up(plans))
    found = [Colocated(engine, **limits).play(plan)[0] for plan in plans]
    del engine
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


async def disaggregated(model: str, plans: Sequence[Sequence[Arrival]], rehearse: bool) -> list[list[Outcome]]:
    async with processes(workers(model, rehearse)) as endpoint, AsyncClient(endpoint) as client:
        await load.play(client, planned(warm_up(plans)), timeout_s=TIMEOUT_S)
        return [(await load.play(client, planned(plan), timeout_s=TIMEOUT_S))[0] for plan in plans]


def warm_up(plans: Sequence[Sequence[Arrival]]) -> list[Arrival]:
    """The lengths of the first few, at once, with other tokens: nothing of them may be found in a cache later."""
    rng = random.Random("warm-up")
    prompts = [[rng.randrange(5, 4000) for _ in arrival.prompt] for arrival in plans[0][:4]]
    return [Arrival(at_s=0.0, prompt=prompt, new_tokens=8) for prompt in prompts]


def planned(plan: Sequence[Arrival]) -> list[load.Planned]:
    return [
        load.Planned(
            request=build_request(list(a.prompt), {"max_tokens": a.new_tokens, "temperature": 0.0, "ignore_eos": True}),
            at_s=a.at_s,
            input_len=len(a.prompt),
        )
        for a in plan
    ]


def summary(name: str, rate: float, outcomes: Sequence[Outcome]) -> dict[str, Any]:
    good = [outcome for outcome in outcomes if outcome.succeeded]
    if len(good) < len(outcomes):
        failed = next(outcome for outcome in outcomes if not outcome.succeeded)
        raise WrongResult(f"{name}: {len(outcomes) - len(good)} of {len(outcomes)} requests failed: {failed.message}")
    values = {
        "ttft": [outcome.ttft_s for outcome in good],
        "tpot": [outcome.tpot_s for outcome in good if outcome.output_len > 1],
        "itl": [gap for outcome in good for gap in outcome.itls_s],
    }
    ended_s = max(outcome.ended_s for outcome in good)
    return {
        "serving": name,
        "rate": rate,
        "requests": len(good),
        "served_per_s": len(good) / ended_s,
        **{f"{key}_ms": [percentile(sorted(all_s), p) * 1e3 for p in (50, 90, 99)] for key, all_s in values.items()},
    }


def bench(model: str, rehearse: bool) -> dict[str, Any]:
    rates, seconds = ((4.0,), 3.0) if rehearse else (RATES, SECONDS)
    lengths = ((32, 128), (4, 16)) if rehearse else (PROMPTS, OUTPUTS)
    plans = [arrivals(rate, seconds, *lengths) for rate in rates]
    apart = asyncio.run(disaggregated(model, plans, rehearse))
    together = colocated(model, plans, rehearse)
    rows = [
        summary(name, rate, outcomes)
        for rate, *both in zip(rates, apart, together, strict=True)
        for name, outcomes in zip(("disaggregated", "colocated"), both, strict=True)
    ]
    return {"model": model.rpartition("/")[2], "prompts": lengths[0], "outputs": lengths[1], "rows": rows}


def show(result: dict[str, Any]) -> None:
    table = Table("serving", "asked, served /s", "TTFT P50/90/99 ms", "TPOT ms", "gaps ms")
    for row in result["rows"]:
        shown = ["/".join(f"{value:.1f}" for value in row[key]) for key in ("ttft_ms", "tpot_ms", "itl_ms")]
        table.add_row(row["serving"], f"{row['rate']:g}, {row['served_per_s']:.2f}", *shown)
    Console().print(table)


def main() -> None:
    arguments = gpu_common.parser(__doc__).parse_args()
    gpu_common.check_device(arguments.rehearse)
    model = weights.model_dir(arguments.model, arguments.rehearse)
    try:
        result = bench(model, arguments.rehearse)
    except (WrongResult, KvrelayError) as error:
        sys.exit(f"WRONG: {error}")
    show(result)
    print(gpu_common.save("one_gpu", gpu_common.about(arguments.rehearse) | result, arguments.rehearse, arguments.out))


if __name__ == "__main__":
    main()

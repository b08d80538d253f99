"""What KV pages in fp8 cost in accuracy, and save in bytes, beside pages in the model's own dtype.

    python -m bench.kv_fp8 [--model DIR] [--rehearse] [--prompts N] [--tokens N]

The same weights run twice over the same tokens, teacher-forced, in chunks, so that every chunk reads what the ones
before it wrote. For each position: the logits' relative error; whether the likeliest token is the same; the divergence
KL(own || fp8) in nats; and how much less likely fp8 makes the token that the model itself finds likeliest. Where the
two differ in the likeliest token, `gap` says how far apart the two tokens were in the model's own logits, in units of
the row's standard deviation: a small one is a near-tie. Beside it, for a sense of scale, the same of bfloat16 as a
whole against float32: what a person accepts already. Runs on a CPU, too, with the torch backend.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench import common
from bench.gpu import common as gpu_common
from engine.engine import Engine
from engine.options import EngineOptions
from engine.types import Chunk

CHUNK = 64
PAGE_SIZE = 16
WAYS = {"float32": ("float32", "auto"), "bfloat16": ("bfloat16", "auto"), "fp8": ("bfloat16", "fp8_e4m3")}


@dataclass(frozen=True, slots=True)
class Difference:
    """Of all positions together."""

    positions: int
    relative_error_median: float
    relative_error_p99: float
    same_likeliest: float  # share of positions
    kl_mean_nats: float
    kl_p99_nats: float
    nll_increase_nats: float  # of the token that the model itself finds likeliest, on average
    gap_of_flips_median: float | None
    gap_of_flips_p99: float | None


def logits_of(engine: Engine, prompts: list[list[int]]) -> torch.Tensor:
    """[prompts * tokens, vocab] in float32, one prompt after the other."""
    pages = -(-len(prompts[0]) // PAGE_SIZE)
    parts: list[list[torch.Tensor]] = [[] for _ in prompts]
    for start in range(0, len(prompts[0]), CHUNK):
        chunks = [
            Chunk(
                request_id=str(i),
                token_ids=prompt[start : start + CHUNK],
                start=start,
                block_table=range(i * pages, (i + 1) * pages),
            )
            for i, prompt in enumerate(prompts)
        ]
        with torch.inference_mode():
            logits = engine.model.forward(engine.pages, chunks).float().cpu()
        rows = sum(len(chunk.token_ids) for chunk in chunks)  # the engine may pad
        for i, part in enumerate(logits[:rows].split([len(chunk.token_ids) for chunk in chunks])):
            parts[i].append(part)
    return torch.cat([torch.cat(part) for part in parts])


def compare(own: torch.Tensor, narrow: torch.Tensor) -> Difference:
    own, narrow = own.double(), narrow.double()
    centred, other = own - own.mean(-1, keepdim=True), narrow - narrow.mean(-1, keepdim=True)
    error = (centred - other).norm(dim=-1) / centred.norm(dim=-1)
    log_own, log_narrow = own.log_softmax(-1), narrow.log_softmax(-1)
    kl = (log_own.exp() * (log_own - log_narrow)).sum(-1)
    best, its_best = own.argmax(-1), narrow.argmax(-1)
    likeliest = log_own.gather(1, best[:, None]) - log_narrow.gather(1, best[:, None])
    gap = ((own.gather(1, best[:, None]) - own.gather(1, its_best[:, None])).squeeze(1) / own.std(-1))[best != its_best]
    return Difference(
        positions=own.shape[0],
        relative_error_median=float(error.median()),
        relative_error_p99=float(error.quantile(0.99)),
        same_likeliest=float((best == its_best).double().mean()),
        kl_mean_nats=float(kl.mean()),
        kl_p99_nats=float(kl.quantile(0.99)),
        nll_increase_nats=float(likeliest.mean()),
        gap_of_flips_median=float(gap.median()) if gap.numel() else None,
        gap_of_flips_p99=float(gap.quantile(0.99)) if gap.numel() else None,
    )


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=None, help="how many (default: 4; 2 in a rehearsal)")
    parser.add_argument("--tokens", type=int, default=None, help="of each (default: 512; 96 in a rehearsal)")
    arguments = parser.parse_args()
    on_cpu = arguments.rehearse or not torch.cuda.is_available()
    count = arguments.prompts or (2 if arguments.rehearse else 4)
    tokens = arguments.tokens or (96 if arguments.rehearse else 512)
    directory = arguments.model or str(common.demo_model("tiny" if arguments.rehearse else "125m"))
    options: dict[str, Any] = {
        "model": directory,
        "num_pages": count * -(-tokens // PAGE_SIZE),
        "page_size": PAGE_SIZE,
        "device": "cpu" if on_cpu else "cuda:0",
        "attention": "torch" if on_cpu else "auto",  # one backend for all, so that only the numbers differ
        "cuda_graphs": False,
        "parity_check": False,
    }
    logits: dict[str, torch.Tensor] = {}
    token_bytes: dict[str, float] = {}
    scales: list[list[float]] = []
    for way, (dtype, kv_dtype) in WAYS.items():
        engine = Engine.load(EngineOptions(**options | {"dtype": dtype, "kv_dtype": kv_dtype}))
        generator = torch.Generator().manual_seed(0)
        prompts = torch.randint(3, engine.info.vocab_size, (count, tokens), generator=generator).tolist()
        logits[way] = logits_of(engine, prompts)
        token_bytes[way] = engine.layout.page_bytes() / PAGE_SIZE
        name, scales = engine.info.name, [[scale.k, scale.v] for scale in engine.pages.scales or ()]
        del engine
    fp8 = compare(logits["bfloat16"], logits["fp8"])
    whole = compare(logits["float32"], logits["bfloat16"])
    result = gpu_common.about(on_cpu) | {"model": name, "prompts": count, "tokens": tokens, "kv_bytes": token_bytes}
    result |= {"fp8_against_bfloat16": asdict(fp8), "bfloat16_against_float32": asdict(whole), "scales": scales}
    table = Table("", "pages in fp8 against bfloat16", "all of bfloat16 against float32")
    small, own, exact = token_bytes["fp8"], token_bytes["bfloat16"], token_bytes["float32"]
    table.add_row("bytes of KV for a token", f"{small:.0f} for {own:.0f}", f"{own:.0f} for {exact:.0f}")
    for (field, value), other in zip(asdict(fp8).items(), asdict(whole).values(), strict=True):
        cells = ("-" if x is None else f"{x:.4g}" for x in (value, other))
        table.add_row(field.replace("_", " "), *cells)
    console = Console()
    console.print(table)
    if on_cpu and not arguments.rehearse:  # accuracy is the arithmetic's, not the machine's
        path = common.save("kv_fp8", result)
    else:
        path = gpu_common.save("kv_fp8", result, arguments.rehearse, arguments.out)
    console.print(f"written to {path}")


if __name__ == "__main__":
    main()

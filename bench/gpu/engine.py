"""How near the engine is to what the GPU can do; bench/gpu/peers.py measures transformers at the same.

    python -m bench.gpu.engine [--rehearse] [--model 8b|1b|tiny|DIR] [--kv fp8_e4m3]

    decode    batch 1, 32 and 128 at a context of 1k: time of a step, against the bytes it must read over the measured
              bandwidth. Steps are begun before the last one's tokens are known, as a decode worker does. Beside it the
              same steps with tokens drawn by top-k and top-p: what sampling costs
    prefill   2k and 8k tokens: against the multiplications over the measured matmul rate
    idle      of the GPU at decode batch 32, from a profiler's trace: within steps, and between them (bench/gpu/idle.py)
    host      what `begin` takes of the host's time: the most a step may be shortened before the GPU waits

Random weights: the time is the same, the tokens mean nothing. The parity check at load says whether they are right.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from bench.gpu import common as gpu_common
from bench.gpu import weights
from bench.gpu.common import said
from bench.gpu.floor import Ceilings, Work, ceilings
from bench.gpu.idle import Idle, Stretch, idle_of, steps_of
from engine.engine import Engine
from engine.gpu.steps import GpuSteps
from engine.options import EngineOptions
from engine.types import PENDING, Chunk, SampleSpec, SamplingParams, Step

WANTED_DECODE, WANTED_PREFILL, WANTED_IDLE = 0.65, 0.60, 0.05
GREEDY = SamplingParams(temperature=0.0)
DRAWN = SamplingParams(temperature=0.8, top_k=50, top_p=0.95, seed=1)
CHUNK_TOKENS = 8192  # of a step that fills contexts


@dataclass(frozen=True, slots=True)
class Sizes:
    batches: tuple[int, ...] = (1, 32, 128)
    context: int = 1024
    prompts: tuple[int, ...] = (2048, 8192)
    steps: int = 40
    idle_batch: int = 32
    page_size: int = 16

    @property
    def pages_per_request(self) -> int:
        return -(-(self.context + 3 * self.steps + 8) // self.page_size)

    @property
    def num_pages(self) -> int:
        return max(max(self.batches) * self.pages_per_request, -(-max(self.prompts) // self.page_size) + 1)


TINY = Sizes(batches=(1, 4), context=40, prompts=(64, 128), steps=4, idle_batch=4)


def what_is_missing(engine: Engine) -> str:
    """What the engine does without, which its log says and its figures would not; empty when nothing."""
    if engine.backend.name != "flashinfer":
        return f"attention runs on the {engine.backend.name} backend, not on FlashInfer; the log says why"
    if not isinstance(engine.steps, GpuSteps) or engine.steps.graphs is None:
        return "decode steps run without CUDA graphs; the log says why"
    return ""


class Driver:
    """Requests of one batch over one engine: fill their contexts, then step."""

    def __init__(self, engine: Engine, sizes: Sizes, batch: int) -> None:
        self._engine = engine
        per_request = sizes.pages_per_request
        self._tables = [range(i * per_request, (i + 1) * per_request) for i in range(batch)]
        self._context = sizes.context
        vocab, generator = engine.info.vocab_size, torch.Generator().manual_seed(batch)
        prompts = torch.randint(3, vocab, (batch, sizes.context), generator=generator).tolist()
        per_step = max(1, CHUNK_TOKENS // sizes.context)
        for at in range(0, batch, per_step):
            rows = range(at, min(at + per_step, batch))
            engine.step(Step(chunks=[self._chunk(i, prompts[i], 0) for i in rows]))
        self._position = sizes.context

    def _chunk(self, request: int, ids: list[int], start: int, params: SamplingParams = GREEDY) -> Chunk:
        spec = SampleSpec(params=params, position=start + len(ids))
        return Chunk(
            request_id=str(request), token_ids=ids, start=start, block_table=self._tables[request], sample=spec
        )

    def run(self, steps: int, params: SamplingParams = GREEDY) -> list[float]:
        """Seconds that the host spent in each `begin`. Ends when the last step's tokens are there."""
        hosts: list[float] = []
        flight = None
        for i in range(steps):
            ids = [5] if i == 0 else [PENDING]
            chunks = [self._chunk(request, ids, self._position, params) for request in range(len(self._tables))]
            began_s = time.perf_counter()
            following = self._engine.begin(Step(chunks=chunks))
            hosts.append(time.perf_counter() - began_s)
            if flight is not None:
                flight.result()
            flight = following
            self._position += 1
        assert flight is not None
        tokens = flight.result()
        if any(token.error for token in tokens):
            raise gpu_common.WrongResult(f"a decode step: {next(t.error for t in tokens if t.error)}")
        return hosts


def measure_decode(engine: Engine, sizes: Sizes, batch: int, work: Work, top: Ceilings) -> dict[str, Any]:
    driver = Driver(engine, sizes, batch)
    driver.run(3)
    began_s = time.perf_counter()
    hosts = driver.run(sizes.steps)
    step_s = (time.perf_counter() - began_s) / sizes.steps
    driver.run(3, DRAWN)
    began_s = time.perf_counter()
    driver.run(sizes.steps, DRAWN)
    drawn_s = (time.perf_counter() - began_s) / sizes.steps
    context = sizes.context + 3 + sizes.steps / 2
    floor_s = work.decode_bytes(batch, int(context)) / top.bandwidth
    row = {
        "batch": batch,
        "context": int(context),
        "step_ms": step_s * 1e3,
        "drawn_step_ms": drawn_s * 1e3,  # tokens by top-k and top-p
        "floor_ms": floor_s * 1e3,
        "share_of_floor": floor_s / step_s,
        "host_ms": statistics.median(hosts) * 1e3,
        "tokens_per_s": batch / step_s,
    }
    if top.datasheet_bandwidth:
        row["share_of_datasheet"] = work.decode_bytes(batch, int(context)) / top.datasheet_bandwidth / step_s
    return row


def measure_prefill(engine: Engine, tokens: int, page_size: int, work: Work, top: Ceilings) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(tokens)
    times: list[float] = []
    for _ in range(4):
        ids = torch.randint(3, engine.info.vocab_size, (tokens,), generator=generator).tolist()
        spec = SampleSpec(params=GREEDY, position=tokens)
        chunk = Chunk(request_id="p", token_ids=ids, start=0, block_table=range(-(-tokens // page_size)), sample=spec)
        began_s = time.perf_counter()
        engine.step(Step(chunks=[chunk]))
        times.append(time.perf_counter() - began_s)
    prefill_s = statistics.median(times[1:])
    floor_s = work.prefill_flops(tokens) / top.matmul
    return {
        "tokens": tokens,
        "ms": prefill_s * 1e3,
        "floor_ms": floor_s * 1e3,
        "share_of_matmul_rate": floor_s / prefill_s,
        "tokens_per_s": tokens / prefill_s,
    }


def measure_idle(engine: Engine, sizes: Sizes) -> Idle | None:
    """None where there is no GPU to be idle. By CUPTI, which before CUDA 13.1 may lose the first kernels (pytorch issue
    192021): they would look like gaps."""
    if engine.device.type != "cuda":
        return None
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    driver = Driver(engine, sizes, sizes.idle_batch)
    driver.run(5)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        driver.run(min(20, sizes.steps))
        torch.cuda.synchronize()
    work = [
        Stretch(event.time_range.start, event.time_range.end, event.name)
        for event in trace.events()
        if event.device_type == DeviceType.CUDA
    ]
    return idle_of(steps_of(work))


def summary(result: dict[str, Any]) -> list[dict[str, str]]:
    rows = [
        {
            "what": f"decode batch {row['batch']}, context {row['context']}",
            "found": f"{row['step_ms']:.2f} ms, {row['share_of_floor']:.0%} of the floor; "
            f"{row['drawn_step_ms']:.2f} ms with drawn tokens",
            "wanted": f"{WANTED_DECODE:.0%}",
        }
        for row in result["decode"]
    ]
    rows += [
        {
            "what": f"prefill {row['tokens']} tokens",
            "found": f"{row['ms']:.1f} ms, {row['share_of_matmul_rate']:.0%} of the matmul rate",
            "wanted": f"{WANTED_PREFILL:.0%}",
        }
        for row in result["prefill"]
    ]
    if idle := result["idle"]:
        found = f"{idle['within_steps']:.1%} within steps, {idle['between_steps']:.1%} between them"
        rows.append({"what": "GPU idle in decode", "found": found, "wanted": f"{WANTED_IDLE:.0%} in all"})
    return rows


def show(console: Console, result: dict[str, Any]) -> None:
    table = Table("", "ms", "floor ms", "share", "host ms", "ms, drawn")
    for row in result["decode"]:
        cells = (f"{row['step_ms']:.2f}", f"{row['floor_ms']:.2f}", f"{row['share_of_floor']:.0%}")
        table.add_row(f"decode {row['batch']}", *cells, f"{row['host_ms']:.2f}", f"{row['drawn_step_ms']:.2f}")
    for row in result["prefill"]:
        cells = (f"{row['ms']:.1f}", f"{row['floor_ms']:.1f}", f"{row['share_of_matmul_rate']:.0%}")
        table.add_row(f"prefill {row['tokens']}", *cells, "", "")
    console.print(table)
    top = result["ceilings"]
    console.print(f"measured: {top['bandwidth'] / 1e12:.3g} TB/s copy, {top['matmul'] / 1e12:.4g} TFLOP/s bfloat16")
    for row in result["summary"][len(result["decode"]) + len(result["prefill"]) :]:
        console.print(f"{row['what']}: {row['found']}")


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--kv", default="auto", choices=["auto", "fp8_e4m3"], help="dtype of the KV pages")
    arguments = parser.parse_args()
    rehearse = arguments.rehearse
    gpu_common.check_device(rehearse)
    console, sizes = Console(), TINY if rehearse else Sizes()
    device = torch.device(gpu_common.device_of(rehearse))
    directory = weights.model_dir(arguments.model, rehearse)
    options = gpu_common.engine_options(
        directory, rehearse, num_pages=sizes.num_pages, page_size=sizes.page_size, kv_dtype=arguments.kv
    )
    began_s = time.monotonic()
    engine = Engine.load(EngineOptions(**(options | {"parity_check": True})))
    load_s = time.monotonic() - began_s
    if not rehearse and (reason := what_is_missing(engine)):
        sys.exit(f"WRONG: {reason}")
    top = ceilings(device, is_small=rehearse)
    work = Work.of(engine, engine.model.module.config)
    result: dict[str, Any] = gpu_common.about(rehearse) | {
        "model": engine.info.name,
        "kv_dtype": engine.layout.dtype,
        "attention": engine.backend.name,
        "kernels": [str(kernels) for kernels in getattr(engine.backend, "kernels", {}).values()],
        "load_s": round(load_s, 1),
        "ceilings": asdict(top),
        "decode": [said(measure_decode(engine, sizes, batch, work, top)) for batch in sizes.batches],
        "prefill": [said(measure_prefill(engine, tokens, sizes.page_size, work, top)) for tokens in sizes.prompts],
    }
    idle = measure_idle(engine, sizes)  # last: whatever is timed after a profile is slower by CUPTI, which stays
    result["idle"] = asdict(idle) if idle else None
    result["summary"] = summary(result)
    show(console, result)
    console.print(f"written to {gpu_common.save('engine', result, rehearse, arguments.out)}")


if __name__ == "__main__":
    main()

"""What requests look like and when they come (WorkloadOptions), and how a benchmark plays them (PlayOptions).

Values only: the flags of `kvrelay bench`, `simulate`, `plan` and `verify` and the keys of a plan's request are made
from them, kvrelay.bench.workload draws requests from them. Nothing is checked here: what may be given together depends
on what is asked, and is told in the words of that.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from engine.knobs import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """A trace, or lengths drawn at random; and arrivals at a rate, or the trace's own."""

    num_prompts: int | None = knob(None, "How many requests; of a trace, the first so many.", unit="requests", ge=1)
    request_rate: float = knob(math.inf, "Requests per second; inf sends all at once.", unit="requests/s", gt=0)
    burstiness: float = knob(1.0, "Shape of the gamma gaps: 1 is Poisson, below is burstier.", ge=0.001)
    trace: Path | None = knob(None, "Azure CSV, any CSV with lengths, or Mooncake JSONL.")  # noqa: RUF009
    trace_timestamps: bool = knob(False, "Keep the trace's own bursts instead of gamma gaps.")
    trace_speedup: float = knob(1.0, "With --trace-timestamps: so many times as fast.", gt=0)
    trace_scale: float = knob(1.0, "Multiply the trace's lengths, for small machines.", gt=0)
    max_input_len: int | None = knob(None, "Cut prompts to this length.", unit="tokens", ge=1)
    max_output_len: int | None = knob(None, "Cut outputs to this length.", unit="tokens", ge=1)
    random_input_len: int | None = knob(None, "Prompt tokens of random requests.", unit="tokens", ge=1)
    random_output_len: int | None = knob(None, "Output tokens of random requests.", unit="tokens", ge=1)
    random_range_ratio: float = knob(0.0, "Lengths from len * (1 - R) to len * (1 + R).", ge=0, lt=1)
    random_prefix_len: int = knob(0, "Tokens that all random prompts begin with, added.", unit="tokens", ge=0)
    seed: int = knob(0, "The same seed, the same requests.", ge=0)

    @property
    def name(self) -> str:
        """As a person would call it."""
        if self.trace is not None:
            return self.trace.name
        return f"random lengths of {self.random_input_len} and {self.random_output_len} tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    max_concurrency: int | None = knob(None, "Requests that are out at once, at most.", unit="requests", ge=1)
    prompt_seed: int | None = knob(None, "Of the prompts' tokens alone: prompts nobody cached. Default: seed.", ge=0)
    ignore_eos: bool = knob(True, "Generate the whole length, as the lengths asked for need.")
    temperature: float = knob(0.0, "0 is greedy.", ge=0)
    num_warmups: int = knob(0, "Requests before the clock starts.", unit="requests", ge=0)
    timeout_s: float | None = knob(None, "Seconds after which a request is given up.", unit="s", gt=0)

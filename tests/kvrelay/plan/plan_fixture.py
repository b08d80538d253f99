"""A Plan made by hand, of the size and shape of a real one, so that tests of what is shown need no search."""

from __future__ import annotations

import math
from dataclasses import replace

from placement.catalogs.base import Degrees
from placement.plan import Candidate, Goodput, Interval, Plan, PoolPlan, RatePoint, Slo, Swing

HARDWARE = "H100-SXM"
USD, WATTS = 2.99, 700.0
STEPS = (0.4, 0.6, 0.75, 0.85, 0.92, 0.97, 1.0, 1.04, 1.1, 1.2)  # of the goodput: where the search stepped


def pool(role: str, tp: int, replicas: int, *, pp: int = 1, num_pages: int = 24_000, chunk_tokens: int = 0) -> PoolPlan:
    return PoolPlan(
        role=role,  # type: ignore[arg-type]
        degrees=Degrees(tp, pp),
        replicas=replicas,
        hardware=HARDWARE,
        num_pages=num_pages,
        page_size=16,
        max_batch_tokens=2048,
        max_batch_size=256,
        chunk_tokens=chunk_tokens,
    )


def apart(prefill: tuple[int, int], decode: tuple[int, int]) -> Candidate:
    """Two pools, each (tensor-parallel degree, replicas)."""
    return Candidate(pools=(pool("prefill", *prefill), pool("decode", *decode)))


def together(tp: int, replicas: int, role: str = "mixed", chunk_tokens: int = 512) -> Candidate:
    return Candidate(pools=(pool(role, tp, replicas, chunk_tokens=chunk_tokens),))


def point(rate: float, knee: float, *, attainment_at_knee: float = 0.9) -> RatePoint:
    """Attainment falls along a logistic that crosses `attainment_at_knee` at the knee; times grow towards it."""
    steep = 14 / knee
    offset = math.log(attainment_at_knee / (1 - attainment_at_knee)) / steep
    share = 1 / (1 + math.exp(steep * (rate - knee - offset)))
    half = 0.004 + 0.035 * share * (1 - share) * 4
    load = min(rate / (1.25 * knee), 0.97)
    wait = load / (1 - load)
    return RatePoint(
        rate=rate,
        attainment=Interval(share, max(0.0, share - half), min(1.0, share + half)),
        ttft_s={p: around(base * (0.55 + 0.35 * wait)) for p, base in (("50", 0.06), ("90", 0.11), ("99", 0.2))},
        tpot_s={
            p: around(base * 0.8 * (0.8 + 0.1 * wait)) for p, base in (("50", 0.018), ("90", 0.025), ("99", 0.031))
        },
        phases_s={
            "route": 0.001 + 0.004 * wait,
            "prefill_queue": 0.012 * wait,
            "prefill": 0.055,
            "handoff": 0.006 + 0.001 * wait,
            "decode_queue": 0.003 * wait,
            "decode": 2.4 * (0.8 + 0.1 * wait),
        },
        busy={
            "prefill": load,
            "decode": 0.72 * load,
            "prefill_kv": 0.21 * load,
            "decode_kv": 0.63 * load,
            "link": 0.05 * load,
        },
        num_requests=8000,
    )


def around(value: float, share: float = 0.06) -> Interval:
    return Interval(value, value * (1 - share), value * (1 + share))


def goodput(candidate: Candidate, knee: float, *, limit: str = "", usd: float = USD) -> Goodput:
    return Goodput(
        candidate=candidate,
        goodput=around(knee, 0.05),
        curve=tuple(point(knee * step, knee) for step in STEPS) if knee else (),
        usd_per_hour=candidate.gpus * usd,
        watts=candidate.gpus * WATTS,
        limit=limit,
    )


TRIED = (
    goodput(apart((2, 2), (4, 1)), 14.2),
    goodput(apart((1, 4), (4, 1)), 13.1),
    goodput(apart((1, 4), (2, 2)), 12.3),
    goodput(apart((2, 3), (2, 1)), 11.0),
    goodput(apart((4, 1), (4, 1)), 9.7),
    goodput(apart((1, 5), (1, 3)), 9.1, limit="decode TP 1: its pages hold 71 requests of this length"),
    goodput(together(2, 4), 8.9),
    goodput(together(4, 2), 8.6),
    goodput(together(8, 1), 6.3),
    goodput(together(4, 2, chunk_tokens=2048), 5.2),
    goodput(together(1, 8), 3.1),
    goodput(apart((2, 1), (2, 1)), 5.8),
    goodput(together(1, 2, chunk_tokens=2048), 0.0, limit="decode at batch 1 already takes longer than the target"),
)

REFUSED = {
    "TP 16": "16 GPUs do not stand on one node of 8",
    "TP 1 x PP 2": "max_pp is 1; give --max-pp 2 to try pipeline stages",
    "TP 6": "6 does not divide the model's 32 attention heads",
}

PLAN = Plan(
    asked={
        "model": "Llama-3.1-8B",
        "hardware": ["h100-sxm"],
        "num_gpus": 8,
        "trace": "configs/workloads/azure-conv-2023.csv",
        "ttft_s": 0.25,
        "tpot_s": 0.025,
        "attainment": 0.9,
        "objective": "goodput",
        "seed": 0,
    },
    slo=Slo(ttft_s=0.25, tpot_s=0.025, attainment=0.9),
    objective="goodput",
    chosen=TRIED[0],
    at_rate=point(14.2, 14.2),
    binding="prefill",
    headroom=0.0,
    tried=TRIED,
    swings=(
        Swing(what="prefill times", less="11% shorter", more="11% longer", at_less=15.9, at_more=12.6),
        Swing(what="TTFT target", less="20% tighter", more="20% looser", at_less=12.9, at_more=15.1),
    ),
    refused=REFUSED,
    advice=(
        "The prefill pool binds: its workers compute 80% of the time, decode's 58%.",
        "One more prefill worker (2 GPUs) would lift goodput to about 17.6 requests/s.",
        "A TTFT target of 400 ms instead of 250 ms would lift it to about 16.1 requests/s with the same GPUs.",
    ),
    sources={
        "latency": "roofline of Llama-3.1-8B on H100-SXM, efficiencies of the hardware file, not calibrated",
        "workload": "azure-conv-2023.csv, Poisson arrivals, lengths resampled, seed 0",
        "hardware": "configs/hardware/h100-sxm.yaml, prices of November 2026",
        "margin": "none measured; the latency model's own error of 10% is in the intervals",
    },
    phase_goodput={
        "prefill": (("TP 1", 3.9), ("TP 2", 3.6), ("TP 4", 2.9), ("TP 8", 1.9)),
        "decode": (("TP 1", 2.2), ("TP 2", 3.8), ("TP 4", 4.4), ("TP 8", 3.7)),
    },
    cpu_s=21.7,
    num_simulated=1_240_000,
)

COLOCATED = replace(PLAN, chosen=TRIED[6], tried=(TRIED[6], *TRIED[7:11], TRIED[11]), binding="none")

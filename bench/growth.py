"""Do large clusters, and several routers, serve as small ones do? Simulated, by the live policies.

    python -m bench.growth [--quick]

Placements of 6 to 13 workers, then 4 and 16 times as many, at the same load per worker, by 1, 2 and 4 routers, which
hear of each other's requests by workers' reports only. Conversations of Azure's trace, latencies by the roofline.
Writes bench/results/growth.json and draws docs/plots/growth.svg.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from bench.common import REPO, RESULTS, about, save
from bench.placement_search import trace
from bench.plots import draw
from placement.build.from_offers import OfferOf, assemble, mixed_of, offers_of, pair_of
from placement.catalogs.base import Degrees
from placement.catalogs.roofline import open_catalog
from placement.compiled.pool import call, packed, simulation_pool
from placement.plan import Candidate, Slo
from placement.search.hybrids import hybrids_of
from placement.simulator.systems import LiveSystem
from placement.workload.traffic import Traffic

SIZES = (1, 4, 16)  # times the workers
ROUTERS = (1, 2, 4)
SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`counts`: workers of each pool, whose degrees TP `tp` are; of one pool that is mixed, or of a prefill pool and
    one of `role`. `rate`: requests/s, about nine tenths of what it can serve."""

    model: str
    hardware: str
    tp: tuple[int, ...]
    counts: tuple[int, ...]
    role: str
    slo: Slo
    rate: float

    def candidate(self, offer_of: OfferOf) -> Candidate:
        offers = [(offer_of(Degrees(tp=tp), False), count) for tp, count in zip(self.tp, self.counts, strict=True)]
        if len(offers) == 1:
            return mixed_of(*offers[0], self.hardware, 512)
        pair = pair_of(offers[0], offers[1], self.hardware)
        return hybrids_of(pair)[-1] if self.role == "mixed" else pair


SMALL, LARGE = ("llama-3.1-8b", "h100-sxm"), ("llama-3.1-70b", "h200-sxm")
TIGHT, WIDE = Slo(ttft_s=0.3, tpot_s=0.015), Slo(ttft_s=0.8, tpot_s=0.03)
CASES: Mapping[str, Case] = {
    name: Case(model=of[0], hardware=of[1], tp=tp, counts=counts, role=role, slo=slo, rate=rate)
    for name, of, tp, counts, role, slo, rate in (
        ("8B, mixed", SMALL, (1,), (8,), "mixed", TIGHT, 87.0),
        ("8B, two pools", SMALL, (1, 2), (4, 2), "decode", TIGHT, 92.0),
        ("70B, hybrid", LARGE, (2, 4), (10, 3), "mixed", WIDE, 60.0),
    )
}


def look(case: Case, times: int, routers: int, seconds: float) -> dict[str, Any]:
    """What so many times the case's workers and requests make of it."""
    offer_of = offers_of(open_catalog(case.model, case.hardware))
    small = case.candidate(offer_of)
    candidate = replace(small, pools=tuple(replace(p, replicas=p.replicas * times) for p in small.pools))
    system = assemble(candidate, offer_of, within_node=False, slo=case.slo)
    assert isinstance(system, LiveSystem)
    cluster = replace(system.cluster, num_routers=routers)
    rate = case.rate * times
    outcome = LiveSystem(cluster).play(Traffic(source=trace("conv")).draw(rate, int(rate * seconds), 1))
    ttft_ms = 1e3 * np.nanpercentile(outcome.ttft_s, (50, 90))
    return {
        "workers": len(cluster.workers),
        "routers": routers,
        "attainment": round(outcome.attainment(case.slo.ttft_s, case.slo.tpot_s), 4),
        "ttft_p50_ms": round(float(ttft_ms[0]), 1),
        "ttft_p90_ms": round(float(ttft_ms[1]), 1),
        "tpot_p90_ms": round(1e3 * float(np.nanpercentile(outcome.tpot_s, 90)), 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.growth", description="Large clusters beside small ones.")
    parser.add_argument("--quick", action="store_true", help="a quarter of the requests, and none of the largest")
    args = parser.parse_args()
    sizes, seconds = (SIZES[:2], SECONDS / 4) if args.quick else (SIZES, SECONDS)
    cases: dict[str, Any] = {}
    with simulation_pool(1) as pool:
        for name, case in CASES.items():
            rows = cases[name] = {"slo": asdict(case.slo), "rate_per_s": case.rate, "rows": []}
            for times in sizes:
                for routers in ROUTERS:
                    row = pool.submit(call, packed(look, case, times, routers, seconds)).result()
                    print(f"{name}: {row}", flush=True)
                    rows["rows"].append(row)
    result = {**about(), "cases": cases}
    save("growth", result)
    draw("growth", result)
    print(f"saved to {(RESULTS / 'growth.json').relative_to(REPO)}")


if __name__ == "__main__":
    main()

"""Who serves a request, simulated: by prediction, and as Splitwise chooses, with the same workers and requests.

    python -m bench.placements [--quick]

Eight H100 serve Llama-3.1-8B, by the live policies and a roofline's times, for Azure's conversation and its code. Half
of the workers are at home with prompts and half with answers; they do both, and `placement`
says which of them serve a request (docs/serving.md, *Which workers*). Beside them, four that only read and four that
only write, and eight of both with chunks of 512. Printed: the highest rate at which 90% of the requests meet 400 ms to
the first token and 20 ms to each after it. Writes bench/results/placements.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from bench.common import about, save
from bench.placement_search import trace
from cluster.spec.load import parse_spec
from kvrelay.simulate.simulation import source_of
from placement.build.from_spec import sim_cluster
from placement.plan import Slo
from placement.simulator.cluster import SimCluster
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload

MODEL, HARDWARE = "llama-3.1-8b", "h100-sxm"
SLO = Slo(ttft_s=0.4, tpot_s=0.020)
LOADS = {"conversation": "conv", "code": "code"}
LEND = [
    {"role": "mixed", "name": "prompts", "replicas": 4, "max_batch_tokens": 2048, "chunk_tokens": 2048},
    {"role": "mixed", "name": "answers", "replicas": 4, "max_batch_tokens": 2048, "chunk_tokens": 512},
]
SPLIT = [{"role": "prefill", "replicas": 4}, {"role": "decode", "replicas": 4}]
ARRANGEMENTS: Mapping[str, tuple[str, Any]] = {
    "splitwise": ("splitwise", LEND),
    "predicted": ("predicted", LEND),
    "four and four": ("predicted", SPLIT),
    "eight of both": ("predicted", [{"role": "mixed", "replicas": 8, "chunk_tokens": 512}]),
}
MOST_PER_S = 256.0
CLOSE = 0.02  # of the rate


def cluster_of(placement: str, pools: Any) -> SimCluster:
    targets = {"slo_ttft_ms": 1e3 * SLO.ttft_s, "slo_tpot_ms": 1e3 * SLO.tpot_s}
    spec = parse_spec({"model": MODEL, "router": {"placement": placement, **targets}, "pools": pools})
    return sim_cluster(spec, source_of(spec, hardware=HARDWARE, profile=None, model=MODEL))


def goodput(cluster: SimCluster, workload: Workload, seconds: float) -> float:
    """Requests a second, by halving; each rate for so long."""
    low, high = 0.0, MOST_PER_S
    while high - low > CLOSE * high and high > 1.0:
        rate = (low + high) / 2
        outcome = simulate(cluster, workload.resampled(round(rate * seconds), rate, seed=0))
        is_met = outcome.attainment(SLO.ttft_s, SLO.tpot_s) >= SLO.attainment
        low, high = (rate, high) if is_met else (low, rate)
    return low


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placements", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="each rate for less time; writes no file")
    seconds = 10.0 if (quick := parser.parse_args().quick) else 60.0
    clusters = {name: cluster_of(*how) for name, how in ARRANGEMENTS.items()}
    loads = {}
    for name, kind in LOADS.items():
        workload = trace(kind)
        loads[name] = {which: round(goodput(cluster, workload, seconds), 1) for which, cluster in clusters.items()}
        print(name, loads[name], flush=True)
    if not quick:
        slo = {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
        save("placements", {**about(), "seconds": seconds, "slo": slo, "goodput_per_s": loads})


if __name__ == "__main__":
    main()

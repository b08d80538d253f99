"""What a simulated request costs: against DistServe's and Splitwise's own simulators, and how it grows.

    python -m bench.simulator [--quick]

Each case is a run of one of those simulators whose CPU time is known (tests/placement/data), on the same requests:
once by its own rules (the named variant), once by the live policies with the same latency model. Then 1,000 to a
million requests, and a thousand workers. CPU time of this process, so other work disturbs it less than wall time, but
it still shares caches and cores: trust the ratios. The known CPU times are from a machine with two such cores, loaded.
Writes bench/results/simulator.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from collections.abc import Callable
from typing import Any

from bench.common import REPO, about, save
from cluster.policy import PolicyOptions
from decode_worker.policy import DecodeLimits
from engine.spec import Role
from placement import distserve, splitwise
from placement.latency import LatencyModel
from placement.published_distserve import distserve_latency
from placement.published_splitwise import splitwise_latency
from placement.results import Outcome
from placement.setup import SimCluster, SimWorker
from placement.simulator import simulate
from placement.workload import from_rows, read_request_list
from prefill_worker.policy import PrefillLimits

DATA = REPO / "tests" / "placement" / "data"
HARDWARE = {"A": "a100-80gb", "H": "h100-80gb", "C": "h100-80gb-pcap"}
ROOMY = PolicyOptions(max_queued_requests=1 << 30, max_queued_tokens=1 << 40)  # those simulators reject nobody


def measure(run: Callable[[], Outcome]) -> tuple[float, Outcome]:
    """Requests per CPU-second."""
    began_s = time.process_time()
    outcome = run()
    return len(outcome) / (time.process_time() - began_s), outcome


def pair(prefill: LatencyModel, decode: LatencyModel, pages: tuple[int, int], counts: tuple[int, int]) -> SimCluster:
    """The live policies on workers of these latencies."""

    def pool(role: Role, latency: LatencyModel, num_pages: int, count: int) -> list[SimWorker]:
        limits = {"prefill": PrefillLimits(max_batch_tokens=2048), "decode": DecodeLimits(max_batch_size=512)}
        return [
            SimWorker(name=f"{role}-{i}", role=role, latency=latency, num_pages=num_pages, **limits)  # type: ignore[arg-type]
            for i in range(count)
        ]

    workers = pool("prefill", prefill, pages[0], counts[0]) + pool("decode", decode, pages[1], counts[1])
    return SimCluster(workers=tuple(workers), router=ROOMY)


def show(name: str, rate: float, base: float | None, of: str) -> dict[str, Any]:
    ratio = f", {rate / base:.0f} times" if base else ""
    print(f"  {name:58} {of:14} {rate:10,.0f} requests/CPU-s{ratio}", flush=True)
    return {
        "case": name,
        "rules": of,
        "requests_per_cpu_s": round(rate),
        "times": round(rate / base, 1) if base else None,
    }


def against_distserve() -> list[dict[str, Any]]:
    rows = []
    for case in json.loads((DATA / "distserve-cases.json").read_text())["cases"]:
        if case["kind"] != "simdistserve run":
            continue
        base = case["N"] / case["cpu_s"]
        workload = read_request_list(DATA / case["trace"].split("/")[1]).faster(case["rate_req_s"])
        tp, pp, decode_tp, decode_pp = case["tp_pp_prefill_tp_pp_decode"]
        prefill = distserve_latency(case["model"], tp, pp, case["backend"])
        decode = distserve_latency(case["model"], decode_tp, decode_pp) if decode_tp else None
        own = distserve.DistServeCluster(prefill=prefill, decode=decode)
        rate, _ = measure(lambda own=own, workload=workload: distserve.simulate(own, workload))  # type: ignore[misc]
        rows.append(show(case["id"], rate, base, "distserve"))
        if decode is not None:
            pages = (prefill.max_batch_tokens // 16, decode.max_batch_tokens // 16)
            live = pair(prefill, decode, pages, (1, 1))
            rate, _ = measure(lambda live=live, workload=workload: simulate(live, workload))  # type: ignore[misc]
            rows.append(show(case["id"], rate, base, "live policies"))
    return rows


def against_splitwise(quick: bool) -> list[dict[str, Any]]:
    with gzip.open(DATA / "rr_code.json.gz", "rt") as file:
        requests: list[list[float]] = json.load(file)["reqs"]
    chosen = [("Baseline-H100", 40, 0), ("Splitwise-HH", 35, 5), ("Splitwise-AA", 55, 15), ("Splitwise-HA", 35, 8)]
    found = json.loads((DATA / "splitwise-cases.json").read_text())["rows"]
    rows = []
    for row in found:
        key = (row["design"], row["prompt"], row["token"])
        if key not in chosen or (quick and not row["trace"].startswith(("rr_code_70", "rr_code_90"))):
            continue
        request_rate = int(row["trace"].split("_")[2])
        workload = from_rows([[at / request_rate, p, o] for at, p, o in requests if at / request_rate < 120])
        first, second = {"Baseline-H100": "HH"}.get(row["design"], row["design"][-2:])
        prompt, token = (splitwise_latency("bloom-176b", HARDWARE[kind], rule="published") for kind in (first, second))
        own = splitwise.SplitwiseCluster(prompt=prompt, num_prompt=row["prompt"], token=token, num_token=row["token"])
        base = row["requests"] / row["sim_cpu_s"]
        name = f"{row['design']} ({row['prompt']},{row['token']}) {row['trace']}"
        rate, _ = measure(lambda own=own, workload=workload: splitwise.simulate(own, workload))  # type: ignore[misc]
        rows.append(show(name, rate, base, "splitwise"))
        if row["token"]:
            pages = prompt.kv_capacity_bytes // prompt.kv_bytes_per_token // 16
            live = pair(prompt, token, (pages, pages), (row["prompt"], row["token"]))
            rate, _ = measure(lambda live=live, workload=workload: simulate(live, workload))  # type: ignore[misc]
            rows.append(show(name, rate, base, "live policies"))
    return rows


def growth(quick: bool) -> list[dict[str, Any]]:
    """One pair of workers at half its goodput; then a thousand workers."""
    latency = distserve_latency("opt_13b", 1)
    source = read_request_list(DATA / "sharegpt_synth_N1000.json")
    pages = latency.max_batch_tokens // 16
    rows = []
    for count in (1_000, 10_000, 100_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
        workload = source.resampled(count, 2.0, seed=0)
        live = pair(latency, latency, (pages, pages), (1, 1))
        rate, _ = measure(lambda live=live, workload=workload: simulate(live, workload))  # type: ignore[misc]
        rows.append(show(f"{count:,} requests, 1 + 1 workers", rate, None, "live policies"))
    for num_workers in (10, 100, 1000):
        workload = source.resampled(5_000 if quick else 20_000, 1.5 * num_workers, seed=0)
        live = pair(latency, latency, (pages, pages), (num_workers // 2, num_workers // 2))
        rate, _ = measure(lambda live=live, workload=workload: simulate(live, workload))  # type: ignore[misc]
        rows.append(show(f"{len(workload):,} requests, {num_workers:,} workers", rate, None, "live policies"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulator", description="What a simulated request costs.")
    parser.add_argument("--quick", action="store_true", help="fewer cases, a hundred thousand requests at most")
    quick = parser.parse_args().quick
    print("against DistServe's simulator:")
    result = {**about(), "distserve": against_distserve()}
    print("against Splitwise's simulator:")
    result["splitwise"] = against_splitwise(quick)
    print("growth:")
    result["growth"] = growth(quick)
    print(f"saved to {save('simulator', result).relative_to(REPO)}")


if __name__ == "__main__":
    main()

"""What a simulated request costs: against DistServe's and Splitwise's own simulators, and how it grows.

    python -m bench.simulator [--quick]

Each case is a run of one of those simulators whose CPU time is known (tests/placement/papers/data), on the same
requests: once by its own rules (the named variant), once by the live policies with the same latency model. Then 1,000
to a million requests, and a thousand workers. Compiled, in a process of its own, and uncompiled. CPU time, which other
work disturbs less than wall time, but it still shares caches and cores: trust the ratios. The known CPU times are from
a machine with two such cores, loaded. Writes bench/results/simulator.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any

from bench.common import REPO, about, save
from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from placement.build.worker import WorkerModel, sim_worker
from placement.compiled.pool import call, packed, simulation_pool
from placement.latency.base import LatencyModel
from placement.papers.distserve import rules as distserve
from placement.papers.distserve.coefficients import distserve_latency
from placement.papers.splitwise import rules as splitwise
from placement.papers.splitwise.table import splitwise_latency
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload, from_rows, read_request_list
from prefill_worker.options import PrefillOptions
from worker.options import report_gap_s

DATA = REPO / "tests" / "placement" / "papers" / "data"
HARDWARE = {"A": "a100-80gb", "H": "h100-80gb", "C": "h100-80gb-pcap"}
ROOMY = RouterOptions(max_queued_requests=1 << 30, max_queued_tokens=1 << 40)  # those simulators reject nobody


def timed(run: Callable[[Any, Workload], Outcome], cluster: Any, workload: Workload) -> float:
    """Requests per CPU-second of the process that this is called in."""
    began_s = time.process_time()
    outcome = run(cluster, workload)
    return len(outcome) / (time.process_time() - began_s)


class Meter:
    """Measures in a process with the compiled modules, and in this one, which has the sources."""

    def __init__(self, pool: Executor) -> None:
        self._pool = pool
        self.rows: list[dict[str, Any]] = []

    def __call__(
        self,
        name: str,
        of: str,
        run: Callable[[Any, Workload], Outcome],
        cluster: Any,
        workload: Workload,
        base: float = 0,
    ) -> None:
        """`base`: the other simulator's requests per CPU-second on the same."""
        compiled = self._pool.submit(call, packed(timed, run, cluster, workload)).result()
        plain = timed(run, cluster, workload) if len(workload) <= 20_000 else 0.0  # a minute and more else
        times = f"{compiled / base:5.0f} times ({plain / base:.0f})" if base else ""
        print(f"  {name:52} {of:14} {compiled:8,.0f} ({plain:6,.0f} uncompiled) requests/CPU-s {times}", flush=True)
        row: dict[str, Any] = {"case": name, "rules": of, "requests_per_cpu_s": round(compiled)}
        if plain:
            row["uncompiled"] = round(plain)
        if base:
            row["times"] = round(compiled / base, 1)
        self.rows.append(row)

    def take(self) -> list[dict[str, Any]]:
        rows, self.rows = self.rows, []
        return rows


def pair(prefill: LatencyModel, decode: LatencyModel, pages: tuple[int, int], counts: tuple[int, int]) -> SimCluster:
    """The live policies on workers of these latencies."""

    def pool(role: str, latency: LatencyModel, num_pages: int, count: int) -> list[SimWorker]:
        policies: dict[str, PrefillOptions | DecodeOptions] = {
            "prefill": PrefillOptions(max_batch_tokens=2048, pack_tokens=None),
            "decode": DecodeOptions(max_batch_size=512),
        }
        model = WorkerModel(latency=latency, num_pages=num_pages, page_size=16)
        return [sim_worker(f"{role}-{i}", role, model, policies[role]) for i in range(count)]

    workers = pool("prefill", prefill, pages[0], counts[0]) + pool("decode", decode, pages[1], counts[1])
    return SimCluster(workers=tuple(workers), router=ROOMY, report_gap_s=report_gap_s(len(workers)))


def against_distserve(meter: Meter) -> None:
    for case in json.loads((DATA / "distserve-cases.json").read_text())["cases"]:
        if case["kind"] != "simdistserve run":
            continue
        base = case["N"] / case["cpu_s"]
        workload = read_request_list(DATA / case["trace"].split("/")[1]).faster(case["rate_req_s"])
        tp, pp, decode_tp, decode_pp = case["tp_pp_prefill_tp_pp_decode"]
        prefill = distserve_latency(case["model"], tp, pp, case["backend"])
        decode = distserve_latency(case["model"], decode_tp, decode_pp) if decode_tp else None
        own = distserve.DistServeCluster(prefill=prefill, decode=decode)
        meter(case["id"], "distserve", distserve.simulate, own, workload, base)
        if decode is not None:
            pages = (prefill.max_batch_tokens // 16, decode.max_batch_tokens // 16)
            live = pair(prefill, decode, pages, (1, 1))
            meter(case["id"], "live policies", simulate, live, workload, base)


def against_splitwise(meter: Meter, quick: bool) -> None:
    with gzip.open(DATA / "rr_code.json.gz", "rt") as file:
        requests: list[list[float]] = json.load(file)["reqs"]
    chosen = [("Baseline-H100", 40, 0), ("Splitwise-HH", 35, 5), ("Splitwise-AA", 55, 15), ("Splitwise-HA", 35, 8)]
    for row in json.loads((DATA / "splitwise-cases.json").read_text())["rows"]:
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
        meter(name, "splitwise", splitwise.simulate, own, workload, base)
        if row["token"]:
            pages = prompt.kv_capacity_bytes // prompt.kv_bytes_per_token // 16
            live = pair(prompt, token, (pages, pages), (row["prompt"], row["token"]))
            meter(name, "live policies", simulate, live, workload, base)


def growth(meter: Meter, quick: bool) -> None:
    """One pair of workers at half its goodput; then a thousand workers."""
    latency = distserve_latency("opt_13b", 1)
    source = read_request_list(DATA / "sharegpt_synth_N1000.json")
    pages = latency.max_batch_tokens // 16
    for count in (1_000, 10_000, 100_000) if quick else (1_000, 10_000, 100_000, 1_000_000):
        workload = source.resampled(count, 2.0, seed=0)
        live = pair(latency, latency, (pages, pages), (1, 1))
        meter(f"{count:,} requests, 1 + 1 workers", "live policies", simulate, live, workload)
    sizes = [(10, 20_000), (100, 20_000), (1000, 20_000), (1000, 1_000_000)]
    for num_workers, count in [(size, 5_000) for size, _ in sizes[:3]] if quick else sizes:
        workload = source.resampled(count, 1.5 * num_workers, seed=0)
        live = pair(latency, latency, (pages, pages), (num_workers // 2, num_workers // 2))
        meter(f"{len(workload):,} requests, {num_workers:,} workers", "live policies", simulate, live, workload)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.simulator", description="What a simulated request costs.")
    parser.add_argument("--quick", action="store_true", help="fewer cases, a hundred thousand requests at most")
    quick = parser.parse_args().quick
    result = about() | {"load_average": round(os.getloadavg()[0], 1)}  # of the last minute, on so many cores
    with simulation_pool(1) as pool:
        meter = Meter(pool)
        print("against DistServe's simulator:")
        against_distserve(meter)
        result["distserve"] = meter.take()
        print("against Splitwise's simulator:")
        against_splitwise(meter, quick)
        result["splitwise"] = meter.take()
        print("growth:")
        growth(meter, quick)
        result["growth"] = meter.take()
    print(f"saved to {save('simulator', result).relative_to(REPO)}")


if __name__ == "__main__":
    main()

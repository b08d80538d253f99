"""Whether the planner may be believed: the same requests simulated and served, at four rates around the knee.

    python -m bench.verify_live [--quick] [--seconds 120]

A real cluster (Ray, processes, gRPC), one prefill and one decode worker on a core each, serves a 124.7M Llama-shaped
model in bf16. It is calibrated; the simulator, which is told nothing else, finds the knee: the rate at which 9 of 10
requests of the Azure conversation trace (lengths scaled to a quarter, Poisson arrivals) meet both targets. Then at
half, three quarters, once and 1.2 times that rate these requests, at the same times, are simulated once and served
twice; the two live runs against each other say what the noise of the machine is. Before each run a few probes say how
far the machine is from what was calibrated. Nothing is refused for noise; bench/results/verify_live*.json keeps it all,
of each kind of CPU.

Wanted: below the knee attainment within 3 points, P90 of TTFT and TPOT within 10%; at and above it what was measured
inside the predicted interval, give or take the noise, and above it the attainment on the same side of the target.
Twenty minutes; --quick takes five and writes no file. Exit code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import MODELS, REPO, CpuWatch, about, demo_model, on_this_cpu, other_cores, save
from bench.e2e import Cluster, cluster, spec
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.workload import timed_workload
from kvrelay.calibrate.calibration import CalibrationError, calibrate
from kvrelay.calibrate.effort import QUICK, Effort
from kvrelay.calibrate.probes import ProbeError, Prober
from kvrelay.calibrate.verifying import Claim, doubt_of, foretell, judge, play
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import KvrelayError
from placement.build.from_profile import sim_cluster
from placement.checks.verification import Verification
from placement.latency.profile import Profile
from placement.latency.profile_file import profile_object, write_profile
from placement.latency.profile_latency import ProfileLatency
from placement.plan import Slo, to_json
from placement.simulator.cluster import SimCluster
from placement.simulator.simulate import simulate
from placement.workload.requests import Workload

TRACE = REPO / "configs" / "workloads" / "azure-conv-2023.csv"
SCALE, MAX_INPUT, MAX_OUTPUT = 0.25, 800, 200  # of 1024 tokens that a sequence may have
SHARES = (0.5, 0.75, 1.0, 1.2)  # of the knee
QUICK_SHARES = (0.6, 1.0)
SECONDS = 120.0  # of arrivals at the knee; at all rates as many requests
QUICK_REQUESTS = 30
LIVE_RUNS = 2
ATTAINMENT = 0.9
SLO_TIMES = {"ttft": 4.0, "tpot": 2.0}  # of an unloaded request of mean length
LONG_RUN = 3000  # requests that say where the knee is in the long run; those that are played say where theirs is
LEAST, MOST = 40, 400  # requests at a rate
PATIENCE_S = 15.0  # a loaded machine that stands still for a while loses no worker
AROUND_S = 15.0  # of a live run: probes before it, the last answers after it
POINTS, SHARE_OF_TIME = 0.03, 0.10  # what is wanted
METRICS = (("ttft", 90.0), ("tpot", 90.0))
console = Console(width=max(136, Console().width))


def workload_at(rate: float, num_prompts: int) -> WorkloadOptions:
    """The same requests at every rate, the gaps between them stretched."""
    return WorkloadOptions(
        num_prompts=num_prompts,
        request_rate=rate,
        trace=TRACE,
        trace_scale=SCALE,
        max_input_len=MAX_INPUT,
        max_output_len=MAX_OUTPUT,
    )


def slo_of(profile: Profile, workload: Workload) -> Slo:
    """Some times what a request of mean length takes when it is alone, in round figures."""
    latency = ProfileLatency(profile)
    prompt, output = round(workload.prompt_len.mean()), round(workload.output_len.mean())
    ttft_s = SLO_TIMES["ttft"] * latency.prefill_s([(prompt, 0)])
    tpot_s = SLO_TIMES["tpot"] * latency.decode_line(1, prompt + output // 2).step_s
    return Slo(ttft_s=math.ceil(100 * ttft_s) / 100, tpot_s=math.ceil(1000 * tpot_s) / 1000, attainment=ATTAINMENT)


def knee_of(simulated: SimCluster, drawn: Callable[[float], Workload], slo: Slo, client_s: float) -> float:
    """The highest rate at which the target share of the requests `drawn` for it is met, by simulation alone: to 1%."""

    def holds(rate: float) -> bool:
        outcome = simulate(simulated, drawn(rate))
        return outcome.attainment(slo.ttft_s - client_s, slo.tpot_s) >= slo.attainment

    low, high = 0.0, 0.25
    while holds(high) and high < 1000:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


def probe(endpoint: str, profile: Profile) -> dict[str, float]:
    """How many times as long as calibrated a lone prompt and a small batch take now; empty where no answer came."""
    try:
        return asyncio.run(_probe(endpoint, profile))
    except (KvrelayError, ProbeError) as error:
        console.print(f"  the probes before the run failed: {error}")
        return {}


async def _probe(endpoint: str, profile: Profile) -> dict[str, float]:
    latency = ProfileLatency(replace(profile, load=None))  # as probes found it
    async with AsyncClient(endpoint) as client:
        prober = Prober(client, await client.model_info(), time.time_ns() % 2**32)
        seen = [(await prober.prefill([prober.prompt(256)]))[0][0].seconds for _ in range(3)]
        prompts = [prober.prompt(32) for _ in range(4)]
        await prober.remember(prompts)
        steps = [one for _ in range(2) for one in await prober.decode(prompts, 32)]
    prefill_s = latency.prefill_s([(256, 0)]) - profile.prefill_overhead_s
    found = {"prefill": statistics.median(seen) / prefill_s}
    if steps:
        ratios = [one.seconds / latency.decode_line(one.batch_size, one.context_tokens).step_s for one in steps]
        found["decode"] = statistics.median(ratios)
    return {name: round(ratio, 4) for name, ratio in found.items()}


def measure_profile(served: Cluster, effort: Effort) -> Profile:
    last = ""

    def on_progress(what: str, done: int, total: int) -> None:
        nonlocal last
        if what != last:
            console.print(f"calibrating: {what}, {total} probes")
            last = what

    async def run() -> Profile:
        async with AsyncClient(served.endpoint) as client:
            head = about()
            return await calibrate(
                client,
                effort=effort,
                seed=time.time_ns() % 2**32,
                machine=head["machine"],
                commit=head["commit"],
                on_progress=on_progress,
            )

    return asyncio.run(run())


def live_run(served: Cluster, claim: Claim, profile: Profile) -> tuple[Verification, dict[str, Any]]:
    """One live run beside its prediction, and the state of the machine meanwhile."""
    around: dict[str, Any] = {
        "busy_cores_before": round(other_cores(1.0), 3),
        "load_average_before": os.getloadavg()[0],
        "machine_against_profile": probe(served.endpoint, profile),
    }
    cpu = CpuWatch(served.parts)

    @contextlib.contextmanager
    def watch(total: int) -> Iterator[Callable[[Outcome], None]]:
        cpu.begin()
        done, said_s = 0, time.monotonic()

        def on_end(_: Outcome) -> None:
            nonlocal done, said_s
            done += 1
            if time.monotonic() - said_s > 20:
                said_s = time.monotonic()
                console.print(f"  {done} of {total} answered")

        yield on_end
        around.update(cpu.end())

    playing = PlayOptions(num_warmups=6, prompt_seed=time.time_ns() % 2**32)
    measured = asyncio.run(play(served.endpoint, claim.workload, playing, watch=watch))
    return judge(claim, foretell(claim), measured), around


def row_of(share: float, runs: Sequence[tuple[Verification, dict[str, Any]]]) -> dict[str, Any]:
    """One rate: the prediction, the live runs, how far the one is from the mean of the others, and their noise."""
    found = [verification for verification, _ in runs]
    first = found[0]
    measured = [one.measured_attainment for one in found]
    row: dict[str, Any] = {
        "share_of_knee": share,
        "rate": round(first.rate, 4),
        "requests": first.num_requests,
        "failed": sum(one.failed for one in found),
        "attainment": {
            "predicted": to_json(first.attainment),
            "measured": measured,
            "error_points": 100 * (statistics.fmean(measured) - first.attainment.value),
            "noise_points": 100 * (max(measured) - min(measured)),
        },
        "phases_ms": {
            name: {
                "predicted": 1e3 * predicted_s,
                "measured": [1e3 * one.phases_s.get(name, (0.0, 0.0))[1] for one in found],
            }
            for name, (predicted_s, _) in first.phases_s.items()
        },
        "runs": [one.to_json() | around for one, around in runs],
    }
    for metric in ("ttft", "tpot", "e2e"):
        for percentile in (50.0, 90.0, 99.0):
            rows = [one.row(metric, percentile) for one in found]
            values = [one.measured for one in rows]
            mean, spread = statistics.fmean(values), max(values) - min(values)
            row[f"{metric}_p{percentile:g}"] = {
                "predicted_ms": {key: 1e3 * value for key, value in to_json(rows[0].predicted).items()},
                "measured_ms": [1e3 * value for value in values],
                "error": mean / rows[0].predicted.value - 1,
                "noise": spread / mean,
                "is_inside": rows[0].predicted.low - spread <= mean <= rows[0].predicted.high + spread,
            }
    return row | {"promises": promises_of(row)}


def promises_of(row: Mapping[str, Any]) -> dict[str, bool]:
    shares = row["attainment"]
    mean = statistics.fmean(shares["measured"])
    if row["share_of_knee"] < 1:
        times = {f"{name} P{p:g}": abs(row[f"{name}_p{p:g}"]["error"]) <= SHARE_OF_TIME for name, p in METRICS}
        return {"attainment": abs(shares["error_points"]) <= 100 * POINTS, **times}
    inside = {f"{name} P{p:g} inside": row[f"{name}_p{p:g}"]["is_inside"] for name, p in METRICS}
    predicted, noise = shares["predicted"], shares["noise_points"] / 100
    kept = {"attainment inside": predicted["low"] - noise <= mean <= predicted["high"] + noise, **inside}
    if row["share_of_knee"] > 1:
        kept["sign"] = (predicted["value"] < ATTAINMENT) == (mean < ATTAINMENT)
    return kept


def table_of(rows: Sequence[Mapping[str, Any]], slo: Slo, knee: float) -> Table:
    targets = f"TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.0f} ms"
    table = Table(title=f"Predicted | served twice; targets {targets}; knee {knee:.2f}/s", title_justify="left")
    columns = ("of the knee", "requests/s", "within both %", "off", "TTFT P90 ms", "off", "TPOT P90 ms", "off", "kept")
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        shares, ttft, tpot = row["attainment"], row["ttft_p90"], row["tpot_p90"]
        measured = "/".join(f"{100 * value:.1f}" for value in shares["measured"])
        table.add_row(
            f"{row['share_of_knee']:g}",
            f"{row['rate']:.2f}",
            f"{100 * shares['predicted']['value']:.1f} | {measured}",
            f"{shares['error_points']:+.1f}",
            _pair(ttft, 0),
            f"{ttft['error']:+.1%}",
            _pair(tpot, 1),
            f"{tpot['error']:+.1%}",
            "yes" if all(row["promises"].values()) else "no",
        )
    return table


def phases_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="Mean of each phase, predicted | served (ms)", title_justify="left")
    names = list(rows[0]["phases_ms"])
    for name in ("of the knee", *names):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for row in rows:
        cells = [
            f"{phase['predicted']:.1f} | {'/'.join(f'{value:.1f}' for value in phase['measured'])}"
            for phase in (row["phases_ms"][name] for name in names)
        ]
        table.add_row(f"{row['share_of_knee']:g}", *cells)
    return table


def broken_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"at {row['share_of_knee']:g} of the knee not as wanted: {name}"
        for row in rows
        for name, kept in row["promises"].items()
        if not kept
    ]


def _pair(figure: Mapping[str, Any], digits: int) -> str:
    measured = "/".join(f"{value:.{digits}f}" for value in figure["measured_ms"])
    return f"{figure['predicted_ms']['value']:.{digits}f} | {measured}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What all rates have in common."""

    profile: Profile
    simulated: SimCluster
    slo: Slo
    count: int  # requests at each rate
    long_run: float  # requests/s: the knee of a run that is long
    knee: float  # of the very requests that are played

    def claim(self, share: float) -> Claim:
        return Claim(
            cluster=self.simulated,
            workload=workload_at(share * self.knee, self.count),
            slo=self.slo,
            source=self.profile.name,
            doubt=doubt_of(self.profile),
        )

    def left_s(self, shares: Sequence[float]) -> float:
        """About how long the live runs at these rates take."""
        return sum(LIVE_RUNS * (self.count / (share * self.knee) + AROUND_S) for share in shares)


def prepare(served: Cluster, seconds: float, *, quick: bool) -> Trial:
    """Calibrate, set the targets, find the knee."""
    profile = replace(measure_profile(served, QUICK if quick else Effort()), name="verify-live-profile.json")
    write_profile(profile, MODELS / profile.name)
    console.print(f"profile in {os.path.relpath(MODELS / profile.name)}; error {profile.error}")
    simulated = sim_cluster(profile)
    lengths = timed_workload(workload_at(1.0, 5000))
    slo = slo_of(profile, lengths)
    long_run = knee_of(simulated, lambda rate: lengths.resampled(LONG_RUN, rate, seed=1), slo, profile.client_s)
    count = QUICK_REQUESTS if quick else round(min(max(long_run * seconds, LEAST), MOST))
    knee = knee_of(simulated, lambda rate: timed_workload(workload_at(rate, count)), slo, profile.client_s)
    console.print(
        f"targets TTFT {1e3 * slo.ttft_s:.0f} ms, TPOT {1e3 * slo.tpot_s:.0f} ms; knee by simulation: "
        f"{long_run:.2f}/s in the long run, {knee:.2f}/s for the {count} requests that are played"
    )
    return Trial(profile=profile, simulated=simulated, slo=slo, count=count, long_run=long_run, knee=knee)


def result_of(head: Mapping[str, Any], trial: Trial, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return {
        **head,
        "load_average": os.getloadavg(),
        "requests_at_each_rate": trial.count,
        "slo": to_json(trial.slo),
        "knee_per_s": trial.knee,
        "knee_in_the_long_run_per_s": trial.long_run,
        "profile": profile_object(trial.profile),
        "rows": to_json(rows),
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.verify_live", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two rates, thirty requests each; writes no file")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of arrivals at the knee; default {SECONDS:g}")
    args = parser.parse_args()
    head = about()
    shares = QUICK_SHARES if args.quick else SHARES
    rows: list[dict[str, Any]] = []
    wanted = spec(demo_model("125m"))
    wanted["router"] |= {"dead_after_s": PATIENCE_S}
    with cluster(wanted) as served:
        console.print(f"ready after {served.ready_s:.0f} s; load average {os.getloadavg()[0]:.2f}")
        trial = prepare(served, args.seconds, quick=args.quick)
        for number, share in enumerate(shares):
            console.print(f"{share:g} of the knee; about {trial.left_s(shares[number:]) / 60:.0f} minutes left")
            claim = trial.claim(share)
            rows.append(row_of(share, [live_run(served, claim, trial.profile) for _ in range(LIVE_RUNS)]))
            console.print(table_of(rows[-1:], trial.slo, trial.knee))
            if not args.quick:  # what is there is kept, should a later rate fail
                saved = save(on_this_cpu("verify_live"), result_of(head, trial, rows))
    console.print(table_of(rows, trial.slo, trial.knee), phases_table(rows), *broken_of(rows), sep="\n")
    if not args.quick:
        console.print(f"written to {os.path.relpath(saved)}")
    if failed := sum(row["failed"] for row in rows):
        console.print(f"[red]{failed} requests failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (KvrelayError, CalibrationError, ProbeError) as error:
        raise SystemExit(f"error: {error}") from None

"""Whether a stated 90% interval is one: over forty live cases, each predicted before it is served.

    python -m bench.coverage [--quick] [--size tiny] [--seconds 26] [--again | --predict-again]

One prefill and one decode worker, a core each, serve a small model. They are calibrated, with all of them at work for
some minutes; then each case (requests of some lengths at some rate, with targets) is simulated and, after that, served.
Of how many cases did what came lie inside the interval that was stated: the share of requests within both targets, and
P50, P90 and P99 of TTFT and TPOT? Wanted: 85 to 95%. Beside it the median width of the intervals, as a share of the
value (of attainment: in points), since an interval from nothing to everything covers all.

Each case is kept as it ends; a run that was cut off goes on where it was, of the same commit (--again: anew). At most
forty minutes on two cores; --quick takes two and writes no file. --predict-again serves nothing: of the same profile
and cases, and what was measured, it makes the predictions of this version. Exit code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.common import REPO, RESULTS, about, demo_model, on_this_cpu, other_cores, save
from bench.e2e import Cluster, cluster, spec
from bench.verify_live import measure_profile
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.workload import timed_workload
from kvrelay.calibrate.calibration import CalibrationError
from kvrelay.calibrate.effort import QUICK, Effort
from kvrelay.calibrate.probes import ProbeError
from kvrelay.calibrate.verifying import doubt_of, play
from kvrelay.client.types import KvrelayError
from placement.build.from_profile import sim_cluster
from placement.checks.verification import Verification, compare, predict
from placement.latency.profile import Profile
from placement.latency.profile_file import profile_from, profile_object
from placement.latency.profile_latency import ProfileLatency
from placement.plan import Slo, to_json
from placement.workload.requests import Workload

NAME = "coverage"
EFFORT = Effort(repeats=3, minutes=6.75, at_most_s=90.0)
TRACE = REPO / "configs" / "workloads" / "azure-conv-2023.csv"
LENGTHS: dict[str, dict[str, Any]] = {
    "even": {"random_input_len": 128, "random_output_len": 48, "random_range_ratio": 0.8},
    "prompts": {"random_input_len": 320, "random_output_len": 24, "random_range_ratio": 0.5},
    "answers": {"random_input_len": 64, "random_output_len": 128, "random_range_ratio": 0.5},
    "azure": {"trace": TRACE, "trace_scale": 0.25, "max_input_len": 800, "max_output_len": 200},
}
BUSY = (0.15, 0.3, 0.45, 0.6)  # of its time that prefill would compute
TARGETS = ((3.0, 1.5), (6.0, 2.5), (12.0, 4.0))  # times what a request takes alone: TTFT, TPOT
SECONDS = 26.0  # of arrivals
LEAST, MOST = 30, 600  # requests
QUANTITIES = ("attainment", *(f"{metric} P{p}" for metric in ("TTFT", "TPOT") for p in (50, 90, 99)))
console = Console(width=max(120, Console().width))
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`busy`: which rate; `targets`: times what a request of its lengths takes alone."""

    lengths: str
    busy: float
    targets: tuple[float, float]
    seed: int

    @property
    def name(self) -> str:
        return f"{self.lengths}, {self.busy:g} busy, targets {self.targets[0]:g} and {self.targets[1]:g} times"


def cases(*, quick: bool = False) -> list[Case]:
    """48, in an order in which neither lengths nor rates come one after another."""
    every = list(itertools.product(LENGTHS, BUSY, TARGETS))
    mixed = [every[i * 29 % len(every)] for i in range(len(every))]
    made = [Case(lengths=lengths, busy=busy, targets=t, seed=100 + i) for i, (lengths, busy, t) in enumerate(mixed)]
    return made[:3] if quick else made


def workload_of(case: Case, profile: Profile, seconds: float) -> WorkloadOptions:
    """At the rate at which prefill would compute that share of the time, and no more tokens than were calibrated."""
    lengths = timed_workload(
        WorkloadOptions(num_prompts=500, request_rate=1.0, seed=case.seed, **LENGTHS[case.lengths])
    )
    latency = ProfileLatency(profile)
    prefill_s = statistics.fmean(latency.prefill_s([(int(length), 0)]) for length in lengths.prompt_len)
    rate = case.busy / prefill_s
    if profile.load:
        rate = min(rate, max(run.tokens_per_s for run in profile.load.runs) / float(lengths.output_len.mean()))
    count = min(MOST, max(LEAST, round(rate * seconds)))
    return WorkloadOptions(num_prompts=count, request_rate=rate, seed=case.seed, **LENGTHS[case.lengths])


def slo_of(case: Case, profile: Profile, workload: Workload) -> Slo:
    latency = ProfileLatency(profile)
    prompt, output = round(workload.prompt_len.mean()), round(workload.output_len.mean())
    ttft_s = latency.prefill_s([(prompt, 0)]) + 2 * profile.message_s + profile.client_s
    tpot_s = latency.decode_line(1, prompt + output // 2).step_s
    return Slo(ttft_s=case.targets[0] * ttft_s, tpot_s=case.targets[1] * tpot_s)


def serve(served: Cluster, case: Case, profile: Profile, seconds: float) -> Row:
    """Predict, then serve."""
    options = workload_of(case, profile, seconds)
    workload = timed_workload(options)
    slo = slo_of(case, profile, workload)
    began_s = time.monotonic()
    prediction = predict(sim_cluster(profile), workload, doubt_of(profile), seed=case.seed)
    predicted_s = time.monotonic() - began_s

    @contextlib.contextmanager
    def watch(total: int) -> Iterator[Callable[[Outcome], None]]:
        yield lambda outcome: None

    playing = PlayOptions(num_warmups=4, prompt_seed=time.time_ns() % 2**32)
    measured = asyncio.run(play(served.endpoint, options, playing, watch=watch))
    return row_of(case, compare(prediction, measured, slo)) | {"predicted_in_s": round(predicted_s, 2)}


def predicted_again(row: Row, case: Case, profile: Profile, seconds: float) -> Row:
    """The row of a case that was served before, with what is predicted now."""
    workload = timed_workload(workload_of(case, profile, seconds))
    prediction = predict(sim_cluster(profile), workload, doubt_of(profile), seed=case.seed)
    now = row_of(case, compare(prediction, prediction.expected, slo_of(case, profile, workload)))
    measured = {name: figures["measured"] for name, figures in row["quantities"].items()}
    return row | {"quantities": {name: held(now["quantities"][name], measured[name]) for name in QUANTITIES}}


def row_of(case: Case, verified: Verification) -> Row:
    found: dict[str, tuple[Any, float]] = {"attainment": (verified.attainment, verified.measured_attainment)}
    for metric in ("ttft", "tpot"):
        for percentile in (50, 90, 99):
            row = verified.row(metric, percentile)
            found[f"{metric.upper()} P{percentile}"] = row.predicted, row.measured
    return {
        "case": case.name,
        "rate": verified.rate,
        "requests": verified.num_requests,
        "failed": verified.failed,
        "slo": to_json(verified.slo),
        "quantities": {name: held(to_json(predicted), measured) for name, (predicted, measured) in found.items()},
    }


def held(predicted: Mapping[str, Any], measured: float) -> Row:
    """What came, against an interval."""
    return {**predicted, "measured": measured, "is_inside": predicted["low"] <= measured <= predicted["high"]}


def coverage_of(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """For each quantity, and all: the share of cases inside, below and above, the median width of the intervals, and
    the median of what came against the value."""
    return {name: _covered([row["quantities"][name] for row in rows], name) for name in QUANTITIES} | {
        "all": {"inside": statistics.fmean(row["quantities"][n]["is_inside"] for row in rows for n in QUANTITIES)}
    }


def _covered(figures: Sequence[Mapping[str, Any]], name: str) -> dict[str, float]:
    is_share = name == "attainment"
    wide = [(f["high"] - f["low"]) / (1 if is_share else f["value"]) for f in figures]
    off = [f["measured"] - f["value"] if is_share else f["measured"] / f["value"] - 1 for f in figures]
    return {
        "inside": statistics.fmean(f["is_inside"] for f in figures),
        "below": statistics.fmean(f["measured"] < f["low"] for f in figures),
        "above": statistics.fmean(f["measured"] > f["high"] for f in figures),
        "width": statistics.median(wide),
        "off": statistics.median(off),
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> Table:
    covered = coverage_of(rows)
    title = f"{len(rows)} cases, {covered['all']['inside']:.0%} of all figures inside their 90% intervals"
    table = Table(title=title, title_justify="left")
    for column in ("", "inside", "below", "above", "median width", "median off by"):
        table.add_column(column, justify="right" if column else "left")
    for name in QUANTITIES:
        figures = covered[name]
        table.add_row(
            name, *(f"{figures[key]:.0%}" for key in ("inside", "below", "above", "width")), f"{figures['off']:+.0%}"
        )
    return table


def line_of(row: Mapping[str, Any]) -> str:
    def one(name: str) -> str:
        figures, times = row["quantities"][name], 100 if name == "attainment" else 1000
        low, high, measured = (times * figures[key] for key in ("low", "high", "measured"))
        return f"{name} {measured:.3g} of {low:.3g} to {high:.3g}{'' if figures['is_inside'] else ' !'}"

    shown = ", ".join(one(name) for name in ("attainment", "TTFT P50", "TTFT P90", "TPOT P50", "TPOT P90"))
    return f"{row['case']}; {row['rate']:.3g}/s: {shown}"


def kept(head: Mapping[str, Any], size: str) -> dict[str, Any] | None:
    """What an earlier run of this commit on this machine has, and not all of it."""
    path = RESULTS / f"{on_this_cpu(NAME)}.json"
    if not path.exists():
        return None
    data: dict[str, Any] = json.loads(path.read_text())
    is_same = all(data.get(key) == head[key] for key in ("commit", "machine")) and data.get("size") == size
    return data if is_same and len(data["cases"]) < len(cases()) else None


def predict_all_again() -> int:
    """Of the file, which keeps what its first predictions were worth."""
    served = json.loads((RESULTS / f"{on_this_cpu(NAME)}.json").read_text())
    profile, pairs = profile_from(served["profile"]), zip(served["cases"], cases(), strict=True)
    rows = [predicted_again(row, case, profile, served["seconds"]) for row, case in pairs]
    first = served.get("predicted_again", {}).get("earlier", served["coverage"])
    again = {"predicted_again": about() | {"earlier": first}, "coverage": coverage_of(rows), "cases": rows}
    save(on_this_cpu(NAME), served | again)
    console.print(table_of(rows))
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.coverage", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="three cases after a quick calibration; writes no file")
    parser.add_argument("--size", default="tiny", choices=("tiny", "125m"), help="of the model; default tiny")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"of arrivals of a case; default {SECONDS:g}")
    parser.add_argument("--again", action="store_true", help="begin anew, whatever was kept")
    parser.add_argument("--predict-again", action="store_true", help="of what was served before, and serve nothing")
    args = parser.parse_args()
    if args.predict_again:
        return predict_all_again()
    head, seconds = about(), 8.0 if args.quick else args.seconds
    earlier = None if args.quick or args.again else kept(head, args.size)
    rows: list[Row] = earlier["cases"] if earlier else []
    with cluster(spec(demo_model(args.size))) as served:
        console.print(f"ready after {served.ready_s:.0f} s; load average {os.getloadavg()[0]:.2f}")
        profile = (
            profile_from(earlier["profile"]) if earlier else measure_profile(served, QUICK if args.quick else EFFORT)
        )
        todo = cases(quick=args.quick)[len(rows) :]
        for number, case in enumerate(todo):
            noise = {"other_cores_before": round(other_cores(0.5), 3), "load_average": os.getloadavg()[0]}
            rows.append(serve(served, case, profile, seconds) | noise)
            console.print(f"{len(rows)} of {len(rows) + len(todo) - number - 1}: {line_of(rows[-1])}")
            if not args.quick:
                result = {"size": args.size, "seconds": seconds, "coverage": coverage_of(rows)}
                saved = save(on_this_cpu(NAME), {**head, **result, "profile": profile_object(profile), "cases": rows})
    console.print(table_of(rows))
    if not args.quick:
        console.print(f"written to {os.path.relpath(saved)}")
    failed = sum(row["failed"] for row in rows)
    if failed:
        console.print(f"[red]{failed} requests failed")
    return 1 if failed else 0


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except (KvrelayError, CalibrationError, ProbeError) as error:
        raise SystemExit(f"error: {error}") from None

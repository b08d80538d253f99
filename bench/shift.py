"""A load that shifts, live: `kvrelay up` with `replan: act` against roles that stay, the same requests, in turns.

    python -m bench.shift [--begin prefill,mixed] [--rates 1.2,3] [--phase 120] [--repeats 1] [--most-devices 2]
                          [--quick]

Azure's conversation comes, then its code, then conversation; then both in turns, a quarter of a phase each. Lengths are
cut down to what the model of bench.e2e serves on two cores (SCALE), each kind has its rate, and arrivals are Poisson's.
Workers of a core each know the targets (TTFT 500 ms, TPOT 50 ms); both runs begin with --begin, and with `act` the
thread of `kvrelay up` looks and has workers change as it does for anybody. With --most-devices it may start more of
them, and end them; they have no core of their own then. Printed: the share of requests
within both targets in each phase, what changed, when and why. Kept in bench/results/shift.json beside what began with
other roles; docs/plots/shift.svg shows all over time. Exit code 1 when a request failed, was sent again or had a token
computed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import csv
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np

from bench.arrangements import BOTH
from bench.common import RESULTS, CpuWatch, about, demo_model, save
from bench.e2e import SLOS_S, WARMUPS, Cluster, cluster, spec
from bench.placement_search import trace
from bench.plots import draw
from kvrelay.bench.metrics import Outcome
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import run
from kvrelay.replan.journal import last_journal_at

SCALE = (1 / 6, 1 / 2)  # of prompts and outputs
MOST = (700, 250)  # tokens: the model takes 1,024
PART_S = 15.0  # of the plot
Row = tuple[float, int, int]  # arrival s, prompt tokens, output tokens


def phases(length_s: float) -> list[tuple[str, float]]:
    return [(kind, length_s) for kind in ("conv", "code", "conv")] + [
        ("code", length_s / 4),
        ("conv", length_s / 4),
    ] * 2


def requests(rates: Mapping[str, float], length_s: float, seed: int) -> list[Row]:
    rows: list[Row] = []
    begin_s = 0.0
    for number, (kind, seconds) in enumerate(phases(length_s)):
        drawn = trace(kind).resampled(max(1, round(rates[kind] * seconds)), rates[kind], seed=100 * seed + number)
        lengths = [
            np.clip(np.round(column * scale), 1, most).astype(int).tolist()
            for column, scale, most in zip((drawn.prompt_len, drawn.output_len), SCALE, MOST, strict=True)
        ]
        rows += zip((begin_s + drawn.arrival_s).tolist(), *lengths, strict=True)
        begin_s += seconds
    return sorted(rows)


def arrangement(begin: Sequence[str], mode: str, most_devices: int | None) -> dict[str, Any]:
    base = spec(demo_model("125m"))
    cores = sorted(os.sched_getaffinity(0))
    pools = [
        BOTH | {"role": role, "name": f"worker-{index}", "threads": 1} | ({} if most_devices else {"cpus": [core]})
        for index, (role, core) in enumerate(zip(begin, cores, strict=False))
    ]
    router = base["router"] | {f"slo_{name}_ms": 1e3 * limit_s for name, limit_s in SLOS_S.items()}
    acts = {"replan_most_devices": most_devices} if most_devices and mode == "act" else {}
    return base | {"pools": pools, "router": router, "replan": mode} | acts


def play(served: Cluster, trace: Path, seed: int) -> tuple[list[Outcome], dict[str, Any]]:
    """And when it began (UTC), and the cores that other work took."""
    cpu, noted = CpuWatch(served.parts), {}

    @contextlib.contextmanager
    def watch(total: int) -> Iterator[Callable[[Outcome], None]]:
        noted["began"] = datetime.now(UTC).timestamp()
        cpu.begin()
        yield lambda outcome: None
        noted.update(cpu.end())

    options = WorkloadOptions(trace=trace, trace_timestamps=True, seed=seed)
    _, outcomes, _ = asyncio.run(run(served.endpoint, options, PlayOptions(num_warmups=WARMUPS), watch=watch))
    return outcomes, noted


def measured(asked: dict[str, Any], rows: Sequence[Row], length_s: float, seed: int) -> dict[str, Any]:
    mode = asked["replan"]
    with tempfile.TemporaryDirectory() as folder, cluster(asked) as served:
        trace = Path(folder) / "shift.csv"
        with trace.open("w", newline="") as file:
            csv.writer(file).writerows([("arrival_s", "prompt_tokens", "output_tokens"), *rows])
        outcomes, noted = play(served, trace, seed)
        decisions = [
            entry | {"at_s": round(datetime.fromisoformat(entry["at"]).timestamp() - noted["began"], 1)}
            for entry in last_journal_at(served.endpoint).last(1000)
            if mode == "act" and datetime.fromisoformat(entry["at"]).timestamp() > noted["began"]
        ]
    met = [_is_within(outcome) for outcome in outcomes]
    ends_s = np.cumsum([seconds for _, seconds in phases(length_s)])
    phase_of = np.minimum(np.searchsorted(ends_s, [outcome.due_s for outcome in outcomes]), len(ends_s) - 1)
    return {
        "mode": mode,
        "seed": seed,
        "attainment": round(float(np.mean(met)), 4),
        "phases": [round(float(np.mean(np.array(met)[phase_of == i])), 3) for i in range(len(ends_s))],
        "over_time": _over_time(outcomes, met),
        "changes": [
            {"at_s": entry["at_s"], "reason": entry["reason"], "changes": entry["changes"]}
            for entry in decisions
            if entry["changes"]
        ],
        "looks": [{name: entry[name] for name in ("at_s", "rate", "measured", "reason")} for entry in decisions],
        "failed": sum(not outcome.succeeded for outcome in outcomes),
        "sent_again": sum(o.timeline.attempts - 1 for o in outcomes if o.timeline is not None),
        "recomputed_tokens": sum(o.receipt.recomputed_tokens for o in outcomes if o.receipt is not None),
        "moves": sum(o.timeline.moves for o in outcomes if o.timeline is not None),
        "requests": len(outcomes),
        "other_cores": noted["other_cores"],
        "stolen_cores": noted["stolen_cores"],
    }


def _is_within(outcome: Outcome) -> bool:
    return outcome.succeeded and outcome.ttft_s <= SLOS_S["ttft"] and outcome.tpot_s <= SLOS_S["tpot"]


def _over_time(outcomes: Sequence[Outcome], met: Sequence[bool]) -> list[tuple[float, float]]:
    """(seconds, share) of those that came in each part."""
    part = np.array([int(outcome.due_s // PART_S) for outcome in outcomes])
    return [(i * PART_S, round(float(np.array(met)[part == i].mean()), 3)) for i in sorted(set(part.tolist()))]


def _say(one: Mapping[str, Any]) -> None:
    by_phase = ", ".join(f"{share:.0%}" for share in one["phases"])
    print(
        f"replan: {one['mode']:3} {one['attainment']:.1%} of {one['requests']} ({by_phase}); "
        f"{one['failed']} failed, {one['sent_again']} sent again, {one['moves']} moves, "
        f"other work {one['other_cores']:.2f} cores",
        flush=True,
    )
    for change in one["changes"]:
        told = ", ".join(_told(each) for each in change["changes"])
        print(f"  {change['at_s']:.0f} s: {told}: {change['reason']}", flush=True)


def _told(change: Mapping[str, Any]) -> str:
    what = f"{change['worker']} to {change['role']}" if change["worker"] else f"{change['pool']}: {change['replicas']}"
    return f"{what} ({change['failure'] or '{:g} s'.format(change['seconds'])})"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.shift", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--begin", default="prefill,mixed", help="roles of the workers (default: prefill,mixed)")
    parser.add_argument("--rates", default="1.2,3", help="requests/s of conversation and of code (default: 1.2,3)")
    parser.add_argument("--phase", type=float, default=120.0, help="seconds (default: 120)")
    parser.add_argument("--repeats", type=int, default=1, help="of both (default: 1)")
    parser.add_argument("--most-devices", type=int, help="cores that workers may take (default: as many stay)")
    parser.add_argument("--quick", action="store_true", help="phases of 20 s; writes no file")
    args = parser.parse_args()
    length_s = 20.0 if args.quick else args.phase
    rates = dict(zip(("conv", "code"), map(float, args.rates.split(",")), strict=True))
    begin = args.begin.split(",")
    head, runs = about(), list[dict[str, Any]]()
    for repeat in range(args.repeats):
        rows = requests(rates, length_s, repeat)
        for mode in ("off", "act") if repeat % 2 == 0 else ("act", "off"):
            began_s = time.monotonic()
            asked = arrangement(begin, mode, args.most_devices)
            runs.append(measured(asked, rows, length_s, repeat) | {"wall_s": round(time.monotonic() - began_s)})
            _say(runs[-1])
    if not args.quick:
        path = RESULTS / "shift.json"
        kept: dict[str, Any] = json.loads(path.read_text())["begins"] if path.exists() else {}
        label = f"{args.begin}, up to {args.most_devices} cores" if args.most_devices else args.begin
        kept[label] = {
            "commit": head["commit"],
            "rates": rates,
            "phases": phases(length_s),
            "scale": SCALE,
            "runs": runs,
        }
        print(f"written to {os.path.relpath(save('shift', {**head, 'begins': kept}))}")
        draw("shift", {"begins": kept})
    bad = [one for one in runs if one["failed"] or one["sent_again"] or one["recomputed_tokens"]]
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())

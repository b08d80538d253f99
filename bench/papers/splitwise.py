"""Splitwise's paper and simulator beside ours: its designs, its rows, its two headline claims, by each decode rule.

    python -m bench.papers.splitwise [--quick|--live]

The rules are Splitwise's own (placement/papers/splitwise/rules.py), bloom-176b, two minutes of Poisson arrivals, prompt
and output lengths of the Azure 2023 traces drawn each by itself, as Splitwise does; then its real timestamps, sped up.
"published" reads its table for decode as its simulator does, flat in the batch; "table" as the rows were measured. The
same draw is used for all mixes and rates. --quick: only the mixes that Splitwise published for equal power, on one
draw. --live: measures again only what the live policies make of those mixes. Writes bench/results/paper_splitwise.json.
"""

from __future__ import annotations

import argparse
import gzip
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import Progress

from bench.common import REPO, RESULTS, about, save
from placement.goodput.runner import Runner, open_runner
from placement.mixes.demand import search_space
from placement.mixes.designs import Mix, Resource, all_designs
from placement.mixes.grid import Asking, GridPoint, Limit, Space
from placement.mixes.load import Load, drawn_load
from placement.mixes.report.rated import interval, spoken
from placement.mixes.rules import rules_named
from placement.mixes.scenario import LoadPoint, PointResult, Scenario
from placement.mixes.search import cheapest, fastest, headroom
from placement.mixes.simulations import DesignSearch, Simulations
from placement.mixes.slowdowns import SlowdownTargets
from placement.papers.splitwise.latency import DecodeRule
from placement.papers.splitwise.machines import GPUS, splitwise_machines
from placement.papers.splitwise.request_list import ListLoad
from placement.workload.requests import Workload, from_rows, from_trace

DATA = REPO / "tests" / "placement" / "papers" / "data"
CASES: dict[str, Any] = json.loads((DATA / "splitwise-cases.json").read_text())
TRACES = {
    "code": ("AzureLLMInferenceTrace_code.csv",),
    "conversation": ("AzureLLMInferenceTrace_conv.csv", "azure-conv-2023.csv"),
}
FOLDERS = (REPO.parent / "shared" / "data" / "azure", REPO / "configs" / "workloads")
NAMES = ("Baseline-A100", "Baseline-H100", "AA", "HH", "HA", "HHcap")
PAIRS = NAMES[2:]
MIXED = ("HA", "HHcap")  # of two types: the mix that costs least need not draw least
POWER, COST = 1760.0, 190.4  # of 40 H100 machines; cost in USD per GPU-hour times machines, as Splitwise counts
LOWER_COST = 0.8
RULES: tuple[DecodeRule, ...] = ("published", "table")
GUESS = 80  # requests/s
FEW_ROWS = 17
REPLAY_GUESS = {"code": 20, "conversation": 70}  # bursts leave less
Count = tuple[int, int]


class Bench:
    """One rule on one load: highest rates and best mixes, every simulation remembered."""

    def __init__(
        self, runner: Runner, bar: Progress, load: Load, rule: DecodeRule, *, rules: str = "splitwise"
    ) -> None:
        self.machines = splitwise_machines(rule=rule)
        self.targets = SlowdownTargets(reference=self.machines[0].latency)
        self.designs = {design.name: design for design in all_designs(self.machines, NAMES)}
        self.scenario = Scenario(load=load, targets=self.targets, rules=rules_named(rules))
        task = bar.add_task("", total=1)
        title = f"{load.source.name}, {load.draw}, {rule}, {rules}"

        def on_progress(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{title}: {what}", completed=done, total=total)

        self.simulations = Simulations(self.scenario, runner, on_progress)

    def highest(
        self, mixes: Mapping[str, Count], step: float = 1.0, seeds: Sequence[int] = (0,), guess: float = GUESS
    ) -> dict[str, Any]:
        """The highest rate of each mix, by the design's name; on several seeds with the interval of their mean."""
        first = self._rates(dict.fromkeys(mixes, guess), mixes, step, 0)
        rates = [first, *(self._rates(first, mixes, step, seed) for seed in seeds[1:])]
        return {name: self._row(name, count, [of[name] for of in rates], step) for name, count in mixes.items()}

    def _rates(
        self, guesses: Mapping[str, float], mixes: Mapping[str, Count], step: float, seed: int
    ) -> dict[str, float]:
        asking = [headroom(*count, max(1, round(guesses[name] / step))) for name, count in mixes.items()]
        answers = self._search("highest rates", list(mixes), asking, step, seed)
        return {name: answer.rate * step if answer else 0.0 for name, answer in answers.items()}

    def _search(
        self, what: str, names: Sequence[str], asking: Sequence[Asking], step: float, seed: int
    ) -> dict[str, GridPoint | None]:
        searches = [
            DesignSearch(design=self.designs[name], step=step, seeds=(seed,), asking=asked)
            for name, asked in zip(names, asking, strict=True)
        ]
        return dict(zip(names, self.simulations.search(what, searches), strict=True))

    def _row(self, name: str, count: Count, rates: Sequence[float], step: float) -> dict[str, Any]:
        mix = self.mix(name, count)
        row = {"machines": list(count), "rate": rates[0], "cost": _cost(mix), "power": round(mix.total("power"), 1)}
        if len(rates) > 1:
            spread = interval(rates, step / 2)
            row["interval"] = [round(spread.low, 1), round(spread.high, 1)]
        missed = self._missed_above(mix, rates[0], step)
        return row | ({"then_misses": missed} if missed else {})

    def mix(self, name: str, count: Count) -> Mix:
        return Mix(design=self.designs[name], num_prompt=count[0], num_token=count[1])

    def _missed_above(self, mix: Mix, rate: float, step: float) -> str:
        result = self.simulations.results.get(LoadPoint(mix, rate + step, 0))
        if result is None or not result.judgement.missed:
            return ""
        ratios = result.judgement.ratios
        return spoken(max(ratios, key=lambda name: ratios[name]))

    def fastest(self, budgets: Mapping[Resource, float], names: Sequence[str] = NAMES) -> dict[str, Any]:
        """Each design's mix of the highest rate within the budgets."""
        limits = {
            name: [Limit(unit_costs=self.designs[name].unit_costs(key), at_most=most) for key, most in budgets.items()]
            for name in names
        }
        return self._best_mixes(
            names, [fastest(self._space(name, GUESS, "gpus"), limits[name], GUESS) for name in names]
        )

    def cheapest(self, rate: float, resource: Resource, names: Sequence[str] = NAMES) -> dict[str, Any]:
        """Each design's mix that takes least of the resource and holds the rate."""
        return self._best_mixes(names, [cheapest(self._space(name, rate, resource), round(rate)) for name in names])

    def _space(self, name: str, rate: float, resource: Resource) -> Space:
        return search_space(self.designs[name], rate, self.scenario, resource)

    def _best_mixes(self, names: Sequence[str], asking: Sequence[Asking]) -> dict[str, Any]:
        answers = self._search("best mixes", names, asking, 1.0, 0)
        return {
            name: self._row(name, (answer.num_prompt, answer.num_token), [float(answer.rate)], 1.0)
            for name, answer in answers.items()
            if answer is not None
        }


def _cost(mix: Mix) -> float:
    return round(mix.total("usd_per_hour") / GPUS, 2)


def budget(resource: Resource, share: float = 1.0) -> float:
    return (COST * GPUS if resource == "usd_per_hour" else POWER) * share + 1e-6


def trace(name: str) -> Workload:
    for folder in FOLDERS:
        for file in TRACES[name]:
            if (folder / file).exists():
                return from_trace(folder / file)
    raise SystemExit(f"the Azure {name} trace is not there; put {TRACES[name][0]} into {FOLDERS[0]}")


def given_list() -> Workload:
    """The requests of the runs of Splitwise's simulator that are known, at 1 request/s."""
    with gzip.open(DATA / "rr_code.json.gz", "rt") as file:
        return from_rows(json.load(file)["reqs"], "rr_code")


# what is compared


def given_rows(runner: Runner, bar: Progress, quick: bool) -> list[dict[str, Any]]:
    """Every known row of its simulator beside ours, by its rule on its requests."""
    bench = Bench(runner, bar, ListLoad(source=given_list()), "published")
    rows = CASES["rows"][:FEW_ROWS] if quick else CASES["rows"]
    points = [_point_of(bench, row) for row in rows]
    bench.simulations.simulate(points)
    return [_beside(row, bench.simulations.results[point]) for row, point in zip(rows, points, strict=True)]


def _point_of(bench: Bench, row: Mapping[str, Any]) -> LoadPoint:
    mix = bench.mix(row["design"].removeprefix("Splitwise-"), (row["prompt"], row["token"]))
    return LoadPoint(mix, float(row["trace"].split("_")[2]), 0)


def _beside(row: Mapping[str, Any], ours: PointResult) -> dict[str, Any]:
    times = {"ttft": ours.ttft_s, "tbt": ours.tpot_s, "e2e": ours.e2e_s}
    apart = [abs(times[name][share] / row[f"{name}_s_p{share}"] - 1) for name in times for share in ("50", "90", "99")]
    return {
        "design": row["design"],
        "machines": [row["prompt"], row["token"]],
        "rate": int(row["trace"].split("_")[2]),
        "slo_met": [row["slo_met"], ours.judgement.is_met],
        "largest_difference": round(max(apart), 5),
        "cost": row["cost_per_gpu_hr_units"],
        "power": row["power_units"],
    }


def given_rates(runner: Runner, bar: Progress) -> dict[str, Any]:
    """The largest iso-power rates of the code trace, on its requests and its grid of 10 requests/s, by both rules."""
    known = CASES["iso_power_max_rate_code_req_s"]
    mixes = {name.split(" ")[0].removeprefix("Splitwise-"): _counts(name) for name in known}
    found = {}
    for rule in RULES:
        bench = Bench(runner, bar, ListLoad(source=given_list()), rule)
        found[rule] = bench.highest(mixes, 10.0)
    return {
        name: {"machines": list(mixes[name]), "splitwise": theirs} | {rule: found[rule][name]["rate"] for rule in RULES}
        for name, theirs in zip(mixes, known.values(), strict=True)
    }


def _counts(name: str) -> Count:
    """`Splitwise-AA (55,15)` or `Baseline-A100 (70)`."""
    first, _, second = name.partition("(")[2].rstrip(")").partition(",")
    return int(first), int(second or 0)


def published_mixes(trace_name: str) -> dict[str, dict[str, Count]]:
    """Splitwise's own counts at equal power and at equal cost."""
    designs = CASES["published_designs"]
    baselines = {"Baseline-A100": (70, 0), "Baseline-H100": (40, 0)}
    return {
        f"iso_{what}": baselines
        | {name: (count[0], count[1]) for name, count in designs[f"iso_{what}_{trace_name}"].items()}
        for what in ("power", "cost")
    }


def one_trace(runner: Runner, bar: Progress, name: str, rule: DecodeRule, quick: bool) -> dict[str, Any]:
    """Its mixes and the best mixes of each design by one rule on one trace."""
    bench = Bench(runner, bar, drawn_load(trace(name), are_lengths_apart=True), rule)
    step = 2.0 if quick else 1.0
    mixes = published_mixes(name)
    result: dict[str, Any] = {
        "its_mixes_iso_power": bench.highest(mixes["iso_power"], step, (0,) if quick else (0, 1, 2)),
        "largest_batches": largest_batches(bench),
    }
    if quick:
        return result
    result["its_mixes_iso_cost"] = bench.highest(mixes["iso_cost"], step)
    result["best_iso_power"] = bench.fastest({"power": budget("power")})
    result["best_iso_cost"] = bench.fastest({"usd_per_hour": budget("usd_per_hour")})
    base = result["its_mixes_iso_power"]["Baseline-H100"]["rate"]
    result["best_at_lower_cost"] = bench.fastest({"usd_per_hour": budget("usd_per_hour", LOWER_COST)}, PAIRS)
    result["iso_throughput"] = {
        "rate": base,
        "least_cost": bench.cheapest(base, "usd_per_hour"),
        "least_power": bench.cheapest(base, "power", MIXED),
    }
    result["cpu_s"], result["simulations"] = round(bench.simulations.cpu_s), len(bench.simulations.results)
    return result


def largest_batches(bench: Bench) -> dict[str, int]:
    """How many requests a decode step may hold within the TBT limit at P50: what sets the rules apart."""
    limit_s = bench.targets.longest_step_s
    return {
        machine.title: max((n for n in range(1, 513) if machine.latency.decode_line(n, n).step_s < limit_s), default=0)
        for machine in bench.machines
        if not machine.is_capped
    }


def replayed(runner: Runner, bar: Progress, name: str, rule: DecodeRule) -> dict[str, Any]:
    """Its iso-power mixes on the trace's own requests and gaps, sped up."""
    bench = Bench(runner, bar, drawn_load(trace(name), is_replay=True), rule)
    return bench.highest(published_mixes(name)["iso_power"], 2.0, guess=REPLAY_GUESS[name])


def by_live_policies(runner: Runner, bar: Progress, name: str) -> dict[str, Any]:
    """Its iso-power mixes under the policies that serve: no machine lends itself, baselines are chunked."""
    bench = Bench(runner, bar, drawn_load(trace(name), are_lengths_apart=True), "table", rules="live")
    return bench.highest(published_mixes(name)["iso_power"], 2.0)


# the claims


def claims(traces: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The two headlines for each trace and rule, with the counts found best and with Splitwise's own."""
    return [
        row for name, rules in traces.items() for rule, found in rules.items() for row in _claims(name, rule, found)
    ]


def _claims(name: str, rule: str, found: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    own = found["its_mixes_iso_power"]
    h100, a100 = own["Baseline-H100"]["rate"], own["Baseline-A100"]["rate"]
    head = {"trace": name, "rule": rule}
    best = _best(found["best_at_lower_cost"])
    yield head | _claim("1.4x at 20% lower cost", best, "Baseline-H100 (40)", h100)
    best = _best(_within_both(found))
    yield head | _claim("2.35x at equal cost and power", best, "Baseline-H100 (40)", h100)
    best = "AA", found["best_iso_power"]["AA"]
    yield head | _claim("2.35x at equal cost and power", best, "Baseline-A100 (70)", a100)
    yield head | _claim("2.35x at equal cost and power", ("AA", own["AA"]), "Baseline-A100 (70)", a100) | {"its": True}


def _within_both(found: Mapping[str, Any]) -> dict[str, Any]:
    """The best mixes at equal power or equal cost that pass neither, of every design."""
    rows: dict[str, Any] = {}
    for key in ("best_iso_power", "best_iso_cost"):
        for name, row in found[key].items():
            is_better = name not in rows or row["rate"] > rows[name]["rate"]
            if name in PAIRS and row["cost"] <= COST and row["power"] <= POWER and is_better:
                rows[name] = row
    return rows


def _best(rows: Mapping[str, Any]) -> tuple[str, Any]:
    return max(rows.items(), key=lambda item: (item[1]["rate"], -item[1]["cost"]))


def _claim(what: str, best: tuple[str, Any], against: str, base: float) -> dict[str, Any]:
    name, row = best
    mix = f"{name} ({row['machines'][0]},{row['machines'][1]})"
    return {
        "claim": what,
        "mix": mix,
        "against": against,
        "times": round(row["rate"] / base, 2) if base else None,
        "rates": [row["rate"], base],
        "cost": row["cost"],
        "power": row["power"],
    }


def paper_figures(traces: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the paper says of the conversation trace, and the same quotient by each rule, with its own mixes where it
    names them; at equal throughput (Baseline-H100's at 40 machines) with the cheapest found."""
    rules = traces["conversation"]

    def rates(key: str, name: str, base: str) -> list[float]:
        return [round(rules[rule][key][name]["rate"] / rules[rule][key][base]["rate"], 2) for rule in RULES]

    def taken(name: str, what: str) -> list[float]:
        rows = [rules[rule]["iso_throughput"]["least_cost"] for rule in RULES]
        return [round(row[name][what] / row["Baseline-H100"][what], 2) for row in rows]

    return [
        _figure("equal power, AA over Baseline-A100, throughput", 2.15, rates("its_mixes_iso_power", *AA_OVER)),
        _figure("equal power, HA over Baseline-H100, throughput", 1.18, rates("its_mixes_iso_power", *HA_OVER)),
        _figure("equal cost, AA over Baseline-H100, throughput", 1.4, rates("its_mixes_iso_cost", "AA", HA_OVER[1])),
        _figure("equal throughput, HHcap to Baseline-H100, power", 0.75, taken("HHcap", "power")),
        _figure("equal throughput, AA to Baseline-H100, cost", 0.75, taken("AA", "cost")),
    ]


AA_OVER, HA_OVER = ("AA", "Baseline-A100"), ("HA", "Baseline-H100")


def _figure(what: str, paper: float, ours: Sequence[float]) -> dict[str, Any]:
    return {"what": what, "paper": paper} | dict(zip(RULES, ours, strict=True))


def reasons(traces: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Where the rules differ and why, from the figures."""
    said = []
    for name, rules in traces.items():
        flat, right = rules["published"], rules["table"]
        batches = ", ".join(
            f"{flat['largest_batches'][kind]} by the published rule and {right['largest_batches'][kind]} by the table "
            f"on an {kind} machine"
            for kind in flat["largest_batches"]
        )
        said.append(
            f"{name}: the largest decode batch that keeps the TBT limit at P50 is {batches}; at equal power "
            f"HH is best with {_shape(flat, 'HH')} by the published rule, with "
            f"{_shape(right, 'HH')} by the table."
        )
        pairs = {rule: rules[rule]["its_mixes_iso_power"] for rule in RULES}
        said.append(_on_equal_machines(name, rules))
        said.append(
            f"{name}, 40 H100 machines: Splitwise's HH {_shape(pairs['table'], 'HH', '')} serves "
            f"{_ratio(pairs['published']):.2f} times what Baseline-H100 does by the published rule, "
            f"{_ratio(pairs['table']):.2f} times by the table"
            + (
                ": the comparison turns round."
                if (_ratio(pairs["published"]) - 1) * (_ratio(pairs["table"]) - 1) < 0
                else "."
            )
        )
    return said


def _on_equal_machines(name: str, rules: Mapping[str, Any]) -> str:
    """The 2.35x: one kind of machine, split or not."""
    times, shapes = [], []
    for rule in RULES:
        best, base = rules[rule]["best_iso_power"]["AA"], rules[rule]["its_mixes_iso_power"]["Baseline-A100"]
        times.append(best["rate"] / base["rate"])
        shapes.append(_shape(rules[rule], "AA"))
    return (
        f"{name}, 70 A100 machines at equal cost and power: AA serves {times[0]:.2f} times what they do unsplit by the "
        f"published rule {shapes[0]}, {times[1]:.2f} times by the table {shapes[1]}; the headline is 2.35."
    )


def _shape(found: Mapping[str, Any], name: str, key: str = "best_iso_power") -> str:
    row = found[key][name] if key else found[name]
    return f"({row['machines'][0]},{row['machines'][1]})"


def _ratio(rows: Mapping[str, Any]) -> float:
    return float(rows["HH"]["rate"] / rows["Baseline-H100"]["rate"])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m bench.papers.splitwise", description="Splitwise's paper beside ours."
    )
    parser.add_argument("--quick", action="store_true", help="the published mixes for equal power only")
    parser.add_argument("--live", action="store_true", help="measure the live policies again; keep the rest as it is")
    args = parser.parse_args()
    if args.live:
        again_live()
    else:
        measure(args.quick)


def measure(quick: bool) -> None:
    result = about()
    result["paper"] = CASES["paper"]
    with Progress(console=Console(stderr=True), transient=True) as bar, open_runner(None) as runner:
        result["given_rates_code"] = given_rates(runner, bar)
        result["given_rows"] = given_rows(runner, bar, quick)
        result["traces"] = {
            name: {rule: one_trace(runner, bar, name, rule, quick) for rule in RULES} for name in TRACES
        }
        if not quick:
            result["claims"] = claims(result["traces"])
            result["reasons"] = reasons(result["traces"])
            result["paper_figures"] = paper_figures(result["traces"])
            result["replay"] = {name: {rule: replayed(runner, bar, name, rule) for rule in RULES} for name in TRACES}
            result["live"] = {name: by_live_policies(runner, bar, name) for name in TRACES}
    used = os.times()
    result["cpu_s"] = round(used.user + used.system + used.children_user + used.children_system)
    show(result)
    print(f"saved to {save('paper_splitwise', result).relative_to(REPO)}, {result['cpu_s']} CPU-s")


def again_live() -> None:
    """The policies have changed, and Splitwise's rules have not."""
    path = RESULTS / "paper_splitwise.json"
    if not path.exists():
        raise SystemExit(f"{path} is not there; run without --live first")
    result = json.loads(path.read_text())
    with Progress(console=Console(stderr=True), transient=True) as bar, open_runner(None) as runner:
        result["live"] = {name: by_live_policies(runner, bar, name) for name in TRACES}
    result["live_commit"] = about()["commit"]
    print(*(f"{name}: {mixes}" for name, mixes in result["live"].items()), sep="\n")
    print(f"saved to {save('paper_splitwise', result).relative_to(REPO)}")


def show(result: Mapping[str, Any]) -> None:
    rows = result["given_rows"]
    same = sum(row["slo_met"][0] == row["slo_met"][1] for row in rows)
    near = sum(row["largest_difference"] < 0.003 for row in rows)
    print(f"its {len(rows)} rows: {same} with the same verdict, {near} within 0.3% in every percentile")
    for name, row in result["given_rates_code"].items():
        print(f"  code, equal power, {name} {row['machines']}: {row}")
    for name, rules in result["traces"].items():
        for rule, found in rules.items():
            for what, mixes in found.items():
                if isinstance(mixes, dict) and what != "largest_batches":
                    print(f"{name}, {rule}, {what}: {mixes}")
    for row in result.get("claims", ()):
        print(row)
    print(*result.get("reasons", ()), sep="\n")


if __name__ == "__main__":
    main()

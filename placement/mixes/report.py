"""What a search for mixes found, as a Plan: intervals from several draws, what binds, and what to know about it.

An interval comes from the draws (Student's t over their results), widened by the latency model's error where it states
one. Nothing is simulated here but points of curves that are still missing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Any

from placement.goodput.stationary import t_90, wilson
from placement.mixes.designs import Mix, Resource
from placement.mixes.runs import Runs, Trial
from placement.mixes.slowdowns import SlowdownSlo
from placement.mixes.trial import PERCENTILES, Verdict
from placement.plan import Goodput, Interval, Plan, Pool, RatePoint, Slo
from placement.search.question import PlanQuestion

CURVE_AT = (0.5, 0.75, 0.9, 1.1)  # of the highest rate
AT_KNEE = 0.05  # headroom below this is none
SAID: Mapping[Resource, str] = {"usd_per_hour": "costs", "power": "draws", "gpus": "has"}
LENT = (
    "These figures count on machines that lend themselves to the other phase under load, as in Splitwise's simulator; "
    "the cluster that `kvrelay up` starts has no such role"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tried:
    """A mix that holds `rate` on all seeds; `rates`: its highest rate on each."""

    mix: Mix
    step: float
    rate: float
    rates: tuple[float, ...] = ()

    @property
    def error(self) -> float:
        return max(machine.offer.error for machine in self.mix.design.machines)


def answer(
    ask: PlanQuestion,
    asked: Mapping[str, Any],
    runs: Runs,
    tried: Sequence[Tried],
    *,
    resource: Resource,
    refused: Mapping[str, str],
    other_rules: float | None,
    cpu_s: float,
) -> Plan:
    """`tried`: the best first. `other_rules`: the best one's highest rate by the rules that were not searched with."""
    best = tried[0]
    seeds = tuple(ask.seed + i for i in range(len(best.rates)))
    highest = interval(best.rates, best.step / 2, best.error)
    rate = ask.rate or best.rate
    wanted = [(best, rate, seed) for seed in seeds]
    wanted += [(one, share * one.rate, ask.seed) for one in tried for share in CURVE_AT]
    runs.play([(one.mix.design, _trial(one.mix, at, seed)) for one, at, seed in wanted])
    goodputs = tuple(_goodput(one, runs) for one in tried)
    headroom = max(0.0, 1 - rate / highest.value) if highest.value else 0.0
    miss = _first_miss(best, runs)
    return Plan(
        asked=asked,
        slo=ask.slo,
        objective=ask.objective,
        chosen=goodputs[0],
        at_rate=_point(best, rate, [runs.verdicts[_trial(best.mix, rate, seed)] for seed in seeds]),
        binding=_binding(miss[1]) if miss else "none",
        headroom=headroom,
        tried=goodputs,
        refused=dict(refused),
        advice=tuple(_advice(ask, runs, tried, resource, miss, headroom, highest, other_rules)),
        sources=_sources(best, runs),
        cpu_s=cpu_s + (runs.cpu_s if runs.pool else 0.0),
        num_simulated=runs.num_simulated,
    )


def interval(values: Sequence[float], least_half: float, error: float = 0.0) -> Interval:
    """The mean of what each draw gave. `error`: of the latency model; times longer by it make rates as much smaller."""
    mean = sum(values) / len(values)
    if len(values) > 1:
        deviation = sqrt(sum((value - mean) ** 2 for value in values) / (len(values) - 1))
        half = max(least_half, t_90(len(values) - 1) * deviation / sqrt(len(values)))
    else:
        half = least_half
    return Interval(mean, max(0.0, mean - half) / (1 + error), (mean + half) / (1 - min(error, 0.9)))


def _trial(mix: Mix, rate: float, seed: int) -> Trial:
    return Trial(mix.design.name, mix.num_prompt, mix.num_token, rate, seed)


def _goodput(one: Tried, runs: Runs) -> Goodput:
    by_rate: dict[float, list[Verdict]] = {}
    for trial, verdict in sorted(runs.verdicts.items(), key=lambda item: (item[0].rate, item[0].seed)):
        if _trial(one.mix, trial.rate, trial.seed) == trial:
            by_rate.setdefault(trial.rate, []).append(verdict)
    miss = _first_miss(one, runs)
    return Goodput(
        candidate=one.mix.candidate("chunked" if runs.scene.rules == "live" else ""),
        goodput=interval(one.rates, one.step / 2, one.error),
        curve=tuple(_point(one, rate, verdicts) for rate, verdicts in by_rate.items()),
        usd_per_hour=one.mix.total("usd_per_hour"),
        watts=one.mix.total("power"),
        limit=f"at {miss[0]:.4g} requests/s {_worst(miss[1])}" if miss else "",
    )


def _point(one: Tried, rate: float, verdicts: Sequence[Verdict]) -> RatePoint:
    shares = [verdict.attainment for verdict in verdicts]
    count = sum(verdict.num_requests for verdict in verdicts)
    found = interval(shares, 0.0)
    low, high = wilson(found.value, count)
    return RatePoint(
        rate=rate,
        attainment=Interval(found.value, max(0.0, min(low, found.low)), min(1.0, max(high, found.high))),
        ttft_s={str(at): _times([v.ttft_s[str(at)] for v in verdicts], one.error) for at in PERCENTILES},
        tpot_s={str(at): _times([v.tpot_s[str(at)] for v in verdicts], one.error) for at in PERCENTILES},
        phases_s=_means([verdict.phases_s for verdict in verdicts]),
        busy=_means([verdict.busy for verdict in verdicts]),
        num_requests=count,
        is_settled=len(verdicts) > 1,
    )


def _times(values: Sequence[float], error: float) -> Interval:
    if max(values) == float("inf"):
        return Interval(max(values), min(values), max(values))
    found = interval(values, 0.0)
    return Interval(found.value, found.low * (1 - min(error, 0.9)), found.high * (1 + error))


def _means(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {key: sum(row[key] for row in rows) / len(rows) for key in rows[0]}


# what binds


def _first_miss(one: Tried, runs: Runs) -> tuple[float, Verdict] | None:
    """The lowest rate above the one held at which the mix was seen to miss the SLO."""
    missed = [
        (trial.rate, trial.seed)
        for trial, verdict in runs.verdicts.items()
        if trial == _trial(one.mix, trial.rate, trial.seed) and trial.rate > one.rate and not verdict.is_met
    ]
    if not missed:
        return None
    rate, seed = min(missed)
    return rate, runs.verdicts[_trial(one.mix, rate, seed)]


def _binding(miss: Verdict) -> Pool:
    """Prompt machines where the time to first token is furthest over its limit, token machines otherwise."""
    ttft = max((ratio for name, ratio in miss.ratios.items() if name.startswith("ttft")), default=0.0)
    rest = max((ratio for name, ratio in miss.ratios.items() if not name.startswith(("ttft", "e2e"))), default=0.0)
    return "prefill" if ttft > rest else "decode"


def _worst(verdict: Verdict) -> str:
    name = max(verdict.ratios, key=lambda key: verdict.ratios[key])
    if verdict.ratios[name] < 1:  # each target alone is kept by enough requests
        return f"only {verdict.attainment:.1%} of requests meet both targets"
    return f"{spoken(name)} is {verdict.ratios[name]:.2f} times its limit"


def spoken(target: str) -> str:
    """tbt_p90 as TBT P90."""
    name, _, share = target.partition("_p")
    return f"{name.upper()} P{share}" if share else name.upper()


# words


def _advice(
    ask: PlanQuestion,
    runs: Runs,
    tried: Sequence[Tried],
    resource: Resource,
    miss: tuple[float, Verdict] | None,
    headroom: float,
    highest: Interval,
    other_rules: float | None,
) -> list[str]:
    best = tried[0]
    said = [_on_baselines(ask, tried, resource)]
    if miss and not best.mix.design.is_baseline:
        pool = _binding(miss[1])
        said.append(f"The {pool} machines bind: at {miss[0]:.4g} requests/s {_worst(miss[1])}.")
    if ask.rate and headroom < AT_KNEE:
        said.append(f"The rate stands at the knee ({highest} requests/s): any more and the SLO is missed.")
    elif ask.rate:
        said.append(f"{headroom:.0%} of the highest rate ({highest} requests/s) is left at the rate asked for.")
    said.append(_on_rules(runs, best, other_rules))
    if any(getattr(m.latency, "rule", "") == "published" for m in best.mix.design.machines):
        said.append(
            "Decode is read as Splitwise's simulator reads its table: a step takes no longer for more requests. The "
            "rule `table` reads it as it was measured; plan with that one."
        )
    return [sentence for sentence in said if sentence]


def _on_baselines(ask: PlanQuestion, tried: Sequence[Tried], resource: Resource) -> str:
    best, is_baseline = tried[0], tried[0].mix.design.is_baseline
    others = [one for one in tried[1:] if one.mix.design.is_baseline != is_baseline]
    if not others:
        return ""
    other = others[0]
    kind = "Do not disaggregate" if is_baseline else "Disaggregation pays"
    if ask.rate:
        share = best.mix.total(resource) / other.mix.total(resource) - 1
        if share > -0.005:
            return f"{best.mix} {SAID[resource]} as much as {other.mix} at the same rate."
        return f"{kind}: {best.mix} {SAID[resource]} {-share:.0%} less than {other.mix} at the same rate."
    ratio = (sum(best.rates) / len(best.rates)) / max(1e-9, sum(other.rates) / len(other.rates))
    return f"{kind}: {best.mix} serves {ratio:.2f} times what {other.mix} does within the same budget."


def _on_rules(runs: Runs, best: Tried, other: float | None) -> str:
    if best.mix.design.is_baseline:
        return ""
    own = sum(best.rates) / len(best.rates)
    if runs.scene.rules == "splitwise":
        tail = "" if other is None else f": by the live policies {best.mix} holds {other:.4g} requests/s, not {own:.4g}"
        return f"{LENT}{tail}."
    if other is None:
        return "These figures are of the live policies; no machine lends itself to the other phase."
    return (
        f"These figures are of the live policies; no machine lends itself to the other phase. By Splitwise's rules, "
        f"where machines do, {best.mix} holds {other:.4g} requests/s against {own:.4g}."
    )


def _sources(best: Tried, runs: Runs) -> dict[str, str]:
    machines = best.mix.design.machines
    arrivals = runs.scene.arrivals
    rules = {"splitwise": "Splitwise's simulator, with its mixed pool", "live": "the live policies"}[runs.scene.rules]
    drawn = {
        "together": "lengths drawn from it",
        "apart": "prompt and output lengths drawn from it each by itself",
        "replay": "its own requests and gaps, at the pace of the rate",
        "list": "its own requests, arrivals divided by the rate",
    }[arrivals.draw]
    return {
        "latency": "; ".join(dict.fromkeys(machine.latency.source for machine in machines)),
        "hardware": ", ".join(dict.fromkeys(machine.name for machine in machines)),
        "workload": f"{arrivals.source.name}: {drawn}",
        "rules": rules,
        "power": machines[0].power_unit,
    }


def slo_asked(slo: Slo | SlowdownSlo) -> dict[str, Any]:
    if isinstance(slo, SlowdownSlo):
        return {
            "slowdowns": {name: list(limits) for name, limits in slo.limits.items()},
            "against": slo.reference.source,
        }
    return {"slo": slo}

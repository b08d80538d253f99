"""Sentences on the mix that was found: baselines beside it, what binds, what is left, whose rules were counted on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from placement.mixes.designs import Resource
from placement.mixes.report.rated import Miss, RatedMix
from placement.mixes.rules import LIVE, MixRules
from placement.plan import Interval
from placement.search.advice import ALIKE

AT_KNEE = 0.05  # headroom below this is none
SAID: Mapping[Resource, str] = {"usd_per_hour": "costs", "power": "draws", "gpus": "has"}


@dataclass(frozen=True, slots=True)
class ByOtherRules:
    """The best mix's highest rate by the rules that were not searched with."""

    rules: MixRules
    rate: float


def advice(
    rated: Sequence[RatedMix],
    *,
    rate: float | None,
    resource: Resource,
    rules: MixRules,
    other: ByOtherRules | None,
    miss: Miss | None,
    headroom: float,
) -> tuple[str, ...]:
    """`rated`: the best first. `rate`: that was asked for; `miss`: the best one's first."""
    best = rated[0]
    sentences = [_on_baselines(rated, rate, resource)]
    if miss and best.mix.design.is_split:
        sentences.append(f"The {miss.binding} machines bind: {miss}.")
    if rate:
        sentences.append(_on_headroom(headroom, best.highest_rate))
    sentences.append(_on_rules(best, rules, other))
    sentences += dict.fromkeys(machine.caution for machine in best.mix.design.machines)
    return tuple(sentence for sentence in sentences if sentence)


def _on_baselines(rated: Sequence[RatedMix], rate: float | None, resource: Resource) -> str:
    best, is_split = rated[0], rated[0].mix.design.is_split
    other = next((mix for mix in rated[1:] if mix.mix.design.is_split != is_split), None)
    if other is None:
        return ""
    kind = "Disaggregation pays" if is_split else "Do not disaggregate"
    if rate:
        share = best.mix.total(resource) / other.mix.total(resource) - 1
        if share > -0.005:
            return f"{best.mix} {SAID[resource]} as much as {other.mix} at the same rate."
        return f"{kind}: {best.mix} {SAID[resource]} {-share:.0%} less than {other.mix} at the same rate."
    ratio = best.mean_rate / max(1e-9, other.mean_rate)
    if is_split and abs(ratio - 1) < ALIKE:
        kind = "Disaggregation makes no difference that is sure"
    serves = f"{kind}: {best.mix} serves {ratio:.2f} times what {other.mix} does within the same budget"
    usd, others_usd = (mix.mix.total("usd_per_hour") for mix in (best, other))
    at_price = f", for {usd:.2f} USD an hour against {others_usd:.2f}" if abs(usd - others_usd) >= 0.005 else ""
    return f"{serves}{at_price}."


def apart_words(rated: Sequence[RatedMix], kinds: Collection[str]) -> str:
    """What a cluster of each kind would serve, where that is more; `rated`: the best first."""
    best: dict[str, RatedMix] = {}
    for each in rated:
        own = {machine.kind for machine in each.mix.design.machines}
        if len(own) == 1:
            best.setdefault(own.pop(), each)
    if len(kinds) < 2 or not set(kinds) <= set(best):
        return ""
    together = sum(best[kind].mean_rate for kind in kinds)
    parts = " and ".join(f"{best[kind].mix} {best[kind].mean_rate:.4g}" for kind in kinds)
    if together < rated[0].mean_rate * (1 + ALIKE):
        return ""
    return f"More is had of a cluster for each kind of its own: {parts}, {together:.4g} requests/s in all."


def _on_headroom(headroom: float, highest: Interval) -> str:
    if headroom < AT_KNEE:
        return f"The rate stands at the knee ({highest} requests/s): any more and the SLO is missed."
    return f"{headroom:.0%} of the highest rate ({highest} requests/s) is left at the rate asked for."


def _on_rules(best: RatedMix, rules: MixRules, other: ByOtherRules | None) -> str:
    if not best.mix.design.is_split:
        return ""
    own = best.mean_rate
    if rules.is_lending:
        lent = (
            f"These figures count on machines that lend themselves to the other phase under load, as in "
            f"{rules.simulator}; the cluster that `kvrelay up` starts has no such role"
        )
        if other is None:
            return f"{lent}."
        return f"{lent}: by {other.rules.policies} {best.mix} holds {other.rate:.4g} requests/s, not {own:.4g}."
    live = f"These figures are of {LIVE.policies}; no machine lends itself to the other phase."
    if other is None:
        return live
    return (
        f"{live} By {other.rules.policies}, where machines do, {best.mix} holds {other.rate:.4g} requests/s against "
        f"{own:.4g}."
    )

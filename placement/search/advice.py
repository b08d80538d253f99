"""advice says in sentences what a plan found: whether two pools pay, which one binds, how near the knee it stands.

Every figure was simulated by placement/search/planner.py; nothing is computed here but ratios of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.plan import Goodput, Interval, Pool
from placement.search.sizing import few_more

NEAR = 0.05  # of the goodput: so little left is the knee
ALIKE = 0.05  # of a goodput: what searches of two clusters may differ by


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`relief`: the attainment at `over` requests/s, as it is ("") and with few workers more of a role. `arrivals`:
    what drawn ones leave out. `acceptance`: of guesses ahead; None: nobody asked for any. `no_room`: which requests
    nobody of it can hold. `has_decode`: not all outputs are one token."""

    chosen: Goodput
    tried: Sequence[Goodput]
    binding: Pool
    relief: Mapping[str, float]
    over: float  # the first rate above the goodput that misses the SLO
    headroom: float
    rate: float | None
    error: float
    asked_colocated: bool
    arrivals: str
    acceptance: float | None = None
    no_room: str = ""
    has_decode: bool = True

    @property
    def keeping(self) -> list[Goodput]:
        """Those of `tried` that keep the rate, or any."""
        return [each for each in self.tried if each.keeps(self.rate)]


def advise(findings: Findings) -> list[str]:
    """The most important first."""
    said = [
        _on_disaggregation(findings),
        f"{findings.no_room}." if findings.no_room else "",
        _on_guesses(findings),
        _on_binding(findings),
        _on_copies(findings.chosen.copies),
        _on_headroom(findings.headroom, findings.chosen.goodput) if findings.rate else "",
        _on_error(findings.error),
        _on_settling(findings.chosen),
        f"{findings.arrivals[:1].upper()}{findings.arrivals[1:]}." if findings.arrivals else "",
    ]
    return [sentence for sentence in said if sentence]


def _on_disaggregation(findings: Findings) -> str:
    chosen, kind = findings.chosen, findings.chosen.candidate.kind
    is_colocated, rate = kind == "one pool", findings.rate
    here = f"at {rate:g} requests/s with as few {chosen.candidate.unit}s" if rate else "here"
    other = next((each for each in findings.keeping if each.candidate.kind not in ("hybrid", kind)), None)
    if is_colocated and not findings.has_decode:
        return "Do not disaggregate: every output is one token, which prefill makes, so nobody decodes."
    if kind == "hybrid" and other is None:
        return f"Run a hybrid: no pure placement keeps the targets {here}."
    if other is None and is_colocated and not findings.rate and chosen.candidate.gpus == 1:  # all that there are
        return f"Do not disaggregate: two pools take 2 {chosen.candidate.unit}s or more, and there is 1."
    if other is None and is_colocated:
        return f"Do not disaggregate: no two pools keep the targets {here}."
    if other is None:
        return f"No colocated candidate keeps the targets {here}." if findings.asked_colocated else ""
    gain = chosen.per_gpu / other.per_gpu
    ratio, pays = f"{gain:.2f} times the goodput per {chosen.candidate.unit} of", "pays"
    takes = "has"
    if findings.rate and chosen.candidate.gpus != other.candidate.gpus:
        takes = "takes"
        ratio = f"{_taken(chosen)} for {findings.rate:g} requests/s, against {other.candidate.gpus} of"
    elif abs(gain - 1) < ALIKE:
        pays = "makes no difference that is sure"
    sure = "" if _is_surely_better(chosen, other) else ", but their intervals overlap"
    if sure and findings.error:
        sure = f", if the latency model, wrong by up to {findings.error:.0%}, is wrong alike for both"
    if is_colocated:
        ratio = f"{takes} {ratio}"
        return (
            f"Do not disaggregate: {chosen.candidate.label} {ratio} the best two pools, {other.candidate.label}{sure}."
        )
    if kind == "hybrid":
        return f"A hybrid {pays}: {ratio} the best pure placement, {other.candidate.label}{sure}."
    return f"Disaggregation {pays}: {ratio} the best colocated candidate, {other.candidate.label}{sure}."


def _taken(goodput: Goodput) -> str:
    gpus, unit = goodput.candidate.gpus, goodput.candidate.unit
    return f"{gpus} {unit}{'s' if gpus > 1 else ''}"


def _on_guesses(findings: Findings) -> str:
    """Whether they pay, at this load."""
    if findings.acceptance is None:
        return ""
    told = f"each right {findings.acceptance:.0%} of the time where those before it are"
    guessing = next((each for each in findings.keeping if each.candidate.num_guesses), None)
    plain = next((each for each in findings.keeping if not each.candidate.num_guesses), None)
    if guessing is None:
        return f"Do not speculate: with guesses, {told}, no placement of these keeps the targets, or has the memory."
    count = f"{guessing.candidate.num_guesses} guesses ahead, {told},"
    if plain is None:
        return f"Speculate: only with {count} the targets are kept."
    advised = "Speculate" if guessing is findings.chosen else "Do not speculate"
    ratio, unit = guessing.per_gpu / plain.per_gpu, plain.candidate.unit
    meant = f"{ratio:.2f} times the goodput per {unit} of the best without"
    if findings.rate and guessing.candidate.gpus != plain.candidate.gpus:
        meant = f"{_taken(guessing)} in place of {plain.candidate.gpus}"
    elif abs(ratio - 1) < ALIKE:
        advised = "Speculating makes no difference that is sure"
    batch = f"a worker that decodes has {_batch(guessing):.3g} requests at once, and {_batch(plain):.3g} without"
    return f"{advised}: {count} mean {meant}; {batch}."


def _batch(goodput: Goodput) -> float:
    """Requests that a worker decodes at once near the goodput, by Little's law."""
    point = min(goodput.curve, key=lambda point: abs(point.rate - goodput.goodput.value))
    workers = sum(pool.replicas for pool in goodput.candidate.pools if pool.role != "prefill")
    return point.rate * point.phases_s.get("decode", 0.0) / workers


def _is_surely_better(chosen: Goodput, other: Goodput) -> bool:
    return chosen.goodput.low / chosen.candidate.gpus > other.goodput.high / other.candidate.gpus


def _on_binding(findings: Findings) -> str:
    if findings.binding == "link":
        return "The link between the workers binds: place them within a node, or give prefill fewer GPUs."
    if findings.binding not in findings.relief:
        return f"The {findings.binding} pool binds." if findings.binding != "none" else ""
    before, after = findings.relief[""], findings.relief[findings.binding]
    index = 0 if findings.binding == "prefill" else 1
    count = few_more(findings.chosen.candidate, index)
    return (
        f"The {findings.binding} pool binds: at {findings.over:.3g} requests/s "
        f"{'one' if count == 1 else count} more {findings.binding} worker{'s' if count > 1 else ''} "
        f"take{'s' if count == 1 else ''} the share that meets both targets from {before:.1%} to {after:.1%}."
    )


def _on_copies(copies: int) -> str:
    if copies == 1:
        return ""
    return (
        f"Run it as {copies} clusters of one pair each, every pair in its nodes: the link between nodes is too slow "
        f"for the KV."
    )


def _on_headroom(headroom: float, goodput: Interval) -> str:
    if headroom < NEAR:
        return f"The rate stands at the knee ({goodput} requests/s): any more and the targets are missed."
    return f"{headroom:.0%} of the goodput ({goodput} requests/s) is left at the rate asked for."


def _on_error(error: float) -> str:
    if not error:
        return ""
    return f"The latency model was wrong by up to {error:.0%} where it was checked; the intervals carry that."


def _on_settling(chosen: Goodput) -> str:
    if all(point.is_settled for point in chosen.curve if point.rate <= chosen.goodput.high):
        return ""
    return "Some rates near the knee did not settle within the limit; their intervals say how sure they are."

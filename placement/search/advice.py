"""advice says in sentences what a plan found: whether two pools pay, which one binds, how near the knee it stands.

Every figure was simulated by placement/search/planner.py; nothing is computed here but ratios of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from placement.plan import Goodput, Interval, Pool

NEAR = 0.05  # of the goodput: so little left is the knee
OVER = 1.1  # times the goodput: where relief was tried


@dataclass(frozen=True, slots=True, kw_only=True)
class Findings:
    """`relief`: the attainment OVER the goodput, as it is ("") and with one worker more of a role. `copies`: clusters
    of one pair. `arrivals`: what drawn ones leave out."""

    chosen: Goodput
    tried: Sequence[Goodput]
    binding: Pool
    relief: Mapping[str, float]
    headroom: float
    rate: float | None
    copies: int
    error: float
    asked_colocated: bool
    arrivals: str


def advise(found: Findings) -> list[str]:
    """The most important first."""
    said = [
        _on_disaggregation(found),
        _on_binding(found),
        _on_copies(found.copies),
        _on_headroom(found.headroom, found.chosen.goodput) if found.rate else "",
        _on_error(found.error),
        _on_settling(found.chosen),
        f"{found.arrivals[:1].upper()}{found.arrivals[1:]}." if found.arrivals else "",
    ]
    return [sentence for sentence in said if sentence]


def _on_disaggregation(found: Findings) -> str:
    chosen, is_colocated = found.chosen, found.chosen.candidate.is_colocated
    other = next((one for one in found.tried if one.candidate.is_colocated != is_colocated), None)
    if other is None and is_colocated:
        return "Do not disaggregate: no two pools keep the targets here."
    if other is None:
        return "No colocated candidate keeps the targets." if found.asked_colocated else ""
    ratio = f"{chosen.per_gpu / other.per_gpu:.2f} times the goodput per GPU of"
    if found.rate:
        ratio = f"{chosen.candidate.gpus} GPUs for {found.rate:g} requests/s, against {other.candidate.gpus} of"
    sure = "" if _is_surely_better(chosen, other) else ", but their intervals overlap"
    if sure and found.error:
        sure = f", if the latency model, wrong by up to {found.error:.0%}, is wrong alike for both"
    if is_colocated:
        return (
            f"Do not disaggregate: {chosen.candidate.label} has {ratio} the best two pools, "
            f"{other.candidate.label}{sure}."
        )
    return f"Disaggregation pays: {ratio} the best colocated candidate, {other.candidate.label}{sure}."


def _is_surely_better(chosen: Goodput, other: Goodput) -> bool:
    return chosen.goodput.low / chosen.candidate.gpus > other.goodput.high / other.candidate.gpus


def _on_binding(found: Findings) -> str:
    if found.binding == "link":
        return "The link between the workers binds: place them within a node, or give prefill fewer GPUs."
    if found.binding not in found.relief:
        return f"The {found.binding} pool binds." if found.binding != "none" else ""
    before, after = found.relief[""], found.relief[found.binding]
    return (
        f"The {found.binding} pool binds: at {OVER * found.chosen.goodput.value:.3g} requests/s one more "
        f"{found.binding} worker takes the share that meets both targets from {before:.1%} to {after:.1%}."
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

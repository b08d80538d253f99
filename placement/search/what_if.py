"""What moves a plan's answer: the chosen placement's goodput where one thing that the plan was told is otherwise, or
with a worker more; and what twice the rate would take.

All is simulated on the plan's own requests, by shorter runs than those that a goodput is verified by, which flatter.
So the chosen placement is looked at likewise as it is, and each figure is put in proportion to that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from placement.goodput.estimate import Effort
from placement.goodput.search import GoodputProblem, find_goodput
from placement.goodput.targets import Targets
from placement.latency.scaled import ScaledLatency
from placement.plan import Goodput, PoolRole, Slo, Swing
from placement.search.placements import Placement, goodput_problem, with_candidate
from placement.search.problem import PlanSearch
from placement.search.sizing import SizingJob, few_more, size_for_rate, sizing_job, with_more
from placement.simulator.systems import LiveSystem
from placement.workload.requests import Workload

TIMES, LENGTHS, TARGETS = 0.1, 0.1, 0.2  # by such a share more and less; times by the latency model's error, if any
LOOK = Effort(first_requests=1000, max_requests=6000, half_width=0.02, decides=True)
TWICE_OF = 3  # placements, the best, are sized for twice the rate
Change = tuple[str, str, str, list[GoodputProblem]]  # what, less, more, and both as problems


def scale_of(search: PlanSearch, placement: Placement, chosen: Goodput) -> float:
    """What a goodput that such short runs find is to be taken times."""
    [unchanged] = search.done(find_goodput, [_problem(search, placement, chosen)], "as it is")
    return chosen.goodput.value / unchanged.goodput.value if unchanged.goodput.value else 1.0


def swings_of(search: PlanSearch, placement: Placement, chosen: Goodput, scale: float) -> tuple[Swing, ...]:
    """What moves the goodput most comes first."""
    changes = list(_changes(search, placement, chosen))
    problems = [problem for change in changes for problem in change[3]]
    knees = iter(search.done(find_goodput, problems, "what moves it"))
    swings = []
    for what, less, more_, _ in changes:
        at_less, at_more = next(knees), next(knees)
        values = {"at_less": scale * at_less.goodput.value, "at_more": scale * at_more.goodput.value}
        swings.append(Swing(what=what, less=less, more=more_, **values))
    return tuple(sorted(swings, key=lambda swing: -swing.span))


def what_if(
    search: PlanSearch, placements: Sequence[Placement], chosen: Goodput, swings: Sequence[Swing], scale: float
) -> list[str]:
    """In sentences. `placements`: of all that was tried, the chosen one first."""
    said = [_on_targets(swings, chosen), _on_one_more(search, placements[0], chosen, scale)]
    if search.question.rate:
        said.append(_on_twice(search, placements[:TWICE_OF], 2 * search.question.rate))
    return [sentence for sentence in said if sentence]


# otherwise


def _changes(search: PlanSearch, placement: Placement, chosen: Goodput) -> Iterator[Change]:
    problem = search.problem
    base = _problem(search, placement, chosen)
    share = search.error_of(chosen.candidate) or TIMES
    times = ("prefill", "decode") if chosen.candidate.kind == "one pool" else ("prefill", "decode", "transfer")
    for part in times:
        paced = [replace(base, system=_paced(base, part, factor)) for factor in (1 - min(share, 0.9), 1 + share)]
        yield f"{part} times", f"{share:.0%} shorter", f"{share:.0%} longer", paced
    for name, key in (("TTFT", "ttft_s"), ("TPOT", "tpot_s")):
        if np.isfinite(getattr(problem.targets.loosest, key)):
            asked = [_with_targets(problem.targets, key, 1 + by) for by in (-TARGETS, TARGETS)]
            searches = [replace(search, problem=replace(problem, targets=each)) for each in asked]
            both = [_problem(each, placement, chosen) for each in searches]
            yield f"{name} target", f"{TARGETS:.0%} tighter", f"{TARGETS:.0%} looser", both
    source = problem.traffic.source
    for name, key in (("prompts", "prompt_len"), ("outputs", "output_len")):
        if key == "prompt_len" and source.blocks:
            continue  # prefixes that are shared have lengths of their own
        sources = [_with_lengths(source, key, 1 + by) for by in (-LENGTHS, LENGTHS)]
        drawn = [replace(base, traffic=replace(problem.traffic, source=each)) for each in sources]
        yield name, f"{LENGTHS:.0%} shorter", f"{LENGTHS:.0%} longer", drawn


def _problem(search: PlanSearch, placement: Placement, chosen: Goodput) -> GoodputProblem:
    problem = goodput_problem(search.problem, placement, effort=LOOK, precision=0.03)
    return replace(problem, top=1.3 * chosen.goodput.value)


def _paced(problem: GoodputProblem, part: str, factor: float) -> LiveSystem:
    assert isinstance(problem.system, LiveSystem)
    cluster = problem.system.cluster
    factors = {name: factor if name == part else 1.0 for name in ("prefill", "decode", "transfer")}
    how = f"{part} times {factor:g}"
    workers = (replace(w, latency=ScaledLatency(model=w.latency, how=how, **factors)) for w in cluster.workers)
    return LiveSystem(replace(cluster, workers=tuple(workers)))


def _with_targets(targets: Targets, key: str, factor: float) -> Targets:
    def scaled(slo: Slo) -> Slo:
        return replace(slo, **{key: getattr(slo, key) * factor})

    classes = tuple(replace(each, slo=scaled(each.slo)) for each in targets.classes)
    return replace(targets, slo=scaled(targets.slo), classes=classes)


def _with_lengths(source: Workload, key: str, factor: float) -> Workload:
    lengths = np.maximum(1, np.rint(getattr(source, key) * factor)).astype(np.int64)
    return replace(source, **{key: lengths})


# in words


def _on_targets(swings: Sequence[Swing], chosen: Goodput) -> str:
    targets = sorted(
        (swing for swing in swings if swing.what.endswith("target")), key=lambda swing: swing.at_more, reverse=True
    )
    gains = [swing for swing in targets if swing.at_more > 1.02 * chosen.goodput.value]
    if not targets:
        return ""
    if not gains:
        return f"No target costs much: {TARGETS:.0%} looser, and the goodput is about the same."
    most, *others = gains[0], *(swing for swing in targets if swing is not gains[0])
    than = f"; with the {others[0].what} so, {others[0].at_more:.3g}" if others else ""
    return f"The {most.what} costs most: {most.more}, and the goodput is {most.at_more:.3g} requests/s{than}."


def _on_one_more(search: PlanSearch, placement: Placement, chosen: Goodput, scale: float) -> str:
    """The pool in which one more gains most for a GPU, or a few more where it is large."""
    candidate = placement.candidate
    counts = [few_more(candidate, i) for i in range(len(candidate.pools))]
    larger = [with_candidate(placement, with_more(placement, candidate, i, n)) for i, n in enumerate(counts)]
    knees = search.done(find_goodput, [_problem(search, each, chosen) for each in larger], "a worker more")
    found = [
        (count, pool.role, each, scale * knee.goodput.value)
        for count, pool, each, knee in zip(counts, candidate.pools, larger, knees, strict=True)
    ]

    def gained(each: tuple[int, PoolRole, Placement, float]) -> float:
        return (each[3] - chosen.goodput.value) / (each[2].candidate.gpus - candidate.gpus)

    count, role, best, goodput = max(found, key=gained)
    added = _priced(search, best.candidate.unit, best.candidate.gpus - candidate.gpus)
    return (
        f"{'One' if count == 1 else count} more {role} worker{'s' if count > 1 else ''} ({added}) "
        f"take{'s' if count == 1 else ''} the goodput from {chosen.goodput.value:.3g} to {goodput:.3g} requests/s."
    )


def _priced(search: PlanSearch, unit: str, count: int) -> str:
    usd = count * search.problem.catalog.cost.usd_per_gpu_hour
    return f"{count} {unit}{'s' if count > 1 else ''}" + (f", {usd:,.2f} USD an hour" if usd else "")


def _on_twice(search: PlanSearch, placements: Sequence[Placement], rate: float) -> str:
    sized = search.done(size_for_rate, [_twice(search, each, rate) for each in placements], "twice the rate")
    kept = [each.placement.candidate for each in sized if each.at_rate.keeps_slo]
    if not kept:
        return f"At twice the rate, {rate:g} requests/s, none of the best placements keeps the targets, however grown."
    best = min(kept, key=lambda candidate: candidate.gpus)
    return (
        f"At twice the rate, {rate:g} requests/s, the cheapest of the best placements, grown, is {best.label}: "
        f"{_priced(search, best.unit, best.gpus)}."
    )


def _twice(search: PlanSearch, placement: Placement, rate: float) -> SizingJob:
    pools = tuple(replace(pool, replicas=2 * pool.replicas) for pool in placement.candidate.pools)
    twice = with_candidate(placement, replace(placement.candidate, pools=pools))
    return sizing_job(search.problem, replace(twice, promised=rate), rate, LOOK)

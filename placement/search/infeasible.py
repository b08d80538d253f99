"""Why nothing can be planned, in a sentence with the figure that forbids it. Nothing is simulated here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from placement.catalogs.base import Offer, PlanError
from placement.goodput.bounds import cached_len, floor_share, floors_s, relaxed, sampled_rows
from placement.goodput.targets import Targets
from placement.plan import Candidate, Slo
from placement.search.problem import PhaseRole, PlacementProblem, SearchLog, WorkerGoodput
from placement.workload.requests import Floats, Ints, Workload

MANY = 1 << 20  # GPUs: as many as any worker takes
HELD_SHARE = 0.999  # of the requests that a worker can hold, that each one must: a trace's longest may be an outlier


def raise_if_nothing_fits(problem: PlacementProblem, offers: Sequence[Offer], log: SearchLog, num_gpus: int) -> None:
    """A model that no degree holds, requests that no worker holds, targets that no degree meets when idle."""
    model, hardware = problem.catalog.model, problem.hardware
    if not offers:
        largest = [*log.refused.values()][-1:]
        reason = next(iter(largest), f"no degree takes {num_gpus} or fewer {_unit(problem)}s")
        raise PlanError(f"{model} fits nowhere on {num_gpus} x {hardware}: {reason}")
    _raise_if_too_long(problem, offers)
    for role in ("prefill", "decode"):
        _raise_if_too_slow(problem, role, offers)


def _unit(problem: PlacementProblem) -> str:
    """What workers take so many of."""
    return problem.catalog.degrees(MANY)[0].unit


def _raise_if_too_long(problem: PlacementProblem, offers: Sequence[Offer]) -> None:
    source = problem.traffic.source
    roomiest = max(offers, key=lambda offer: offer.longest)
    total = held_len(source, "decode")
    over = float((total > roomiest.longest).mean())
    if over > 1 - problem.targets.slo.attainment:
        row = int(np.argmax(total))
        raise PlanError(
            f"{source.name}: request {row} has {total[row]:,} tokens, and the roomiest worker ({roomiest.degrees}) "
            f"holds {roomiest.longest:,}; {over:.0%} of the requests are too long, so cut them or give "
            f"a worker more GPUs"
        )


def room_reason(problem: PlacementProblem, role: PhaseRole, offer: Offer, offers: Sequence[Offer]) -> str:
    """Why a worker would have no room for requests that another of the offers has; nothing where it has. A router
    refuses what finds none: however many others are in time, nobody would run that."""
    lengths = held_len(problem.traffic.source, role)
    most = max(other.longest for other in offers)
    somewhere = lengths[lengths <= most]
    over = float((somewhere > offer.longest).mean()) if len(somewhere) else 0.0
    if over <= 1 - HELD_SHARE:
        return ""
    what = "prompts" if role == "prefill" else "requests"
    return (
        f"it holds {offer.longest:,} tokens of KV on {problem.hardware} at {offer.degrees}, and {over:.1%} of the "
        f"{what} are longer, up to {int(somewhere.max()):,}: they would be refused"
    )


def held_len(source: Workload, role: PhaseRole) -> Ints:
    """Tokens of each request whose KV a worker of this phase must have room for."""
    return source.prompt_len if role == "prefill" else source.prompt_len + source.output_len


def no_room(source: Workload, candidate: Candidate, max_len: int) -> str:
    """Which requests nobody of it can hold, if there are any. Those beyond `max_len` (0: none) are told elsewhere."""
    held = {
        role: max(pool.num_pages * pool.page_size for pool in candidate.pools if pool.role != other)
        for role, other in (("prefill", "decode"), ("decode", "prefill"))
    }
    lengths = held_len(source, "decode")
    is_over = (source.prompt_len > held["prefill"]) | (lengths > held["decode"])
    if max_len:
        is_over &= lengths <= max_len
    if not is_over.any():
        return ""
    longest = int(lengths[is_over].max())
    return (
        f"{is_over.mean():.2%} of the requests find no room and would be refused: the longest has {longest:,} tokens, "
        f"and these workers hold {min(held.values()):,}"
    )


def _raise_if_too_slow(problem: PlacementProblem, role: PhaseRole, offers: Sequence[Offer]) -> None:
    """TPOT 5 ms: one decode step of this model at batch 1 takes 9.1 ms on this GPU even at TP 8."""
    is_prefill = role == "prefill"
    only = relaxed(problem.targets, tpot=is_prefill, ttft=not is_prefill)
    source = problem.traffic.source
    pairs = [(offer if is_prefill else None, None if is_prefill else offer) for offer in offers]
    if any(floor_share(prefill, decode, source, only) >= 0 for prefill, decode in pairs):
        return
    floors = [floors_s(prefill, decode, source) for prefill, decode in pairs]
    times = [float((ttft if is_prefill else tpot).mean()) for ttft, tpot in floors]
    fastest = offers[int(np.argmin(times))]
    sentence = floor_sentence(problem, role, fastest).replace(" at TP", " even at TP")
    raise PlanError(f"{sentence}; ask for a longer {'TTFT' if is_prefill else 'TPOT'} or faster hardware")


def why_nothing(
    problem: PlacementProblem,
    offers: Sequence[Offer],
    log: SearchLog,
    num_gpus: int,
    prefills: Sequence[WorkerGoodput],
    decodes: Sequence[WorkerGoodput],
    colocated: Sequence[WorkerGoodput],
) -> str:
    """Each phase could keep its target when idle, and yet no cluster was found."""
    if prefills and decodes:
        least = min(worker.gpus for worker in prefills) + min(worker.gpus for worker in decodes)
        if least > num_gpus and not colocated:
            return (
                f"num_gpus is {num_gpus}: the smallest prefill and decode workers that keep the targets take {least}; "
                f"give {least} or more"
            )
    wanted = f"{100 * problem.targets.slo.attainment:.4g}% of requests"
    if problem.targets.classes:
        wanted = "as many requests of each class as are to meet them"
    if prefills and decodes:
        told = " and ".join(filter(None, (_target(problem.targets, "prefill"), _target(problem.targets, "decode"))))
        return (
            f"no placement keeps {told} for {wanted} at any rate that was tried; ask for longer targets or a smaller "
            "share"
        )
    role: PhaseRole = "decode" if prefills else "prefill"
    gpus = max(offer.degrees.gpus for offer in offers)
    most = f"{gpus} GPU{'s' if gpus > 1 else ''}"
    if target := _target(problem.targets, role):
        return (
            f"{target}: no {role} worker of up to {most} keeps it for {wanted} but when idle; ask for a longer "
            "one or allow more GPUs to a worker"
        )
    why = next((reason for name, reason in log.refused.items() if name.startswith(role)), "none kept up")
    return f"no {role} worker of up to {most} serves these requests ({why}); allow more GPUs to a worker"


def _target(targets: Targets, role: PhaseRole) -> str:
    """The strictest of the classes; nothing where none has one for this phase."""
    slos = [each.slo for each in targets.classes] or [targets.slo]
    if role == "prefill":
        name, target_s = "TTFT", min(slo.ttft_s for slo in slos)
    else:
        name, target_s = "TPOT", min(slo.tpot_s for slo in slos)
    return f"{name} {ms(target_s)}" if math.isfinite(target_s) else ""


# with nobody else there


def idle_reason(problem: PlacementProblem, role: PhaseRole, offer: Offer) -> str:
    """Why a worker misses its target with nobody else there; nothing when it does not."""
    source, targets = problem.traffic.source, problem.targets
    is_prefill = role == "prefill"
    only = relaxed(targets, tpot=is_prefill, ttft=not is_prefill)
    if floor_share(offer if is_prefill else None, None if is_prefill else offer, source, only) >= 0:
        return ""
    return floor_sentence(problem, role, offer)


def floor_sentence(problem: PlacementProblem, role: PhaseRole, offer: Offer) -> str:
    """TTFT 100 ms: a prompt of 2,735 tokens (P90) takes 310 ms alone on A100 at TP 8. Of the class that is furthest
    from its share, and of its request at the percentile that is to be attained: a mean may well meet the target."""
    is_prefill = role == "prefill"
    source = problem.traffic.source
    sampled = sampled_rows(source)
    ttft, tpot = floors_s(offer if is_prefill else None, None if is_prefill else offer, source)
    floors, sample = (ttft if is_prefill else tpot), source.without_prefixes(sampled)
    slo, rows = _furthest(problem.targets, sample, floors, is_prefill=is_prefill)
    ordered = rows[np.argsort(floors[rows], kind="stable")]
    at = int(ordered[math.ceil(slo.attainment * len(rows)) - 1])
    where, share = f"on {problem.hardware} at {offer.degrees}", f"P{100 * slo.attainment:.4g}"
    prompt_len, took = int(sample.prompt_len[at]), ms(float(floors[at]))
    if is_prefill:
        cached = int(cached_len(offer, source)[sampled[at]])
        what = f"a prompt of {prompt_len:,} tokens ({share}{f', {cached:,} of them cached' if cached else ''})"
        return f"TTFT {ms(slo.ttft_s)}: {what} takes {took} alone {where}"
    context = prompt_len + int(sample.output_len[at]) // 2
    step = f"one decode step of {problem.catalog.model} at batch 1 with {context:,} tokens of context ({share})"
    return f"TPOT {ms(slo.tpot_s)}: {step} takes {took} {where}"


def _furthest(targets: Targets, sample: Workload, floors: Floats, *, is_prefill: bool) -> tuple[Slo, Ints]:
    """The SLO, and the rows of the requests, of the class whose share in time is furthest below what it should be."""
    slos = [each.slo for each in targets.classes] or [targets.slo]

    def slack(slo: Slo, rows: Ints) -> float:
        in_time = floors[rows] <= (slo.ttft_s if is_prefill else slo.tpot_s)
        return float(in_time.mean()) - slo.attainment if len(rows) else math.inf

    groups = [np.flatnonzero(is_of) for is_of, _ in targets.groups(sample).values()]
    return min(zip(slos, groups, strict=True), key=lambda group: slack(*group))


def ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"

"""Why nothing can be planned, in a sentence with the figure that forbids it. Nothing is simulated here."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from placement.catalogs.base import Offer, PlanError
from placement.goodput.bounds import decode_alone_s, floor_share, floors_s, mean_context, relaxed
from placement.goodput.targets import Targets
from placement.plan import Candidate
from placement.search.problem import PhaseRole, PlacementProblem, SearchLog, WorkerGoodput
from placement.workload.requests import Ints, Workload

MANY = 1 << 20  # GPUs: as many as any worker takes
HELD_SHARE = 0.999  # of the requests that a worker can hold, that each one must: a trace's longest may be an outlier


def raise_if_nothing_fits(problem: PlacementProblem, offers: Sequence[Offer], log: SearchLog, num_gpus: int) -> None:
    """A model that no degree holds, requests that no worker holds, targets that no degree meets when idle."""
    model, hardware = problem.catalog.model, problem.hardware
    if not offers:
        reason = next(iter(log.refused.values()), f"no degree takes {num_gpus} or fewer {_unit(problem)}s")
        raise PlanError(f"{model} fits nowhere on {num_gpus} x {hardware}: {reason}")
    _raise_if_too_long(problem, offers)
    for role in ("prefill", "decode"):
        _raise_if_too_slow(problem, role, offers)


def _unit(problem: PlacementProblem) -> str:
    """What workers take so many of."""
    return problem.catalog.degrees(MANY)[0].unit


def _raise_if_too_long(problem: PlacementProblem, offers: Sequence[Offer]) -> None:
    source = problem.traffic.source
    roomiest = max(offers, key=lambda offer: offer.kv_tokens)
    total = held_len(source, "decode")
    over = float((total > roomiest.kv_tokens).mean())
    if over > 1 - problem.targets.slo.attainment:
        row = int(np.argmax(total))
        raise PlanError(
            f"{source.name}: request {row} has {total[row]:,} tokens, and the roomiest worker ({roomiest.degrees}) "
            f"holds {roomiest.kv_tokens:,}; {over:.0%} of the requests are too long, so cut them or give "
            f"a worker more GPUs"
        )


def room_reason(problem: PlacementProblem, role: PhaseRole, offer: Offer, offers: Sequence[Offer]) -> str:
    """Why a worker would have no room for requests that another of the offers has; nothing where it has. A router
    refuses what finds none: however many others are in time, nobody would run that."""
    lengths = held_len(problem.traffic.source, role)
    most = max(other.kv_tokens for other in offers)
    somewhere = lengths[lengths <= most]
    over = float((somewhere > offer.kv_tokens).mean()) if len(somewhere) else 0.0
    if over <= 1 - HELD_SHARE:
        return ""
    what = "prompts" if role == "prefill" else "requests"
    return (
        f"it holds {offer.kv_tokens:,} tokens of KV on {problem.hardware} at {offer.degrees}, and {over:.1%} of the "
        f"{what} are longer, up to {int(somewhere.max()):,}: they would be refused"
    )


def held_len(source: Workload, role: PhaseRole) -> Ints:
    """Tokens of each request whose KV a worker of this phase must have room for."""
    return source.prompt_len if role == "prefill" else source.prompt_len + source.output_len


def no_room(source: Workload, candidate: Candidate) -> str:
    """Which requests nobody of it can hold, if there are any."""
    held = {
        role: max(pool.num_pages * pool.page_size for pool in candidate.pools if pool.role != other)
        for role, other in (("prefill", "decode"), ("decode", "prefill"))
    }
    is_over = (source.prompt_len > held["prefill"]) | (held_len(source, "decode") > held["decode"])
    if not is_over.any():
        return ""
    longest = int(held_len(source, "decode").max())
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
    slos = [kind.slo for kind in problem.targets.classes] or [problem.targets.slo]
    target_s = min(slo.ttft_s if is_prefill else slo.tpot_s for slo in slos)
    sentence = floor_sentence(problem, role, fastest, target_s).replace(" at TP", " even at TP")
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
    slo = problem.targets.slo
    if prefills and decodes:
        least = min(worker.gpus for worker in prefills) + min(worker.gpus for worker in decodes)
        if least > num_gpus and not colocated:
            return (
                f"num_gpus is {num_gpus}: the smallest prefill and decode workers that keep the targets take {least}; "
                f"give {least} or more"
            )
    if prefills and decodes:
        return (
            f"no placement keeps TTFT {ms(slo.ttft_s)} and TPOT {ms(slo.tpot_s)} for {slo.attainment:.0%} of requests "
            f"at any rate that was tried; ask for longer targets or a smaller share"
        )
    role = "decode" if prefills else "prefill"
    target = f"TPOT {ms(slo.tpot_s)}" if prefills else f"TTFT {ms(slo.ttft_s)}"
    return (
        f"{target}: no {role} worker of up to {max(offer.degrees.gpus for offer in offers)} GPUs keeps it for "
        f"{slo.attainment:.0%} of requests but when idle; ask for a longer one or allow more GPUs to a worker"
    )


# with nobody else there


def idle_reason(problem: PlacementProblem, role: PhaseRole, offer: Offer) -> str:
    """Why a worker misses its target with nobody else there; nothing when it does not."""
    source, targets = problem.traffic.source, problem.targets
    is_prefill = role == "prefill"
    only = relaxed(targets, tpot=is_prefill, ttft=not is_prefill)
    if floor_share(offer if is_prefill else None, None if is_prefill else offer, source, only) >= 0:
        return ""
    slo = _strictest(targets, is_prefill)
    return floor_sentence(problem, role, offer, slo)


def _strictest(targets: Targets, is_prefill: bool) -> float:
    slos = [kind.slo for kind in targets.classes] or [targets.slo]
    return min(slo.ttft_s if is_prefill else slo.tpot_s for slo in slos)


def floor_sentence(problem: PlacementProblem, role: PhaseRole, offer: Offer, target_s: float) -> str:
    """TTFT 100 ms: a prompt of 2,735 tokens takes 310 ms alone on A100 at TP 8."""
    source, model = problem.traffic.source, problem.catalog.model
    where = f"on {problem.hardware} at {offer.degrees}"
    if role == "decode":
        step_s = decode_alone_s(offer, math.ceil(mean_context(source)))
        return f"TPOT {ms(target_s)}: one decode step of {model} at batch 1 takes {ms(step_s)} {where}"
    ttft, _ = floors_s(offer, None, source)
    order = sorted(range(len(ttft)), key=lambda i: float(ttft[i]))
    at = order[min(len(order) - 1, int(problem.targets.slo.attainment * len(order)))]
    prompt = int(source.prompt_len[at])
    share = f"P{100 * problem.targets.slo.attainment:.0f}"
    return f"TTFT {ms(target_s)}: a prompt of {prompt:,} tokens ({share}) takes {ms(float(ttft[at]))} alone {where}"


def ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"

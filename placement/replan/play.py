"""play says how what came lately would fare in an arrangement: by the live policies, on the virtual clock."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.plan import Slo
from placement.replan.arrangements import Arrangement, Move, grown, moves, nearby, resized, shrunk
from placement.replan.distserve import Profile, decide_anew, profile_of
from placement.replan.policy import Decision, Played, Terms, decide
from placement.replan.seen import Seen
from placement.simulator.simulate import simulate

MOST_SLOWER = 2.0  # what is off by more is something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Workers that may change their roles at once, and devices that all may take; None: no worker comes or goes.
    `may_shrink`: whether arrangements of fewer are played; `barred`: moves that are not made for a while."""

    most_changes: int
    most_devices: int | None = None
    may_shrink: bool = False
    barred: Collection[Move] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """`others`: none where no change would come of it, for to play them takes time from the cluster."""

    present: Played
    others: Sequence[Played]
    decision: Decision


def weigh(seen: Seen, slo: Slo, bounds: Bounds, terms: Terms) -> Weighed:
    """Play the arrangements near by, and decide."""
    seen, present = corrected(seen, slo)
    others: list[Played] = []
    if max(terms.measured, present.attainment) < terms.wanted:
        others = _others(seen, present, slo, bounds)
    elif terms.is_enough and bounds.may_shrink:
        others = _all_played(seen, shrunk(seen.roles), slo, bounds)
    return Weighed(present=present, others=others, decision=decide(present, others, terms))


def weigh_shifts(seen: Seen, slo: Slo, since: Profile | None, bounds: Bounds) -> tuple[Weighed, Profile | None]:
    """As DistServe does. `since`: of when a search has found nothing better than what there is; None: none has yet.
    Returns what to ask with at the next look."""
    profile = profile_of(seen)
    seen, present = corrected(seen, slo)
    has_shifted = since is None or profile.has_shifted(since)
    others = _others(seen, present, slo, bounds) if has_shifted else []
    decision = decide_anew(present, others)
    ends = has_shifted and not decision.moves  # a search goes on from what it has found, at the next look
    return Weighed(present=present, others=others, decision=decision), profile if ends else since


def _others(seen: Seen, present: Played, slo: Slo, bounds: Bounds) -> list[Played]:
    """Other roles, then other chunks in the best of them and in the present ones, and more workers."""
    found = _all_played(seen, nearby(seen.roles, bounds.most_changes), slo, bounds)
    best = max((present, *found), key=lambda played: played.attainment)
    for base in {id(played): played.arrangement for played in (present, best)}.values():
        found += _all_played(seen, resized(base, *seen.chunks_and_steps(base)), slo, bounds)
    if bounds.most_devices is not None:
        found += _all_played(seen, grown(seen.roles, seen.devices, bounds.most_devices), slo, bounds)
    return found


def _all_played(seen: Seen, arrangements: Iterable[Arrangement], slo: Slo, bounds: Bounds) -> list[Played]:
    """But those that a barred move would lead to."""
    named = [seen.named(each) for each in arrangements]
    return [play(seen, each, slo) for each in named if not {*(moves(seen.roles, each) or ())} & {*bounds.barred}]


def play(seen: Seen, arrangement: Arrangement, slo: Slo) -> Played:
    outcome = simulate(seen.cluster(arrangement), seen.workload)
    met = outcome.attained(*seen.workload.targets_s(slo.ttft_s, slo.tpot_s))
    tpot_s = np.nan_to_num(outcome.tpot_s, nan=np.inf)
    devices = sum(seen.model_of(name).devices for name in arrangement.roles)
    return Played(arrangement=arrangement, met=met, tpot_s=float(np.median(tpot_s)), devices=devices)


def corrected(seen: Seen, slo: Slo) -> tuple[Seen, Played]:
    """With steps of answers so much longer that these come as slowly as they came, and the present arrangement played
    so: what was measured are steps, and there is more between two tokens than a step."""
    now = Arrangement(roles=seen.roles)
    present, measured_s = play(seen, now, slo), seen.middle_tpot_s
    if not 0 < present.tpot_s < measured_s:
        return seen, present
    seen = replace(seen, slower=min(MOST_SLOWER, measured_s / present.tpot_s))
    return seen, play(seen, now, slo)

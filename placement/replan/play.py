"""play says how what came lately would fare in an arrangement: by the live policies, on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.plan import Slo
from placement.replan.arrangements import Arrangement, grown, nearby, resized, shrunk
from placement.replan.policy import Decision, Played, Prices, decide, is_long
from placement.replan.seen import Seen
from placement.simulator.simulate import simulate

MOST_SLOWER = 2.0  # what is off by more is something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Workers that may change their roles at once, and devices that all may take; None: no worker comes or goes."""

    most_changes: int
    most_devices: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """`others`: none where no change would come of it, for to play them takes time from the cluster."""

    present: Played
    others: Sequence[Played]
    decision: Decision


def weigh(seen: Seen, slo: Slo, *, measured: float, bounds: Bounds, prices: Prices) -> Weighed:
    """Play the arrangements near by, and decide. `measured`: the share of requests that met their targets."""
    seen, present = corrected(seen, slo)
    if max(measured, present.attainment) < slo.attainment:
        others = _others(seen, present, slo, bounds)
    elif measured >= slo.attainment and bounds.most_devices is not None and is_long(seen.seen_s, prices):
        others = [play(seen, fewer, slo) for fewer in shrunk(seen.roles)]
    else:
        others = []
    decision = decide(present, others, wanted=slo.attainment, seen_s=seen.seen_s, prices=prices, measured=measured)
    return Weighed(present=present, others=others, decision=decision)


def _others(seen: Seen, present: Played, slo: Slo, bounds: Bounds) -> list[Played]:
    """Other roles, then other chunks in the best of them and in the present ones, and more workers."""
    found = [play(seen, near, slo) for near in nearby(seen.roles, bounds.most_changes)]
    best = max((present, *found), key=lambda played: played.attainment)
    for base in {id(played): played.arrangement for played in (present, best)}.values():
        sizes = resized(base, seen.chunks(base), seen.most_step_tokens)
        found += [play(seen, other, slo) for other in sizes]
    if bounds.most_devices is not None:
        found += [play(seen, more, slo) for more in grown(seen.roles, seen.devices, bounds.most_devices)]
    return found


def play(seen: Seen, arrangement: Arrangement, slo: Slo) -> Played:
    outcome = simulate(seen.cluster(arrangement), seen.workload)
    met, tpot_s = outcome.attained(slo.ttft_s, slo.tpot_s), np.nan_to_num(outcome.tpot_s, nan=np.inf)
    devices = sum(seen.model_of(name).devices for name in arrangement.roles)
    return Played(arrangement=arrangement, met=met, tpot_s=float(np.median(tpot_s)), devices=devices)


def corrected(seen: Seen, slo: Slo) -> tuple[Seen, Played]:
    """With steps of answers so much longer that these come as slowly as they came, and the present arrangement played
    so: what was measured are steps, and there is more between two tokens than a step."""
    now = Arrangement(roles=seen.roles)
    present, measured_s = play(seen, now, slo), float(np.median(seen.tpot_s))
    if not (0 < present.tpot_s < measured_s < np.inf):
        return seen, present
    seen = replace(seen, slower=min(MOST_SLOWER, measured_s / present.tpot_s))
    return seen, play(seen, now, slo)

"""play says how what came lately would fare in an arrangement of roles: by the live policies, on the virtual clock."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from placement.plan import Slo
from placement.replan.policy import Decision, Played, Roles, candidates, decide
from placement.replan.seen import Seen
from placement.simulator.simulate import simulate

CHANGE_S = 5.0  # that a change takes, until one was seen
MOST_SLOWER = 2.0  # what is off by more is something else


@dataclass(frozen=True, slots=True, kw_only=True)
class Weighed:
    """`others`: none where no change would come of it, for to play them takes time from the cluster."""

    present: Played
    others: Sequence[Played]
    decision: Decision


def weigh(seen: Seen, slo: Slo, *, measured: float, most_changes: int, change_s: float = CHANGE_S) -> Weighed:
    """Play the arrangements near by, and decide. `measured`: the share of requests that met their targets."""
    seen, present = corrected(seen, slo)
    is_short = max(measured, present.attainment) < slo.attainment
    others = [play(seen, roles, slo) for roles in candidates(seen.roles, most_changes)] if is_short else []
    decision = decide(present, others, wanted=slo.attainment, seen_s=seen.seen_s, change_s=change_s, measured=measured)
    return Weighed(present=present, others=others, decision=decision)


def play(seen: Seen, roles: Roles, slo: Slo) -> Played:
    outcome = simulate(seen.cluster(roles), seen.workload)
    met, tpot_s = outcome.attained(slo.ttft_s, slo.tpot_s), np.nan_to_num(outcome.tpot_s, nan=np.inf)
    return Played(roles=dict(roles), met=met, tpot_s=float(np.median(tpot_s)))


def corrected(seen: Seen, slo: Slo) -> tuple[Seen, Played]:
    """With steps of answers so much longer that these come as slowly as they came, and the present arrangement played
    so: what was measured are steps, and there is more between two tokens than a step."""
    present, measured_s = play(seen, seen.roles, slo), float(np.median(seen.tpot_s))
    if not (0 < present.tpot_s < measured_s < np.inf):
        return seen, present
    seen = replace(seen, slower=min(MOST_SLOWER, measured_s / present.tpot_s))
    return seen, play(seen, seen.roles, slo)

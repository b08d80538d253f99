"""What one more worker, or a worker of another role, would bring a tail to: what came lately is played again by the
simulator, as the cluster is and otherwise (as `kvrelay replan` does). Nothing is changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kvrelay.client.types import ClusterStatus, EndedRequest
from kvrelay.explain.live import Tail, ms
from kvrelay.replan.replanner import NotYet, seen_of
from placement.plan import Slo
from placement.replan.arrangements import Arrangement, grown, nearby
from placement.replan.play import corrected
from placement.replan.seen import Seen
from placement.simulator.outcome import Outcome
from placement.simulator.simulate import simulate
from worker.options import pool_of

FAR = 1.5  # times what was measured, or a part of it
WORTH = 0.9  # of what it is: a tail that is longer is no better, by a simulation


@dataclass(frozen=True, slots=True, kw_only=True)
class Other:
    """What another arrangement would bring each tail to, in seconds, by its name. `change`: from the present one."""

    change: str
    tails_s: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """`present`: what the simulator makes of what was measured."""

    present: Other
    others: Sequence[Other]

    def words(self, tail: Tail) -> str:
        now_s = self.present.tails_s[tail.name]
        played = f"the simulator makes {_ms(now_s)} of it as it is"
        if not tail.seconds / FAR < now_s < tail.seconds * FAR:
            played += ", which is so far off that this is a direction and no figure"
        best = min(self.others, key=lambda other: other.tails_s[tail.name], default=None)
        if best is None or best.tails_s[tail.name] > WORTH * now_s:
            return f"no one worker more or of another role would bring it down by a tenth; {played}"
        return f"{best.change} would bring it to {_ms(best.tails_s[tail.name])}; {played}"


def what_if(status: ClusterStatus, load: Sequence[EndedRequest], tails: Sequence[Tail], num_routers: int) -> WhatIf:
    """Raises NotYet, SetupError for what is not simulated."""
    if len(status.models) > 1:
        raise NotYet(f"this cluster serves {' and '.join(status.models)}, and what is played is of one model")
    seen = seen_of(status, load, load)
    if phase := seen.missing_costs:
        raise NotYet(f"no worker's steps of {phase} were measured yet")
    seen, _ = corrected(seen, Slo())
    present = _played(seen, Arrangement(roles=seen.roles), "as it is", tails)
    most = sum(seen.devices.values()) + max(seen.devices.values())
    more = [each for each in grown(seen.roles, seen.devices, most) if len(each.roles) == len(seen.roles) + 1]
    others = [*more, *nearby(seen.roles, 1)]
    return WhatIf(present=present, others=[_played(seen, each, _change(seen, each), tails) for each in others])


def _change(seen: Seen, other: Arrangement) -> str:
    for name, role in other.roles.items():
        if name not in seen.roles:
            return f"one more {role} worker ({pool_of(name)})"
        if seen.roles[name] != role:
            return f"{name} as a {role} worker"
    raise AssertionError("it is the present one")


def _played(seen: Seen, arrangement: Arrangement, change: str, tails: Sequence[Tail]) -> Other:
    outcome = simulate(seen.cluster(seen.named(arrangement)), seen.workload)
    return Other(change=change, tails_s={tail.name: _tail_s(outcome, tail) for tail in tails})


def _tail_s(outcome: Outcome, tail: Tail) -> float:
    """What was not served took for ever."""
    values = outcome.ttft_s if tail.metric == "ttft" else outcome.tpot_s[outcome.workload.output_len > 1]
    return float(np.quantile(np.nan_to_num(values, nan=np.inf), tail.quantile)) if len(values) else 0.0


def _ms(seconds: float) -> str:
    return ms(seconds) if np.isfinite(seconds) else "no end"

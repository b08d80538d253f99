"""DistServe's replanning, to compare with: when the load has shifted, the best arrangement for what came of late is
taken (Zhong et al., OSDI 2024, section 4.3: a profiler watches the average lengths and the rate of requests, and at a
significant shift the placement is searched again for what came of late).

It weighs no price and no chance. What a significant shift is the paper does not say: SHIFTED is ours, and the search is
over arrangements near by, as ours is, and not over all placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

from placement.replan.arrangements import moves
from placement.replan.policy import Decision, Played
from placement.replan.seen import Seen

SHIFTED = 0.3  # of what it was, up or down


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Requests a second, and the average tokens of their prompts and answers."""

    rate: float
    prompt_tokens: float
    output_tokens: float

    def has_shifted(self, since: Profile) -> bool:
        return any(abs(now - then) > SHIFTED * then for now, then in zip(astuple(self), astuple(since), strict=True))


def profile_of(seen: Seen) -> Profile:
    workload = seen.workload
    return Profile(
        rate=seen.rate,
        prompt_tokens=float(workload.prompt_len.mean()),
        output_tokens=float(workload.output_len.mean()),
    )


def decide_anew(present: Played, others: Sequence[Played]) -> Decision:
    """`others`: none where nothing has shifted."""
    if not others:
        return Decision(moves=(), reason="what comes has not shifted since placements were searched")
    best = max((present, *others), key=lambda played: played.attainment)
    words = f"best for what comes now is {best.arrangement}, {best.attainment:.0%} ({present.attainment:.0%} as it is)"
    return Decision(moves=moves(present.arrangement.roles, best.arrangement) or (), reason=words)

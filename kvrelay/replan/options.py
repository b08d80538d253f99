"""What a replanner is asked, and what it does unless it is asked otherwise. It imports nothing that takes time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from placement.plan import Slo

EVERY_S = 15.0
WINDOW_S = 120.0
MOST_CHANGES = 2
Policy = Literal["kvrelay", "distserve"]  # placement/replan/policy.py, placement/replan/distserve.py
POLICIES: tuple[Policy, ...] = get_args(Policy)
REFUSED = ("UNAUTHENTICATED", "PERMISSION_DENIED", "UNIMPLEMENTED", "FAILED_PRECONDITION")  # at the next look, too
NICE = 10  # it plays arrangements on the machine on which a cluster may run


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    slo: Slo
    acts: bool
    most_changes: int = MOST_CHANGES
    most_devices: int | None = None  # that workers may take together; None: as many workers stay
    policy: Policy = "kvrelay"
    window_s: float = WINDOW_S  # of what came, that is looked at

    @property
    def mode(self) -> str:
        return "act" if self.acts else "advise"

"""Shared is what the routers of one process have in common, each of which serves a model: one event loop, in which
clients take turns whatever they ask for; one bound on what clients have not read; one account of what happened.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from cluster.router.live.bundles import Bundles
from cluster.router.live.turns import Turns
from cluster.router.live.unread import Unread
from cluster.router.monitoring.chronicle import Chronicle
from cluster.router.monitoring.load import Load
from cluster.router.options import RouterOptions
from worker.awake import AwakeClock


@dataclass(frozen=True, slots=True, kw_only=True)
class Shared:
    bundles: Bundles
    unread: Unread
    turns: Turns = field(default_factory=Turns)
    loop_clock: AwakeClock = field(default_factory=AwakeClock)
    load: Load = field(default_factory=Load)
    chronicle: Chronicle = field(default_factory=Chronicle)

    @classmethod
    def of(
        cls,
        options: RouterOptions,
        *,
        bundle_share: float = 0.0,
        max_unread_bytes: int = sys.maxsize,
        max_unread_total_bytes: int = sys.maxsize,
    ) -> Shared:
        return cls(
            bundles=Bundles(bundle_share, options.slo_tpot_ms / 1e3),
            unread=Unread(max_unread_bytes, max_unread_total_bytes),
        )

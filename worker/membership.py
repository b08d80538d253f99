"""What a process knows of the cluster that it is a member of: what it is made with, and what its controller tells it.
Values; no Ray.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from worker.wire.secrets import Secrets


@dataclass(frozen=True, slots=True, kw_only=True)
class Membership:
    """What it must know before it can ask. No secret: Ray's GCS keeps what an actor is made with."""

    controller: str  # the actor in the cluster's namespace that keeps it
    liveness_timeout_s: float  # a controller that does not ask for so long, nor answer for as long, is killed
    log_dir: str = ""  # "": Ray keeps what is logged


@dataclass(frozen=True, slots=True, kw_only=True)
class Greeting:
    """What the controller says to a process that has just started."""

    secrets: Secrets
    last_address: str = ""  # where a router was reached before it was restarted
    last_http: str = ""  # likewise over HTTP
    load_delay_s: float = 0.0  # to wait before it loads, when earlier ones died of that
    spec: Any = None  # of a router: what it serves by, which may be newer than what it was made with
    knobs: Mapping[str, Any] = field(default_factory=dict)  # of a worker's policy, likewise: those that change live

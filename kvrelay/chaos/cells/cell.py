"""A Cell is one kind of fault: a name, the bound it is held against, how often it is tried, and what is done to the
cluster while streams run. Here is what acts of every kind share; the acts are in the files beside this one.

    kill/decode/decoding            what / to whom / in which phase
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from kvrelay.chaos.round import Round

Act = Callable[[Round], Awaitable[None]]
NOTHING_LOST: frozenset[str] = frozenset()
ROUTER_GONE = frozenset(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
STREAMS = 6
CROWD = 3 * STREAMS  # more than a small pool has pages for
TIMEOUT_S = 25.0  # of a stream
ROUTER_TIMEOUT_S = 5.0  # of one whose router is stopped: nobody else ends it
PHASE_S = 2.0  # that a phase is waited for, until the fault is made without it
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
PAST = {"kill": "killed", "stop": "stopped"}

# the phase -> the moment of worker/faults/box.py, and at which role's workers it is reached
PHASES: dict[str, tuple[str, str]] = {
    "connecting": ("hello", "decode"),
    "first chunk": ("first_chunk", "prefill"),
    "later chunk": ("later_chunk", "prefill"),
    "first token": ("last_chunk", "prefill"),
    "reserving": ("reserve", "decode"),
    "mid-transfer": ("segment", "prefill"),
    "announced": ("announce", "decode"),
    "stalled": ("queued", "decode"),
    "commit": ("commit", "decode"),
    "receipt": ("receipt", "decode"),
    "decoding": ("decode", "decode"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    name: str
    bound: str  # a Bound's fault
    act: Act
    share: float  # of all faults, against the others'
    allowed: frozenset[str] = NOTHING_LOST  # codes that its streams may end with
    shape: str = "pools"
    is_crowded: bool = False  # streams wait for each other's pages, so that no fault bounds their next token


def timeout_of(role: str) -> float:
    """Of a stream while a process of the role is gone."""
    return ROUTER_TIMEOUT_S if role == "router" else TIMEOUT_S


def allowed_of(role: str) -> frozenset[str]:
    """The codes that it may end with then."""
    return ROUTER_GONE if role == "router" else NOTHING_LOST


async def in_phase(round_: Round, phase: str, victim: str, timeout_s: float = TIMEOUT_S, **rule: Any) -> None:
    """Arm, start the load, and wait until the rule has fired somewhere."""
    cluster = round_.cluster
    at, role = PHASES[phase]
    rule = {"at": at, "nth": round_.rng.randrange(1, 20 if phase == "decoding" else 4), **rule}
    is_own = victim in cluster.names(role)
    where = [victim] if is_own else cluster.names(role)
    pid = 0 if is_own else cluster.pid(victim)
    armed = [(name, await cluster.arm(name, pid=pid, **rule)) for name in where]
    round_.start(CROWD if phase == "stalled" else STREAMS, timeout_s=timeout_s)
    deadline = time.monotonic() + PHASE_S
    while time.monotonic() < deadline and not round_.is_over:
        fired = [time_s for name, rule_id in armed for time_s in cluster.times(name, rule_id)]
        if fired:
            round_.fault(min(fired))
            return
        await asyncio.sleep(0.005)
    round_.missed = True

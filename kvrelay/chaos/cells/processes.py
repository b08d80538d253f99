"""SIGKILL and SIGSTOP of workers, of one process of a tensor-parallel worker, and of the router, in each phase; and of
all workers of a kind, or of both, in one moment.
"""

from __future__ import annotations

import asyncio
import os
import signal
from functools import partial

from kvrelay.chaos.cells.cell import (
    CROWD,
    PAST,
    PHASE_S,
    SIGNALS,
    STREAMS,
    TIMEOUT_S,
    Cell,
    allowed_of,
    in_phase,
    timeout_of,
)
from kvrelay.chaos.round import Round

LAST_TOKENS = 3  # of a stream
PAUSE_S = 3.0  # that all of a kind are stopped
CROWDED = ("stalled", "queued")
BOTH_PHASES = ("idle", "queued", "connecting", "first chunk", "mid-transfer", "commit", "receipt", "stalled")
END_PHASES = ("decoding", "last token")
PHASES_OF = {
    "prefill": (*BOTH_PHASES, "later chunk", "first token", *END_PHASES),
    "decode": (*BOTH_PHASES, "reserving", "announced", *END_PHASES),
    "mixed": ("idle", "first chunk", "later chunk", "first token", "reserving", "receipt", *END_PHASES),
    "router": ("idle", "queued", "first chunk", "mid-transfer", "commit", "decoding"),
}
SHARES = {"prefill": (6.0, 1.0), "decode": (6.0, 1.0), "mixed": (6.0, 1.0), "router": (3.0, 1.0)}  # of kill and stop


async def process(round_: Round, do: str, role: str, phase: str) -> None:
    """By itself where it is a worker that reaches the phase, else by who does, or from outside."""
    cluster, timeout_s = round_.cluster, timeout_of(role)
    victim = round_.rng.choice(cluster.names(role))
    await _reach(round_, do, victim, phase, timeout_s)
    if not round_.fault_s:
        cluster.signal(victim, SIGNALS[do])
        round_.fault()
    if phase == "idle":
        round_.start(STREAMS, timeout_s=timeout_s)
    await round_.all_ended()
    if role == "router":
        cluster.signal(victim, signal.SIGCONT)  # nobody else says who holds pages


async def _reach(round_: Round, do: str, victim: str, phase: str, timeout_s: float) -> None:
    match phase:
        case "idle":
            pass
        case "queued":
            round_.start(CROWD, timeout_s=timeout_s)
            round_.missed = not await round_.until_status(lambda status: status.num_queued > 0, PHASE_S)
        case "last token":
            streams = round_.start_alike(STREAMS, timeout_s=timeout_s)
            round_.missed = not await round_.until(lambda: any(s.num_due <= LAST_TOKENS for s in streams), TIMEOUT_S)
        case _:
            if phase == "connecting":
                _disconnect(round_)
            await in_phase(round_, phase, victim, timeout_s, do=do)


def _disconnect(round_: Round) -> None:
    cluster = round_.cluster
    for name in cluster.names("prefill"):
        for decode in cluster.names("decode"):
            cluster.proxy.link(f"{name}>{decode}").reset()


async def together(round_: Round, do: str, roles: tuple[str, ...]) -> None:
    """As where a host has no memory left, or stands still for a moment."""
    cluster = round_.cluster
    round_.start(STREAMS)
    await round_.until_tokens(round_.rng.randrange(1, 12))
    round_.start(STREAMS)
    victims = [name for role in roles for name in cluster.names(role)]
    for name in victims:
        cluster.signal(name, SIGNALS[do])
    round_.fault()
    if do == "stop":
        await asyncio.sleep(PAUSE_S)
        for name in victims:
            cluster.signal(name, signal.SIGCONT)
    await round_.all_ended()


async def rank(round_: Round, do: str) -> None:
    """One of the other processes of decode-0."""
    cluster = round_.cluster
    round_.start(STREAMS)
    await round_.until_tokens(4)
    pids = cluster.rank_pids("decode-0")
    assert pids, "decode-0 has no other processes"
    os.kill(pids[0], SIGNALS[do])
    round_.fault()
    await round_.all_ended()


def _cell(do: str, role: str, phase: str, share: float) -> Cell:
    return Cell(
        name=f"{do}/{role}/{phase}",
        bound=f"{'router' if role == 'router' else 'worker'}-{PAST[do]}",
        act=partial(process, do=do, role=role, phase=phase),
        share=share,
        allowed=allowed_of(role),
        shape="mixed" if role == "mixed" else "small" if phase in CROWDED else "pools",
        is_crowded=phase in CROWDED,
    )


CELLS = [
    *(
        _cell(do, role, phase, share)
        for role, phases in PHASES_OF.items()
        for phase in phases
        for do, share in zip(SIGNALS, SHARES[role], strict=True)
    ),
    *(
        Cell(name=f"{do}/rank/decoding", bound=f"rank-{PAST[do]}", act=partial(rank, do=do), share=2, shape="ranks")
        for do in SIGNALS
    ),
    *(
        Cell(
            name=f"together/{do}/{' and '.join(roles)}",
            bound=f"together-{PAST[do]}",
            act=partial(together, do=do, roles=roles),
            share=2,
        )
        for roles in (("prefill",), ("decode",), ("prefill", "decode"))
        for do in SIGNALS
    ),
]

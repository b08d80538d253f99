"""SIGKILL and SIGSTOP of processes that Ray keeps: what the deployment mends."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from kvrelay.chaos.cells.cell import PAST, SIGNALS, STREAMS, Cell, allowed_of, timeout_of
from kvrelay.chaos.round import Round

REPLACED_S = 60.0  # that a stopped process is waited for, until it is called forgotten


async def deployed(round_: Round, do: str, role: str) -> None:
    """With streams before and meanwhile, until its process has ended."""
    cluster = round_.cluster
    victim = round_.rng.choice(cluster.names(role))
    timeout_s = timeout_of(role)
    round_.start(STREAMS, timeout_s=timeout_s)
    await round_.until_tokens(2)
    await round_.until(lambda: cluster.is_ready(victim), REPLACED_S)  # the round before may have ended it
    before_s = cluster.ended_s(victim)
    cluster.signal(victim, SIGNALS[do])
    round_.fault()
    while cluster.ended_s(victim) == before_s and time.monotonic() - round_.fault_s[0] < REPLACED_S:
        if round_.is_over:
            round_.start(2, timeout_s=timeout_s)
        await asyncio.sleep(0.1)
    round_.noticed_at_s = time.monotonic()
    await round_.all_ended()


def _cell(do: str, role: str) -> Cell:
    return Cell(
        name=f"ray/{do}/{role}",
        bound=f"{'controller' if role == 'controller' else 'deployed'}-{PAST[do]}",
        act=partial(deployed, do=do, role=role),
        share=0.6,
        shape="ray",
        allowed=allowed_of(role),
    )


CELLS = [_cell(do, role) for role in ("prefill", "decode", "router", "controller") for do in SIGNALS]

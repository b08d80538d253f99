"""Clients that cancel, never read, want it sooner than it can be had, or vanish; beside some that stay."""

from __future__ import annotations

import asyncio
from functools import partial

from kvrelay.chaos.cells.cell import ROUTER_GONE, ROUTER_TIMEOUT_S, STREAMS, Cell
from kvrelay.chaos.load import Fate
from kvrelay.chaos.round import Round

FATES: dict[Fate, float] = {"cancel": 1500.0, "deadline": 1500.0, "never_read": 400.0}  # -> share
AT_ONCE = 20


async def clients(round_: Round, fate: Fate, count: int) -> None:
    """Each at some token."""
    round_.start(2)
    for _ in range(count):
        rng = round_.rng
        if fate == "deadline":
            stream = round_.start(1, fate="deadline", timeout_s=rng.uniform(0.02, 0.5), long=rng.random() < 0.5)[0]
        else:
            after = rng.choice((0, 0, 1, 2, 8, 20))
            stream = round_.start(1, fate=fate, after_tokens=after, long=rng.random() < 0.5)[0]
        stream.allowed = frozenset(("DEADLINE_EXCEEDED",))
        round_.fault()
        await asyncio.sleep(rng.uniform(0.0, 0.02))
    await round_.all_ended()


async def vanish(round_: Round, how: str) -> None:
    """Their cable: reset, as when their process dies, or cut."""
    cut = round_.cluster.proxy.link("client>router-0")
    for stream in round_.start(STREAMS, timeout_s=ROUTER_TIMEOUT_S):
        stream.allowed = ROUTER_GONE
    await round_.until_tokens(round_.rng.randrange(1, 20))
    if how == "reset":
        cut.reset()
    else:
        cut.cut()
    round_.fault()
    await round_.all_ended()


CELLS = [
    *(
        Cell(name=f"client/{fate}", bound="client", act=partial(clients, fate=fate, count=AT_ONCE), share=share)
        for fate, share in FATES.items()
    ),
    Cell(
        name="client/cancel/mixed",
        bound="client",
        act=partial(clients, fate="cancel", count=AT_ONCE),
        share=300,
        shape="mixed",
    ),
    Cell(name="client/vanish", bound="client", act=partial(vanish, how="reset"), share=20),
    Cell(name="client/cable", bound="client-cut", act=partial(vanish, how="cut"), share=3),
]

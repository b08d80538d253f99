"""What a machine does to its processes: no descriptors or memory are left, the log's disk is full, the clock jumps."""

from __future__ import annotations

from functools import partial

from kvrelay.chaos.cells.cell import STREAMS, Cell
from kvrelay.chaos.round import Round

JUMP_S = 3600.0


async def limit(round_: Round, what: str) -> None:
    """A worker that may open or take no more, for a while."""
    cluster = round_.cluster
    victim = round_.rng.choice([*cluster.names("prefill"), *cluster.names("decode")])
    round_.start(STREAMS)
    await round_.until_tokens(2)
    undo = cluster.limit(victim, what)
    round_.fault()
    for name in cluster.names("prefill"):
        cluster.proxy.link(f"{name}>{victim}").reset()
        cluster.proxy.link(f"{victim}>{name}").reset()
    round_.start(STREAMS)
    await round_.all_ended()
    undo()


async def worker_rule(round_: Round, do: str, for_s: float = 0.0) -> None:
    """Something that every worker does to itself while it serves."""
    cluster = round_.cluster
    round_.start(STREAMS)
    await round_.until_tokens(2)
    for name in [*cluster.names("prefill"), *cluster.names("decode")]:
        await cluster.arm(name, at="now", do=do, for_s=for_s)
        round_.fault()
    round_.start(STREAMS)
    await round_.all_ended()


def _harmless(name: str, do: str, for_s: float = 0.0) -> Cell:
    return Cell(name=name, bound="harmless", act=partial(worker_rule, do=do, for_s=for_s), share=20)


CELLS = [
    Cell(name="limit/descriptors", bound="limit", act=partial(limit, what="descriptors"), share=4),
    Cell(name="limit/memory", bound="limit", act=partial(limit, what="memory"), share=4),
    _harmless("log/full", "log_full"),
    _harmless("clock/forward", "clock", JUMP_S),
    _harmless("clock/back", "clock", -JUMP_S),
]

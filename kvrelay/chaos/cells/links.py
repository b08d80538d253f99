"""Bytes between processes: connections that break, stall or lose, segments and messages of handoffs that are
corrupt, lost, doubled or late."""

from __future__ import annotations

import asyncio
from functools import partial

from kvrelay.chaos.cells.cell import PHASE_S, STREAMS, Cell
from kvrelay.chaos.round import Round

CUT_S = 2.5  # that a link is cut or slow
LATE_SEGMENT_S, LATE_MESSAGE_S = 0.05, 0.1
LINKS = {"reset": 20.0, "blackhole": 3.0, "one-way up": 3.0, "one-way down": 3.0, "slow": 6.0}  # -> share
SEGMENTS = {"corrupt": 300.0, "drop": 300.0, "double": 300.0, "delay": 300.0, "fail": 150.0}
MESSAGES = ("reserve", "granted", "announce", "commit", "receipt")
MESSAGE_FAULTS = {"double": 60.0, "delay": 60.0, "drop": 4.0}


async def link(round_: Round, between: str, how: str, for_s: float) -> None:
    """For a while, with streams under way and new ones coming."""
    cluster = round_.cluster
    sources, targets = ("router", "prefill") if between == "router" else ("prefill", "decode")
    if between == "router" and round_.rng.random() < 0.5:
        targets = "decode"
    name = f"{round_.rng.choice(cluster.names(sources))}>{round_.rng.choice(cluster.names(targets))}"
    cut = cluster.proxy.link(name)
    round_.start(STREAMS)
    await round_.until_tokens(round_.rng.randrange(1, 12))
    match how:
        case "blackhole":
            cut.cut()
        case "one-way up":
            cut.cut("up")
        case "one-way down":
            cut.cut("down")
        case "slow":
            cut.delay_s, cut.loss = 0.1, 0.01
        case "reset":
            cut.reset()
    round_.fault()
    round_.start(STREAMS // 2)
    await asyncio.sleep(for_s)
    await round_.all_ended()


async def messages(round_: Round, at: str, do: str, count: int, for_s: float = 0.0) -> None:
    """`count` of each worker's."""
    cluster = round_.cluster
    role = "prefill" if at == "segment" else "decode"
    nth = round_.rng.randrange(1, 4)
    armed = [(n, await cluster.arm(n, at=at, do=do, nth=nth, times=count, for_s=for_s)) for n in cluster.names(role)]
    round_.start(2 * STREAMS)
    await round_.until(lambda: any(cluster.times(*each) for each in armed) or round_.is_over, PHASE_S)
    await round_.all_ended()
    for each in armed:
        for at_s in cluster.times(*each):
            round_.fault(at_s)
    round_.fault_s.sort()
    if not round_.fault_s:
        round_.missed = True
        round_.fault()


def _link_cell(between: str, how: str, share: float) -> Cell:
    return Cell(
        name=f"link/{between}/{how}",
        bound={"reset": "link-reset", "slow": "link-slow"}.get(how, f"{between}-cut"),
        act=partial(link, between=between, how=how, for_s=0.0 if how == "reset" else CUT_S),
        share=share,
    )


def _segment_cell(do: str, share: float) -> Cell:
    # one that fails breaks its pair, and all handoffs there: of many, a request could meet as many as `max_attempts`
    act = partial(messages, at="segment", do=do, count=1 if do == "fail" else 6, for_s=LATE_SEGMENT_S)
    return Cell(name=f"segment/{do}", bound="segment", act=act, share=share)


def _message_cell(at: str, do: str, share: float) -> Cell:
    act = partial(messages, at=at, do=do, count=2, for_s=LATE_MESSAGE_S)
    return Cell(name=f"message/{at}/{do}", bound="message", act=act, share=share)


CELLS = [
    *(_link_cell(between, how, share) for between in ("router", "pair") for how, share in LINKS.items()),
    *(_segment_cell(do, share) for do, share in SEGMENTS.items()),
    *(_message_cell(at, do, share) for at in MESSAGES for do, share in MESSAGE_FAULTS.items()),
]

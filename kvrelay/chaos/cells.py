"""CELLS are the faults of the suite: each is a name, the bound it is held against, how often it is tried, and what is
done to the cluster while streams run. A fault is a few lines here and nothing elsewhere.

    kill/decode/decoding            what / to whom / in which phase
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from kvrelay.chaos.load import Fate
from kvrelay.chaos.oracle import POISON_ID
from kvrelay.chaos.round import Round

Act = Callable[[Round[Any]], Awaitable[None]]
NOTHING_LOST: frozenset[str] = frozenset()
STREAMS = 6
TIMEOUT_S = 25.0  # of a stream
PHASE_S = 2.0  # that a phase is waited for, until the fault is made without it
REPLACED_S = 60.0  # that a stopped process is waited for, until it is called forgotten
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}

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
    is_quick: bool = False  # in the small round


# Processes


async def process(round_: Round[Any], do: str, role: str, phase: str, timeout_s: float = TIMEOUT_S) -> None:
    """SIGKILL or SIGSTOP of one process: by itself where it is a worker that reaches the phase, else by who does."""
    cluster = round_.cluster
    victim = round_.rng.choice(cluster.names(role))
    if phase == "idle":
        cluster.signal(victim, SIGNALS[do])
        round_.fault()
        round_.start(STREAMS, timeout_s=timeout_s)
    else:
        if phase == "connecting":
            for name in cluster.names("prefill"):
                for decode in cluster.names("decode"):
                    cluster.proxy.link(f"{name}>{decode}").reset()
        await in_phase(round_, phase, victim, timeout_s, do=do)
        if not round_.fault_s:
            cluster.signal(victim, SIGNALS[do])
            round_.fault()
    await round_.all_ended()
    if role == "router":
        cluster.signal(victim, signal.SIGCONT)  # nobody else says who holds pages


async def in_phase(round_: Round[Any], phase: str, victim: str, timeout_s: float = TIMEOUT_S, **rule: Any) -> None:
    """Arm, start the load, and wait until the rule has fired somewhere."""
    cluster = round_.cluster
    at, role = PHASES[phase]
    rule = {"at": at, "nth": round_.rng.randrange(1, 20 if phase == "decoding" else 4), **rule}
    is_own = victim in cluster.names(role)
    where = [victim] if is_own else cluster.names(role)
    pid = 0 if is_own else cluster.pid(victim)
    armed = [(name, await cluster.arm(name, pid=pid, **rule)) for name in where]
    round_.start(STREAMS * (3 if phase == "stalled" else 1), timeout_s=timeout_s)
    deadline = time.monotonic() + PHASE_S
    while time.monotonic() < deadline and not round_.is_over:
        fired = [time_s for name, rule_id in armed for time_s in cluster.times(name, rule_id)]
        if fired:
            round_.fault(min(fired))
            return
        await asyncio.sleep(0.005)
    round_.missed = True


async def rank(round_: Round[Any], do: str) -> None:
    """One of the other processes of decode-0."""
    cluster = round_.cluster
    round_.start(STREAMS)
    await round_.until_tokens(4)
    pids = cluster.rank_pids("decode-0")
    assert pids, "decode-0 has no other processes"
    os.kill(pids[0], SIGNALS[do])
    round_.fault()
    await round_.all_ended()


# Engines


async def engine(round_: Round[Any], do: str, phase: str, times: int, for_s: float = 0.0) -> None:
    """A step of one worker that hangs, fails, or brings what is no number: once, or from then on."""
    at, role = PHASES[phase]
    victim = round_.rng.choice(round_.cluster.names(role))
    await in_phase(round_, phase, victim, do=do, times=times, for_s=for_s, at=at if times == 1 else "step")
    if round_.missed:
        round_.fault()
    await round_.all_ended()


async def poison(round_: Round[Any]) -> None:
    """A prompt that ends the process which computes it, beside others that do not."""
    cluster = round_.cluster
    workers = [*cluster.names("prefill"), *cluster.names("decode")]
    for name in workers:
        await cluster.arm(name, at="token", token=POISON_ID, do="kill", times=10**9, stays=True)
    round_.start(STREAMS)
    template = round_.streams[0].template
    bad = replace(template, prompt=[*template.prompt[:8], POISON_ID], tokens=())
    await round_.until_tokens(2)
    stream = round_.start_one(bad)
    stream.allowed = frozenset(("FAILED_PRECONDITION", "UNAVAILABLE"))
    round_.fault()
    await round_.all_ended()
    cluster.disarm()


# Links


async def link(round_: Round[Any], between: str, how: str, for_s: float) -> None:
    """What happens to the bytes between two processes, for a while, with streams under way and new ones coming."""
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


async def messages(round_: Round[Any], at: str, do: str, count: int, for_s: float = 0.0) -> None:
    """Segments and messages of handoffs that are corrupt, lost, doubled or late: `count` of each worker's."""
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


# Under Ray: what the deployment mends


async def deployed(round_: Round[Any], do: str, role: str) -> None:
    """SIGKILL or SIGSTOP of a process that Ray keeps, with streams before and meanwhile, until it has ended."""
    cluster = round_.cluster
    victim = round_.rng.choice(cluster.names(role))
    timeout_s = 5.0 if role == "router" else TIMEOUT_S
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


# Clients


async def clients(round_: Round[Any], fate: Fate, count: int) -> None:
    """Clients that go away at some token, never read, or want it sooner than it can be had; beside some that stay."""
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


async def vanish(round_: Round[Any], how: str) -> None:
    """The clients' cable: reset, as when their process dies, or cut."""
    cut = round_.cluster.proxy.link("client>router-0")
    for stream in round_.start(STREAMS, timeout_s=5.0):
        stream.allowed = frozenset(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
    await round_.until_tokens(round_.rng.randrange(1, 20))
    if how == "reset":
        cut.reset()
    else:
        cut.cut()
    round_.fault()
    await round_.all_ended()


# Limits, disks, clocks


async def limit(round_: Round[Any], what: str) -> None:
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


async def worker_rule(round_: Round[Any], do: str, for_s: float = 0.0) -> None:
    """Something that a worker does to itself while it serves: its log's disk is full, its wall clock jumps."""
    cluster = round_.cluster
    round_.start(STREAMS)
    await round_.until_tokens(2)
    for name in [*cluster.names("prefill"), *cluster.names("decode")]:
        await cluster.arm(name, at="now", do=do, for_s=for_s)
        round_.fault()
    round_.start(STREAMS)
    await round_.all_ended()


# The table


def _cell(name: str, bound: str, act: Act, share: float, **rest: Any) -> Cell:
    return Cell(name=name, bound=bound, act=act, share=share, **rest)


ROUTER_GONE = frozenset(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
PREFILL_PHASES = ("idle", "first chunk", "later chunk", "first token", "mid-transfer", "commit", "receipt")
DECODE_PHASES = ("idle", "connecting", "reserving", "announced", "commit", "receipt", "decoding")
ROUTER_PHASES = ("idle", "first chunk", "mid-transfer", "commit", "decoding")
QUICK = {
    *("kill/decode/decoding", "kill/prefill/mid-transfer", "engine/decode/fail"),
    *("segment/corrupt", "client/cancel", "link/router/reset"),
}


def _cells() -> list[Cell]:
    cells = []
    for role, phases in (("prefill", PREFILL_PHASES), ("decode", DECODE_PHASES)):
        for phase in (*phases, "stalled"):
            shape = "small" if phase == "stalled" else "pools"
            for do, share in (("kill", 6), ("stop", 1)):
                act = partial(process, do=do, role=role, phase=phase)
                cells.append(_cell(f"{do}/{role}/{phase}", f"worker-{_past(do)}", act, share, shape=shape))
    for phase in ROUTER_PHASES:
        for do, share in (("kill", 3), ("stop", 1)):
            act = partial(process, do=do, role="router", phase=phase, timeout_s=5.0)
            cells.append(_cell(f"{do}/router/{phase}", f"router-{_past(do)}", act, share, allowed=ROUTER_GONE))
    cells += [
        _cell(f"{do}/rank/decoding", f"rank-{_past(do)}", partial(rank, do=do), 0.5, shape="ranks")
        for do in ("kill", "stop")
    ]
    for role, phase in (("prefill", "first chunk"), ("decode", "decoding")):
        for what, do, times, share in (("fail", "fail", 1, 60), ("nan", "nan", 1, 60), ("sticky", "fail", 10**9, 2)):
            act = partial(engine, do=do, phase=phase, times=times)
            bound = "engine-sticky" if what == "sticky" else "engine-failed"
            cells.append(_cell(f"engine/{role}/{what}", bound, act, share))
        act = partial(engine, do="hang", phase=phase, times=1, for_s=10**6)
        cells.append(_cell(f"engine/{role}/hang", "engine-hung", act, 1))
    cells.append(_cell("poison/prompt", "poison", poison, 2))
    for between in ("router", "pair"):
        for how, share in (("reset", 20), ("blackhole", 3), ("one-way up", 3), ("one-way down", 3), ("slow", 6)):
            bound = {"reset": "link-reset", "slow": "link-slow"}.get(how, f"{between}-cut")
            act = partial(link, between=between, how=how, for_s=2.5 if how != "reset" else 0.0)
            cells.append(_cell(f"link/{between}/{how}", bound, act, share))
    for do, share in (("corrupt", 300), ("drop", 300), ("double", 300), ("delay", 300), ("fail", 150)):
        act = partial(messages, at="segment", do=do, count=6, for_s=0.05)
        cells.append(_cell(f"segment/{do}", "segment", act, share))
    for at in ("reserve", "granted", "announce", "commit", "receipt"):
        for do in ("double", "delay", "drop"):
            act = partial(messages, at=at, do=do, count=2, for_s=0.1)
            cells.append(_cell(f"message/{at}/{do}", "message", act, 4 if do == "drop" else 60))
    fates: tuple[tuple[Fate, int], ...] = (("cancel", 1500), ("deadline", 1500), ("never_read", 400))
    for fate, share in fates:
        act = partial(clients, fate=fate, count=20)
        cells.append(_cell(f"client/{fate}", "client", act, share))
    cells.append(_cell("client/vanish", "client", partial(vanish, how="reset"), 20))
    cells.append(_cell("client/cable", "client-cut", partial(vanish, how="cut"), 3))
    cells.append(_cell("limit/descriptors", "limit", partial(limit, what="descriptors"), 4))
    cells.append(_cell("limit/memory", "limit", partial(limit, what="memory"), 4))
    cells.append(_cell("log/full", "harmless", partial(worker_rule, do="log_full"), 20))
    for name, jump_s in (("forward", 3600.0), ("back", -3600.0)):
        cells.append(_cell(f"clock/{name}", "harmless", partial(worker_rule, do="clock", for_s=jump_s), 20))
    for role in ("prefill", "decode", "router", "controller"):
        allowed = ROUTER_GONE if role == "router" else NOTHING_LOST
        for do in SIGNALS:
            act = partial(deployed, do=do, role=role)
            bound = f"deployed-{_past(do)}" if role != "controller" else f"controller-{_past(do)}"
            cells.append(_cell(f"ray/{do}/{role}", bound, act, 0.3, shape="ray", allowed=allowed))
    return [replace(cell, is_quick=cell.name in QUICK) for cell in cells]


def _past(do: str) -> str:
    return {"kill": "killed", "stop": "stopped"}[do]


CELLS: dict[str, Cell] = {cell.name: cell for cell in _cells()}

"""BOUNDS is what kvrelay promises for each fault: how long until it is noticed, until the request has its next token,
and until the pages are free. One home: docs/reliability.md shows these rows (docs/fill_reliability.py), and the fault
suite holds what it measures against them.

A time is a sum of settings, of the measures below and of seconds: `dead_after_s + start_s`, `2 * step_s + 0.5`. It is
meant for a machine that has a core for each process; a busier one adds `busy_s` to each. A cluster's settings make it a
number (`seconds`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

TERM = re.compile(r"(?:(?P<times>[\d.]+) \* )?(?P<name>[a-z_]+)|(?P<number>[\d.]+)")

MEASURES = {
    "step_s": "one step of the engine, with the largest batch that the pool takes",
    "start_s": "from a process's end until its successor is ready: Ray's part and the load of the model",
    "prefill_s": "of the request's prompt and the tokens so far",
    "busy_s": "0 on a machine with a core for each process; and what the machine itself stood still meanwhile",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Bound:
    """`noticed`, `next_token` and `pages` count from the fault. Empty: nothing to wait for."""

    fault: str  # the name that cells of kvrelay/chaos/cells/ go by
    what: str
    phases: str
    noticed: str = ""
    next_token: str = ""  # or, where no other worker is free, the documented code
    pages: str = ""
    how: str = ""  # and what the client sees


BOUNDS: tuple[Bound, ...] = (
    Bound(
        fault="worker-killed",
        what="a worker's process dies",
        phases="all",
        noticed="0.5",
        next_token="0.5 + prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="its streams break; its requests go on elsewhere with the tokens so far",
    ),
    Bound(
        fault="worker-stopped",
        what="a worker's process says nothing: stopped, swapped out, out of processor time",
        phases="all",
        noticed="dead_after_s + 0.5",
        next_token="dead_after_s + 0.5 + prefill_s + 2 * step_s + 1",
        pages="peer_silent_s + fence_timeout_s + 1",
        how="silence, then as if it had died; who may write into another's pages is killed after `fence_timeout_s`",
    ),
    Bound(
        fault="together-killed",
        what="all workers of a kind, or of both, die in one moment",
        phases="all",
        noticed="0.5",
        next_token="start_s + 2 * prefill_s + 2 * step_s + 2",
        pages="1 + 2 * step_s",
        how="requests wait for the successors, at most `unavailable_grace_s`, and none is taken for the cause",
    ),
    Bound(
        fault="together-stopped",
        what="all workers of a kind, or of both, stand still and go on",
        phases="all",
        noticed="dead_after_s + 0.5",
        next_token="lost_after_s + prefill_s + 2 * step_s + 1",
        pages="peer_silent_s + fence_timeout_s + 1",
        how="suspect, their requests wait; lost after `lost_after_s`",
    ),
    Bound(
        fault="pair-cut",
        what="nothing passes any more between one prefill and one decode worker",
        phases="mid-transfer, between commit and receipt, connecting",
        noticed="peer_silent_s + 0.5",
        next_token="peer_silent_s + connect_timeout_s + prefill_s + 2 * step_s + 1",
        pages="peer_silent_s + 1",
        how="the pair is lost to both, tried again by itself and told to routers, who send requests past it",
    ),
    Bound(
        fault="rank-killed",
        what="a process of a tensor-parallel worker dies",
        phases="decoding",
        noticed="1",
        next_token="1 + prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="its worker ends, and starts anew",
    ),
    Bound(
        fault="engine-failed",
        what="a step raises, or brings what is no number",
        phases="first chunk, decoding",
        noticed="0.5",
        next_token="prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="its requests are tried elsewhere",
    ),
    Bound(
        fault="engine-sticky",
        what="every step raises from some time on",
        phases="first chunk, decoding",
        noticed="0.5",
        next_token="prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="tried elsewhere; a token of the engine's own cannot be had either, `max_failed_steps` times in a row, or "
        "CUDA does not recover from the error: the worker's process ends and is replaced",
    ),
    Bound(
        fault="engine-hung",
        what="a step of a worker's engine does not end",
        phases="first chunk, decoding",
        noticed="step_timeout_s + 1",
        next_token="step_timeout_s + 1 + prefill_s + 2 * step_s + 1",
        pages="step_timeout_s + 2",
        how="its age stands in the reports meanwhile; the worker's process ends and is replaced",
    ),
    Bound(
        fault="rank-stopped",
        what="a process of a tensor-parallel worker is stopped",
        phases="decoding, idle",
        noticed="3",
        next_token="3 + prefill_s + 2 * step_s + 1",
        pages="4",
        how="its worker ends, and starts anew",
    ),
    Bound(
        fault="router-stopped",
        what="a router's process says nothing",
        phases="all",
        noticed="drop_router_after_s + 0.5",
        pages="drop_router_after_s + 1",
        how="its clients' own deadlines; workers drop its requests, and at once when 64 MiB wait for it",
    ),
    Bound(
        fault="client-cut",
        what="the client's cable is cut",
        phases="all",
        pages="keepalive_s + 6",
        how="the client's own deadline; the router pings it, and drops its requests",
    ),
    Bound(
        fault="router-killed",
        what="a router's process dies",
        phases="all",
        noticed="0.5",
        next_token="1",
        pages="start_s + 1 + 2 * step_s",
        how="UNAVAILABLE to its clients; workers drop its requests; started again on the same port",
    ),
    Bound(
        fault="link-reset",
        what="a connection between router and worker, or between two workers, breaks",
        phases="all",
        noticed="0.5",
        next_token="prefill_s + 2 * step_s + 1.5",
        pages="1 + 2 * step_s",
        how="connected again; its requests are tried again",
    ),
    Bound(
        fault="link-slow",
        what="100 ms more on a link, and 1% of its packets lost",
        phases="all",
        next_token="prefill_s + 2 * step_s + 2",
        pages="1.5 + 2 * step_s",
        how="later tokens, nothing else",
    ),
    Bound(
        fault="router-cut",
        what="a link between router and worker carries nothing, in one direction or both",
        phases="all",
        noticed="dead_after_s + 0.5",
        next_token="dead_after_s + 0.5 + prefill_s + 2 * step_s + 1",
        pages="dead_after_s + 1",
        how="the worker is lost to this router until it answers; the worker drops the router's requests",
    ),
    Bound(
        fault="segment",
        what="a segment of KV is damaged, lost, moved twice, late, or cannot be moved",
        phases="mid-transfer",
        next_token="timeout_s + prefill_s + 2 * step_s + 1.5",
        pages="1 + 2 * step_s",
        how="the receipt names it; sent again `max_resends` times, then another attempt",
    ),
    Bound(
        fault="message",
        what="a message of a handoff is lost, doubled or late",
        phases="mid-transfer, commit, receipt",
        next_token="lease_ttl_s + timeout_s + prefill_s + 2 * step_s + 1.5",
        pages="lease_ttl_s + 1 + 2 * step_s",
        how="another attempt",
    ),
    Bound(
        fault="poison",
        what="a prompt that ends every process which computes it",
        phases="first chunk",
        noticed="0.5",
        next_token="start_s + prefill_s + 2 * step_s + 2",
        pages="1 + 2 * step_s",
        how="after two workers FAILED_PRECONDITION; others' requests go on, and do not pay from their attempts",
    ),
    Bound(
        fault="client",
        what="the client leaves, cancels, never reads, or its deadline is over",
        phases="all",
        pages="0.5 + 2 * step_s",
        how="CANCELLED or DEADLINE_EXCEEDED; dropped everywhere. Who never reads: RESOURCE_EXHAUSTED after max_stall_s",
    ),
    Bound(
        fault="limit",
        what="a worker may open no more files, or take no more memory",
        phases="all",
        next_token="timeout_s + start_s + prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="what it cannot do is done elsewhere",
    ),
    Bound(
        fault="harmless",
        what="the log's disk is full; the wall clock jumps an hour",
        phases="all",
        next_token="prefill_s + 2 * step_s + 1",
        pages="0.5 + 2 * step_s",
        how="nothing",
    ),
    Bound(
        fault="deployed-killed",
        what="a process that Ray keeps dies",
        phases="all",
        noticed="2",
        next_token="0.5 + prefill_s + 2 * step_s + 1",
        pages="start_s + 1",
        how="as above; Ray starts another",
    ),
    Bound(
        fault="deployed-stopped",
        what="a process that Ray keeps is stopped, or hangs: until it is ended and another started",
        phases="all",
        noticed="liveness_timeout_s + 3",
        next_token="liveness_timeout_s + 3 + prefill_s + 2 * step_s + 1",
        pages="liveness_timeout_s + start_s + 1",
        how="its streams go on elsewhere long before; the controller kills it",
    ),
    Bound(
        fault="controller-stopped",
        what="the controller is stopped, or hangs: until members have ended it",
        phases="all",
        noticed="2 * liveness_timeout_s + 3",
        next_token="prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="nothing: it carries no request. Ray starts it again",
    ),
    Bound(
        fault="controller-killed",
        what="the controller dies",
        phases="all",
        next_token="prefill_s + 2 * step_s + 1",
        pages="1 + 2 * step_s",
        how="nothing: it carries no request. Ray starts it again",
    ),
)


def bound_of(fault: str) -> Bound:
    return next(bound for bound in BOUNDS if bound.fault == fault)


def seconds(time: str, values: Mapping[str, float]) -> float:
    """What a time of a Bound is with these settings and measures. Raises KeyError for one that is not there."""
    total = 0.0
    for term in filter(None, time.split(" + ")):
        match = TERM.fullmatch(term)
        assert match is not None, f"{term!r} of {time!r} is no number, setting or multiple of one"
        if match["number"]:
            total += float(match["number"])
        else:
            total += float(match["times"] or 1) * values[match["name"]]
    return total


def within(time: str, values: Mapping[str, float]) -> float:
    """The same on the machine that these were measured on."""
    return seconds(time, values) + values["busy_s"]

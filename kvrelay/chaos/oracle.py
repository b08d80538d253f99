"""Oracle knows every answer beforehand: prompts drawn from a seed, each asked alone of a cluster without faults first.

A request is told by its seed, so the same tokens are due whatever happens to the processes under it. `verdict` holds
what a stream brought against that; it is never "about right".
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from itertools import pairwise

from kvrelay.chaos.load import Ended, Stream, play
from kvrelay.chaos.templates import Template, draw
from kvrelay.client.client import AsyncClient

POISON_ID = 4090  # in no prompt but the poisoned
LEARN_S = 60.0
AT_ONCE = 8
LATE_S = 0.5  # that the client's own clock may give a deadline

CODES = frozenset(  # that a client may see: docs/reliability.md
    (
        *("INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED", "NOT_FOUND", "ALREADY_EXISTS", "UNIMPLEMENTED"),
        *("RESOURCE_EXHAUSTED", "UNAVAILABLE", "FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "CANCELLED"),
    )
)


class OracleError(Exception):
    """The cluster does not answer though nothing is wrong yet, or answers twice differently."""


async def learn(client: AsyncClient, count: int) -> tuple[list[Template], dict[str, float]]:
    """Templates with their answers, and the measures of them that bounds are made of. Raises OracleError."""
    rng = random.Random(0)
    templates = [draw(rng) for _ in range(count)]
    learnt: list[Template] = []
    played: list[Stream] = []
    for begin in range(0, count, AT_ONCE):
        some = templates[begin : begin + AT_ONCE]
        streams = [Stream(template=template, client=client, timeout_s=LEARN_S) for template in some]
        await asyncio.gather(*(play(stream) for stream in streams))
        played += streams
        for template, stream in zip(some, streams, strict=True):
            if stream.ended is not Ended.DONE:
                raise OracleError(f"without any fault a request ended {stream.code}: {stream.reason}")
            if POISON_ID not in stream.tokens:
                learnt.append(Template(template.prompt, template.options, tuple(stream.tokens)))
    gaps = [b - a for stream in played for a, b in pairwise(stream.times_s)]
    waits = [stream.times_s[0] - stream.began_s for stream in played]
    return learnt, {"step_s": max(gaps), "prefill_s": max(waits)}


def verdict(stream: Stream, allowed: frozenset[str], busy_s: float = 0.0) -> str:
    """What is wrong with how a stream went; empty if nothing is. `allowed`: the codes that it may have ended with.
    `busy_s`: more time for all, on a machine with fewer cores than processes."""
    due = stream.template.tokens
    got = tuple(stream.tokens)
    if got != due[: len(got)]:
        at = next(i for i, (a, b) in enumerate(zip(got, due + (-1,) * len(got), strict=False)) if a != b)
        return f"token {at} is {got[at]}, and {due[at] if at < len(due) else 'none'} was due"
    match stream.ended:
        case Ended.DONE if got != due:
            return f"it ended well with {len(got)} tokens of {len(due)}"
        case Ended.DONE | Ended.LEFT:
            return ""
        case Ended.RUNS:
            return f"it hangs, with {len(got)} tokens of {len(due)}"
    if stream.code not in CODES:
        return f"it ended {stream.code}, which no client should see: {stream.reason}"
    if stream.ended_s - stream.began_s > stream.timeout_s + LATE_S + busy_s:
        return f"it ended {stream.ended_s - stream.began_s - stream.timeout_s:.2f} s after its deadline"
    if stream.code not in allowed:
        return f"it ended {stream.code} with {len(got)} tokens of {len(due)}: {stream.reason}"
    return ""


def pick(templates: Sequence[Template], rng: random.Random, count: int, *, long: bool = False) -> list[Template]:
    """Some of them; only long prompts, where chunks and segments are wanted."""
    pool = [template for template in templates if template.is_long] if long else list(templates)
    return [rng.choice(pool) for _ in range(count)]

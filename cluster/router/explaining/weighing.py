"""Who was weighed when a request was given its workers, beside those that got it, and what it stood behind there."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import islice

from cluster.router.accounts import DecodeAccount, PrefillAccount, RequestShape
from cluster.router.explaining.notes import Routed, Weighed
from cluster.router.live.requests import LiveRequest
from cluster.router.placing.predicting import read_s, token_s
from cluster.router.workers import Workers

OTHERS = 2  # of each phase, the least loaded
NAMED = 4  # of those before it, the last


def routed(
    workers: Workers, live: LiveRequest, reason: str, now: float, get: Callable[[str], LiveRequest | None]
) -> Routed:
    """Just after it was given its workers, as these are now. `get`: the request of this wire id."""
    account = workers.prefill.accounts[live.prefill]
    request, before = account.waiting[live.wire_id], islice(reversed(account.waiting), 1, 1 + NAMED)
    known = [other for other in map(get, before) if other is not None]
    others: list[Weighed] = []
    if len(workers.prefill.accounts) > 1:
        prefills = [each for each in workers.prefill.least(OTHERS + 1) if each is not account]
        others += [_prefill(each, request.shape) for each in prefills[:OTHERS]]
    if len(workers.decode.accounts) > 1:
        decodes = [each for each in workers.decode.least(OTHERS + 1) if each.view.name != live.decode]
        others += [_decode(each) for each in decodes[:OTHERS]]
    behind = [(other.call_id, other.owner) for other in known]
    tokens = max(0, account.queued_tokens - request.work)
    return Routed(
        now, live.attempt, live.prefill, live.decode, reason, others, len(account.waiting) - 1, behind, tokens
    )


def _prefill(account: PrefillAccount, shape: RequestShape) -> Weighed:
    takes_s = read_s(account, shape)
    takes_s = takes_s if math.isfinite(takes_s) else 0.0
    return Weighed(account.view.name, "prefill", takes_s, account.queued_tokens, account.cached_len(shape))


def _decode(account: DecodeAccount) -> Weighed:
    view = account.view
    return Weighed(view.name, "decode", token_s(account), 0, 0, account.free_pages, view.total_pages, account.batch)

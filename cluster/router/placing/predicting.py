"""Predicting says what a placement would take: when a request's first token would come, and at what cost to whom.

By the costs of their steps that workers report, and what has been sent to them since. Of the placements that keep the
request's targets that one is best which holds up others least; where none does, likewise: who is late anyway should not
make others late. So a long prompt goes where nobody decodes, as long as its first token is in time there, and is read
beside answers when it would be late; an answer is written where its steps are short enough, not where they are shortest
(conditional disaggregation; compare TaiChi, arXiv 2508.01989). Short enough for whoever wants the shortest of those
that this router has sent there, too; nor are prompts read beside such answers that would make them late. Who wants what
no worker could give to one alone is not looked after so.

Where an engine has pipeline stages, the costs are of a pass through all of them, and a pass is in each: what waits goes
by that many times as fast, and each pass holds its share of the answers.

Several routers hear of each other's requests by reports only, up to 50 ms late and more of many workers. So each has
readers of its own, and takes those where nobody is late for it and the cost is at most twice that of another's. Answers
last for seconds: of them reports tell enough.

An answer that is not written where its prompt is read waits for what the reading does not hide of the handoff, and
that for those before it (handoff_times.py).

It looks and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cluster.router.accounts import DecodeAccount, PrefillAccount, RequestShape
from cluster.router.placing.handoff_times import NO_WAIT, HandoffTimes

USED = 0.9  # of a target, that a prediction may take
OWN_COST = 2.0  # times that of another router's worker, at most: so far may loads differ where their traffic does
OUTPUT_TOKENS = 128  # of an answer, whose length nobody knows


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Seconds. 0: none."""

    ttft_s: float
    tpot_s: float


NO_TARGET = Target(ttft_s=0.0, tpot_s=0.0)


@dataclass(frozen=True, slots=True)
class Part:
    """Of a placement, at one worker: the time that it takes there, whether that keeps the target, and what it costs:
    the work itself, for each request that is held up by it, this one and those that are there."""

    takes_s: float
    is_kept: bool
    cost_s: float
    own_s: float = 0.0  # of takes_s the last, in which the prompt itself is read


@dataclass(frozen=True, slots=True)
class Predicted:
    prefill: PrefillAccount
    decode: DecodeAccount
    read: Part
    written: Part

    @property
    def is_late(self) -> bool:
        return not (self.read.is_kept and self.written.is_kept)

    @property
    def cost_s(self) -> float:
        return self.read.cost_s + self.written.cost_s

    @property
    def rank(self) -> tuple[bool, float, float, bool, str, str]:
        """The least is best."""
        reader, writer = self.prefill.view.name, self.decode.view.name
        return self.is_late, self.cost_s, self.read.takes_s, reader != writer, reader, writer


def best_predicted(
    shape: RequestShape,
    target: Target,
    waited_s: float,
    own: Sequence[PrefillAccount],
    others: Sequence[PrefillAccount],
    decodes: Sequence[DecodeAccount],
    is_broken: Callable[[str, str], bool],
    times: HandoffTimes,
    now: float,
) -> Predicted | None:
    """Of all pairs that are not broken. None where there is none, or the costs of a worker are not known yet. `others`:
    readers that other routers take first."""
    reports = [account.report for accounts in (own, others, decodes) for account in accounts]
    if any(report.costs is None for report in reports):
        return None
    written = {account.view.name: (account, _written(account, shape, target)) for account in decodes}
    order = sorted(written, key=lambda name: (not written[name][1].is_kept, written[name][1].cost_s, name))

    def best_of(prefills: Sequence[PrefillAccount]) -> Predicted | None:
        best: Predicted | None = None
        for prefill in prefills:
            name, read = prefill.view.name, _read(prefill, shape, target, waited_s)
            if name in written:
                best = _better(best, Predicted(prefill, written[name][0], read, written[name][1]))
            is_kept: bool | None = None
            for other in order:
                if other == name or is_broken(name, other):
                    continue
                decode, part = written[other]
                is_kept = part.is_kept if is_kept is None else is_kept
                free = Predicted(prefill, decode, read, part)
                if part.is_kept != is_kept or _better(best, free) is not free:
                    break  # all that follow are worse, however fast their links
                handed = _handed_over(free, shape, target, waited_s, times, now)
                best = _better(best, handed)
                if handed is free:
                    break
        return best

    return _own_instead(best_of(own), best_of(others))


def _own_instead(own: Predicted | None, other: Predicted | None) -> Predicted | None:
    """Where it is as good as another router's, as far as is known here what that has sent there."""
    if own is None or other is None:
        return own or other
    is_as_good = other.is_late if own.is_late != other.is_late else own.cost_s <= OWN_COST * other.cost_s
    return own if is_as_good else other


def _better(best: Predicted | None, other: Predicted) -> Predicted:
    return other if best is None or other.rank < best.rank else best


def _handed_over(
    predicted: Predicted, shape: RequestShape, target: Target, waited_s: float, times: HandoffTimes, now: float
) -> Predicted:
    """With what the handoff adds to it: to each token of the answer its share of the wait."""
    read, written = predicted.read, predicted.written
    wait = times.wait(
        predicted.prefill.view.name,
        predicted.decode.view.name,
        shape.kv_len,
        now,
        read_in_s=read.takes_s - waited_s,
        own_s=read.own_s,
    )
    if wait is NO_WAIT:
        return predicted
    takes_s = written.takes_s + wait.exposed_s / max(1, min(OUTPUT_TOKENS, shape.max_tokens))
    is_kept = written.is_kept and takes_s < (USED * target.tpot_s or math.inf)
    later = Part(takes_s, is_kept, written.cost_s + wait.cost_s)
    return Predicted(predicted.prefill, predicted.decode, read, later)


def read_s(account: PrefillAccount, shape: RequestShape) -> float:
    """When its first token would come; 0 where the costs of steps are not known."""
    return 0.0 if account.report.costs is None else _read(account, shape, NO_TARGET, 0.0).takes_s


def token_s(account: DecodeAccount) -> float:
    """What each token takes that is written there; 0 where its costs are not known."""
    return 0.0 if account.report.costs is None else _step_s(account, account.report.prompt_share, account.batch, 0)


def tightest_s(account: DecodeAccount) -> float:
    """The least time for a token that anybody wants who writes there, and could have: what an answer alone would miss,
    too, is no reason to leave anybody alone there."""
    costs, least_s = account.report.costs, account.tightest_s
    if costs is None or least_s > (alone_s := costs.step_s(0.0, 1, 0, 0.0)):
        return least_s
    return min((wanted_s for wanted_s in account.wanted if wanted_s > alone_s), default=math.inf)


def is_slow(account: DecodeAccount) -> bool:
    """Whether a token there takes longer than one of those wants, and could have, that write there."""
    if not account.wanted or account.batch < 2:  # one alone is nowhere faster
        return False
    return token_s(account) > tightest_s(account)


def is_better(shape: RequestShape, target: Target, source: DecodeAccount, to: DecodeAccount) -> bool:
    """Whether its tokens would take less time there, and all that write there keep their targets: not before the costs
    of both are known."""
    if source.report.costs is None or to.report.costs is None:
        return False
    written = _written(to, shape, target)
    return written.is_kept and written.takes_s < token_s(source)


def could_gain(source: DecodeAccount, to: DecodeAccount, least_len: int, loosest_s: float) -> bool:
    """Whether `is_better` may be true of some request of so many tokens or more, that wants so much a token or less."""
    if source.report.costs is None or to.report.costs is None:
        return False
    takes_s = _step_s(to, to.report.prompt_share, to.batch + 1, least_len)
    return takes_s < USED * min(loosest_s, tightest_s(to)) and takes_s < token_s(source)


def _read(account: PrefillAccount, shape: RequestShape, target: Target, waited_s: float) -> Part:
    """Its prompt. The step under way counts for half of one."""
    costs, view, beside = account.report.costs, account.view, account.beside
    assert costs is not None
    own = shape.prompt_len - account.cached_len(shape)
    tokens, batch = account.queued_tokens + own, 0 if beside is None else beside.batch
    last = min(own, (view.chunk_tokens if batch else view.step_tokens) or own)  # its last pass takes its whole time
    passed = last + (tokens - last) / view.num_stages
    takes_s = waited_s + costs.prompt_token_s * passed
    if beside is None or not batch:
        takes_s += costs.fixed_s * (passed / max(1, view.step_tokens) + 1.0)
    elif view.chunk_tokens:
        before = -(-tokens // view.chunk_tokens) - 1
        takes_s += _pass_s(beside, 0.0, batch, 0, both=1.0) * (before / view.num_stages + 1.5)
    else:
        takes_s = float("inf")  # it waits until nobody decodes there
    is_kept = takes_s < (USED * target.ttft_s or math.inf)
    if beside is not None and (others_s := tightest_s(beside)) < (target.tpot_s or math.inf):
        share = min(view.chunk_tokens, tokens / OUTPUT_TOKENS)
        is_kept = is_kept and _step_s(beside, share, batch, 0) < USED * others_s
    longer_s = costs.prompt_token_s * own / view.num_stages
    cost_s = longer_s * (1 + len(account.waiting) + batch)
    return Part(takes_s, is_kept, cost_s, own_s=(takes_s - waited_s) * own / tokens)


def _written(account: DecodeAccount, shape: RequestShape, target: Target) -> Part:
    """Its answer, each token of it. With as many tokens of prompts in each step as there were of late."""
    costs, batch = account.report.costs, account.batch
    assert costs is not None
    takes_s = _step_s(account, account.report.prompt_share, batch + 1, shape.prompt_len)
    longer_s = costs.request_s + costs.context_token_s * (shape.prompt_len + OUTPUT_TOKENS // 2)
    longer_s /= account.view.num_stages
    is_kept = takes_s < USED * min(target.tpot_s or math.inf, tightest_s(account))
    return Part(takes_s, is_kept, longer_s * OUTPUT_TOKENS * (1 + batch))


def _step_s(account: DecodeAccount, share: float, batch: int, longer: int) -> float:
    """With so many tokens of prompts in each on average, so many answers, and a context longer by `longer` tokens."""
    return _pass_s(account, share, batch, longer, both=min(1.0, share / max(1, account.view.chunk_tokens)))


def _pass_s(account: DecodeAccount, share: float, batch: int, longer: int, both: float) -> float:
    costs, stages = account.report.costs, account.view.num_stages
    assert costs is not None
    return costs.step_s(share, -(-batch // stages), (_context(account) + longer) // stages, both)


def _context(account: DecodeAccount) -> int:
    """Tokens, at most."""
    return (account.view.total_pages - account.free_pages) * account.view.page_size

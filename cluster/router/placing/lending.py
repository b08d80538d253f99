"""Lending chooses two workers as Splitwise does (Patel et al., ISCA 2024, section IV: its mixed pool; the rules of its
simulator, placement/papers/splitwise/rules.py): two pools, and workers lent by one to the other while that has too few.

    home of prompts: those that only read them, and mixed workers whose chunks fill a step
    home of answers: those that only write them, and all other mixed workers
    lent:            a mixed worker with work of the other phase; it is home again when that has ended

A prompt goes to the worker at home with the fewest prompt tokens before it, unless that has a queue that would pass
MAX_PENDING_TOKENS; then to one that is lent, by the same rule; then one of the other pool is lent for it. Its answer
goes to the worker at home with most free pages, if it has room; then to one that is lent; then another is lent.

Other than there a lent worker is home when its work of the other phase has ended, not when it is empty, for ours need
not be either: they do both at once; its room is what is free now, for nobody knows the length of an answer; and prompts
beyond `max_backlog_tokens` wait in the router. Each router counts the work that it gave out itself. It looks at all
workers for each request.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from cluster.router.accounts import DecodeAccount, PrefillAccount, RequestShape, WorkerView
from worker.roles import kind_of

MAX_PENDING_TOKENS = 8192
HOME, LENT, TO_LEND = range(3)


def lend(
    shape: RequestShape, prefills: Sequence[PrefillAccount], decodes: Sequence[DecodeAccount]
) -> tuple[PrefillAccount, DecodeAccount] | None:
    """`decodes` have room for it. None where it finds no place by these rules."""
    lent = {account.view.name for account in prefills if _is_lent(account)}
    source = _source(shape, prefills, lent)
    target = min(
        decodes,
        key=lambda a: (_group(a.view, lent, reads=False), -a.free_pages, a.view.name),
        default=None,
    )
    return (source, target) if source is not None and target is not None else None


def _source(shape: RequestShape, prefills: Sequence[PrefillAccount], lent: Collection[str]) -> PrefillAccount | None:
    for group in (HOME, LENT, TO_LEND):
        alike = [account for account in prefills if _group(account.view, lent, reads=True) == group]
        best = min(alike, key=lambda account: (account.queued_tokens, account.view.name), default=None)
        if best is None:
            continue
        is_long = best.queued_tokens and best.queued_tokens + shape.prompt_len > MAX_PENDING_TOKENS
        if group == TO_LEND or not is_long:
            return best
    return None


def _is_lent(account: PrefillAccount) -> bool:
    if account.beside is None:
        return False
    has_answers = bool(account.beside.promised or account.beside.listed)
    return has_answers if _reads_at_home(account.view) else bool(account.waiting)


def _group(view: WorkerView, lent: Collection[str], *, reads: bool) -> int:
    """Who is asked first: those at home, then who is lent already, then others."""
    if view.name in lent:
        return LENT
    return HOME if _reads_at_home(view) == reads else TO_LEND


def _reads_at_home(view: WorkerView) -> bool:
    return "decode" not in kind_of(view.role).phases or 0 < view.step_tokens <= view.chunk_tokens

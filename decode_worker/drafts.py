"""Drafts has the tokens that follow guessed, so that one step computes several of a request's: speculative decoding.

What stood behind a request's last tokens when they were there before, in its prompt or its answer, is a guess at what
comes now (prompt lookup: Saxena, 2023; `ngram` in vLLM); or a draft model makes them, just before the step
(engine/drafting.py). A step runs the guesses behind the last token, and draws at each of these positions the target's
own token, keyed by (seed, position): a guess is kept as long as it is what was drawn, so that the answer is that of a
step for each token, at any temperature.

How many guesses are run follows from what they bring and what they cost (compare SmartSpec, Liu et al.,
arXiv 2406.14066). One more row of a step is worth its time while its chance to be kept is above what a step computes in
that time without it; and one more pass of a draft model, while all rows of it are. The chances are followed for each
request, also of guesses that were looked up and not run, and the times are those that the worker has measured of its
steps. Pure: no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from decode_worker.batches import DecodeBatch
from decode_worker.options import DecodeOptions
from engine.types import Draft, SampledToken, SamplingParams
from worker.steps.costs import StepCosts

WINDOW = 8192  # tokens at the end of a prompt, that are looked through
CANDIDATES = 8  # places of which the one with the most tokens in common is taken
FIRST_CHANCE = 0.6  # of a guess, before any of the request has been seen
REMEMBERED = 0.9  # of a chance, by each guess that is seen
WORTH_IT = 1.05  # times as many tokens in the same time: what is measured of steps is no surer than that
COSTS_ASKED = 32  # steps, after which what a step costs is asked anew
TRIALS = 8  # steps with guesses of one request alone, before more are run: what a guess costs is known of such steps
TRIED = 64  # steps without any, after which there is another trial


class Answer(Protocol):
    """A request that is decoded, as far as guesses go: a worker's HeldRequest."""

    @property
    def id(self) -> str: ...

    @property
    def params(self) -> SamplingParams: ...

    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and output so far; may grow at its end."""

    @property
    def new_tokens_left(self) -> int: ...


class Lookup(Protocol):
    def guess(self, num_tokens: int) -> list[int]:
        """What may follow all tokens so far, `num_tokens` at most."""


class PromptLookup:
    """Guesses for one request, whose `tokens` may grow at their end."""

    def __init__(self, tokens: Sequence[int], *, least: int, most: int) -> None:
        """So many of the last tokens must have been there before; of several places that one counts where more were,
        `most` at most, and then the latest."""
        self._tokens = tokens
        self._least = least
        self._most = most
        self._end = max(0, len(tokens) - WINDOW) + least  # of the next run of `least` tokens that is not noted yet
        self._last: dict[tuple[int, ...], int] = {}  # by such a run: where it ended last
        self._before: dict[int, int] = {}  # and where the same one ended before

    def guess(self, num_tokens: int) -> list[int]:
        """What may follow all tokens so far; none where their end is new."""
        tokens, least = self._tokens, self._least
        for end in range(self._end, len(tokens)):  # there is a token behind each
            run = tuple(tokens[end - least : end])
            if (last := self._last.get(run)) is not None:
                self._before[end] = last
            self._last[run] = end
        self._end = max(self._end, len(tokens))
        at = self._last.get(tuple(tokens[-least:])) if len(tokens) >= least else None
        return [] if at is None else self._following(self._best(at), num_tokens)

    def _best(self, at: int) -> int:
        best, longest = at, self._common(at)
        for _ in range(CANDIDATES - 1):
            if longest >= self._most or (before := self._before.get(at)) is None:
                break
            at = before
            if (common := self._common(at)) > longest:
                best, longest = at, common
        return best

    def _common(self, at: int) -> int:
        """How many tokens before `at` are the last ones, too."""
        tokens, count = self._tokens, self._least
        while count < min(self._most, at) and tokens[at - 1 - count] == tokens[-1 - count]:
            count += 1
        return count

    def _following(self, at: int, num_tokens: int) -> list[int]:
        """Also beyond the end, where what follows repeats itself."""
        tokens = list(self._tokens[at : at + num_tokens])
        period = len(tokens)
        while len(tokens) < num_tokens:
            tokens.append(tokens[-period])
        return tokens


@dataclass(slots=True)
class _Guesses:
    chance: float = FIRST_CHANCE
    lookup: Lookup | None = None
    draft: Draft | None = None
    tokens: Sequence[int] = ()  # for what follows the last token; a draft model's are known when they were run

    def see(self, was_right: bool) -> None:
        self.chance = REMEMBERED * self.chance + (1 - REMEMBERED) * was_right


class Drafts:
    def __init__(
        self,
        options: DecodeOptions,
        costs: Callable[[], StepCosts | None],
        eos_token_ids: Sequence[int] = (),
        *,
        make_draft: Callable[[str], Draft] | None = None,
        pass_s: Callable[[], float] = lambda: 0.0,
        make_lookup: Callable[[Answer], Lookup] | None = None,
    ) -> None:
        """`costs`: of steps; None while they are not known. Where a draft model guesses: `make_draft`, for a request
        that it has not heard of, by its id, and `pass_s`, what it takes to guess one more of all. `make_lookup`: of a
        driver that has no tokens to look through."""
        self._options = options
        self._eos_token_ids = frozenset(eos_token_ids)
        self._ask_costs = costs
        self._make_draft = make_draft
        self._make_lookup = make_lookup or self._lookup_in
        self._pass_s = pass_s
        self._costs: StepCosts | None = None
        self._steps = 0
        self._last_run = 0  # the step in which some were run last
        self._num_run = 0  # steps with some
        self._guesses: dict[str, _Guesses] = {}
        self._running: dict[str, int] = {}  # how many of whom are in the step under way

    def wanted(self, requests: Iterable[Answer]) -> tuple[tuple[str, int], ...]:
        """For which of those that are about to be computed a step should run how many guesses."""
        if self._steps % COSTS_ASKED == 0:
            self._costs = self._ask_costs()
        self._steps += 1
        context_tokens = num_requests = 0
        chances: list[tuple[str, float, int]] = []  # whose, of one to be right, and how many there are
        for request in requests:
            num_requests += 1
            context_tokens += len(request.tokens)
            most = min(self._options.num_speculative_tokens, request.new_tokens_left - 1)
            guesses = self._guesses.get(request.id)
            if guesses is None:
                guesses = self._guesses[request.id] = self._made(request)
            guesses.tokens = ()
            if guesses.lookup is not None:
                guesses.tokens = self._looked_up(request, guesses.lookup, most)
                most = len(guesses.tokens)
            if most > 0:
                chances.append((request.id, guesses.chance, most))
        chances.sort(key=lambda one: -one[1])
        return tuple(self._worthwhile(chances, num_requests, context_tokens).items())

    def _made(self, request: Answer) -> _Guesses:
        if self._make_draft is not None:
            return _Guesses(draft=self._make_draft(request.id))
        return _Guesses(lookup=self._make_lookup(request))

    def _lookup_in(self, request: Answer) -> Lookup:
        options = self._options
        return PromptLookup(request.tokens, least=options.prompt_lookup_min, most=options.prompt_lookup_max)

    def _looked_up(self, request: Answer, lookup: Lookup, most: int) -> list[int]:
        """Before the end of the answer, behind which nothing is wanted."""
        tokens = lookup.guess(most) if most > 0 else []
        ends = {*request.params.stop_token_ids, *(() if request.params.ignore_eos else self._eos_token_ids)}
        return tokens[: next((i for i, token in enumerate(tokens) if token in ends), len(tokens))]

    def _worthwhile(
        self, chances: Sequence[tuple[str, float, int]], requests: int, context_tokens: int
    ) -> dict[str, int]:
        """So many guesses of each, the likeliest first, make the tokens of a step the most for its time: first ones,
        then what may follow those."""
        counts: dict[str, int] = {}
        costs = self._costs
        if costs is None or not chances:
            return counts
        if self._num_run < TRIALS or self._steps - self._last_run > TRIED:
            return self._trial(chances)
        pass_s = self._pass_s()
        alone_s = costs.step_s(0, requests, context_tokens, both=0)
        tokens, taken_s = float(requests), alone_s
        for depth in range(1, self._options.num_speculative_tokens + 1):
            more, longer_s = tokens, taken_s + pass_s + (costs.both_s if depth == 1 else 0.0)
            added: list[str] = []
            for request_id, chance, most in chances:
                is_kept = chance**depth
                if is_kept * longer_s < costs.prompt_token_s * more:
                    break
                if counts.get(request_id, 0) == depth - 1 and depth <= most:
                    added.append(request_id)
                    more += is_kept
                    longer_s += costs.prompt_token_s
            if not added or more * taken_s <= tokens * longer_s:
                break
            tokens, taken_s = more, longer_s
            counts |= dict.fromkeys(added, depth)
        return counts if tokens * alone_s > WORTH_IT * requests * taken_s else {}

    def _trial(self, chances: Sequence[tuple[str, float, int]]) -> dict[str, int]:
        """Of one request, the likeliest of those that a draft model has read, if it has read any."""
        drafts = [(name, most, self._guesses[name].draft) for name, _, most in chances]
        read = [(name, most) for name, most, draft in drafts if draft is None or draft.num_read]
        name, most = read[0] if read else drafts[0][:2]
        return {name: most}

    def begin(self, batch: DecodeBatch) -> None:
        """This step is run, with so many of the guesses as its entries say."""
        self._running = {entry.request_id: entry.drafted for entry in batch.entries if entry.drafted}
        if self._running:
            self._last_run = self._steps
            self._num_run += 1

    def of(self, request_id: str) -> Sequence[int]:
        """Those of the step under way that stand behind the request's last token."""
        guesses = self._guesses.get(request_id)
        return () if guesses is None else guesses.tokens[: self._running.get(request_id, 0)]

    def asked_of(self, request_id: str) -> Draft | None:
        """What the draft model is asked for in the step under way."""
        guesses, count = self._guesses.get(request_id), self._running.get(request_id, 0)
        if not count or guesses is None or guesses.draft is None:
            return None
        guesses.draft.num_wanted = count
        return guesses.draft

    def end(self, tokens: Sequence[SampledToken]) -> tuple[list[SampledToken], dict[str, tuple[int, int]]]:
        """Of a step's draws those that count, in order; and of each request that had guesses in it how many, and how
        many draws count."""
        counted: list[SampledToken] = []
        counts: dict[str, int] = {}
        done: set[str] = set()
        for request_id in self._running:
            guesses = self._guesses.get(request_id)
            if guesses is not None and guesses.draft is not None:
                guesses.tokens = tuple(guesses.draft.guesses)
        for token in tokens:
            request_id = token.request_id
            if request_id in done:
                continue
            counted.append(token)
            at = counts[request_id] = counts.get(request_id, 0) + 1
            guesses = self._guesses.get(request_id)
            if token.error or guesses is None or at > len(guesses.tokens):
                done.add(request_id)
                continue
            is_right = guesses.tokens[at - 1] == token.token_id
            guesses.see(is_right)
            if not is_right or at > self._running.get(request_id, 0):
                done.add(request_id)
        return counted, {name: (len(self.of(name)), counts.get(name, 1)) for name in self._running}

    def forget(self, request_id: str) -> None:
        """It is over, or elsewhere."""
        self._guesses.pop(request_id, None)

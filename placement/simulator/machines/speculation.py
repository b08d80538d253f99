"""SpeculatedRun is a DecodeRun of a worker that guesses ahead: each step is one of its own, with the guesses that the
live Drafts wants of it and in the rows and pages that the DecodePolicy gives them.

    begin   Drafts.wanted -> next_batch -> passes of the draft model
    end     draws -> Drafts.end -> on_batch_done

What a simulation lacks is tokens. A guess is right by chance (placement/latency/speculation.py), drawn by the request
and the position: so the same request has the same luck wherever and in whatever batch it is decoded. Drafts learns what
steps cost as it does live, from the steps that it has seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from decode_worker.batches import DecodeBatch, DecodeRequest, DecodeSchedule
from decode_worker.drafts import Answer, Drafts, Lookup
from decode_worker.policy import DecodePolicy
from decode_worker.run import DecodeRun
from engine.types import Draft, SampledToken, SampleSpec, SamplingParams
from placement.latency.speculation import Speculation
from placement.simulator.machines.draft_passes import GUESS, DraftPasses
from worker.steps.costs import StepCosts
from worker.steps.times import StepTimes

OTHER = 0  # any token but GUESS
ANY = SamplingParams()
MASK = (1 << 64) - 1


def chance_of(seed: int, position: int) -> float:
    """Even between 0 and 1, of these two alone: splitmix64 (Steele et al., OOPSLA 2014)."""
    mixed = ((seed << 32) + (position + 1) * 0x9E3779B97F4A7C15) & MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & MASK
    return (mixed ^ (mixed >> 31)) / 2.0**64


class SimAnswer:
    """A request as Drafts sees it, between two steps."""

    def __init__(self, request: DecodeRequest) -> None:
        self.request = request
        self.seed = int(request.request_id.partition("/")[0])
        self.draws = tuple([SampledToken(request_id=request.request_id, token_id=token) for token in (OTHER, GUESS)])

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def params(self) -> SamplingParams:
        return ANY

    @property
    def tokens(self) -> Sequence[int]:
        """As many as there are; the last one's KV is not made yet."""
        return range(self.request.computed_len + 1)

    @property
    def new_tokens_left(self) -> int:
        return self.request.max_len - self.request.computed_len


class Found:
    """There is always a guess; one that a live worker would not find counts among those that are wrong."""

    def guess(self, num_tokens: int) -> list[int]:
        return [GUESS] * num_tokens


class SpeculatedRun(DecodeRun):
    """`phases`: that the worker computes. `rows`: of the step under way, guesses counted; `guess_s`: that passes of the
    draft model took before it; `made`: tokens beyond the first of each in the step that has ended."""

    def __init__(self, policy: DecodePolicy, speculation: Speculation, phases: Sequence[str]) -> None:
        super().__init__(policy)
        self.speculation = speculation
        self.rows = 0
        self.guess_s = 0.0
        self.num_drafted = 0
        self.made: list[tuple[str, int]] = []
        self._phases = phases
        self._times = StepTimes()
        self._passes = None if speculation.draft is None else DraftPasses(speculation.draft, speculation)
        self._answers: dict[str, SimAnswer] = {}
        self._changes = 0  # of the policy's requests, when those who had gone were forgotten
        self._batch: DecodeBatch | None = None
        self._drafts = Drafts(
            replace(policy.options, num_speculative_tokens=speculation.num_tokens),
            self._step_costs,
            make_draft=None if self._passes is None else _draft,
            pass_s=self._pass_s_of_late,
            make_lookup=_found,
        )

    def _step_costs(self) -> StepCosts | None:
        return self._times.costs(self._phases)

    def _pass_s_of_late(self) -> float:
        return 0.0 if self._passes is None else self._passes.pass_s

    def note(self, taken_s: float, prompt_tokens: int) -> None:
        """What the step that has begun takes, passes of the draft model aside."""
        entries = self._batch.entries if self._batch is not None else ()
        context_tokens = sum([entry.position + 1 for entry in entries])
        self._times.note(prompt_tokens, len(entries), context_tokens, taken_s, self.rows - len(entries))

    # as a DecodeRun

    def begin(self) -> DecodeSchedule:
        policy = self._policy
        self._forget()
        batch = policy.next_batch(self._drafts.wanted([self._answer(request) for request in policy.running]))
        self._drafts.begin(batch)
        self._batch = batch
        computed = {entry.request_id for entry in batch.entries}
        requests = [request for request in policy.running if request.request_id in computed]
        for request in requests:
            self._answer(request)
        self.guess_s = self._guess(batch)
        num_guesses = sum([len(self._guesses_of(entry.request_id)) for entry in batch.entries])
        self.rows = len(batch.entries) + num_guesses
        self.context_tokens = sum([entry.position + 1 for entry in batch.entries]) + num_guesses
        return DecodeSchedule(requests=requests, joined=batch.joined, preempted=batch.preempted)

    @property
    def steps_ahead(self) -> int:
        return 0

    def advance(self, steps: int) -> None:
        assert not steps, "each step has guesses of its own"

    def end(self) -> None:
        batch, self._batch = self._batch, None
        self.made, self.num_drafted = [], 0
        if batch is None or not batch.entries:
            return
        draws: list[SampledToken] = []
        for entry in batch.entries:
            num_guesses = len(self._guesses_of(entry.request_id))
            draws += self._drawn(self._answers[entry.request_id], entry.position + 1, num_guesses)
        _, counts = self._drafts.end(draws)
        self._policy.on_batch_done(batch, [(request_id, kept) for request_id, (_, kept) in counts.items()])
        for request_id, (drafted, kept) in counts.items():
            self.num_drafted += drafted
            self.made.append((request_id, kept - 1))
            draft = self._drafts.asked_of(request_id)
            if draft is not None:  # what it has read of wrong guesses is read again
                draft.num_read = min(draft.num_read, draft.length + kept - 1)

    def leave(self, request_id: str) -> None:
        """Lengths lag behind nowhere."""

    def settle(self) -> None:
        """Nor here."""

    # guesses

    def _answer(self, request: DecodeRequest) -> SimAnswer:
        answer = self._answers.get(request.request_id)
        if answer is None or answer.request is not request:
            answer = self._answers[request.request_id] = SimAnswer(request)
        return answer

    def _forget(self) -> None:
        """Those who are over, or elsewhere."""
        if self._changes == self._policy.num_changes:
            return
        self._changes = self._policy.num_changes
        for request_id in [name for name in self._answers if not self._policy.holds(name)]:
            del self._answers[request_id]
            self._drafts.forget(request_id)

    def _guesses_of(self, request_id: str) -> Sequence[int]:
        draft = self._drafts.asked_of(request_id)
        return self._drafts.of(request_id) if draft is None else draft.guesses

    def _drawn(self, answer: SimAnswer, position: int, num_guesses: int) -> list[SampledToken]:
        """Those that count: up to the first that was not guessed, or the one behind all guesses."""
        draws = []
        for at in range(position, position + num_guesses + 1):
            is_right = chance_of(answer.seed, at) < self.speculation.acceptance
            draws.append(answer.draws[is_right])
            if not is_right:
                break
        return draws

    def _guess(self, batch: DecodeBatch) -> float:
        """Seconds of the passes that guess."""
        if self._passes is None:
            return 0.0
        asked: list[tuple[Draft, int, bool]] = []
        for entry in batch.entries:
            draft = self._drafts.asked_of(entry.request_id)
            if draft is not None:
                has_run = entry.position > self._answers[entry.request_id].request.prompt_len
                asked.append((draft, entry.position + 1, has_run))
        return self._passes.guess(asked) if asked else 0.0


def _draft(request_id: str) -> Draft:
    return Draft(tokens=(), spec=_spec)


def _spec(position: int, guesses: Sequence[int]) -> SampleSpec:
    return SampleSpec(params=ANY, position=position)


def _found(answer: Answer) -> Lookup:
    return Found()

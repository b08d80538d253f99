"""DraftModel guesses the tokens that follow by a smaller model, before each step that runs them: speculative decoding.

    step with Drafts --> passes of the draft model, one for each guess --> the same step with the guesses in its chunks

(Leviathan et al., arXiv 2211.17192.) Its draws are keyed as the target's are, by (seed, position), and made by the same
SampleSpecs: where both models think alike, the draft model draws the very token that the target will, at any
temperature, which is what makes a guess stand here. It owns pages of its own for as many tokens as the target has, and
is given the same page numbers; what it has not read of a request it reads when it is asked to guess, a part in a step.
A guess that fails is one that is not made. One thread calls it, as it does its engine.
"""

from __future__ import annotations

import logging
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

from engine import device as devices
from engine.errors import raise_if_broken
from engine.loading.load import LoadedModel
from engine.types import MOST_READ, PASS_SEEN, Chunk, Draft, SampledToken, SampleSpec, Step

log = logging.getLogger(__name__)


class Guesser(ABC):
    """What guesses, before each step that runs its guesses: a draft model, or heads (engine/heads.py)."""

    NAME: str  # in its log
    most = sys.maxsize  # guesses of a request in a step

    def __init__(self) -> None:
        self.spent_s = 0.0  # on guesses, in all
        self.pass_s = 0.0  # of late, on each pass that guesses one more

    def with_guesses(self, step: Step) -> Step:
        """Each chunk that has a Draft runs its guesses behind its token, and draws behind each."""
        asked = [chunk for chunk in step.chunks if chunk.draft is not None]
        if not asked:
            return step
        began_s = time.perf_counter()
        try:
            self._guess(asked)
        except Exception as error:
            raise_if_broken(error)
            log.exception("%s could not guess; the step runs without", self.NAME)
            for chunk in asked:
                if chunk.draft is not None:
                    chunk.draft.guesses, chunk.draft.num_read = [], 0
        self.spent_s += time.perf_counter() - began_s
        return replace(step, chunks=[_with_guesses(chunk) for chunk in step.chunks])

    @abstractmethod
    def _guess(self, asked: Sequence[Chunk]) -> None:
        """Give the Draft of each its guesses, as many as it wants at most."""

    @abstractmethod
    def end(self, step: Step) -> None:
        """That step, with its guesses, was run."""

    def _note_pass(self, began_s: float) -> None:
        taken_s = time.perf_counter() - began_s
        self.pass_s += (taken_s - self.pass_s) * (PASS_SEEN if self.pass_s else 1.0)


class DraftModel(Guesser):
    NAME = "the draft model"

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__()
        self._loaded = loaded
        self._max_len = loaded.info.max_model_len

    def end(self, step: Step) -> None:
        """It remembers by Drafts."""

    def _guess(self, asked: Sequence[Chunk]) -> None:
        first, left = [], MOST_READ
        for chunk in asked:
            part = self._next_part(chunk, left)
            left -= len(part.token_ids) - (part.sample is not None)
            first.append(part)
        began_s = time.perf_counter()
        self._take(asked, self._run([part for part in first if part.token_ids]))
        if all(len(part.token_ids) == 1 for part in first):
            self._note_pass(began_s)
        for number in range(1, max(_draft(chunk).num_wanted for chunk in asked)):
            began_s = time.perf_counter()
            going = [chunk for chunk in asked if len(_draft(chunk).guesses) == number < _draft(chunk).num_wanted]
            if not going:
                break
            self._take(going, self._run([_one_more(chunk) for chunk in going]))
            self._note_pass(began_s)

    def _next_part(self, chunk: Chunk, most: int) -> Chunk:
        """Of the request's tokens those that were not read; drawn from if they are the last."""
        draft, length = _draft(chunk), chunk.start + 1
        draft.go_back()
        tokens, draft.guesses, draft.length = draft.tokens, [], length
        begin = min(draft.num_read, length - 1)
        end = min(length, begin + most + 1)
        if length + draft.num_wanted > self._max_len:
            end = begin
        draft.num_read = end
        spec = draft.spec(length, ()) if end == length else None
        return replace(
            chunk, token_ids=tokens[begin:end], start=begin, sample=spec, scores=(), draft=None, adapter=None
        )

    def _run(self, chunks: Sequence[Chunk]) -> list[SampledToken]:
        if not chunks:
            return []
        with devices.current(self._loaded.model.device):
            return self._loaded.steps.begin(Step(chunks=chunks)).result()

    def _take(self, asked: Sequence[Chunk], drawn: Sequence[SampledToken]) -> None:
        tokens = {token.request_id: token.token_id for token in drawn if not token.error}
        for chunk in asked:
            if chunk.request_id in tokens:
                _draft(chunk).guesses.append(tokens[chunk.request_id])


def _draft(chunk: Chunk) -> Draft:
    assert chunk.draft is not None
    return chunk.draft


def _one_more(chunk: Chunk) -> Chunk:
    draft = _draft(chunk)
    at = draft.length + len(draft.guesses)
    draft.num_read = at
    return replace(
        chunk,
        token_ids=draft.guesses[-1:],
        start=at - 1,
        sample=draft.spec(at, draft.guesses),
        scores=(),
        draft=None,
        adapter=None,  # it guesses as the base does
    )


def _with_guesses(chunk: Chunk) -> Chunk:
    draft = chunk.draft
    if draft is None or not draft.guesses:
        return replace(chunk, draft=None) if draft is not None else chunk
    length, guesses = chunk.start + 1, draft.guesses
    scores: list[SampleSpec] = [draft.spec(length + i, guesses[:i]) for i in range(len(guesses))]
    return replace(
        chunk,
        token_ids=[*chunk.token_ids, *guesses],
        scores=scores,
        sample=draft.spec(length + len(guesses), guesses),
        draft=None,
    )

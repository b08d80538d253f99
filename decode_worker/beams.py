"""BeamSearch decides which beams of one request live on, which hypotheses are finished, and when the search ends.

It never reads a clock and knows no pages: it is given what follows each beam, and says from which beam each of the next
goes on. The rules are transformers' (GenerationMixin._beam_search), sums and quotients in float32 as there:

    rows of candidates --> ranked by their sums --> of the first num_beams those that end: [finished], at most num_beams
                                               \\--> the first num_beams that go on: [live]

Of equal sums that of the first beam goes first, and of its tokens the lowest.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

from engine.types import FinishReason, SamplingParams, TokenLogprob, finish_reason

_score = attrgetter("score")


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """`score`: the sum of its tokens' log-probabilities; of a finished one divided by a power of its length."""

    token_ids: tuple[int, ...]
    score: float
    reason: FinishReason | None = None


class BeamSearch:
    def __init__(self, params: SamplingParams, eos_token_ids: Sequence[int]) -> None:
        assert params.beam_search is not None, "a search without beams"
        self._params = params
        self._options = params.beam_search
        self._eos_token_ids = eos_token_ids
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
        self.num_candidates = self._options.num_beams + len(ends)  # of a row: num_beams of them go on
        self.live = [Hypothesis(token_ids=(), score=0.0)]
        self._finished: list[Hypothesis] = []  # the best first

    def step(self, rows: Sequence[Sequence[TokenLogprob]]) -> list[int]:
        """What may follow each live beam, the likeliest first. Returns of each that is live now the number of the beam
        that it goes on from."""
        assert len(rows) == len(self.live), f"{len(rows)} rows for {len(self.live)} beams"
        ranked = [
            (-_float32(beam.score + each.logprob), number, each.token_id)
            for number, (beam, row) in enumerate(zip(self.live, rows, strict=True))
            for each in row
        ]
        ranked.sort()
        parents: list[int] = []
        live: list[Hypothesis] = []
        finished: list[Hypothesis] = []
        for rank, (negated, number, token_id) in enumerate(ranked):
            is_late = rank >= self._options.num_beams
            if is_late and len(live) == self._options.num_beams:
                break
            before = self.live[number].token_ids
            length = len(before) + 1
            reason = finish_reason(self._params, token_id, length, self._eos_token_ids)
            if reason is None and len(live) < self._options.num_beams:
                live.append(Hypothesis(token_ids=(*before, token_id), score=-negated))
                parents.append(number)
            elif reason is not None and not is_late:
                score = self._per_length(-negated, length)
                finished.append(Hypothesis(token_ids=(*before, token_id), score=score, reason=reason))
        self._finished = sorted([*self._finished, *finished], key=_score, reverse=True)[: self._options.num_beams]
        self.live = live
        return parents

    @property
    def is_over(self) -> bool:
        if not self.live:
            return True
        if len(self._finished) < self._options.num_beams:
            return False
        return self._options.early_stopping is True or self._best_possible() <= self._finished[-1].score

    def _best_possible(self) -> float:
        """That the best beam may reach, as transformers reckons."""
        is_patient = self._options.early_stopping == "never" and self._options.length_penalty > 0
        length = self._params.max_tokens if is_patient else len(self.live[0].token_ids)
        return self._per_length(self.live[0].score, length)

    def _per_length(self, score: float, length: int) -> float:
        return _float32(score / _float32(length**self._options.length_penalty))

    @property
    def best(self) -> list[Hypothesis]:
        """The n best, once it is over. Where bans have left fewer, the last of them stands for those, too."""
        found = self._finished[: self._params.n]
        return found + found[-1:] * (self._params.n - len(found))


def _float32(value: float) -> float:
    """Rounded to the nearest float32."""
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded

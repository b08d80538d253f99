"""From the tokens of a submission to the messages of its answer: text, stop strings, usage, timeline, receipt.

It owns what a client reads; it sends nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.front.detokenizer import Detokenizer
from cluster.front.tokenizer import TextCodec
from cluster.router.live.requests import ChoiceUpdate, LiveRequest, Submission
from engine.types import FinishReason, SamplingParams
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_TO_PROTO


class ChoiceAnswer:
    """Turns the tokens of one choice into messages."""

    def __init__(
        self,
        request_id: str,
        index: int,
        params: SamplingParams,
        codec: TextCodec | None,
        shown_special: frozenset[int] = frozenset(),
        *,
        prompt_ids: Sequence[int] = (),
        shows_stop_token: bool = False,
    ) -> None:
        """`prompt_ids`: or the last of them; the text goes on from theirs. `shows_stop_token`: the text has that of a
        token that ended the request by its id."""
        self._request_id = request_id
        self._index = index
        self._shows_stop_token = shows_stop_token
        self._text = Detokenizer(
            codec.backend if codec is not None else None,
            stop=params.stop,
            min_tokens=params.min_tokens,
            hidden=codec.special_ids - shown_special if codec is not None else None,
            before=prompt_ids,
        )
        self.num_tokens = 0

    def response(self, update: ChoiceUpdate) -> generate_pb2.GenerateResponse:
        """The message for these tokens. If they complete a stop string it ends the choice, whatever `finish` says."""
        ids, details, finish = update.ids, update.details, update.finish
        # A token that ended the request by its id (EOS, stop_token_ids) is part of the tokens, not always of the text.
        shown = ids[:-1] if finish is FinishReason.STOP and not self._shows_stop_token else ids
        text = self._text.push(shown)
        if self._text.stopped:
            finish = FinishReason.STOP
            ids = ids[: self._text.num_tokens - self.num_tokens]
        elif finish is not None:
            text += self._text.finish()
            if self._text.stopped:
                finish = FinishReason.STOP
        response = generate_pb2.GenerateResponse(
            request_id=self._request_id, index=self._index, text=text, token_ids=ids
        )
        if details:
            self._add_details(response, details[: len(ids)])
        self.num_tokens += len(ids)
        if finish is not None:
            response.finish_reason = FINISH_REASON_TO_PROTO[finish]
            response.stop_string = self._text.stop_string or ""
        return response

    def _add_details(self, response: generate_pb2.GenerateResponse, details: Sequence[pb.TokenOutput]) -> None:
        """Log-probabilities have come with every token, or with none."""
        first = details[0]
        if first.HasField("logprobs"):
            response.logprobs.extend(each.logprobs for each in details)
        if not self.num_tokens:
            response.prompt_logprobs.extend(first.prompt_logprobs)
        if first.hypotheses:
            response.score = first.hypotheses[0].score


def merged(updates: Sequence[ChoiceUpdate]) -> Sequence[ChoiceUpdate]:
    """One for each choice, in the order in which they came first."""
    if len(updates) == 1:
        return updates
    merged: dict[int, ChoiceUpdate] = {}
    for update in updates:
        if known := merged.get(update.choice):
            known.ids += update.ids
            known.details += update.details
            known.finish = update.finish or known.finish
        else:
            merged[update.choice] = ChoiceUpdate(update.choice, [*update.ids], update.details, update.finish)
    return [*merged.values()]


def conclude(response: generate_pb2.GenerateResponse, submission: Submission, num_tokens: int) -> None:
    """Put usage, timeline and receipts into the last message of the call."""
    first: LiveRequest = submission.choices[0]
    prompt_tokens, cached_tokens = len(first.prompt_ids), first.cached_tokens
    usage = response.usage
    usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens = prompt_tokens, num_tokens, cached_tokens
    response.timeline.CopyFrom(first.timeline_to_proto())
    if (receipt := first.receipt_to_proto()) is not None:
        response.receipt.CopyFrom(receipt)
    response.moved.extend(first.moved)


def trailers(submission: Submission) -> tuple[tuple[str, str], ...]:
    """The request's id, and where its time went."""
    phases = submission.choices[0].timeline.phases()
    text = ";".join(f"{name}={seconds:.6f}" for name, seconds in phases.items())
    return ("kvrelay-request-id", submission.id), ("kvrelay-timeline", text)


class WholeAnswer:
    """Puts the parts of a stream together to an answer in one message."""

    def __init__(self) -> None:
        self._answer = generate_pb2.GenerateOnceResponse()
        self._choices: dict[int, generate_pb2.Choice] = {}
        self._texts: dict[int, list[str]] = {}

    def add(self, part: generate_pb2.GenerateResponse) -> None:
        choice = self._choices.setdefault(part.index, generate_pb2.Choice(index=part.index))
        self._texts.setdefault(part.index, []).append(part.text)
        choice.token_ids.extend(part.token_ids)
        choice.logprobs.extend(part.logprobs)
        if part.finish_reason:
            choice.finish_reason = part.finish_reason
            choice.stop_string = part.stop_string
        if part.HasField("score"):
            choice.score = part.score
        self._answer.prompt_logprobs.extend(part.prompt_logprobs)
        if part.HasField("usage"):
            self._conclude(part)

    def _conclude(self, last: generate_pb2.GenerateResponse) -> None:
        self._answer.request_id = last.request_id
        self._answer.usage.CopyFrom(last.usage)
        self._answer.timeline.CopyFrom(last.timeline)
        if last.HasField("receipt"):
            self._answer.receipt.CopyFrom(last.receipt)
        self._answer.moved.extend(last.moved)

    def message(self) -> generate_pb2.GenerateOnceResponse:
        for index, choice in sorted(self._choices.items()):
            choice.text = "".join(self._texts[index])
            self._answer.choices.append(choice)
        return self._answer

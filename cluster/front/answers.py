"""From the tokens of a submission to the messages of its answer: text, stop strings, usage, timeline, receipt.

It owns what a client reads; it sends nothing and asks nobody.
"""

from __future__ import annotations

from collections.abc import Sequence

from cluster.front.detokenizer import Detokenizer
from cluster.front.tokenizer import TextCodec
from cluster.router.live_requests import ChoiceUpdate, LiveRequest, Submission
from engine.types import FinishReason, SamplingParams
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_TO_PROTO


class ChoiceAnswer:
    """Turns the tokens of one choice into messages."""

    def __init__(self, request_id: str, index: int, params: SamplingParams, codec: TextCodec | None) -> None:
        self._request_id = request_id
        self._index = index
        self._text = Detokenizer(
            codec.backend if codec is not None else None, stop=params.stop, min_tokens=params.min_tokens
        )
        self.num_tokens = 0

    def response(self, tokens: Sequence[pb.TokenOutput], finish: FinishReason | None) -> generate_pb2.GenerateResponse:
        """The message for these tokens. If they complete a stop string it ends the choice, whatever `finish` says."""
        ids = [token.token_id for token in tokens]
        # A token that ended the request by its id (EOS, stop_token_ids) is part of the tokens, not of the text.
        shown = ids[:-1] if finish is FinishReason.STOP else ids
        text = self._text.push(shown)
        if self._text.stopped:
            finish = FinishReason.STOP
            ids = ids[: self._text.num_tokens - self.num_tokens]
        elif finish is not None:
            text += self._text.finish()
            if self._text.stopped:
                finish = FinishReason.STOP
        self.num_tokens += len(ids)
        response = generate_pb2.GenerateResponse(
            request_id=self._request_id, index=self._index, text=text, token_ids=ids
        )
        if tokens and tokens[0].HasField("logprobs"):
            response.logprobs.extend(token.logprobs for token in tokens[: len(ids)])
        if finish is not None:
            response.finish_reason = FINISH_REASON_TO_PROTO[finish]
            response.stop_string = self._text.stop_string or ""
        return response


def merged(updates: Sequence[ChoiceUpdate]) -> list[tuple[int, list[pb.TokenOutput], FinishReason | None]]:
    """One entry for each choice, in the order in which they came first."""
    if len(updates) == 1:
        return [(updates[0].choice, updates[0].tokens, updates[0].finish)]
    merged: dict[int, ChoiceUpdate] = {}
    for update in updates:
        if known := merged.get(update.choice):
            known.tokens = [*known.tokens, *update.tokens]
            known.finish = update.finish or known.finish
        else:
            merged[update.choice] = ChoiceUpdate(update.choice, update.tokens, update.finish)
    return [(update.choice, update.tokens, update.finish) for update in merged.values()]


def conclude(response: generate_pb2.GenerateResponse, submission: Submission, num_tokens: int) -> None:
    """Put usage, timeline and receipt into the last message of the call."""
    first: LiveRequest = submission.choices[0]
    response.usage.prompt_tokens = len(first.prompt_ids)
    response.usage.completion_tokens = num_tokens
    response.usage.cached_tokens = first.cached_tokens
    response.timeline.CopyFrom(first.timeline_to_proto())
    if (receipt := first.receipt_to_proto()) is not None:
        response.receipt.CopyFrom(receipt)


def trailers(submission: Submission) -> tuple[tuple[str, str], ...]:
    """The request's id, and where its time went."""
    phases = submission.choices[0].timeline.phases()
    text = ";".join(f"{name}={seconds:.6f}" for name, seconds in phases.items())
    return ("kvrelay-request-id", submission.id), ("kvrelay-timeline", text)


def append(choice: generate_pb2.Choice, part: generate_pb2.GenerateResponse) -> None:
    """Put another part of a stream into the choice of an answer in one message."""
    choice.text += part.text
    choice.token_ids.extend(part.token_ids)
    choice.logprobs.extend(part.logprobs)
    if part.finish_reason:
        choice.finish_reason = part.finish_reason
        choice.stop_string = part.stop_string


def copy_end(answer: generate_pb2.GenerateOnceResponse, part: generate_pb2.GenerateResponse) -> None:
    """Put what the last part of a stream concludes into an answer in one message."""
    answer.request_id = part.request_id
    answer.usage.CopyFrom(part.usage)
    answer.timeline.CopyFrom(part.timeline)
    if part.HasField("receipt"):
        answer.receipt.CopyFrom(part.receipt)

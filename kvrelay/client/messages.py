"""Translates between the public values (kvrelay.client.types) and the wire's messages (kvrelay.v1).

It opens no socket and knows no gRPC, only protobuf. What the wire cannot carry becomes INVALID_ARGUMENT here; whether
a value makes sense is for the server to say.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, TypeVar

from engine.kept import POLICY_KEYS
from engine.types import FinishReason, TokenLogprob
from kvrelay.client.types import (
    Choice,
    ClusterStatus,
    Completion,
    Delta,
    EndedRequest,
    ExplainedRequest,
    GenerateOptions,
    KvrelayError,
    PairTrouble,
    PendingWorker,
    PoolState,
    PositionLogprobs,
    Receipt,
    RouterLoad,
    ServedModel,
    Span,
    Timeline,
    Usage,
    WorkerState,
)
from kvrelay.v1 import cluster_pb2, generate_pb2
from worker.convert import EARLY_STOPPING_TO_PROTO

_REPEATED = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words")
_BEAMS = ("num_beams", "length_penalty", "early_stopping")
_FORMS = ("json_schema", "json_object", "regex", "choice", "grammar")


def build_request(prompt: str | Sequence[int], options: GenerateOptions) -> generate_pb2.GenerateRequest:
    """The wire's form. Raises KvrelayError for an unknown option or a value that the wire cannot carry."""
    values: dict[str, Any] = {key: value for key, value in options.items() if value is not None}
    request = generate_pb2.GenerateRequest()
    for key in ("model", "adapter", "request_id", "cache_salt", "prefill_worker", "decode_worker"):
        _set(request, key, values.pop(key, ""))
    for key in ("slo_ttft_ms", "slo_tpot_ms"):
        _set(request, key, values.pop(key, 0.0))
    _set(request, "priority", values.pop("priority", 0))
    for key in POLICY_KEYS:
        if (tokens := values.pop(f"kv_{key}", None)) is not None:
            request.kv_policy.SetInParent()
            _set(request.kv_policy, key, tokens)
    if isinstance(prompt, str):
        _set(request, "text", prompt, "prompt")
    else:
        request.token_ids.SetInParent()
        _extend(request.token_ids.ids, "prompt token ids", prompt)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    request.sampling.SetInParent()
    for key, value in values.items():
        if key not in GenerateOptions.__annotations__:
            known = ", ".join(GenerateOptions.__annotations__)
            raise KvrelayError("INVALID_ARGUMENT", f"{key} is no option of generate; there are {known}")
        if key in _REPEATED:
            _extend(getattr(request.sampling, key), key, value)
        elif key == "logit_bias":
            _update(request.sampling.logit_bias, key, value)
        elif key in _FORMS:
            _set_form(request.sampling, key, value)
        elif key in _BEAMS:
            _set_beams(request.sampling.beam_search, key, value)
        else:
            _set(request.sampling, key, value)
    return request


def _set_form(sampling: generate_pb2.SamplingParams, key: str, value: Any) -> None:
    if value is False and key == "json_object":
        return
    if form := sampling.structured.WhichOneof("form"):
        raise KvrelayError("INVALID_ARGUMENT", f"{form} and {key} are given; an answer has one form")
    if key == "choice":
        sampling.structured.choice.SetInParent()
        _extend(sampling.structured.choice.texts, key, [value] if isinstance(value, str) else value)
        return
    if key == "json_schema" and not isinstance(value, str):
        try:
            value = json.dumps(value)
        except (TypeError, ValueError, RecursionError) as error:
            raise _cannot_carry(key, value, error) from error
    _set(sampling.structured, key, value)


def _set_beams(search: generate_pb2.BeamSearch, key: str, value: Any) -> None:
    search.SetInParent()
    if key != "early_stopping":
        _set(search, key, value)
    elif value in EARLY_STOPPING_TO_PROTO:
        _set(search, key, EARLY_STOPPING_TO_PROTO[value])
    else:
        raise KvrelayError("INVALID_ARGUMENT", f'{key} is {value!r}; give True, False or "never"')


def _set(message: Any, key: str, value: Any, name: str | None = None) -> None:
    try:
        setattr(message, key, value)
    except (TypeError, ValueError) as error:
        raise _cannot_carry(name or key, value, error) from error


def _extend(target: Any, name: str, values: Any) -> None:
    try:
        target.extend(values)
    except (TypeError, ValueError) as error:
        raise _cannot_carry(name, values, error) from error


def _update(target: Any, name: str, values: Any) -> None:
    try:
        target.update(values)
    except (TypeError, ValueError) as error:
        raise _cannot_carry(name, values, error) from error


def _cannot_carry(name: str, value: Any, error: Exception) -> KvrelayError:
    """Python's and protobuf's reasons name the value or its type; a long one is cut."""
    shown = repr(value)
    shown = shown if len(shown) <= 40 else shown[:37] + "..."
    return KvrelayError("INVALID_ARGUMENT", f"{name} is {shown}, which cannot be sent: {error}")


class Fold:
    """Gathers a stream's messages into one Completion. Cheap for each message; the work is done in `completion`."""

    def __init__(self) -> None:
        self._request_id = ""
        self._parts: dict[int, list[generate_pb2.GenerateResponse]] = {}
        self._last: generate_pb2.GenerateResponse | None = None

    def add(self, message: generate_pb2.GenerateResponse) -> None:
        self._request_id = message.request_id or self._request_id
        self._parts.setdefault(message.index, []).append(message)
        if message.HasField("usage") or message.HasField("timeline"):
            self._last = message

    def completion(self) -> Completion:
        """All that has come so far."""
        end = self._last
        return Completion(
            request_id=self._request_id,
            choices=tuple(_join(index, parts) for index, parts in sorted(self._parts.items())),
            usage=usage_from(end.usage) if end is not None and end.HasField("usage") else None,
            timeline=timeline_from(end.timeline) if end is not None and end.HasField("timeline") else None,
            receipt=receipt_from(end.receipt) if end is not None and end.HasField("receipt") else None,
            moved=tuple(receipt_from(receipt) for receipt in end.moved) if end is not None else (),
            prompt_logprobs=logprobs_from([each for part in self._parts.get(0, ()) for each in part.prompt_logprobs]),
        )


def _join(index: int, parts: Sequence[generate_pb2.GenerateResponse]) -> Choice:
    reasons = [reason for part in parts if (reason := finish_reason_from(part.finish_reason)) is not None]
    return Choice(
        index=index,
        text="".join(part.text for part in parts),
        token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
        logprobs=tuple(logprobs for part in parts for logprobs in logprobs_from(part.logprobs)),
        finish_reason=reasons[-1] if reasons else None,
        stop_string=next((part.stop_string for part in parts if part.stop_string), ""),
        score=_score_of(parts[-1]),
    )


def _score_of(message: generate_pb2.GenerateResponse | generate_pb2.Choice) -> float | None:
    return message.score if message.HasField("score") else None


def delta_from(message: generate_pb2.GenerateResponse) -> Delta:
    return Delta(
        index=message.index,
        text=message.text,
        token_ids=tuple(message.token_ids),
        logprobs=logprobs_from(message.logprobs) if message.logprobs else (),
        finish_reason=finish_reason_from(message.finish_reason),
        stop_string=message.stop_string,
        score=_score_of(message),
    )


def completion_from(answer: generate_pb2.GenerateOnceResponse) -> Completion:
    choices = tuple(
        Choice(
            index=choice.index,
            text=choice.text,
            token_ids=tuple(choice.token_ids),
            logprobs=logprobs_from(choice.logprobs),
            finish_reason=finish_reason_from(choice.finish_reason),
            stop_string=choice.stop_string,
            score=_score_of(choice),
        )
        for choice in answer.choices
    )
    return Completion(
        request_id=answer.request_id,
        choices=choices,
        usage=usage_from(answer.usage) if answer.HasField("usage") else None,
        timeline=timeline_from(answer.timeline) if answer.HasField("timeline") else None,
        receipt=receipt_from(answer.receipt) if answer.HasField("receipt") else None,
        moved=tuple(receipt_from(receipt) for receipt in answer.moved),
        prompt_logprobs=logprobs_from(answer.prompt_logprobs),
    )


_FINISH_REASONS: dict[int, FinishReason] = {
    int(generate_pb2.FINISH_REASON_STOP): FinishReason.STOP,
    int(generate_pb2.FINISH_REASON_LENGTH): FinishReason.LENGTH,
    int(generate_pb2.FINISH_REASON_ABORT): FinishReason.ABORT,
}


def finish_reason_from(value: int) -> FinishReason | None:
    return _FINISH_REASONS.get(value)


def logprobs_from(positions: Sequence[generate_pb2.PositionLogprobs]) -> tuple[PositionLogprobs, ...]:
    return tuple(
        PositionLogprobs(chosen=_logprob(position.chosen), top=tuple(_logprob(token) for token in position.top))
        for position in positions
    )


def _logprob(token: generate_pb2.TokenLogprob) -> TokenLogprob:
    return TokenLogprob(token_id=token.token_id, logprob=token.logprob)


def usage_from(usage: generate_pb2.Usage) -> Usage:
    return _copy(Usage, usage)


def timeline_from(timeline: generate_pb2.Timeline) -> Timeline:
    return _copy(Timeline, timeline, phases_s={phase.name: phase.seconds for phase in timeline.phases})


def receipt_from(receipt: generate_pb2.HandoffReceipt) -> Receipt:
    return _copy(Receipt, receipt, rank_bytes=tuple(receipt.rank_bytes))


def model_from(info: generate_pb2.GetModelInfoResponse) -> ServedModel:
    usual = {field.name: float(f"{value:.7g}") for field, value in info.usual_sampling.ListFields()}
    return _copy(ServedModel, info, eos_token_ids=tuple(info.eos_token_ids), usual_sampling=usual)


def pending_from(answer: cluster_pb2.ScaleResponse) -> tuple[PendingWorker, ...]:
    return tuple(_copy(PendingWorker, worker) for worker in answer.pending)


def pool_from(answer: cluster_pb2.ScaleResponse) -> PoolState:
    return PoolState(replicas=answer.replicas, pending=pending_from(answer))


def load_from(answer: cluster_pb2.GetLoadResponse) -> RouterLoad:
    requests = tuple(
        _copy(
            EndedRequest,
            request,
            before_first_s=tuple(request.before_first_s),
            after_first_s=tuple(request.after_first_s),
        )
        for request in answer.requests
    )
    return RouterLoad(requests=requests, whole_s=answer.whole_s)


def explained_from(requests: Iterable[cluster_pb2.ExplainedRequest]) -> tuple[ExplainedRequest, ...]:
    return tuple(_copy(ExplainedRequest, each, spans=_spans_from(each.spans)) for each in requests)


def _spans_from(spans: Iterable[cluster_pb2.Span]) -> tuple[Span, ...]:
    return tuple(_copy(Span, span, details=_spans_from(span.details)) for span in spans)


def status_from(status: cluster_pb2.GetStatusResponse) -> ClusterStatus:
    workers = tuple(
        _copy(
            WorkerState,
            worker,
            counters=dict(worker.counters),
            limits=dict(worker.limits),
            step_costs=dict(worker.step_costs),
            pairs=tuple(_copy(PairTrouble, pair) for pair in worker.pairs),
        )
        for worker in status.workers
    )
    plain = {"counters": dict(status.counters), "limits": dict(status.limits), "models": tuple(status.models)}
    return _copy(ClusterStatus, status, workers=workers, **plain)


T = TypeVar("T")


def _copy(kind: type[T], message: Any, **others: Any) -> T:
    """A value of `kind` from the message's fields of the same names, and from `others`."""
    names = (field.name for field in fields(kind) if field.name not in others)  # type: ignore[arg-type]
    return kind(**{name: getattr(message, name) for name in names}, **others)

"""Between the wire's messages and the engine's types. No defaults are decided here but those of the public API."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from engine.pages.news import HASH_BYTES, NO_NEWS, PageHash, PageNews
from engine.types import BeamOptions, FinishReason, LengthRope, ModelInfo, SampledToken, SamplingParams, TokenLogprob
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from worker.steps.costs import StepCosts

FINISH_REASON_TO_PROTO = {
    FinishReason.STOP: generate_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: generate_pb2.FINISH_REASON_LENGTH,
    FinishReason.ABORT: generate_pb2.FINISH_REASON_ABORT,
}
EARLY_STOPPING_TO_PROTO: dict[bool | str, generate_pb2.EarlyStopping] = {
    False: generate_pb2.EARLY_STOPPING_UNSPECIFIED,
    True: generate_pb2.EARLY_STOPPING_TRUE,
    "never": generate_pb2.EARLY_STOPPING_NEVER,
}
EARLY_STOPPING_FROM_PROTO: dict[int, Any] = {value: key for key, value in EARLY_STOPPING_TO_PROTO.items()}
FINISH_REASON_FROM_PROTO = {value: key for key, value in FINISH_REASON_TO_PROTO.items()}


def sampling_from_proto(message: generate_pb2.SamplingParams, *, seed: int = 0) -> SamplingParams:
    """What is set in the message, and the defaults of SamplingParams for the rest. `seed`: where it has none."""
    given: dict[str, Any] = {"seed": seed}
    for field, value in message.ListFields():
        given[field.name] = MADE.get(field.name, _exact)(value)
    given.pop("bad_words", None)  # the front has made tokens of them
    if structured := given.pop("structured", None):
        given["grammar"] = structured.grammar  # likewise: whatever the form was
    return SamplingParams(**given)


def sampling_to_proto(params: SamplingParams) -> generate_pb2.SamplingParams:
    """Every number set, so that both workers see the same request."""
    lists: dict[str, Any] = {key: getattr(params, key) for key in ("stop", "stop_token_ids", "allowed_token_ids")}
    lists["logit_bias"] = dict(params.logit_bias)
    lists["bad_token_ids"] = [generate_pb2.TokenIds(ids=ids) for ids in params.bad_token_ids]
    return generate_pb2.SamplingParams(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        top_n_sigma=params.top_n_sigma,
        typical_p=params.typical_p,
        seed=params.seed,
        max_tokens=params.max_tokens,
        min_tokens=params.min_tokens,
        ignore_eos=params.ignore_eos,
        logprobs=params.logprobs,
        repetition_penalty=params.repetition_penalty,
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        n=params.n,
        prompt_logprobs=params.prompt_logprobs,
        structured=generate_pb2.StructuredOutput(grammar=params.grammar) if params.grammar else None,
        beam_search=None if params.beam_search is None else _beams_to_proto(params.beam_search),
        **{key: value for key, value in lists.items() if value},
    )


def _beams_to_proto(options: BeamOptions) -> generate_pb2.BeamSearch:
    return generate_pb2.BeamSearch(
        num_beams=options.num_beams,
        length_penalty=options.length_penalty,
        early_stopping=EARLY_STOPPING_TO_PROTO[options.early_stopping],
    )


def _beams_from_proto(message: generate_pb2.BeamSearch) -> BeamOptions:
    given = {field.name: value for field, value in message.ListFields() if field.name != "early_stopping"}
    stopping = EARLY_STOPPING_FROM_PROTO.get(message.early_stopping, False)
    return BeamOptions(**{"num_beams": 0, **given, "early_stopping": stopping})


def model_info_to_proto(info: ModelInfo) -> generate_pb2.GetModelInfoResponse:
    usual: Mapping[str, Any] = info.usual_sampling
    return generate_pb2.GetModelInfoResponse(
        name=info.name,
        architecture=info.architecture,
        dtype=info.dtype,
        vocab_size=info.vocab_size,
        max_model_len=info.max_model_len,
        num_params=info.num_params,
        eos_token_ids=info.eos_token_ids,
        fingerprint=info.fingerprint,
        usual_sampling=generate_pb2.SamplingParams(**usual) if usual else None,
    )


def rope_to_proto(rope: LengthRope | None) -> pb.LengthRope | None:
    return None if rope is None else pb.LengthRope(**asdict(rope))


def rope_from_proto(hello: pb.WorkerHello) -> LengthRope | None:
    if not hello.HasField("rope"):
        return None
    return LengthRope(**{field.name: getattr(hello.rope, field.name) for field in fields(LengthRope)})


def step_costs_to_proto(costs: StepCosts) -> pb.StepCosts:
    return pb.StepCosts(**asdict(costs))


def step_costs_from_proto(costs: pb.StepCosts) -> StepCosts:
    return StepCosts(**{field.name: getattr(costs, field.name) for field in fields(StepCosts)})


def page_news_to_proto(news: PageNews, report: pb.WorkerReport) -> None:
    report.found_pages, report.lost_pages, report.pages_anew = b"".join(news.found), b"".join(news.lost), news.is_all


def page_news_from_proto(report: pb.WorkerReport) -> PageNews:
    if not (report.found_pages or report.lost_pages or report.pages_anew):
        return NO_NEWS
    return PageNews(_hashes(report.found_pages), _hashes(report.lost_pages), report.pages_anew)


def _hashes(joined: bytes) -> tuple[PageHash, ...]:
    return tuple(joined[start : start + HASH_BYTES] for start in range(0, len(joined), HASH_BYTES))


def token_output(
    state: pb.RequestState, index: int, token: SampledToken, reason: FinishReason | None
) -> pb.TokenOutput:
    """The token as output `index` of the request."""
    output = pb.TokenOutput(request_id=state.request_id, attempt=state.attempt, index=index, token_id=token.token_id)
    if token.logprob is not None:
        output.logprobs.CopyFrom(logprobs_to_proto(token.logprob, token.top_logprobs))
    if reason is not None:
        output.finish_reason = FINISH_REASON_TO_PROTO[reason]
    return output


def add_token(outputs: pb.Outputs, token: pb.TokenOutput) -> None:
    """To the columns, if it brings nothing but itself."""
    brings_numbers = token.finish_reason or token.drafted or token.HasField("logprobs")
    if brings_numbers or token.prompt_logprobs or token.heavy_pages or token.hypotheses:
        outputs.tokens.append(token)
        return
    outputs.request_ids.append(token.request_id)
    outputs.indexes.append(token.index)
    outputs.token_ids.append(token.token_id)


def failure_cause(token: SampledToken) -> pb.FailureCause:
    """Of one that could not be drawn."""
    if token.is_own_fault:
        return pb.FAILURE_CAUSE_REQUEST
    return pb.FAILURE_CAUSE_WORKER if token.is_unable else pb.FAILURE_CAUSE_STEP


def logprobs_to_proto(chosen: TokenLogprob, top: Sequence[TokenLogprob]) -> generate_pb2.PositionLogprobs:
    return generate_pb2.PositionLogprobs(
        chosen=_logprob_to_proto(chosen), top=[_logprob_to_proto(each) for each in top]
    )


def _logprob_to_proto(logprob: TokenLogprob) -> generate_pb2.TokenLogprob:
    return generate_pb2.TokenLogprob(token_id=logprob.token_id, logprob=logprob.logprob)


def _exact(value: Any) -> Any:
    """A float32 field as the decimal that was meant: 0.7, not 0.699999988079071."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


MADE: dict[str, Callable[[Any], Any]] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "allowed_token_ids": tuple,
    "logit_bias": lambda biases: tuple((token_id, _exact(bias)) for token_id, bias in sorted(biases.items())),
    "bad_token_ids": lambda lists: tuple(tuple(each.ids) for each in lists),
    "beam_search": _beams_from_proto,
}

"""Checks what clients send: from a GenerateRequest to a NewRequest that can be served, or one sentence why not.

Everything that a client can get wrong is refused here, before it costs a worker anything. Raises InvalidRequest
(INVALID_ARGUMENT) or RequestFailed with another status.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import NamedTuple, TypeVar

import grpc

from cluster.front.allowance.options import NO_LIMITS, Account
from cluster.front.models.adapters import AdapterBook
from cluster.front.structured import check_form
from cluster.front.tokenizer import PromptTooLong, TextCodec
from cluster.front.trace_context import TRACE
from cluster.router.live.requests import NewRequest, RequestFailed
from engine.kept import POLICY_KEYS
from engine.types import SEED_BITS, InvalidRequest, SamplingParams, check_counts
from kvrelay.v1 import generate_pb2
from worker.convert import sampling_from_proto, sampling_to_proto
from worker.wire.door import CALLER
from worker.wire.tokens import OPERATORS

T = TypeVar("T")
MAX_ID_CHARS = 128
AS_MANY_AS_FIT = 2**31 - 1  # of max_tokens: what the model takes behind the prompt, and workers have pages for
MAX_BAD_WORD_CHARS = 256
MAX_SCORES = 32_768  # log-probabilities of one prompt


class CheckedRequest(NamedTuple):
    new: NewRequest
    params: SamplingParams  # as asked for, defaults filled in, max_tokens clipped to what fits


class TimeLimits(NamedTuple):
    """On the router's clock."""

    arrived_s: float
    deadline_s: float
    deadline_reason: str
    queue_deadline_s: float


async def check_request(
    request: generate_pb2.GenerateRequest,
    *,
    model: generate_pb2.GetModelInfoResponse,
    adapters: AdapterBook,
    codec: TextCodec | None,
    admit: Callable[[str, int], None],
    limits: TimeLimits,
    account: Account = NO_LIMITS,
    usual_kept: Mapping[str, int] = MappingProxyType({}),
    most_tokens: int = 0,
    page_size: int = 1,
) -> CheckedRequest:
    """Everything checked, the prompt tokenised, an id and a seed given where the client gave none.

    `admit` is asked with the id and the number of choices before the prompt is tokenised, and raises RequestFailed when
    the caller gets nothing now. `usual_kept`: the KvPolicy of requests that give none. `most_tokens`: of prompt and
    answer, whose KV any worker can hold, in pages of `page_size`; 0: not known.
    """
    adapter = adapters.asked(request.model, request.adapter)
    request_id = checked_id(request.request_id)
    caller = CALLER.get()
    cache_salt = _cache_salt(request.cache_salt, caller)
    slo = (_target_s("slo_ttft_ms", request.slo_ttft_ms), _target_s("slo_tpot_ms", request.slo_tpot_ms))
    priority = _priority(request.priority, caller, account.least_priority)
    pair = _pair(request.prefill_worker, request.decode_worker, caller)
    usual = generate_pb2.KvPolicy(**({} if request.sampling.HasField("beam_search") else usual_kept))
    kept = _kv_policy(request.kv_policy if request.HasField("kv_policy") else usual)
    check_counts((field.name, value) for field, value in request.sampling.ListFields())
    seed = 0 if request.sampling.HasField("seed") else secrets.randbits(SEED_BITS)
    params = sampling_from_proto(_completed(request.sampling, model.usual_sampling), seed=seed)
    if request.sampling.bad_words:
        params = replace(params, bad_token_ids=params.bad_token_ids + _bad_words(request.sampling.bad_words, codec))
    params.validate(model.vocab_size)
    _check_what_goes_together(request, params, model, codec, has_policy=kept is not None)
    if params.beam_search is not None:
        params = replace(params, temperature=0.0)
    admit(request_id, params.n if params.beam_search is None else params.beam_search.num_beams)
    form = request.sampling.structured
    if request.sampling.HasField("structured") and codec is not None:
        params = replace(params, grammar=await _within(limits, codec.forms.grammar(form, model)))
    prompt_ids = await _prompt_ids(request, model, codec, limits)
    _check_scores(params.prompt_logprobs, len(prompt_ids))
    room = _room(len(prompt_ids), params, model.max_model_len, most_tokens if kept is None else 0, page_size)
    if params.max_tokens > room:
        params = replace(params, max_tokens=room, min_tokens=min(params.min_tokens, room))
    new = NewRequest(
        id=request_id,
        prompt_ids=prompt_ids,
        owner=caller,
        weight=account.weight,
        cache_salt=cache_salt,
        adapter=adapter,
        kv_policy=kept,
        slo=slo,
        priority=priority,
        pair=pair,
        sampling=_samplings(params),
        arrived_s=limits.arrived_s,
        deadline_s=limits.deadline_s,
        deadline_reason=limits.deadline_reason,
        queue_deadline_s=limits.queue_deadline_s,
        trace=TRACE.get(),
    )
    return CheckedRequest(new=new, params=params)


def _room(prompt_len: int, params: SamplingParams, max_model_len: int, most_tokens: int, page_size: int) -> int:
    """For its answer; `most_tokens`, `page_size`: as of `check_request`. Beams share the pages that are full when their
    search begins, behind all but the last token of the prompt."""
    room = max_model_len - prompt_len
    if params.max_tokens != AS_MANY_AS_FIT or most_tokens <= prompt_len:
        return room
    beams = params.beam_search.num_beams if params.beam_search is not None else 1
    shared = (prompt_len - 1) // page_size
    pages = (most_tokens // page_size + (beams - 1) * shared) // beams  # of each, those that are shared among them
    return min(room, max(1, pages * page_size - prompt_len))


def _completed(given: generate_pb2.SamplingParams, usual: generate_pb2.SamplingParams) -> generate_pb2.SamplingParams:
    """With what is usual where it says nothing. A beam search draws nothing, and knows no more than the penalty."""
    completed = generate_pb2.SamplingParams()
    if not given.HasField("beam_search"):
        completed.CopyFrom(usual)
    elif usual.HasField("repetition_penalty"):
        completed.repetition_penalty = usual.repetition_penalty
    completed.MergeFrom(given)
    return completed


def _check_what_goes_together(
    request: generate_pb2.GenerateRequest,
    params: SamplingParams,
    model: generate_pb2.GetModelInfoResponse,
    codec: TextCodec | None,
    *,
    has_policy: bool,
) -> None:
    """`has_policy`: it keeps less than all KV."""
    has_form = request.sampling.HasField("structured")
    if params.stop and codec is None:
        raise InvalidRequest(f"stop has {len(params.stop)} strings but no tokenizer is loaded; give stop_token_ids")
    if has_form:
        check_form(request.sampling.structured, params, model)
        if codec is None:
            raise InvalidRequest("structured is given but no tokenizer is loaded; leave it out")
    if params.beam_search is not None and (has_form or has_policy):
        key = "structured" if has_form else "kv_policy"
        raise InvalidRequest(f"{key} is given, which a beam search does not know; leave it out, or num_beams")


def _check_scores(count: int | None, prompt_len: int) -> None:
    if count is not None and (entries := (1 + count) * prompt_len) > MAX_SCORES:
        why = f"prompt_logprobs is {count} for a prompt of {prompt_len} tokens, which is {entries} entries"
        raise InvalidRequest(f"{why}; ask for at most {MAX_SCORES} in all")


def _bad_words(words: Sequence[str], codec: TextCodec | None) -> tuple[tuple[int, ...], ...]:
    if codec is None:
        raise InvalidRequest(f"bad_words has {len(words)} but no tokenizer is loaded; give bad_token_ids")
    for word in words:
        if not word.strip() or len(word) > MAX_BAD_WORD_CHARS:
            raise InvalidRequest(f"bad_words has one of {len(word)} characters; give 1 to {MAX_BAD_WORD_CHARS}")
    return tuple(ids for word in words for ids in codec.spellings(word))


def checked_id(request_id: str) -> str:
    """The client's id, or a new one. It goes into trailing metadata, which carries printable ASCII only."""
    if not request_id:
        return secrets.token_hex(8)
    if len(request_id) > MAX_ID_CHARS:
        raise InvalidRequest(f"request_id has {len(request_id)} characters; give at most {MAX_ID_CHARS}")
    if not request_id.isascii() or not request_id.isprintable():
        raise InvalidRequest(f"request_id is {request_id!r}; give printable ASCII characters only")
    return request_id


def _cache_salt(given: str, caller: str) -> str:
    """Whom a request shares cached prefixes with: those of the same caller that gave the same salt. Another caller's
    are out of reach, whatever is given."""
    if len(given) > MAX_ID_CHARS or not given.isprintable():
        raise InvalidRequest(f"cache_salt has {len(given)} characters; give at most {MAX_ID_CHARS}, all printable")
    return f"{caller}\n{given}" if caller else given


def _priority(given: int, caller: str, least: int | None) -> int:
    """Nobody gets before others by asking for it. `least`: by the caller's account."""
    if given < (least or 0) and (least is not None or caller not in OPERATORS):
        whose = "its account has this `least_priority`" if least is not None else "only operators may go before others"
        why = f"priority is {given}; the token of {caller!r} may give {least or 0} or more: {whose}"
        raise RequestFailed(grpc.StatusCode.PERMISSION_DENIED, why)
    return given


def _pair(prefill: str, decode: str, caller: str) -> tuple[str, str] | None:
    if not prefill and not decode:
        return None
    if caller not in OPERATORS:
        why = f"the token of {caller!r} may not say which workers serve a request: only operators may"
        raise RequestFailed(grpc.StatusCode.PERMISSION_DENIED, why)
    if not prefill or not decode:
        raise InvalidRequest("of prefill_worker and decode_worker one is given; give both, or neither")
    return prefill, decode


def _kv_policy(given: generate_pb2.KvPolicy) -> generate_pb2.KvPolicy | None:
    """None where all is kept."""
    for key in POLICY_KEYS:
        tokens = getattr(given, key)
        if tokens < 0:
            raise InvalidRequest(f"kv_policy.{key} is {tokens}; give 0 or more")
        if tokens and not given.window_tokens:
            why = f"kv_policy.{key} is {tokens} and kv_policy.window_tokens is 0"
            raise InvalidRequest(f"{why}; give a window of a token or more, or neither to keep all")
    return given if given.window_tokens else None


def _target_s(key: str, given_ms: float) -> float:
    if not 0 <= given_ms < float("inf"):
        raise InvalidRequest(f"{key} is {given_ms:g}; give milliseconds above 0, or 0 for the router's own target")
    return given_ms / 1e3


async def _within(limits: TimeLimits, work: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(limits.deadline_s - limits.arrived_s):
            return await work
    except TimeoutError:
        raise RequestFailed(grpc.StatusCode.DEADLINE_EXCEEDED, limits.deadline_reason) from None


async def _prompt_ids(
    request: generate_pb2.GenerateRequest,
    model: generate_pb2.GetModelInfoResponse,
    codec: TextCodec | None,
    limits: TimeLimits,
) -> Sequence[int]:
    kind = request.WhichOneof("prompt")
    if kind is None:
        raise InvalidRequest("the prompt is missing; give text or token_ids")
    if kind == "token_ids":
        ids = request.token_ids.ids[:]  # a list: what a message holds is read slowly
    else:
        ids = await _within(limits, encode(request.text, model, codec))  # tokenising takes time
    if not ids:
        raise InvalidRequest(f"the prompt is empty; give {kind} with at least one token")
    if len(ids) >= model.max_model_len:
        raise PromptTooLong(f"{len(ids)} tokens", model.max_model_len)
    if (largest := max(ids)) >= model.vocab_size:
        raise InvalidRequest(f"the prompt has token id {largest}; the model's ids go from 0 to {model.vocab_size - 1}")
    return ids


async def encode(
    text: str,
    model: generate_pb2.GetModelInfoResponse,
    codec: TextCodec | None,
    *,
    special_tokens: bool = True,
) -> list[int]:
    """Token ids of a text that may fit the model. Raises InvalidRequest."""
    if codec is None:
        raise InvalidRequest("the prompt is text but no tokenizer is loaded; give token_ids")
    ids = await codec.encode(text, model.max_model_len, special_tokens=special_tokens)
    if not ids:  # a tokenizer may add a token to no text
        raise InvalidRequest("the prompt is empty; give text with at least one token")
    return ids


def _samplings(params: SamplingParams) -> list[generate_pb2.SamplingParams]:
    """One for each choice; a beam search brings them all."""
    if params.beam_search is not None:
        return [sampling_to_proto(params)]
    return [_choice_sampling(params, i) for i in range(params.n)]


def _choice_sampling(params: SamplingParams, index: int) -> generate_pb2.SamplingParams:
    """What the workers get for choice `index`: one choice, with a seed of its own. Stop strings stay at the front."""
    message = sampling_to_proto(params)
    message.seed, message.n = (params.seed + index) % 2**SEED_BITS, 1
    message.ClearField("stop")
    if index:  # the first choice tells of their prompt
        message.ClearField("prompt_logprobs")
    return message

"""The words that every part shares: what a request asks for, what one engine step does, what comes back.

Values only. Nothing here decides, reads a clock or touches torch, so policies and the simulator import it freely.

Positions. A request's sequence is prompt + generated tokens. The token that output index `i` names stands at
position `prompt_len + i`; its draw is keyed by (seed, position), so it does not depend on the batch, the worker
or how often the request was moved.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, Protocol

from engine.kept import KeptPages

MAX_STOP_STRING_CHARS = 1024
MAX_LOGPROBS = 20
MAX_BIAS = 100.0  # OpenAI's
MAX_BAD_LENGTH = 256  # tokens
MOST = {  # entries of a field of SamplingParams
    "stop": 16,
    "stop_token_ids": 256,
    "logit_bias": 1024,
    "allowed_token_ids": 8192,
    "bad_words": 128,
    "bad_token_ids": 256,
}
MAX_FORM_CHARS = 131_072  # of what an answer's form is given by
MOST_READ = 256  # tokens of prompts that a draft model reads in a step: answers wait for them meanwhile
PASS_SEEN = 0.1  # of a draft model's pass, in what its passes take of late
MAX_N = 64
MAX_BEAMS = 16
MAX_LENGTH_PENALTY = 4.0  # far larger ones leave float32
SEED_BITS = 63
PENDING = -1  # in a chunk's token_ids: the token that the step before draws for the same request


class InvalidRequest(ValueError):
    """A request that can never be served: one sentence naming the key, the value and the mend."""


class FinishReason(StrEnum):
    STOP = "stop"  # EOS, a stop token or a stop string
    LENGTH = "length"  # max_tokens or the model's length
    ABORT = "abort"  # cancelled, past its deadline, or failed


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamOptions:
    """A beam search, as transformers has it: its names, values and defaults."""

    num_beams: int
    length_penalty: float = 1.0  # the power of its length by which a hypothesis' sum of log-probabilities is divided
    early_stopping: bool | Literal["never"] = False  # whether num_beams that are finished end the search


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to choose tokens. Applied in this order: logit bias, penalties, what may not be drawn, temperature,
    top-n-sigma, top-k, top-p, min-p, typical-p. That is vLLM's but for min-p, which it has before top-k (transformers
    has it here). Names are vLLM's."""

    temperature: float = 1.0  # 0 is greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    top_n_sigma: float = 0.0  # 0: off (Tang et al., arXiv 2411.07641)
    typical_p: float = 1.0  # 1: off (Meister et al., arXiv 2202.00666)
    seed: int = 0
    max_tokens: int = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; N: the sampled token's and the N likeliest
    repetition_penalty: float = 1.0  # CTRL (Keskar et al., 2019): over prompt and output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    n: int = 1
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id, each once
    allowed_token_ids: tuple[int, ...] = ()  # empty: any
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that the output never has
    prompt_logprobs: int | None = None  # as `logprobs`, of the prompt's tokens but the first
    grammar: str = ""  # of the answer's text: llguidance's JSON (sampling/structured.py); empty: any
    beam_search: BeamOptions | None = None  # in place of drawing: the n best are the choices

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def reads_output(self) -> bool:
        """Whether the next draw depends on tokens that were drawn before."""
        is_told = self.has_penalties or bool(self.grammar) or self.beam_search is not None
        return is_told or any(len(ids) > 1 for ids in self.bad_token_ids)

    def validate(self, vocab_size: int) -> None:
        """Raise InvalidRequest for the first value out of range."""
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        _check_float("top_n_sigma", self.top_n_sigma, 0.0, 100.0)
        _check_float("typical_p", self.typical_p, 0.0, 1.0, open_low=True)
        _check_float(
            "repetition_penalty", self.repetition_penalty, 1 / 64, 100.0
        )  # far lower ones make logits infinite
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_int("top_k", self.top_k, 0, None)
        _check_int("max_tokens", self.max_tokens, 1, None)
        _check_int("min_tokens", self.min_tokens, 0, self.max_tokens)
        _check_int("n", self.n, 1, MAX_N)
        _check_int("seed", self.seed, 0, 2**SEED_BITS - 1)
        for key in ("logprobs", "prompt_logprobs"):
            if (count := getattr(self, key)) is not None:
                _check_int(key, count, 0, MAX_LOGPROBS)
        if self.beam_search is not None:
            self._check_search(self.beam_search, vocab_size)
        if self.grammar and self.ignore_eos:
            raise InvalidRequest("ignore_eos is set with structured, whose answers end by EOS; leave one of them out")
        if lists := [(key, value) for key in MOST if (value := getattr(self, key, ()))]:
            check_counts(lists)
            _check_stops(self.stop, self.stop_token_ids, vocab_size)
            self._check_ids(vocab_size)

    def _check_search(self, search: BeamOptions, vocab_size: int) -> None:
        """What transformers' beam search has, too, is kept exactly; the rest is refused."""
        _check_int("num_beams", search.num_beams, 1, MAX_BEAMS)
        _check_float("length_penalty", search.length_penalty, -MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)
        if self.n > search.num_beams:
            raise InvalidRequest(f"n is {self.n} with num_beams {search.num_beams}; give at most num_beams")
        unset = SamplingParams()
        for key in ("stop", "logprobs", "prompt_logprobs", "presence_penalty", "frequency_penalty"):
            if (value := getattr(self, key)) != getattr(unset, key):
                shown = f"has {len(value)} strings" if key == "stop" else f"is {value}"
                raise InvalidRequest(f"{key} {shown}, which a beam search does not know; leave it out, or num_beams")
        num_left = len(self.allowed_token_ids) or vocab_size
        if num_left < 2 * search.num_beams:
            why = f"num_beams is {search.num_beams}, with {num_left} tokens to choose from"
            raise InvalidRequest(f"{why}; give at most {num_left // 2}")

    def _check_ids(self, vocab_size: int) -> None:
        for token_id, bias in self.logit_bias:
            _check_float(f"logit_bias of {token_id}", bias, -MAX_BIAS, MAX_BIAS)
        _check_vocabulary("logit_bias", [token_id for token_id, _ in self.logit_bias], vocab_size)
        _check_vocabulary("allowed_token_ids", self.allowed_token_ids, vocab_size)
        for ids in self.bad_token_ids:
            if not 0 < len(ids) <= MAX_BAD_LENGTH:
                raise InvalidRequest(f"bad_token_ids has one of {len(ids)} tokens; give 1 to {MAX_BAD_LENGTH}")
            _check_vocabulary("bad_token_ids", ids, vocab_size)
        if self.allowed_token_ids and {(token_id,) for token_id in self.allowed_token_ids} <= {*self.bad_token_ids}:
            raise InvalidRequest("bad_token_ids has all of allowed_token_ids; leave one to draw")


def _check_float(key: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    above = value > low if open_low else value >= low
    if math.isfinite(value) and above and value <= high:
        return
    raise InvalidRequest(f"{key} is {value:g}; give a number {'above' if open_low else 'from'} {low:g} to {high:g}")


def _check_int(key: str, value: int, low: int, high: int | None) -> None:
    if value >= low and (high is None or value <= high):
        return
    upto = "or more" if high is None else f"to {high}"
    raise InvalidRequest(f"{key} is {value}; give a whole number of {low} {upto}")


def check_counts(given: Iterable[tuple[str, Any]]) -> None:
    """Raise InvalidRequest for too many of anything; to be asked before lists are made of them. `given`: fields of
    SamplingParams by name, and bad_words."""
    for key, value in given:
        if key in MOST and len(value) > MOST[key]:
            raise InvalidRequest(f"{key} has {len(value)} entries; give at most {MOST[key]}")


def _check_stops(stop: Sequence[str], stop_token_ids: Sequence[int], vocab_size: int) -> None:
    for text in stop:
        if not text or len(text) > MAX_STOP_STRING_CHARS:
            raise InvalidRequest(f"stop has a string of {len(text)} characters; give 1 to {MAX_STOP_STRING_CHARS}")
    _check_vocabulary("stop_token_ids", stop_token_ids, vocab_size)


def _check_vocabulary(key: str, token_ids: Sequence[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise InvalidRequest(f"{key} has {token_id}; the model's ids go from 0 to {vocab_size - 1}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthRope:
    """Rotary frequencies that go by the length of a request's own sequence once that is beyond `limit` tokens, as in
    transformers' generate of it alone: all tokens of the prompt are turned for the prompt's length, each later one for
    the length that it makes, and none is turned again. Where KV is computed anew (`is_anew`: Phi), all are turned for a
    length beyond the limit as soon as there is one. So a token's frequencies depend on its position and one number of
    its request (`length`), wherever it runs."""

    limit: int
    is_dynamic: bool  # each length beyond the limit has its own (NTK); else all have the same (longrope)
    is_anew: bool

    def length(self, prompt_len: int, known_len: int) -> int:
        """Of a request that came with so many tokens known, its prompt's and those of earlier attempts."""
        return known_len if self.is_anew else prompt_len

    def salt(self, length: int) -> str:
        """Of pages' hashes: what was turned otherwise is never found for one another. Up to the limit, and for tokens
        that came after a prompt up to it, positions decide alone."""
        if length <= self.limit:
            return ""
        return f"for {length} tokens" if self.is_dynamic else "long"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the rest of the cluster needs to know of a loaded model.

    `fingerprint` is a hash of weights' names, shapes and bytes, and of the config: two workers exchange KV only when
    theirs agree.
    """

    name: str
    architecture: str
    fingerprint: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    num_layers: int
    num_params: int
    weight_bytes: int
    rope: LengthRope | None = None  # None: frequencies are the same at every length that is served
    usual_sampling: Mapping[str, float] = field(default_factory=dict)  # of SamplingParams: where a request says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """The LoRA adapter that a request asks for: a directory as PEFT saves it, on each worker's host, and a digest of
    what it held when it was named."""

    name: str
    path: str
    digest: str


class NextTokens(Protocol):
    """Those that keep the form of an answer."""

    def bits(self) -> bytes:
        """One for each id of the vocabulary, the lowest first, in whole bytes; waits until they are known."""

    @property
    def error(self) -> str:
        """Why there are none, in a sentence."""


class AttentionMass(Protocol):
    """Who adds up what a prompt's rows give of their attention (pages/mass.py)."""

    def begin(self) -> None:
        """A step begins; what one added that failed is void."""

    def add(self, weights_L: Any) -> None:
        """Of one layer's rows in it, to each token so far: a tensor [tokens]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSpec:
    """Draw one token after a token of a chunk. `prompt_ids` and `output_ids` are read for penalties only."""

    params: SamplingParams
    position: int  # where the drawn token will stand in the sequence
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    banned_ids: tuple[int, ...] = ()  # may not be drawn: see banned_token_ids
    form: NextTokens | None = None  # none but these may be drawn
    given_id: int | None = None  # the token stands already, and nothing is drawn: its log-probability is wanted
    num_candidates: int = 0  # above 0: so many of the likeliest are wanted, for a beam search


@dataclass(slots=True, kw_only=True)
class Draft:
    """What a draft model has made of one request, and is asked for next: to guess what follows its known `tokens`.

    `spec` says how to draw the token at a position, behind guesses from the end of `tokens` on. `num_read` tokens have
    their KV in the request's pages of the draft model: the first `length` of its tokens, and guesses behind those.
    """

    tokens: Sequence[int]
    spec: Callable[[int, Sequence[int]], SampleSpec]
    num_wanted: int = 0  # guesses
    guesses: list[int] = field(default_factory=list)
    num_read: int = 0
    length: int = 0

    def go_back(self) -> None:
        """To what is still true of what was read: guesses were wrong, perhaps."""
        following = self.tokens[self.length : self.length + len(self.guesses)]
        right = 0
        while right < len(following) and following[right] == self.guesses[right]:
            right += 1
        self.num_read = min(self.num_read, self.length + right)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """One request's share of a step: run `token_ids`, which stand at positions start, start + 1, and so on.

    `block_table` names the pages of positions 0 .. start + len(token_ids) - 1, in order. A token id may be PENDING in
    a step that is begun while the one before it, which draws that token, still runs. `scores` are for what follows its
    first tokens, in order, and `sample` is for what follows its last one. Of a request that keeps less than all of its
    KV (`kept`), the first `num_dropped` of the pages that it does not keep are not in `block_table`.
    """

    request_id: str
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    sample: SampleSpec | None = None
    scores: Sequence[SampleSpec] = ()
    draft: Draft | None = None  # what a draft model guesses is run behind its one token
    adapter: Adapter | None = None
    kept: KeptPages | None = None
    num_dropped: int = 0
    mass: AttentionMass | None = None  # told what its rows attend to
    rope_len: int = 0  # LengthRope.length, of the models that have one


OnLayer = Callable[[int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One forward pass over the chunks of many requests.

    `on_layer(i)` is called in the engine's thread as soon as the KV of layer i of every chunk stands in its pages,
    in the order of the layers; it must return at once. On a GPU the writing is queued by then, not done: an event
    recorded on the current stream inside the call marks its end. `on_layer_of(request id)` is what is called instead
    where that request's chunk is run by itself. `copies`: before all else the content of the first page of each pair
    goes to the second, once: the engine takes them out.
    """

    chunks: Sequence[Chunk]
    on_layer: OnLayer | None = None
    on_layer_of: Callable[[str], OnLayer | None] | None = None
    copies: list[tuple[int, int]] = field(default_factory=list)

    def alone(self, chunk: Chunk) -> Step:
        """That chunk by itself: of the others' KV, which does not stand there yet, nothing is told."""
        on_layer = self.on_layer_of(chunk.request_id) if self.on_layer_of is not None else None
        return Step(chunks=(chunk,), on_layer=on_layer, copies=self.copies)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLogprob:
    token_id: int
    logprob: float  # natural log, of the raw distribution (before temperature and penalties), as vLLM reports it


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledToken:
    """`error`, one sentence, says why nothing could be drawn; token_id means nothing then. `is_given`: of a score.
    Where candidates are wanted, they are the top_logprobs, as bias, penalties and bans leave them."""

    request_id: str
    token_id: int
    error: str = ""
    is_own_fault: bool = False  # the request's: it would fail so at any worker
    is_unable: bool = False  # the worker, which cannot have the request's adapter
    logprob: TokenLogprob | None = None
    top_logprobs: tuple[TokenLogprob, ...] = field(default=())
    is_given: bool = False


def read_before_search(prompt_len: int) -> int:
    """Tokens of the prompt that are read before a beam search, whose first step computes the last one."""
    return max(1, prompt_len - 1)


def finish_reason(
    params: SamplingParams, token_id: int, num_output_tokens: int, eos_token_ids: Sequence[int]
) -> FinishReason | None:
    """Whether the request ends with this token, the last of `num_output_tokens`; stop strings are the front's."""
    if params.grammar and token_id in eos_token_ids:
        return FinishReason.STOP  # before min_tokens where nothing else keeps the form
    if num_output_tokens >= params.min_tokens:
        if token_id in params.stop_token_ids:
            return FinishReason.STOP
        if not params.ignore_eos and token_id in eos_token_ids:
            return FinishReason.STOP
    return FinishReason.LENGTH if num_output_tokens >= params.max_tokens else None


def banned_token_ids(
    params: SamplingParams, output_ids: Sequence[int], num_output_tokens: int, eos_token_ids: Sequence[int]
) -> tuple[int, ...]:
    """Ids that may not be drawn next: the last of a bad sequence, and those that would end the request before
    min_tokens are out. `output_ids` is read only where `params.reads_output`."""
    banned = _ends_of_bad(params.bad_token_ids, output_ids) if params.bad_token_ids else ()
    if num_output_tokens >= params.min_tokens:
        return banned
    eos = () if params.ignore_eos else tuple(eos_token_ids)
    return banned + params.stop_token_ids + eos


def _ends_of_bad(bad: Sequence[tuple[int, ...]], output_ids: Sequence[int]) -> tuple[int, ...]:
    return tuple(ids[-1] for ids in bad if tuple(output_ids[len(output_ids) - len(ids) + 1 :]) == ids[:-1])

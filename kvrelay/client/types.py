"""What a caller of kvrelay says and gets back, as plain values: every type that the public client hands out.

Nothing here opens a socket or knows the wire. Lengths are in tokens, times in seconds, sizes in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict

from engine.types import FinishReason, TokenLogprob


class KvrelayError(Exception):
    """The one error that the client raises.

    code: the gRPC status as a word. What to do with the common ones:
        INVALID_ARGUMENT    the request can never be served: mend it
        NOT_FOUND           no such model here
        RESOURCE_EXHAUSTED  all queues are full: try again after `retry_after_s`
        UNAVAILABLE         the server, or every worker that could serve it, is gone: try again later
        DEADLINE_EXCEEDED   `timeout_s` is over; the server has dropped the request
        CANCELLED           somebody cancelled it
    message: one sentence.
    retry_after_s: how long the server asks to wait, where it says so.
    """

    def __init__(self, code: str, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, Any]:
        return {"code": self.code, "message": self.message, "retry_after_s": self.retry_after_s}


class GenerateOptions(TypedDict, total=False):
    """How to generate. What is left out takes the server's default (in brackets); temperature, top_k, top_p, min_p and
    repetition_penalty what the model's generation_config.json says, if anything.

    temperature [1.0]: divides the logits; 0 is greedy. Then top_n_sigma [0.0: off], top_k [0: off], top_p [1.0],
        min_p [0.0], typical_p [1.0: off] narrow the choice.
    seed [random]: the same seed gives the same tokens, however the request is batched or moved.
    max_tokens [16], min_tokens [0]: bounds on the output.
    stop [none]: a string or several; the text ends before the first that appears. stop_token_ids [none].
    ignore_eos [False]: go on after the model's end-of-sequence token.
    logprobs [None]: N gives each token's log-probability and the N likeliest. prompt_logprobs [None]: likewise of the
        prompt's tokens but the first.
    repetition_penalty [1.0], presence_penalty [0.0], frequency_penalty [0.0]: as in vLLM.
    logit_bias [none]: by token id, what is added to its logit, -100 to 100. allowed_token_ids [any]: none but these.
    bad_words [none]: what the output never has.
    json_schema, json_object, regex, choice, grammar [none]: one of them, the form that the answer's text has. A JSON
        Schema (an object, or its text), whether it is any JSON object, a regular expression, texts of which it is one,
        a grammar (Lark's notation or GBNF). The answer ends where its form is whole.
    n [1]: how many choices; choice i draws with seed + i.
    num_beams [none]: search for the n likeliest answers along so many beams in place of drawing, as transformers does;
        length_penalty [1.0]: above 0 longer ones gain; early_stopping [False]: when it ends, or "never" before it must.
    model [the one served], request_id [made by the server].
    adapter [none]: a LoRA adapter of the server's, which `model` may name as well.
    cache_salt [none]: only requests with the same one share cached prefixes, so that nobody learns by timing what
        another has asked; where clients have names, each shares with itself only.
    kv_window_tokens, kv_sink_tokens, kv_heavy_tokens [the server's]: how much of its KV is kept behind the prompt: the
        last tokens, the first, those of the prompt that were attended to most; a window of 0 keeps all.
    slo_ttft_ms, slo_tpot_ms [the server's]: what its first token, and each after it, should take; it is placed by them.
    priority [0]: lower goes first where requests wait; below 0 is for operators.
    prefill_worker, decode_worker [chosen by the server]: who shall read and write it; for operators.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    top_n_sigma: float
    typical_p: float
    seed: int
    max_tokens: int
    min_tokens: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int
    prompt_logprobs: int
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    allowed_token_ids: Sequence[int]
    bad_words: Sequence[str]
    json_schema: Mapping[str, Any] | str
    json_object: bool
    regex: str
    choice: Sequence[str]
    grammar: str
    n: int
    num_beams: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    model: str
    adapter: str
    request_id: str
    cache_salt: str
    kv_window_tokens: int
    kv_sink_tokens: int
    kv_heavy_tokens: int
    slo_ttft_ms: float
    slo_tpot_ms: float
    priority: int
    prefill_worker: str
    decode_worker: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """Token counts of a request, over all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # of the prompt: their KV came from a prefix cache


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """Where the time went, as the server saw it; the phases (route, prefill_queue, ...) sum to e2e_s."""

    phases_s: Mapping[str, float]
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prefill_worker: str
    decode_worker: str  # empty if the request ended at prefill
    attempts: int
    moves: int = 0  # from one worker to another, while it was decoded or read
    drafted_tokens: int = 0  # guessed ahead while it was decoded (speculative decoding)
    accepted_tokens: int = 0  # of those, right


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What the decode worker said of the KV that it was handed."""

    transport: str
    pages: int
    bytes: int
    checksums_ok: bool  # they agree; not so: they are off (`transfer.checksums`)
    cached_pages: int
    recomputed_tokens: int
    resends: int
    transfer_s: float  # in which bytes moved, summed over the parts
    exposed_s: float  # from the last computed layer to the receipt: what prefill did not hide
    dropped_pages: int = 0  # that are not kept (`kv_window_tokens`), and did not move
    rank_bytes: tuple[int, ...] = ()  # of `bytes`, by process of the worker that sent them, if it has several


@dataclass(frozen=True, slots=True, kw_only=True)
class PositionLogprobs:
    chosen: TokenLogprob
    top: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """What one message of a stream adds to choice `index`. `finish_reason` is set in the choice's last one."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] = ()
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    score: float | None = None  # of a beam search


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None  # None while it goes on
    logprobs: tuple[PositionLogprobs, ...] = ()
    stop_string: str = ""
    score: float | None = None  # of a beam search: its log-probability, divided by the power of its length


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """An answer. `text`, `token_ids` and `finish_reason` are those of the first choice."""

    request_id: str
    choices: tuple[Choice, ...]
    usage: Usage | None = None  # these four come with the end of the answer
    timeline: Timeline | None = None
    receipt: Receipt | None = None  # None as well if nothing was handed over
    moved: tuple[Receipt, ...] = ()  # one for each of the timeline's moves, 64 at most
    prompt_logprobs: tuple[PositionLogprobs, ...] = ()  # of the prompt's tokens but the first

    @property
    def text(self) -> str:
        return self.choices[0].text if self.choices else ""

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.choices[0].token_ids if self.choices else ()

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.choices[0].finish_reason if self.choices else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_params: int
    eos_token_ids: tuple[int, ...]
    fingerprint: str
    usual_sampling: Mapping[str, float] = field(default_factory=dict)  # of a request that says nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTrouble:
    """A decode worker that a prefill worker cannot hand over to."""

    peer: str
    failures: int  # one after another
    reason: str  # of the last one
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedRequest:
    """How long a request was, and how it fared. Times in seconds."""

    age_s: float  # since it came
    prompt_tokens: int
    cached_tokens: int  # of those, found in a prefix cache
    output_tokens: int
    ttft_s: float
    tpot_s: float
    handoff_s: float  # from its first token being computed to its KV being where it is decoded; 0: that is one place
    failed: bool  # ended without an answer, past its deadline too, or its client left when its first token was late
    slo_ttft_s: float = 0.0  # that it asked for itself; 0: nothing
    slo_tpot_s: float = 0.0
    before_first_s: tuple[float, ...] = ()  # of ttft_s, in each phase of a timeline, in their order
    after_first_s: tuple[float, ...] = ()  # likewise after its first token
    prefill_worker: str = ""
    decode_worker: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterLoad:
    """The requests that ended lately at a router. None is missing that came in the last `whole_s` and has ended."""

    requests: tuple[EndedRequest, ...]
    whole_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A part of a request's time; seconds since it came. `details` may lie beside one another, and reach beyond it."""

    name: str
    begin_s: float
    end_s: float
    worker: str  # empty: in the router
    attempt: int
    words: str
    details: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExplainedRequest:
    """Where the time of a request went, of one of its choices. Up to the first token the spans sum to `ttft_s`, and all
    of them to `e2e_s`; in a list of requests there are none."""

    request_id: str
    choice: int
    state: str  # running, finished, failed or cancelled
    reason: str  # why it failed
    age_s: float
    ttft_s: float
    tpot_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    moves: int
    slow: bool
    why: str  # where most of its time went, in a phrase
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingWorker:
    """One that is not yet, or still, in its pool."""

    name: str
    stage: str  # waiting, started, weights, ..., lost; or leaving
    reason: str  # why it is no further


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolState:
    """How far a pool is."""

    replicas: int  # workers that it shall have, whoever asked last
    pending: tuple[PendingWorker, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerState:
    """A worker as the router sees it."""

    name: str
    role: str
    address: str
    state: str  # connecting, ready, draining, suspect or lost
    num_waiting: int
    num_running: int
    waiting_tokens: int
    available_pages: int
    cached_pages: int
    total_pages: int
    leased_pages: int
    report_age_s: float
    losses: int
    reason: str
    page_size: int = 0
    counters: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)  # that its policy keeps, by their names in the spec
    fenced_pages: int = 0  # leased ones whose lease is over while the peer may still write
    quarantined_pages: int = 0  # leased ones out of use, because who may write into them cannot be stopped
    step_age_s: float = 0.0
    loop_lag_s: float = 0.0
    circuit: str = ""  # closed, open or half_open: whether requests are sent to it
    pairs: tuple[PairTrouble, ...] = ()
    step_costs: Mapping[str, float] = field(default_factory=dict)  # as far as they were measured: worker/steps/costs.py
    num_tasks: int = 0  # of its event loop
    round_trip_s: float = 0.0  # from the router and back, at least; 0: not known yet
    model: str = ""  # that it serves, as the cluster's spec names it; empty: the cluster's own
    clock_ahead_s: float = 0.0  # its host's time of day before the router's, give or take half a round trip


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    router_id: str
    model: str
    uptime_s: float
    num_queued: int
    num_in_flight: int
    workers: tuple[WorkerState, ...]
    counters: Mapping[str, int] = field(default_factory=dict)
    limits: Mapping[str, str] = field(default_factory=dict)  # that the router's policy keeps
    loop_lag_s: float = 0.0
    num_tasks: int = 0  # of its event loop
    cluster_id: str = ""  # the same at all routers of the cluster, and another one whenever one is started
    models: tuple[str, ...] = ()  # that may be asked for, the cluster's own first

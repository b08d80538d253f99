from kvrelay.v1 import generate_pb2 as _generate_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EventKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EVENT_KIND_UNSPECIFIED: _ClassVar[EventKind]
    EVENT_KIND_PREFILL_STARTED: _ClassVar[EventKind]
    EVENT_KIND_FIRST_TOKEN: _ClassVar[EventKind]
    EVENT_KIND_HANDOFF_STALLED: _ClassVar[EventKind]
    EVENT_KIND_DECODE_READY: _ClassVar[EventKind]
    EVENT_KIND_DECODE_STARTED: _ClassVar[EventKind]
    EVENT_KIND_PREEMPTED: _ClassVar[EventKind]
    EVENT_KIND_FAILED: _ClassVar[EventKind]
    EVENT_KIND_CANCELLED: _ClassVar[EventKind]
    EVENT_KIND_HANDED_OFF: _ClassVar[EventKind]
    EVENT_KIND_MOVED: _ClassVar[EventKind]
    EVENT_KIND_MOVE_FAILED: _ClassVar[EventKind]
    EVENT_KIND_TRACE: _ClassVar[EventKind]
    EVENT_KIND_REASSIGNED: _ClassVar[EventKind]

class FailureCause(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FAILURE_CAUSE_UNSPECIFIED: _ClassVar[FailureCause]
    FAILURE_CAUSE_STEP: _ClassVar[FailureCause]
    FAILURE_CAUSE_PEER: _ClassVar[FailureCause]
    FAILURE_CAUSE_ROOM: _ClassVar[FailureCause]
    FAILURE_CAUSE_REQUEST: _ClassVar[FailureCause]
    FAILURE_CAUSE_WORKER: _ClassVar[FailureCause]

class WorkerSpanKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WORKER_SPAN_KIND_UNSPECIFIED: _ClassVar[WorkerSpanKind]
    WORKER_SPAN_KIND_CHUNK: _ClassVar[WorkerSpanKind]
    WORKER_SPAN_KIND_LEASE: _ClassVar[WorkerSpanKind]
    WORKER_SPAN_KIND_SEGMENT: _ClassVar[WorkerSpanKind]
    WORKER_SPAN_KIND_COMMIT: _ClassVar[WorkerSpanKind]
    WORKER_SPAN_KIND_FIRST_STEP: _ClassVar[WorkerSpanKind]
    WORKER_SPAN_KIND_SLOW_STEP: _ClassVar[WorkerSpanKind]
EVENT_KIND_UNSPECIFIED: EventKind
EVENT_KIND_PREFILL_STARTED: EventKind
EVENT_KIND_FIRST_TOKEN: EventKind
EVENT_KIND_HANDOFF_STALLED: EventKind
EVENT_KIND_DECODE_READY: EventKind
EVENT_KIND_DECODE_STARTED: EventKind
EVENT_KIND_PREEMPTED: EventKind
EVENT_KIND_FAILED: EventKind
EVENT_KIND_CANCELLED: EventKind
EVENT_KIND_HANDED_OFF: EventKind
EVENT_KIND_MOVED: EventKind
EVENT_KIND_MOVE_FAILED: EventKind
EVENT_KIND_TRACE: EventKind
EVENT_KIND_REASSIGNED: EventKind
FAILURE_CAUSE_UNSPECIFIED: FailureCause
FAILURE_CAUSE_STEP: FailureCause
FAILURE_CAUSE_PEER: FailureCause
FAILURE_CAUSE_ROOM: FailureCause
FAILURE_CAUSE_REQUEST: FailureCause
FAILURE_CAUSE_WORKER: FailureCause
WORKER_SPAN_KIND_UNSPECIFIED: WorkerSpanKind
WORKER_SPAN_KIND_CHUNK: WorkerSpanKind
WORKER_SPAN_KIND_LEASE: WorkerSpanKind
WORKER_SPAN_KIND_SEGMENT: WorkerSpanKind
WORKER_SPAN_KIND_COMMIT: WorkerSpanKind
WORKER_SPAN_KIND_FIRST_STEP: WorkerSpanKind
WORKER_SPAN_KIND_SLOW_STEP: WorkerSpanKind

class RequestState(_message.Message):
    __slots__ = ("request_id", "router_id", "prompt_ids", "output_ids", "sampling", "attempt", "cache_salt", "held", "priority", "move", "adapter", "kv_policy", "heavy_pages", "dropped_tokens")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    KV_POLICY_FIELD_NUMBER: _ClassVar[int]
    HEAVY_PAGES_FIELD_NUMBER: _ClassVar[int]
    DROPPED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    router_id: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    output_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _generate_pb2.SamplingParams
    attempt: int
    cache_salt: str
    held: bool
    priority: int
    move: int
    adapter: Adapter
    kv_policy: _generate_pb2.KvPolicy
    heavy_pages: _containers.RepeatedScalarFieldContainer[int]
    dropped_tokens: int
    def __init__(self, request_id: _Optional[str] = ..., router_id: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., output_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_generate_pb2.SamplingParams, _Mapping]] = ..., attempt: _Optional[int] = ..., cache_salt: _Optional[str] = ..., held: _Optional[bool] = ..., priority: _Optional[int] = ..., move: _Optional[int] = ..., adapter: _Optional[_Union[Adapter, _Mapping]] = ..., kv_policy: _Optional[_Union[_generate_pb2.KvPolicy, _Mapping]] = ..., heavy_pages: _Optional[_Iterable[int]] = ..., dropped_tokens: _Optional[int] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "path", "digest")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ...) -> None: ...

class WorkerAddress(_message.Message):
    __slots__ = ("name", "address", "incarnation")
    NAME_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    name: str
    address: str
    incarnation: str
    def __init__(self, name: _Optional[str] = ..., address: _Optional[str] = ..., incarnation: _Optional[str] = ...) -> None: ...

class RouterMessage(_message.Message):
    __slots__ = ("hello", "submit", "cancel", "ping", "reassign", "begin", "move", "drain", "set_role")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    CANCEL_FIELD_NUMBER: _ClassVar[int]
    PING_FIELD_NUMBER: _ClassVar[int]
    REASSIGN_FIELD_NUMBER: _ClassVar[int]
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    SET_ROLE_FIELD_NUMBER: _ClassVar[int]
    hello: RouterHello
    submit: Submit
    cancel: Cancel
    ping: Ping
    reassign: Reassign
    begin: Begin
    move: Move
    drain: Drain
    set_role: SetRole
    def __init__(self, hello: _Optional[_Union[RouterHello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., cancel: _Optional[_Union[Cancel, _Mapping]] = ..., ping: _Optional[_Union[Ping, _Mapping]] = ..., reassign: _Optional[_Union[Reassign, _Mapping]] = ..., begin: _Optional[_Union[Begin, _Mapping]] = ..., move: _Optional[_Union[Move, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ..., set_role: _Optional[_Union[SetRole, _Mapping]] = ...) -> None: ...

class RouterHello(_message.Message):
    __slots__ = ("router_id", "protocol_version")
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    protocol_version: int
    def __init__(self, router_id: _Optional[str] = ..., protocol_version: _Optional[int] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("seq", "request", "decode")
    SEQ_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    seq: int
    request: RequestState
    decode: WorkerAddress
    def __init__(self, seq: _Optional[int] = ..., request: _Optional[_Union[RequestState, _Mapping]] = ..., decode: _Optional[_Union[WorkerAddress, _Mapping]] = ...) -> None: ...

class Cancel(_message.Message):
    __slots__ = ("request_id", "reason", "last_move")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_MOVE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    reason: str
    last_move: int
    def __init__(self, request_id: _Optional[str] = ..., reason: _Optional[str] = ..., last_move: _Optional[int] = ...) -> None: ...

class Begin(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class Reassign(_message.Message):
    __slots__ = ("request_id", "decode")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode: WorkerAddress
    def __init__(self, request_id: _Optional[str] = ..., decode: _Optional[_Union[WorkerAddress, _Mapping]] = ...) -> None: ...

class Move(_message.Message):
    __slots__ = ("request_id", "decode", "unread", "number")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    DECODE_FIELD_NUMBER: _ClassVar[int]
    UNREAD_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    decode: WorkerAddress
    unread: bool
    number: int
    def __init__(self, request_id: _Optional[str] = ..., decode: _Optional[_Union[WorkerAddress, _Mapping]] = ..., unread: _Optional[bool] = ..., number: _Optional[int] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("undo",)
    UNDO_FIELD_NUMBER: _ClassVar[int]
    undo: bool
    def __init__(self, undo: _Optional[bool] = ...) -> None: ...

class SetRole(_message.Message):
    __slots__ = ("role", "chunk_tokens")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    role: str
    chunk_tokens: int
    def __init__(self, role: _Optional[str] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class Ping(_message.Message):
    __slots__ = ("router_ns", "has_left", "report_gap_ms")
    ROUTER_NS_FIELD_NUMBER: _ClassVar[int]
    HAS_LEFT_FIELD_NUMBER: _ClassVar[int]
    REPORT_GAP_MS_FIELD_NUMBER: _ClassVar[int]
    router_ns: int
    has_left: bool
    report_gap_ms: int
    def __init__(self, router_ns: _Optional[int] = ..., has_left: _Optional[bool] = ..., report_gap_ms: _Optional[int] = ...) -> None: ...

class WorkerMessage(_message.Message):
    __slots__ = ("hello", "outputs", "report", "pong")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    REPORT_FIELD_NUMBER: _ClassVar[int]
    PONG_FIELD_NUMBER: _ClassVar[int]
    hello: WorkerHello
    outputs: Outputs
    report: WorkerReport
    pong: Pong
    def __init__(self, hello: _Optional[_Union[WorkerHello, _Mapping]] = ..., outputs: _Optional[_Union[Outputs, _Mapping]] = ..., report: _Optional[_Union[WorkerReport, _Mapping]] = ..., pong: _Optional[_Union[Pong, _Mapping]] = ...) -> None: ...

class WorkerHello(_message.Message):
    __slots__ = ("worker", "role", "model", "num_pages", "page_size", "max_batch", "limits", "rope")
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    ROPE_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerAddress
    role: str
    model: _generate_pb2.GetModelInfoResponse
    num_pages: int
    page_size: int
    max_batch: int
    limits: _containers.ScalarMap[str, str]
    rope: LengthRope
    def __init__(self, worker: _Optional[_Union[WorkerAddress, _Mapping]] = ..., role: _Optional[str] = ..., model: _Optional[_Union[_generate_pb2.GetModelInfoResponse, _Mapping]] = ..., num_pages: _Optional[int] = ..., page_size: _Optional[int] = ..., max_batch: _Optional[int] = ..., limits: _Optional[_Mapping[str, str]] = ..., rope: _Optional[_Union[LengthRope, _Mapping]] = ...) -> None: ...

class LengthRope(_message.Message):
    __slots__ = ("limit", "is_dynamic", "is_anew")
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    IS_DYNAMIC_FIELD_NUMBER: _ClassVar[int]
    IS_ANEW_FIELD_NUMBER: _ClassVar[int]
    limit: int
    is_dynamic: bool
    is_anew: bool
    def __init__(self, limit: _Optional[int] = ..., is_dynamic: _Optional[bool] = ..., is_anew: _Optional[bool] = ...) -> None: ...

class Pong(_message.Message):
    __slots__ = ("router_ns", "worker_ns", "wall_ns")
    ROUTER_NS_FIELD_NUMBER: _ClassVar[int]
    WORKER_NS_FIELD_NUMBER: _ClassVar[int]
    WALL_NS_FIELD_NUMBER: _ClassVar[int]
    router_ns: int
    worker_ns: int
    wall_ns: int
    def __init__(self, router_ns: _Optional[int] = ..., worker_ns: _Optional[int] = ..., wall_ns: _Optional[int] = ...) -> None: ...

class TokenOutput(_message.Message):
    __slots__ = ("request_id", "attempt", "index", "token_id", "logprobs", "finish_reason", "prompt_logprobs", "drafted", "accepted", "heavy_pages", "hypotheses")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DRAFTED_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_FIELD_NUMBER: _ClassVar[int]
    HEAVY_PAGES_FIELD_NUMBER: _ClassVar[int]
    HYPOTHESES_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    index: int
    token_id: int
    logprobs: _generate_pb2.PositionLogprobs
    finish_reason: _generate_pb2.FinishReason
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_generate_pb2.PositionLogprobs]
    drafted: int
    accepted: int
    heavy_pages: _containers.RepeatedScalarFieldContainer[int]
    hypotheses: _containers.RepeatedCompositeFieldContainer[Hypothesis]
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., index: _Optional[int] = ..., token_id: _Optional[int] = ..., logprobs: _Optional[_Union[_generate_pb2.PositionLogprobs, _Mapping]] = ..., finish_reason: _Optional[_Union[_generate_pb2.FinishReason, str]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_generate_pb2.PositionLogprobs, _Mapping]]] = ..., drafted: _Optional[int] = ..., accepted: _Optional[int] = ..., heavy_pages: _Optional[_Iterable[int]] = ..., hypotheses: _Optional[_Iterable[_Union[Hypothesis, _Mapping]]] = ...) -> None: ...

class Hypothesis(_message.Message):
    __slots__ = ("token_ids", "finish_reason", "score")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    SCORE_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    finish_reason: _generate_pb2.FinishReason
    score: float
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., finish_reason: _Optional[_Union[_generate_pb2.FinishReason, str]] = ..., score: _Optional[float] = ...) -> None: ...

class RequestEvent(_message.Message):
    __slots__ = ("request_id", "attempt", "kind", "at_ns", "reason", "receipt", "cached_tokens", "decode_worker", "cause", "peer", "move", "trace")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    AT_NS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    CAUSE_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MOVE_FIELD_NUMBER: _ClassVar[int]
    TRACE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    attempt: int
    kind: EventKind
    at_ns: int
    reason: str
    receipt: _generate_pb2.HandoffReceipt
    cached_tokens: int
    decode_worker: str
    cause: FailureCause
    peer: str
    move: int
    trace: Trace
    def __init__(self, request_id: _Optional[str] = ..., attempt: _Optional[int] = ..., kind: _Optional[_Union[EventKind, str]] = ..., at_ns: _Optional[int] = ..., reason: _Optional[str] = ..., receipt: _Optional[_Union[_generate_pb2.HandoffReceipt, _Mapping]] = ..., cached_tokens: _Optional[int] = ..., decode_worker: _Optional[str] = ..., cause: _Optional[_Union[FailureCause, str]] = ..., peer: _Optional[str] = ..., move: _Optional[int] = ..., trace: _Optional[_Union[Trace, _Mapping]] = ...) -> None: ...

class Outputs(_message.Message):
    __slots__ = ("tokens", "events", "request_ids", "indexes", "token_ids")
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    INDEXES_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenOutput]
    events: _containers.RepeatedCompositeFieldContainer[RequestEvent]
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    indexes: _containers.RepeatedScalarFieldContainer[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenOutput, _Mapping]]] = ..., events: _Optional[_Iterable[_Union[RequestEvent, _Mapping]]] = ..., request_ids: _Optional[_Iterable[str]] = ..., indexes: _Optional[_Iterable[int]] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class WorkerReport(_message.Message):
    __slots__ = ("made_ns", "last_submit_seq", "num_waiting", "num_running", "waiting_tokens", "available_pages", "cached_pages", "total_pages", "leased_pages", "counters", "draining", "request_ids", "fenced_pages", "quarantined_pages", "step_age_ms", "loop_lag_ms", "peers", "num_tasks", "step_costs", "prompt_share", "found_pages", "lost_pages", "pages_anew", "drained", "is_others")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    MADE_NS_FIELD_NUMBER: _ClassVar[int]
    LAST_SUBMIT_SEQ_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    LEASED_PAGES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    REQUEST_IDS_FIELD_NUMBER: _ClassVar[int]
    FENCED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_MS_FIELD_NUMBER: _ClassVar[int]
    PEERS_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_SHARE_FIELD_NUMBER: _ClassVar[int]
    FOUND_PAGES_FIELD_NUMBER: _ClassVar[int]
    LOST_PAGES_FIELD_NUMBER: _ClassVar[int]
    PAGES_ANEW_FIELD_NUMBER: _ClassVar[int]
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    IS_OTHERS_FIELD_NUMBER: _ClassVar[int]
    made_ns: int
    last_submit_seq: int
    num_waiting: int
    num_running: int
    waiting_tokens: int
    available_pages: int
    cached_pages: int
    total_pages: int
    leased_pages: int
    counters: _containers.ScalarMap[str, int]
    draining: bool
    request_ids: _containers.RepeatedScalarFieldContainer[str]
    fenced_pages: int
    quarantined_pages: int
    step_age_ms: int
    loop_lag_ms: int
    peers: _containers.RepeatedCompositeFieldContainer[PeerHealth]
    num_tasks: int
    step_costs: StepCosts
    prompt_share: float
    found_pages: bytes
    lost_pages: bytes
    pages_anew: bool
    drained: bool
    is_others: bool
    def __init__(self, made_ns: _Optional[int] = ..., last_submit_seq: _Optional[int] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., available_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., leased_pages: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., draining: _Optional[bool] = ..., request_ids: _Optional[_Iterable[str]] = ..., fenced_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., step_age_ms: _Optional[int] = ..., loop_lag_ms: _Optional[int] = ..., peers: _Optional[_Iterable[_Union[PeerHealth, _Mapping]]] = ..., num_tasks: _Optional[int] = ..., step_costs: _Optional[_Union[StepCosts, _Mapping]] = ..., prompt_share: _Optional[float] = ..., found_pages: _Optional[bytes] = ..., lost_pages: _Optional[bytes] = ..., pages_anew: _Optional[bool] = ..., drained: _Optional[bool] = ..., is_others: _Optional[bool] = ...) -> None: ...

class StepCosts(_message.Message):
    __slots__ = ("fixed_s", "prompt_token_s", "request_s", "context_token_s", "both_s", "spread")
    FIXED_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    REQUEST_S_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKEN_S_FIELD_NUMBER: _ClassVar[int]
    BOTH_S_FIELD_NUMBER: _ClassVar[int]
    SPREAD_FIELD_NUMBER: _ClassVar[int]
    fixed_s: float
    prompt_token_s: float
    request_s: float
    context_token_s: float
    both_s: float
    spread: float
    def __init__(self, fixed_s: _Optional[float] = ..., prompt_token_s: _Optional[float] = ..., request_s: _Optional[float] = ..., context_token_s: _Optional[float] = ..., both_s: _Optional[float] = ..., spread: _Optional[float] = ...) -> None: ...

class PeerHealth(_message.Message):
    __slots__ = ("name", "incarnation", "failures", "reason", "age_ms")
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    name: str
    incarnation: str
    failures: int
    reason: str
    age_ms: int
    def __init__(self, name: _Optional[str] = ..., incarnation: _Optional[str] = ..., failures: _Optional[int] = ..., reason: _Optional[str] = ..., age_ms: _Optional[int] = ...) -> None: ...

class PrefillMessage(_message.Message):
    __slots__ = ("hello", "reserve", "announce", "commit", "abort", "stopped")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    ANNOUNCE_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    STOPPED_FIELD_NUMBER: _ClassVar[int]
    hello: HandoffHello
    reserve: Reserve
    announce: Announce
    commit: Commit
    abort: Abort
    stopped: Stopped
    def __init__(self, hello: _Optional[_Union[HandoffHello, _Mapping]] = ..., reserve: _Optional[_Union[Reserve, _Mapping]] = ..., announce: _Optional[_Union[Announce, _Mapping]] = ..., commit: _Optional[_Union[Commit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., stopped: _Optional[_Union[Stopped, _Mapping]] = ...) -> None: ...

class HandoffHello(_message.Message):
    __slots__ = ("worker", "protocol_version", "model_fingerprint", "layout", "tensor_parallel", "pipeline_parallel", "transports", "pid", "host_id")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    TENSOR_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    PIPELINE_PARALLEL_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    HOST_ID_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerAddress
    protocol_version: int
    model_fingerprint: str
    layout: str
    tensor_parallel: int
    pipeline_parallel: int
    transports: _containers.RepeatedScalarFieldContainer[str]
    pid: int
    host_id: str
    def __init__(self, worker: _Optional[_Union[WorkerAddress, _Mapping]] = ..., protocol_version: _Optional[int] = ..., model_fingerprint: _Optional[str] = ..., layout: _Optional[str] = ..., tensor_parallel: _Optional[int] = ..., pipeline_parallel: _Optional[int] = ..., transports: _Optional[_Iterable[str]] = ..., pid: _Optional[int] = ..., host_id: _Optional[str] = ...) -> None: ...

class Reserve(_message.Message):
    __slots__ = ("lease_id", "request", "room_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    ROOM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    request: RequestState
    room_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., request: _Optional[_Union[RequestState, _Mapping]] = ..., room_tokens: _Optional[int] = ...) -> None: ...

class Announce(_message.Message):
    __slots__ = ("lease_id", "segment", "layer_begin", "layer_end", "page_begin", "page_end", "bytes", "checksum", "checksum_off", "resend", "transfer_seq", "transfer_s")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENT_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    PAGE_BEGIN_FIELD_NUMBER: _ClassVar[int]
    PAGE_END_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_FIELD_NUMBER: _ClassVar[int]
    CHECKSUM_OFF_FIELD_NUMBER: _ClassVar[int]
    RESEND_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_SEQ_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    segment: int
    layer_begin: int
    layer_end: int
    page_begin: int
    page_end: int
    bytes: int
    checksum: int
    checksum_off: bool
    resend: bool
    transfer_seq: int
    transfer_s: float
    def __init__(self, lease_id: _Optional[int] = ..., segment: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., page_begin: _Optional[int] = ..., page_end: _Optional[int] = ..., bytes: _Optional[int] = ..., checksum: _Optional[int] = ..., checksum_off: _Optional[bool] = ..., resend: _Optional[bool] = ..., transfer_seq: _Optional[int] = ..., transfer_s: _Optional[float] = ...) -> None: ...

class Commit(_message.Message):
    __slots__ = ("lease_id", "segments", "token_id", "num_tokens", "computed_ns", "more_token_ids", "unread_tokens")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_NS_FIELD_NUMBER: _ClassVar[int]
    MORE_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    UNREAD_TOKENS_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    segments: int
    token_id: int
    num_tokens: int
    computed_ns: int
    more_token_ids: _containers.RepeatedScalarFieldContainer[int]
    unread_tokens: int
    def __init__(self, lease_id: _Optional[int] = ..., segments: _Optional[int] = ..., token_id: _Optional[int] = ..., num_tokens: _Optional[int] = ..., computed_ns: _Optional[int] = ..., more_token_ids: _Optional[_Iterable[int]] = ..., unread_tokens: _Optional[int] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Stopped(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    def __init__(self, lease_id: _Optional[int] = ...) -> None: ...

class DecodeMessage(_message.Message):
    __slots__ = ("welcome", "granted", "queued", "denied", "ended", "receipt")
    WELCOME_FIELD_NUMBER: _ClassVar[int]
    GRANTED_FIELD_NUMBER: _ClassVar[int]
    QUEUED_FIELD_NUMBER: _ClassVar[int]
    DENIED_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    RECEIPT_FIELD_NUMBER: _ClassVar[int]
    welcome: HandoffWelcome
    granted: LeaseGranted
    queued: LeaseQueued
    denied: LeaseDenied
    ended: LeaseEnded
    receipt: Receipt
    def __init__(self, welcome: _Optional[_Union[HandoffWelcome, _Mapping]] = ..., granted: _Optional[_Union[LeaseGranted, _Mapping]] = ..., queued: _Optional[_Union[LeaseQueued, _Mapping]] = ..., denied: _Optional[_Union[LeaseDenied, _Mapping]] = ..., ended: _Optional[_Union[LeaseEnded, _Mapping]] = ..., receipt: _Optional[_Union[Receipt, _Mapping]] = ...) -> None: ...

class HandoffWelcome(_message.Message):
    __slots__ = ("worker", "transport", "transport_params")
    class TransportParamsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    WORKER_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_PARAMS_FIELD_NUMBER: _ClassVar[int]
    worker: WorkerAddress
    transport: str
    transport_params: _containers.ScalarMap[str, str]
    def __init__(self, worker: _Optional[_Union[WorkerAddress, _Mapping]] = ..., transport: _Optional[str] = ..., transport_params: _Optional[_Mapping[str, str]] = ...) -> None: ...

class LeaseGranted(_message.Message):
    __slots__ = ("lease_id", "pages", "cached_pages")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    pages: _containers.RepeatedScalarFieldContainer[int]
    cached_pages: int
    def __init__(self, lease_id: _Optional[int] = ..., pages: _Optional[_Iterable[int]] = ..., cached_pages: _Optional[int] = ...) -> None: ...

class LeaseQueued(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class LeaseDenied(_message.Message):
    __slots__ = ("lease_id", "reason", "retryable", "unable")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RETRYABLE_FIELD_NUMBER: _ClassVar[int]
    UNABLE_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    retryable: bool
    unable: bool
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ..., retryable: _Optional[bool] = ..., unable: _Optional[bool] = ...) -> None: ...

class LeaseEnded(_message.Message):
    __slots__ = ("lease_id", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class Receipt(_message.Message):
    __slots__ = ("lease_id", "ok", "bad_segments", "pages", "bytes", "reason")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    BAD_SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    PAGES_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    lease_id: int
    ok: bool
    bad_segments: _containers.RepeatedScalarFieldContainer[int]
    pages: int
    bytes: int
    reason: str
    def __init__(self, lease_id: _Optional[int] = ..., ok: _Optional[bool] = ..., bad_segments: _Optional[_Iterable[int]] = ..., pages: _Optional[int] = ..., bytes: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class WorkerSpan(_message.Message):
    __slots__ = ("kind", "begin_ns", "end_ns", "tokens", "requests", "layer_begin", "layer_end", "bytes", "peer", "merged", "median_ns")
    KIND_FIELD_NUMBER: _ClassVar[int]
    BEGIN_NS_FIELD_NUMBER: _ClassVar[int]
    END_NS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    LAYER_BEGIN_FIELD_NUMBER: _ClassVar[int]
    LAYER_END_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PEER_FIELD_NUMBER: _ClassVar[int]
    MERGED_FIELD_NUMBER: _ClassVar[int]
    MEDIAN_NS_FIELD_NUMBER: _ClassVar[int]
    kind: WorkerSpanKind
    begin_ns: int
    end_ns: int
    tokens: int
    requests: int
    layer_begin: int
    layer_end: int
    bytes: int
    peer: str
    merged: int
    median_ns: int
    def __init__(self, kind: _Optional[_Union[WorkerSpanKind, str]] = ..., begin_ns: _Optional[int] = ..., end_ns: _Optional[int] = ..., tokens: _Optional[int] = ..., requests: _Optional[int] = ..., layer_begin: _Optional[int] = ..., layer_end: _Optional[int] = ..., bytes: _Optional[int] = ..., peer: _Optional[str] = ..., merged: _Optional[int] = ..., median_ns: _Optional[int] = ...) -> None: ...

class Trace(_message.Message):
    __slots__ = ("spans",)
    SPANS_FIELD_NUMBER: _ClassVar[int]
    spans: _containers.RepeatedCompositeFieldContainer[WorkerSpan]
    def __init__(self, spans: _Optional[_Iterable[_Union[WorkerSpan, _Mapping]]] = ...) -> None: ...

from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ListAdaptersRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AdapterInfo(_message.Message):
    __slots__ = ("name", "path", "digest", "rank", "num_params", "why_not")
    NAME_FIELD_NUMBER: _ClassVar[int]
    PATH_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    NUM_PARAMS_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    name: str
    path: str
    digest: str
    rank: int
    num_params: int
    why_not: str
    def __init__(self, name: _Optional[str] = ..., path: _Optional[str] = ..., digest: _Optional[str] = ..., rank: _Optional[int] = ..., num_params: _Optional[int] = ..., why_not: _Optional[str] = ...) -> None: ...

class ListAdaptersResponse(_message.Message):
    __slots__ = ("adapters",)
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    adapters: _containers.RepeatedCompositeFieldContainer[AdapterInfo]
    def __init__(self, adapters: _Optional[_Iterable[_Union[AdapterInfo, _Mapping]]] = ...) -> None: ...

class SetAdaptersRequest(_message.Message):
    __slots__ = ("add", "remove")
    class AddEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ADD_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    add: _containers.ScalarMap[str, str]
    remove: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, add: _Optional[_Mapping[str, str]] = ..., remove: _Optional[_Iterable[str]] = ...) -> None: ...

class SetAdaptersResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("worker", "undo", "force", "remove")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    REMOVE_FIELD_NUMBER: _ClassVar[int]
    worker: str
    undo: bool
    force: bool
    remove: bool
    def __init__(self, worker: _Optional[str] = ..., undo: _Optional[bool] = ..., force: _Optional[bool] = ..., remove: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class SetRoleRequest(_message.Message):
    __slots__ = ("worker", "role", "force", "chunk_tokens")
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    worker: str
    role: str
    force: bool
    chunk_tokens: int
    def __init__(self, worker: _Optional[str] = ..., role: _Optional[str] = ..., force: _Optional[bool] = ..., chunk_tokens: _Optional[int] = ...) -> None: ...

class SetRoleResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScaleRequest(_message.Message):
    __slots__ = ("pool", "replicas", "force", "look")
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    FORCE_FIELD_NUMBER: _ClassVar[int]
    LOOK_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replicas: int
    force: bool
    look: bool
    def __init__(self, pool: _Optional[str] = ..., replicas: _Optional[int] = ..., force: _Optional[bool] = ..., look: _Optional[bool] = ...) -> None: ...

class ScaleResponse(_message.Message):
    __slots__ = ("pending", "replicas")
    PENDING_FIELD_NUMBER: _ClassVar[int]
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    pending: _containers.RepeatedCompositeFieldContainer[PendingWorker]
    replicas: int
    def __init__(self, pending: _Optional[_Iterable[_Union[PendingWorker, _Mapping]]] = ..., replicas: _Optional[int] = ...) -> None: ...

class PendingWorker(_message.Message):
    __slots__ = ("name", "stage", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    stage: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., stage: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GetLoadRequest(_message.Message):
    __slots__ = ("window_s",)
    WINDOW_S_FIELD_NUMBER: _ClassVar[int]
    window_s: float
    def __init__(self, window_s: _Optional[float] = ...) -> None: ...

class GetLoadResponse(_message.Message):
    __slots__ = ("requests", "whole_s")
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_S_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[EndedRequest]
    whole_s: float
    def __init__(self, requests: _Optional[_Iterable[_Union[EndedRequest, _Mapping]]] = ..., whole_s: _Optional[float] = ...) -> None: ...

class EndedRequest(_message.Message):
    __slots__ = ("age_s", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "tpot_s", "handoff_s", "failed", "slo_ttft_s", "slo_tpot_s", "before_first_s", "after_first_s", "prefill_worker", "decode_worker")
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    FAILED_FIELD_NUMBER: _ClassVar[int]
    SLO_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    SLO_TPOT_S_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIRST_S_FIELD_NUMBER: _ClassVar[int]
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    age_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    handoff_s: float
    failed: bool
    slo_ttft_s: float
    slo_tpot_s: float
    before_first_s: _containers.RepeatedScalarFieldContainer[float]
    after_first_s: _containers.RepeatedScalarFieldContainer[float]
    prefill_worker: str
    decode_worker: str
    def __init__(self, age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., failed: _Optional[bool] = ..., slo_ttft_s: _Optional[float] = ..., slo_tpot_s: _Optional[float] = ..., before_first_s: _Optional[_Iterable[float]] = ..., after_first_s: _Optional[_Iterable[float]] = ..., prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "role", "address", "state", "num_waiting", "num_running", "waiting_tokens", "available_pages", "cached_pages", "total_pages", "leased_pages", "report_age_s", "losses", "counters", "reason", "page_size", "limits", "fenced_pages", "quarantined_pages", "step_age_s", "loop_lag_s", "circuit", "pairs", "num_tasks", "step_costs", "round_trip_s", "clock_ahead_s", "receipts", "model")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class StepCostsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    NAME_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    NUM_WAITING_FIELD_NUMBER: _ClassVar[int]
    NUM_RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    AVAILABLE_PAGES_FIELD_NUMBER: _ClassVar[int]
    CACHED_PAGES_FIELD_NUMBER: _ClassVar[int]
    TOTAL_PAGES_FIELD_NUMBER: _ClassVar[int]
    LEASED_PAGES_FIELD_NUMBER: _ClassVar[int]
    REPORT_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LOSSES_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    FENCED_PAGES_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_PAGES_FIELD_NUMBER: _ClassVar[int]
    STEP_AGE_S_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    CIRCUIT_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    STEP_COSTS_FIELD_NUMBER: _ClassVar[int]
    ROUND_TRIP_S_FIELD_NUMBER: _ClassVar[int]
    CLOCK_AHEAD_S_FIELD_NUMBER: _ClassVar[int]
    RECEIPTS_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    name: str
    role: str
    address: str
    state: str
    num_waiting: int
    num_running: int
    waiting_tokens: int
    available_pages: int
    cached_pages: int
    total_pages: int
    leased_pages: int
    report_age_s: float
    losses: int
    counters: _containers.ScalarMap[str, int]
    reason: str
    page_size: int
    limits: _containers.ScalarMap[str, str]
    fenced_pages: int
    quarantined_pages: int
    step_age_s: float
    loop_lag_s: float
    circuit: str
    pairs: _containers.RepeatedCompositeFieldContainer[PairStatus]
    num_tasks: int
    step_costs: _containers.ScalarMap[str, float]
    round_trip_s: float
    clock_ahead_s: float
    receipts: _containers.RepeatedCompositeFieldContainer[PairReceipts]
    model: str
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., available_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., leased_pages: _Optional[int] = ..., report_age_s: _Optional[float] = ..., losses: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., reason: _Optional[str] = ..., page_size: _Optional[int] = ..., limits: _Optional[_Mapping[str, str]] = ..., fenced_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., step_age_s: _Optional[float] = ..., loop_lag_s: _Optional[float] = ..., circuit: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ..., num_tasks: _Optional[int] = ..., step_costs: _Optional[_Mapping[str, float]] = ..., round_trip_s: _Optional[float] = ..., clock_ahead_s: _Optional[float] = ..., receipts: _Optional[_Iterable[_Union[PairReceipts, _Mapping]]] = ..., model: _Optional[str] = ...) -> None: ...

class PairStatus(_message.Message):
    __slots__ = ("peer", "failures", "reason", "age_s")
    PEER_FIELD_NUMBER: _ClassVar[int]
    FAILURES_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    peer: str
    failures: int
    reason: str
    age_s: float
    def __init__(self, peer: _Optional[str] = ..., failures: _Optional[int] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ...) -> None: ...

class GetStatusResponse(_message.Message):
    __slots__ = ("router_id", "model", "uptime_s", "num_queued", "num_in_flight", "workers", "counters", "limits", "loop_lag_s", "num_tasks", "cluster_id", "models")
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    class LimitsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    ROUTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UPTIME_S_FIELD_NUMBER: _ClassVar[int]
    NUM_QUEUED_FIELD_NUMBER: _ClassVar[int]
    NUM_IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    LOOP_LAG_S_FIELD_NUMBER: _ClassVar[int]
    NUM_TASKS_FIELD_NUMBER: _ClassVar[int]
    CLUSTER_ID_FIELD_NUMBER: _ClassVar[int]
    MODELS_FIELD_NUMBER: _ClassVar[int]
    router_id: str
    model: str
    uptime_s: float
    num_queued: int
    num_in_flight: int
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    counters: _containers.ScalarMap[str, int]
    limits: _containers.ScalarMap[str, str]
    loop_lag_s: float
    num_tasks: int
    cluster_id: str
    models: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, router_id: _Optional[str] = ..., model: _Optional[str] = ..., uptime_s: _Optional[float] = ..., num_queued: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., limits: _Optional[_Mapping[str, str]] = ..., loop_lag_s: _Optional[float] = ..., num_tasks: _Optional[int] = ..., cluster_id: _Optional[str] = ..., models: _Optional[_Iterable[str]] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainResponse(_message.Message):
    __slots__ = ("choices",)
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    choices: _containers.RepeatedCompositeFieldContainer[ExplainedRequest]
    def __init__(self, choices: _Optional[_Iterable[_Union[ExplainedRequest, _Mapping]]] = ...) -> None: ...

class ExplainedRequest(_message.Message):
    __slots__ = ("request_id", "choice", "state", "reason", "age_s", "ttft_s", "tpot_s", "e2e_s", "prompt_tokens", "cached_tokens", "output_tokens", "attempts", "moves", "slow", "why", "spans")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    TPOT_S_FIELD_NUMBER: _ClassVar[int]
    E2E_S_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    SLOW_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    SPANS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    choice: int
    state: str
    reason: str
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
    why: str
    spans: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, request_id: _Optional[str] = ..., choice: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., age_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., e2e_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., attempts: _Optional[int] = ..., moves: _Optional[int] = ..., slow: _Optional[bool] = ..., why: _Optional[str] = ..., spans: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class Span(_message.Message):
    __slots__ = ("name", "begin_s", "end_s", "worker", "attempt", "words", "details")
    NAME_FIELD_NUMBER: _ClassVar[int]
    BEGIN_S_FIELD_NUMBER: _ClassVar[int]
    END_S_FIELD_NUMBER: _ClassVar[int]
    WORKER_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    WORDS_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    name: str
    begin_s: float
    end_s: float
    worker: str
    attempt: int
    words: str
    details: _containers.RepeatedCompositeFieldContainer[Span]
    def __init__(self, name: _Optional[str] = ..., begin_s: _Optional[float] = ..., end_s: _Optional[float] = ..., worker: _Optional[str] = ..., attempt: _Optional[int] = ..., words: _Optional[str] = ..., details: _Optional[_Iterable[_Union[Span, _Mapping]]] = ...) -> None: ...

class ListSlowRequest(_message.Message):
    __slots__ = ("last",)
    LAST_FIELD_NUMBER: _ClassVar[int]
    last: int
    def __init__(self, last: _Optional[int] = ...) -> None: ...

class ListSlowResponse(_message.Message):
    __slots__ = ("requests",)
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    requests: _containers.RepeatedCompositeFieldContainer[ExplainedRequest]
    def __init__(self, requests: _Optional[_Iterable[_Union[ExplainedRequest, _Mapping]]] = ...) -> None: ...

class GetSpecRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetSpecResponse(_message.Message):
    __slots__ = ("values", "rollout")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    ROLLOUT_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[SpecValue]
    rollout: Rollout
    def __init__(self, values: _Optional[_Iterable[_Union[SpecValue, _Mapping]]] = ..., rollout: _Optional[_Union[Rollout, _Mapping]] = ...) -> None: ...

class SpecValue(_message.Message):
    __slots__ = ("key", "value", "source")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: str
    source: str
    def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ..., source: _Optional[str] = ...) -> None: ...

class Rollout(_message.Message):
    __slots__ = ("running", "current", "total", "reason")
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    CURRENT_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    running: bool
    current: int
    total: int
    reason: str
    def __init__(self, running: _Optional[bool] = ..., current: _Optional[int] = ..., total: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ApplySpecRequest(_message.Message):
    __slots__ = ("spec", "sources", "dry_run", "max_surge")
    class SourcesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SPEC_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    MAX_SURGE_FIELD_NUMBER: _ClassVar[int]
    spec: str
    sources: _containers.ScalarMap[str, str]
    dry_run: bool
    max_surge: int
    def __init__(self, spec: _Optional[str] = ..., sources: _Optional[_Mapping[str, str]] = ..., dry_run: _Optional[bool] = ..., max_surge: _Optional[int] = ...) -> None: ...

class ApplySpecResponse(_message.Message):
    __slots__ = ("changes",)
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    changes: _containers.RepeatedCompositeFieldContainer[SpecChange]
    def __init__(self, changes: _Optional[_Iterable[_Union[SpecChange, _Mapping]]] = ...) -> None: ...

class SpecChange(_message.Message):
    __slots__ = ("key", "before", "after", "how", "reason")
    KEY_FIELD_NUMBER: _ClassVar[int]
    BEFORE_FIELD_NUMBER: _ClassVar[int]
    AFTER_FIELD_NUMBER: _ClassVar[int]
    HOW_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    key: str
    before: str
    after: str
    how: str
    reason: str
    def __init__(self, key: _Optional[str] = ..., before: _Optional[str] = ..., after: _Optional[str] = ..., how: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RollPoolsRequest(_message.Message):
    __slots__ = ("pools", "max_surge")
    POOLS_FIELD_NUMBER: _ClassVar[int]
    MAX_SURGE_FIELD_NUMBER: _ClassVar[int]
    pools: _containers.RepeatedScalarFieldContainer[str]
    max_surge: int
    def __init__(self, pools: _Optional[_Iterable[str]] = ..., max_surge: _Optional[int] = ...) -> None: ...

class RollPoolsResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PairReceipts(_message.Message):
    __slots__ = ("peer", "good", "bad", "bytes", "transfer_s", "exposed_s", "resends")
    PEER_FIELD_NUMBER: _ClassVar[int]
    GOOD_FIELD_NUMBER: _ClassVar[int]
    BAD_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_S_FIELD_NUMBER: _ClassVar[int]
    EXPOSED_S_FIELD_NUMBER: _ClassVar[int]
    RESENDS_FIELD_NUMBER: _ClassVar[int]
    peer: str
    good: int
    bad: int
    bytes: int
    transfer_s: float
    exposed_s: float
    resends: int
    def __init__(self, peer: _Optional[str] = ..., good: _Optional[int] = ..., bad: _Optional[int] = ..., bytes: _Optional[int] = ..., transfer_s: _Optional[float] = ..., exposed_s: _Optional[float] = ..., resends: _Optional[int] = ...) -> None: ...

class NoteDecisionRequest(_message.Message):
    __slots__ = ("by", "what", "reason", "acted")
    BY_FIELD_NUMBER: _ClassVar[int]
    WHAT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    ACTED_FIELD_NUMBER: _ClassVar[int]
    by: str
    what: str
    reason: str
    acted: bool
    def __init__(self, by: _Optional[str] = ..., what: _Optional[str] = ..., reason: _Optional[str] = ..., acted: _Optional[bool] = ...) -> None: ...

class NoteDecisionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetUsageRequest(_message.Message):
    __slots__ = ("since_s", "until_s")
    SINCE_S_FIELD_NUMBER: _ClassVar[int]
    UNTIL_S_FIELD_NUMBER: _ClassVar[int]
    since_s: float
    until_s: float
    def __init__(self, since_s: _Optional[float] = ..., until_s: _Optional[float] = ...) -> None: ...

class GetUsageResponse(_message.Message):
    __slots__ = ("database", "usage", "prices")
    DATABASE_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    PRICES_FIELD_NUMBER: _ClassVar[int]
    database: str
    usage: _containers.RepeatedCompositeFieldContainer[KeyUsage]
    prices: UsagePrices
    def __init__(self, database: _Optional[str] = ..., usage: _Optional[_Iterable[_Union[KeyUsage, _Mapping]]] = ..., prices: _Optional[_Union[UsagePrices, _Mapping]] = ...) -> None: ...

class KeyUsage(_message.Message):
    __slots__ = ("hour_s", "key", "requests", "prompt_tokens", "cached_tokens", "generated_tokens", "prefill_s", "handoff_s", "decode_s")
    HOUR_S_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_S_FIELD_NUMBER: _ClassVar[int]
    HANDOFF_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    hour_s: int
    key: str
    requests: int
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    prefill_s: float
    handoff_s: float
    decode_s: float
    def __init__(self, hour_s: _Optional[int] = ..., key: _Optional[str] = ..., requests: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., prefill_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., decode_s: _Optional[float] = ...) -> None: ...

class UsagePrices(_message.Message):
    __slots__ = ("currency", "prompt", "cached", "generated")
    CURRENCY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    CACHED_FIELD_NUMBER: _ClassVar[int]
    GENERATED_FIELD_NUMBER: _ClassVar[int]
    currency: str
    prompt: float
    cached: float
    generated: float
    def __init__(self, currency: _Optional[str] = ..., prompt: _Optional[float] = ..., cached: _Optional[float] = ..., generated: _Optional[float] = ...) -> None: ...

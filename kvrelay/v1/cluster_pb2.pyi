from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

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
    __slots__ = ("pending",)
    PENDING_FIELD_NUMBER: _ClassVar[int]
    pending: _containers.RepeatedCompositeFieldContainer[PendingWorker]
    def __init__(self, pending: _Optional[_Iterable[_Union[PendingWorker, _Mapping]]] = ...) -> None: ...

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
    __slots__ = ("age_s", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "tpot_s", "handoff_s", "failed", "slo_ttft_s", "slo_tpot_s")
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
    def __init__(self, age_s: _Optional[float] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., output_tokens: _Optional[int] = ..., ttft_s: _Optional[float] = ..., tpot_s: _Optional[float] = ..., handoff_s: _Optional[float] = ..., failed: _Optional[bool] = ..., slo_ttft_s: _Optional[float] = ..., slo_tpot_s: _Optional[float] = ...) -> None: ...

class GetStatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("name", "role", "address", "state", "num_waiting", "num_running", "waiting_tokens", "available_pages", "cached_pages", "total_pages", "leased_pages", "report_age_s", "losses", "counters", "reason", "page_size", "limits", "fenced_pages", "quarantined_pages", "step_age_s", "loop_lag_s", "circuit", "pairs", "num_tasks", "step_costs")
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
    def __init__(self, name: _Optional[str] = ..., role: _Optional[str] = ..., address: _Optional[str] = ..., state: _Optional[str] = ..., num_waiting: _Optional[int] = ..., num_running: _Optional[int] = ..., waiting_tokens: _Optional[int] = ..., available_pages: _Optional[int] = ..., cached_pages: _Optional[int] = ..., total_pages: _Optional[int] = ..., leased_pages: _Optional[int] = ..., report_age_s: _Optional[float] = ..., losses: _Optional[int] = ..., counters: _Optional[_Mapping[str, int]] = ..., reason: _Optional[str] = ..., page_size: _Optional[int] = ..., limits: _Optional[_Mapping[str, str]] = ..., fenced_pages: _Optional[int] = ..., quarantined_pages: _Optional[int] = ..., step_age_s: _Optional[float] = ..., loop_lag_s: _Optional[float] = ..., circuit: _Optional[str] = ..., pairs: _Optional[_Iterable[_Union[PairStatus, _Mapping]]] = ..., num_tasks: _Optional[int] = ..., step_costs: _Optional[_Mapping[str, float]] = ...) -> None: ...

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
    __slots__ = ("router_id", "model", "uptime_s", "num_queued", "num_in_flight", "workers", "counters", "limits", "loop_lag_s", "num_tasks", "cluster_id")
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
    def __init__(self, router_id: _Optional[str] = ..., model: _Optional[str] = ..., uptime_s: _Optional[float] = ..., num_queued: _Optional[int] = ..., num_in_flight: _Optional[int] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., counters: _Optional[_Mapping[str, int]] = ..., limits: _Optional[_Mapping[str, str]] = ..., loop_lag_s: _Optional[float] = ..., num_tasks: _Optional[int] = ..., cluster_id: _Optional[str] = ...) -> None: ...

"""A process of the model: a worker's real role, pool, policy, pairs and streams, and an engine that answers at once.

Its engine writes into each slot of a page the stamp of all tokens up to it, as KV would be, and asserts when a step
reads another: a page that was given to two, or one whose KV has not come, does not stay unseen. It has no loop: it
sleeps and wakes as the real one, and takes a step in two halves when it is told to.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from engine.pages.pool import PagePool
from engine.types import Chunk, ModelInfo, SampledToken
from kvrelay.v1 import worker_pb2 as pb
from tests.protocol.setting import PAGE_SIZE, VOCAB_SIZE, next_token, stamp
from worker.driver import Worker
from worker.options import WorkerOptions, worker_options
from worker.role_change import RoleChange
from worker.roles import kind_of
from worker.steps.times import StepTimes
from worker.streams.router_link import RouterLink
from worker.streams.router_streams import RouterStreams

INFO = ModelInfo(
    name="model",
    architecture="Model",
    fingerprint="f",
    dtype="float32",
    vocab_size=VOCAB_SIZE,
    max_model_len=64,
    eos_token_ids=(),
    num_layers=1,
    num_params=1,
    weight_bytes=1,
)


@cache
def _options(name: str, role: str, prefix_cache: bool) -> WorkerOptions:
    settings = {"transports": ("loopback",), "checksums": False, "prefix_cache": prefix_cache, "chunk_tokens": 2}
    return worker_options(name, role, secret=name, **settings)


@cache
def _memory(name: str, num_pages: int) -> KvMemory:
    return KvMemory(KvLayout(page_size=PAGE_SIZE, dtype="float32", layers=(LayerKv(1, 1, 1),), num_pages=num_pages))


NO_ADAPTERS = SimpleNamespace(num_loads=0)


class Link(RouterLink):
    """What is put into it is sent at once, until the stream breaks."""

    def __init__(self, router_id: str, send: Callable[[pb.WorkerMessage], None]) -> None:
        super().__init__(router_id)
        self._send = send

    def put(self, message: pb.WorkerMessage) -> None:
        if not self.is_closed:
            self._send(message)


class Streams(RouterStreams):
    """They report when they are told to."""

    def __init__(self, host: Process) -> None:
        super().__init__(host.name, host, lambda: 0.0, report_interval_s=1.0, drop_after_s=1.0)
        self.reported: pb.WorkerReport | None = None

    def flush(self) -> None:
        for link in self._links.values():
            link.flush()

    def join(self, link: RouterLink) -> None:
        """A router's stream is there; the end of its last one may not have been heard yet."""
        self.end(link.router_id)
        self._links[link.router_id] = link
        self.reported = None

    def end(self, router_id: str) -> None:
        if (link := self._links.get(router_id)) is not None:
            self._drop(link, "its stream has ended")

    def hear(self, router_id: str, message: pb.RouterMessage) -> None:
        """Nothing on a stream that is over: the router does not know yet."""
        link = self._links.get(router_id)
        if link is not None and not link.is_closed:
            self._on_message(link, message)
            self.flush()

    @property
    def can_report(self) -> bool:
        return bool(self._links) and self._host.report() != self.reported

    def report(self) -> None:
        self.reported = self._host.report()
        for link in self._links.values():
            link.put(pb.WorkerMessage(report=self._report_for(link, self.reported)))


class Process(Worker[Any]):
    """A worker: RoleHost for the real role, WorkerHost for the real streams."""

    def __init__(self, name: str, role: str, incarnation: str, *, num_pages: int, prefix_cache: bool) -> None:
        self.options = _options(name, role, prefix_cache)
        memory = _memory(name, num_pages)
        memory.bytes.zero_()
        self._kv = memory.k(0).numpy()[:, :, 0, 0]
        self.engine: Any = SimpleNamespace(
            info=INFO, memory=memory, layout=memory.layout, can_overlap=False, num_stages=1, adapters=NO_ADAPTERS
        )
        self.pool = PagePool(num_pages, PAGE_SIZE)
        self.address = pb.WorkerAddress(name=name, address=f"{name}:{incarnation}", incarnation=incarnation)
        self.counters: Counter[str] = Counter()
        self.streams: Streams = Streams(self)
        self.clock: Any = SimpleNamespace(lag_s=0.0, num_tasks=0)
        self._watched: Any = SimpleNamespace(age_s=0.0, times=StepTimes())
        self.faults = None
        self._change = RoleChange(self)
        self.is_draining = self.is_stopping = False
        self.is_alive = True
        self.is_awake = False
        self.batch: Any = None  # that the engine computes
        self.role: Any = kind_of(role).load_driver()(self)

    @property
    def name(self) -> str:
        return self.options.name

    def wake(self) -> None:
        self.is_awake = True

    @property
    def decodes(self) -> bool:
        return "decode" in kind_of(self.options.role).phases

    @property
    def reservations(self) -> Any:
        """Of one that decodes."""
        return self.role._decode.reservations if self.options.role == "mixed" else self.role.reservations

    @property
    def is_idle(self) -> bool:
        """A step would compute nothing, and change nothing."""
        policy = self.role.policy
        if self.options.role == "prefill":
            return not policy._queue()
        if self.options.role == "decode":
            return not (policy._ready or policy._running)
        decode = policy.decode
        return not (policy.prefill._queue() or decode._ready or decode._running or decode._queued)

    def computes(self, request_id: str) -> bool:
        return any(chunk.request_id == request_id for chunk in self._chunks())

    def begin_step(self) -> None:
        self.batch = self.role.next_batch()
        self.is_awake = self.batch is not None
        for chunk in self._chunks():
            self._write(chunk)
        if self.batch is not None and (on_layer := self.role.step_of(self.batch).on_layer) is not None:
            on_layer(0)

    def end_step(self, error: str = "") -> None:
        """`error`: why it fails, for each of its requests."""
        chunks = self._chunks()
        batch, self.batch = self.batch, None
        self.role.on_step(batch, [self._sampled(chunk, error) for chunk in chunks if chunk.sample is not None or error])
        self.streams.flush()

    def _chunks(self) -> list[Chunk]:
        return [] if self.batch is None else list(self.role.step_of(self.batch).chunks)

    def _tokens(self, chunk: Chunk) -> list[int]:
        """Of its request, with the chunk's own: none is known of one that has gone meanwhile."""
        request = self.role.requests.get(chunk.request_id)
        return [] if request is None else list(request.tokens[: chunk.start + len(chunk.token_ids)])

    def _write(self, chunk: Chunk) -> None:
        tokens = self._tokens(chunk)
        for position in range(chunk.start, len(tokens)):
            self._kv[chunk.block_table[position // PAGE_SIZE], position % PAGE_SIZE] = stamp(tokens[: position + 1])

    def _sampled(self, chunk: Chunk, error: str) -> SampledToken:
        tokens = self._tokens(chunk)
        if error:
            return SampledToken(request_id=chunk.request_id, token_id=0, error=error)
        for position in range(len(tokens)):
            page = chunk.block_table[position // PAGE_SIZE]
            is_its = self._kv[page, position % PAGE_SIZE] == stamp(tokens[: position + 1])
            assert is_its, f"{self.name}: page {page} of {chunk.request_id} does not hold its token {position}"
        return SampledToken(request_id=chunk.request_id, token_id=next_token(tokens))


@dataclass
class Watch:
    """ProcessWatch of a prefill worker."""

    process: Process
    on_kill: Callable[[Process], None]

    @property
    def has_exited(self) -> bool:
        return not self.process.is_alive

    def kill(self, mapped_inode: int) -> str:
        if self.process.is_alive:
            self.on_kill(self.process)
        return ""

    def close(self) -> None: ...

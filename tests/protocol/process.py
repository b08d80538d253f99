"""A process of the model: a worker's real role, pool, policy and pairs, an engine that answers at once, and no loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

from engine.pages.layout import KvLayout, LayerKv
from engine.pages.memory import KvMemory
from engine.pages.pool import PagePool, page_hashes
from engine.types import ModelInfo, SampledToken, Step
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import model_info_to_proto
from worker.options import worker_options
from worker.roles import kind_of
from worker.streams.router_link import RouterLink

PAGE_SIZE = 4
NUM_PAGES = 8
INFO = ModelInfo(
    name="model",
    architecture="Model",
    fingerprint="f",
    dtype="float32",
    vocab_size=1000,
    max_model_len=64,
    eos_token_ids=(),
    num_layers=1,
    num_params=1,
    weight_bytes=1,
)


@cache
def _memory(name: str) -> KvMemory:
    layout = KvLayout(page_size=PAGE_SIZE, dtype="float32", layers=(LayerKv(1, 1, 1),), num_pages=NUM_PAGES)
    return KvMemory(layout)


def token_at(position: int) -> int:
    return 100 + position


class Link(RouterLink):
    """What is put into it is sent at once, until the stream breaks."""

    def __init__(self, router_id: str, send: Callable[[pb.WorkerMessage], None]) -> None:
        super().__init__(router_id)
        self._send = send

    def put(self, message: pb.WorkerMessage) -> None:
        if not self.is_closed:
            self._send(message)


class Streams:
    """Of a worker with the one router."""

    def __init__(self) -> None:
        self.router: Link | None = None

    def link(self, router_id: str) -> RouterLink | None:
        return self.router

    def event(self, request: pb.RequestState, kind: pb.EventKind, **more: Any) -> None:
        if self.router is not None:
            self.router.event(request, kind, **more)

    def flush(self) -> None:
        if self.router is not None:
            self.router.flush()


class Process:
    """A worker: RoleHost for the real role."""

    def __init__(
        self,
        name: str,
        role: str,
        incarnation: str,
        *,
        prefix_cache: bool,
        send: Callable[[str, str, Any], None],
    ) -> None:
        """`send(source, target, message)`"""
        self.options = worker_options(
            name, role, secret=name, transports=("loopback",), checksums=False, prefix_cache=prefix_cache
        )
        memory = _memory(name)
        self.engine = SimpleNamespace(info=INFO, memory=memory, layout=memory.layout, can_overlap=False)
        self.pool = PagePool(NUM_PAGES, PAGE_SIZE)
        self.address = pb.WorkerAddress(name=name, address=f"{name}:{incarnation}", incarnation=incarnation)
        self.counters: Counter[str] = Counter()
        self.streams = Streams()
        self._send = send
        self.faults = None
        self.is_draining = False
        self.is_alive = True
        self.batch: Any = None  # that the engine computes
        self.role: Any = kind_of(role).load_driver()(self)

    @property
    def name(self) -> str:
        return self.options.name

    def wake(self) -> None: ...

    def page_hashes(self, tokens: Sequence[int], parent: bytes = b"", **salt: Any) -> list[bytes]:
        return page_hashes(tokens, PAGE_SIZE, parent=parent) if self.options.prefix_cache else []

    def begin_step(self) -> None:
        self.batch = self.role.next_batch()
        if self.batch is not None:
            step: Step = self.role.step_of(self.batch)
            if step.on_layer is not None:
                step.on_layer(0)

    def end_step(self) -> None:
        batch, self.batch = self.batch, None
        chunks = self.role.step_of(batch).chunks
        tokens = [
            SampledToken(request_id=chunk.request_id, token_id=token_at(chunk.start + len(chunk.token_ids)))
            for chunk in chunks
            if chunk.sample is not None
        ]
        self.role.on_step(batch, tokens)
        self.streams.flush()

    def on_router(self, router_id: str) -> None:
        self.streams.router = Link(router_id, lambda message: self._send(self.name, "router", message))

    def on_router_lost(self) -> None:
        self.streams.router = None
        for request_id in list(self.role.requests):
            self.role.on_cancel(request_id, "the router is lost")

    def hello(self) -> pb.WorkerHello:
        model = model_info_to_proto(INFO)
        return pb.WorkerHello(
            worker=self.address, role=self.options.role, model=model, num_pages=NUM_PAGES, page_size=PAGE_SIZE
        )


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

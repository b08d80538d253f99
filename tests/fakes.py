"""Workers that compute nothing, for tests and benchmarks of the router. They speak worker.proto over real gRPC.

The tokens of a request are a function of its prompt and the position, so a test knows them beforehand and a request
that moved to another worker must go on with the same ones. The handoff is a call within the process.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

import grpc.aio

from cluster.router.links.worker_link import WorkerEndpoint
from engine.pages.pool import pages_for
from engine.types import SamplingParams, finish_reason
from kvrelay.v1 import generate_pb2, worker_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import FINISH_REASON_TO_PROTO, add_token, sampling_from_proto
from worker.wire.rpc import bind, make_server, secret_door
from worker.wire.tls import TlsFiles

VOCAB = 1000
EOS = 2


def scripted_token(prompt_ids: Sequence[int], index: int) -> int:
    """Output token `index` of a prompt; never EOS."""
    return 10 + (sum(prompt_ids) * 31 + index * 7) % (VOCAB - 10)


def scripted_tokens(prompt_ids: Sequence[int], count: int) -> list[int]:
    return [scripted_token(prompt_ids, index) for index in range(count)]


Script = Callable[[Sequence[int], int], int]


@dataclass(kw_only=True)
class FakeWorker(worker_pb2_grpc.WorkerServicer):
    name: str
    role: str = "prefill"
    num_pages: int = 256
    page_size: int = 16
    max_model_len: int = 512
    fingerprint: str = "f1"
    usual_sampling: generate_pb2.SamplingParams | None = None
    script: Script = scripted_token
    secret: str = ""
    tls: TlsFiles | None = None
    report_interval_s: float = 0.05
    port: int = 0
    submits: list[pb.Submit] = field(default_factory=list)
    cancels: list[str] = field(default_factory=list)
    reassigns: list[pb.Reassign] = field(default_factory=list)
    is_draining: bool = False
    is_silent: bool = False  # answers nothing any more, as a stopped process

    def __post_init__(self) -> None:
        self.incarnation = secrets.token_hex(4)
        self.up: dict[str, asyncio.Queue[pb.WorkerMessage]] = {}
        self.seqs: dict[str, int] = {}
        self._server: grpc.aio.Server | None = None
        self.connected = asyncio.Event()
        self.changed = asyncio.Condition()

    async def start(self) -> WorkerEndpoint:
        self._server = make_server(secret_door(self.secret))
        worker_pb2_grpc.add_WorkerServicer_to_server(self, self._server)
        self.port = bind(self._server, "127.0.0.1", self.port, self.tls)
        await self._server.start()
        return self.endpoint

    @property
    def endpoint(self) -> WorkerEndpoint:
        return WorkerEndpoint(name=self.name, role=self.role, address=f"127.0.0.1:{self.port}")

    async def kill(self) -> None:
        """Gone at once; its streams break. `start` brings it back, empty, as another incarnation."""
        assert self._server is not None
        await self._server.stop(0)
        self.incarnation = secrets.token_hex(4)
        self.drop_all()

    def drop_all(self) -> None: ...

    async def wait_for(self, predicate: Callable[[], bool]) -> None:
        async with asyncio.timeout(20), self.changed:
            await self.changed.wait_for(predicate)

    async def _notify(self) -> None:
        async with self.changed:
            self.changed.notify_all()

    async def Connect(
        self, requests: AsyncIterator[pb.RouterMessage], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.WorkerMessage]:
        first = await anext(aiter(requests))
        router_id = first.hello.router_id
        out: asyncio.Queue[pb.WorkerMessage] = asyncio.Queue()
        self.up[router_id], self.seqs[router_id] = out, 0
        reader = asyncio.create_task(self._read(requests, router_id, out))
        reporter = asyncio.create_task(self._report_forever())
        self.connected.set()
        try:
            await self._speaks()
            yield pb.WorkerMessage(hello=self.hello())
            yield pb.WorkerMessage(report=self.report(router_id))
            while True:
                message = await out.get()
                await self._speaks()
                yield message
        finally:
            reader.cancel()
            reporter.cancel()
            if self.up.get(router_id) is out:
                del self.up[router_id]
                self.on_router_lost(router_id)

    def on_router_lost(self, router_id: str) -> None: ...

    async def _speaks(self) -> None:
        while self.is_silent:
            await asyncio.sleep(0.01)

    def hello(self) -> pb.WorkerHello:
        model = generate_pb2.GetModelInfoResponse(
            name="fake",
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            fingerprint=self.fingerprint,
            usual_sampling=self.usual_sampling,
        )
        address = pb.WorkerAddress(name=self.name, address=self.endpoint.address, incarnation=self.incarnation)
        return pb.WorkerHello(
            worker=address, role=self.role, model=model, num_pages=self.num_pages, page_size=self.page_size
        )

    async def _read(
        self, requests: AsyncIterator[pb.RouterMessage], router_id: str, out: asyncio.Queue[pb.WorkerMessage]
    ) -> None:
        async for message in requests:
            match message.WhichOneof("kind"):
                case "submit":
                    self.seqs[router_id] = message.submit.seq
                    self.submits.append(message.submit)
                    self.on_submit(message.submit)
                case "begin":
                    self.on_begin(message.begin.request_id)
                case "cancel":
                    self.cancels.append(message.cancel.request_id)
                    self.on_cancel(message.cancel.request_id)
                case "reassign":
                    self.reassigns.append(message.reassign)
                case "ping":
                    pong = pb.Pong(router_ns=message.ping.router_ns, worker_ns=time.monotonic_ns())
                    out.put_nowait(pb.WorkerMessage(pong=pong))
            if message.WhichOneof("kind") != "ping":
                await self._notify()

    async def _report_forever(self) -> None:
        while True:
            await asyncio.sleep(self.report_interval_s)
            self.send_reports()

    def send_reports(self) -> None:
        for router_id, out in self.up.items():
            out.put_nowait(pb.WorkerMessage(report=self.report(router_id)))

    def report(self, router_id: str) -> pb.WorkerReport:
        return pb.WorkerReport(
            made_ns=time.monotonic_ns(),
            last_submit_seq=self.seqs[router_id],
            available_pages=self.num_pages,
            total_pages=self.num_pages,
            draining=self.is_draining,
            counters={"steps": 1},
        )

    def on_submit(self, submit: pb.Submit) -> None: ...

    def on_begin(self, request_id: str) -> None: ...

    def on_cancel(self, request_id: str) -> None: ...

    def emit(
        self, router_id: str, *, tokens: Sequence[pb.TokenOutput] = (), events: Sequence[pb.RequestEvent] = ()
    ) -> None:
        if out := self.up.get(router_id):
            outputs = pb.Outputs(events=events)
            for token in tokens:
                add_token(outputs, token)
            out.put_nowait(pb.WorkerMessage(outputs=outputs))

    def event(self, state: pb.RequestState, kind: pb.EventKind, **more: object) -> pb.RequestEvent:
        return pb.RequestEvent(
            request_id=state.request_id,
            attempt=state.attempt,
            kind=kind,
            at_ns=time.monotonic_ns(),
            **more,  # type: ignore[arg-type]
        )

    def token(self, state: pb.RequestState, params: SamplingParams, index: int) -> pb.TokenOutput:
        token_id = self.script(state.prompt_ids, index)
        output = pb.TokenOutput(request_id=state.request_id, attempt=state.attempt, index=index, token_id=token_id)
        if params.logprobs is not None:
            output.logprobs.chosen.token_id = token_id
            output.logprobs.chosen.logprob = -0.5
            output.logprobs.top.extend([output.logprobs.chosen] * params.logprobs)
        if params.prompt_logprobs is not None and index == 0:
            output.prompt_logprobs.extend(
                generate_pb2.PositionLogprobs(
                    chosen=generate_pb2.TokenLogprob(token_id=prompt_id, logprob=-0.25 * prompt_id),
                    top=[generate_pb2.TokenLogprob(token_id=9, logprob=-0.125)] * params.prompt_logprobs,
                )
                for prompt_id in state.prompt_ids[1:]
            )
        reason = finish_reason(params, token_id, index + 1, [EOS])
        if reason is not None:
            output.finish_reason = FINISH_REASON_TO_PROTO[reason]
        return output


@dataclass(kw_only=True)
class FakeDecodeWorker(FakeWorker):
    role: str = "decode"
    step_s: float = 0.0
    max_batch_size: int = 256  # tokens in one message; it runs whatever is there, as several workers would
    max_unsent: int = 1024  # messages to a router, above which it waits with the next step
    max_steps: int | None = None  # stop stepping after so many, until `resume`

    def __post_init__(self) -> None:
        super().__post_init__()
        self.running: dict[str, tuple[pb.RequestState, SamplingParams, int]] = {}  # next output index
        self.held: dict[str, pb.RequestState] = {}  # until the router lets them begin
        self.steps = 0
        self._wake = asyncio.Event()
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> WorkerEndpoint:
        self._loop_task = asyncio.create_task(self._run())
        return await super().start()

    async def kill(self) -> None:
        if self._loop_task is not None:
            self._loop_task.cancel()
        await super().kill()

    def resume(self) -> None:
        self.max_steps = None
        self._wake.set()

    def drop_all(self) -> None:
        self.running.clear()
        self.held.clear()

    def take(self, state: pb.RequestState, receipt: generate_pb2.HandoffReceipt) -> None:
        """The KV of a request stands here."""
        self.emit(state.router_id, events=[self.event(state, pb.EVENT_KIND_DECODE_READY, receipt=receipt)])
        if state.held:
            self.held[state.request_id] = state
        else:
            self._begin(state)

    def _begin(self, state: pb.RequestState) -> None:
        first = len(state.output_ids) + 1
        self.running[state.request_id] = (state, sampling_from_proto(state.sampling), first)
        self.emit(state.router_id, events=[self.event(state, pb.EVENT_KIND_DECODE_STARTED)])
        self._wake.set()

    def on_begin(self, request_id: str) -> None:
        if state := self.held.pop(request_id, None):
            self._begin(state)

    def preempt(self, request_id: str) -> None:
        state, _, _ = self.running.pop(request_id)
        self.emit(state.router_id, events=[self.event(state, pb.EVENT_KIND_PREEMPTED)])

    def on_cancel(self, request_id: str) -> None:
        self.held.pop(request_id, None)
        if entry := self.running.pop(request_id, None):
            self.emit(entry[0].router_id, events=[self.event(entry[0], pb.EVENT_KIND_CANCELLED)])

    def on_router_lost(self, router_id: str) -> None:
        self.running = {i: entry for i, entry in self.running.items() if entry[0].router_id != router_id}
        self.held = {i: state for i, state in self.held.items() if state.router_id != router_id}

    def report(self, router_id: str) -> pb.WorkerReport:
        report = super().report(router_id)
        held = sum(pages_for(len(s.prompt_ids) + index, self.page_size) for s, _, index in self.running.values())
        report.available_pages = max(0, self.num_pages - held)
        report.num_running = len(self.running)
        report.request_ids.extend(self.running)
        return report

    async def _run(self) -> None:
        while True:
            while not self.running or (self.max_steps is not None and self.steps >= self.max_steps):
                self._wake.clear()
                await self._wake.wait()
            if all(out.qsize() <= self.max_unsent for out in self.up.values()):
                self._step()
            await self._notify()
            await asyncio.sleep(self.step_s)

    def _step(self) -> None:
        self.steps += 1
        outputs: dict[str, list[pb.TokenOutput]] = {}
        for request_id, (state, params, index) in list(self.running.items()):
            token = self.token(state, params, index)
            outputs.setdefault(state.router_id, []).append(token)
            if token.finish_reason:
                del self.running[request_id]
            else:
                self.running[request_id] = (state, params, index + 1)
        for router_id, tokens in outputs.items():
            for start in range(0, len(tokens), self.max_batch_size):
                self.emit(router_id, tokens=tokens[start : start + self.max_batch_size])


@dataclass(kw_only=True)
class FakePrefillWorker(FakeWorker):
    decodes: Sequence[FakeDecodeWorker] = ()
    is_holding: bool = False  # keep what is submitted, until `release`
    fail_with: str = ""  # answer the next submit with FAILED (retryable)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.held: list[pb.Submit] = []

    def drop_all(self) -> None:
        self.held.clear()

    def on_router_lost(self, router_id: str) -> None:
        self.held = [s for s in self.held if s.request.router_id != router_id]

    def on_submit(self, submit: pb.Submit) -> None:
        if self.fail_with:
            reason, self.fail_with = self.fail_with, ""
            failed = self.event(submit.request, pb.EVENT_KIND_FAILED, reason=reason)
            self.emit(submit.request.router_id, events=[failed])
        elif self.is_holding:
            self.held.append(submit)
        else:
            self.compute(submit)

    def on_cancel(self, request_id: str) -> None:
        for submit in [s for s in self.held if s.request.request_id == request_id]:
            self.held.remove(submit)
            state = submit.request
            self.emit(state.router_id, events=[self.event(state, pb.EVENT_KIND_CANCELLED)])

    def release(self) -> None:
        self.is_holding = False
        held, self.held = self.held, []
        for submit in held:
            self.compute(submit)

    def report(self, router_id: str) -> pb.WorkerReport:
        report = super().report(router_id)
        report.waiting_tokens = sum(len(s.request.prompt_ids) for s in self.held)
        report.num_waiting = len(self.held)
        report.request_ids.extend(s.request.request_id for s in self.held)
        return report

    def compute(self, submit: pb.Submit) -> None:
        state = submit.request
        token = self.token(state, sampling_from_proto(state.sampling), len(state.output_ids))
        events = [
            self.event(state, pb.EVENT_KIND_PREFILL_STARTED, cached_tokens=0),
            self.event(state, pb.EVENT_KIND_FIRST_TOKEN),
        ]
        self.emit(state.router_id, tokens=[token], events=events)
        if token.finish_reason:
            return
        decode = next((d for d in self.decodes if d.name == submit.decode.name), None)
        if decode is None or decode.incarnation != submit.decode.incarnation:
            failed = self.event(state, pb.EVENT_KIND_FAILED, reason="the decode worker is gone")
            self.emit(state.router_id, events=[failed])
            return
        pages = pages_for(len(state.prompt_ids) + len(state.output_ids), self.page_size)
        receipt = generate_pb2.HandoffReceipt(transport="loopback", pages=pages, bytes=pages * 1024, checksums_ok=True)
        decode.take(state, receipt)
        handed_off = self.event(state, pb.EVENT_KIND_HANDED_OFF, receipt=receipt, decode_worker=decode.name)
        self.emit(state.router_id, events=[handed_off])

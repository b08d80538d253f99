"""DecodeWorker drives one engine by a DecodePolicy: KV in, tokens out.

    prefill worker --reserve--> policy --lease--> KV segments arrive (kv_transfer.decode_side) --commit--> policy: ready
                                                                                                 |
    router <-- one message a step with the tokens of all its requests <-- step <-- next_batch <--+

The loop: take the next batch, run it in the engine's thread, report what it brought. When pages run out the policy
says who leaves; the router is told and has the request computed again (prompt and tokens so far) by the prefill pool.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, OrderedDict
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from decode_worker.policy import DecodeBatch, DecodeEntry, DecodePolicy
from engine.engine import Engine
from engine.execution import wait_broken
from engine.pages.pool import PageHash, PagePool, page_hashes
from engine.types import (
    PENDING,
    Chunk,
    SampledToken,
    SampleSpec,
    SamplingParams,
    Step,
    banned_token_ids,
    finish_reason,
)
from kv_transfer.decode_side.servicer import HandoffServicer
from kv_transfer.lease import Denied, Granted, Queued
from kv_transfer.transports.registry import nccl_counters
from kvrelay.v1 import generate_pb2, worker_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from worker.convert import model_info_to_proto, sampling_from_proto, token_output
from worker.options import WorkerOptions
from worker.recording import record_calls
from worker.router_streams import RouterLink, WorkerService
from worker.rpc import bind, make_server
from worker.run_ahead import Flights, StepInFlight

log = logging.getLogger(__name__)

CANCELLED_REMEMBERED = 4096  # ids whose cancel came before their reservation


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request as the driver knows it: `tokens` is prompt + output, the last one's KV not yet computed."""

    state: pb.RequestState
    params: SamplingParams
    tokens: list[int]
    parent: PageHash = b""  # hash of the last page whose tokens are known
    hashed_pages: int = 0

    @property
    def id(self) -> str:
        return self.state.request_id

    @property
    def prompt_len(self) -> int:
        return len(self.state.prompt_ids)

    @property
    def num_outputs(self) -> int:
        return len(self.tokens) - self.prompt_len


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A batch whose step was begun."""

    batch: DecodeBatch
    step: StepInFlight


_NOTHING = DecodeBatch(entries=(), joined=(), preempted=())


class DecodeWorker:
    def __init__(self, options: WorkerOptions, engine: Engine) -> None:
        self.options = options
        self.engine = engine
        self.address = pb.WorkerAddress(
            name=options.name, incarnation=options.incarnation or secrets.token_hex(8), address=""
        )
        layout = engine.layout
        self.policy = DecodePolicy(
            PagePool(layout.num_pages, layout.page_size),
            options.policy,
            name=options.name,
        )
        if options.record:
            record_calls(self.policy, options.record, options.name)
        self.counters: Counter[str] = Counter(nccl_counters(options.transfer.nccl, engine.memory))
        self._live: dict[str, _Live] = {}
        self._cancelled: OrderedDict[str, None] = OrderedDict()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._flights = Flights(engine, self._thread)
        self._wake = asyncio.Event()
        self._is_draining = False
        self._is_stopping = False
        self._service = WorkerService(self, report_interval_s=options.report_interval_s)
        self.handoffs = HandoffServicer(
            self,
            memory=engine.memory,
            me=self.address,
            model_fingerprint=engine.info.fingerprint,
            options=options.transfer,
            address_host=options.host,
        )
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> pb.WorkerAddress:
        """Listen and run. Raises OSError when the port is taken."""
        self._server = make_server(self.options.secret, ["kvrelay.v1.Worker", "kvrelay.v1.Handoff"])
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._server)
        worker_pb2_grpc.add_HandoffServicer_to_server(self.handoffs, self._server)
        port = bind(self._server, self.options.host, self.options.port)
        self.address.address = f"{self.options.host}:{port}"
        await self._server.start()
        self._service.start()
        self._loop_task = asyncio.get_running_loop().create_task(self._run())
        log.info("%s serves decode on %s", self.options.name, self.address.address)
        return self.address

    async def stop(self, grace_s: float = 0.0) -> None:
        """Take no more, let what runs end within `grace_s`, then stop."""
        self._is_draining = True
        deadline = time.monotonic() + grace_s
        while self._live and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for live in list(self._live.values()):
            self._stop(live, "the worker stops")
        await self._service.stop()
        await self.handoffs.close()
        await self._server.stop(0)
        self._is_stopping = True
        self._wake.set()
        if self._loop_task is not None:
            await asyncio.gather(self._loop_task, return_exceptions=True)  # a step in flight ends, and frees its pages
        self._thread.shutdown(wait=True)

    async def wait_broken(self) -> None:
        """Raises what broke the step loop, if ever: whoever keeps the worker must end it, for it serves nothing."""
        assert self._loop_task is not None, "wait_broken before start"
        await wait_broken(self._loop_task, self.engine)

    # What routers send: WorkerHost

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(
            worker=self.address,
            role="decode",
            model=model_info_to_proto(self.engine.info),
            num_pages=self.policy.pool.num_pages,
            page_size=self.policy.pool.page_size,
            max_batch=self.policy.options.max_batch_size,
            limits=self.options.limits,
        )

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        reason = f"{self.options.name} decodes; prompts go to a prefill worker"
        link.event(submit.request, pb.EVENT_KIND_FAILED, reason=reason)
        self._service.flush()

    def on_reassign(self, reassign: pb.Reassign) -> None:
        log.warning("%s decodes; reassign of %s is for its prefill worker", self.options.name, reassign.request_id)

    def on_cancel(self, cancel: pb.Cancel) -> None:
        live = self._live.get(cancel.request_id)
        if live is None:
            self._remember_cancelled(cancel.request_id)
        else:
            self._stop(live, cancel.reason)

    def _stop(self, live: _Live, reason: str) -> None:
        self.counters["cancelled"] += 1
        if self.policy.is_reserved(live.id):
            self.handoffs.leases.end(live.id, reason)  # on_lease_released follows, after the fence
            return
        self._end(live)
        self._event(live, pb.EVENT_KIND_CANCELLED, reason=reason)
        self._service.flush()

    def on_router_lost(self, router_id: str) -> None:
        for live in [live for live in self._live.values() if live.state.router_id == router_id]:
            self._stop(live, f"router {router_id} is lost")

    def report(self) -> pb.WorkerReport:
        usage = self.policy.pool.usage
        return pb.WorkerReport(
            num_waiting=self.policy.num_waiting,
            num_running=self.policy.num_running,
            available_pages=self.policy.spare_pages,
            cached_pages=usage.cached,
            total_pages=usage.total,
            leased_pages=self.handoffs.leases.leased_pages,
            counters=self._all_counters(),
            draining=self._is_draining,
            request_ids=self.policy.request_ids,
        )

    def check_invariants(self) -> None:
        self.policy.check_invariants()
        self.handoffs.check_invariants()

    # What prefill workers bring: ReservationHost

    def reserve(self, request: pb.RequestState) -> Granted | Queued | Denied:
        request_id = request.request_id
        if self._is_draining:
            return Denied(reason=f"{self.options.name} is stopping", retryable=True)
        if request_id in self._cancelled:
            return Denied(reason=f"{request_id} was cancelled before its KV came", retryable=False)
        if self._service.link(request.router_id) is None:
            return Denied(reason=f"{self.options.name} has no stream with {request.router_id}", retryable=True)
        tokens = [*request.prompt_ids, *request.output_ids]
        params = sampling_from_proto(request.sampling)
        hashes = self._hashes(tokens) if self.options.prefix_cache else []
        answer = self.policy.reserve(
            request_id,
            num_tokens=len(tokens),
            max_new_tokens=params.max_tokens - len(request.output_ids),
            hashes=hashes,
        )
        if not isinstance(answer, Denied):
            live = _Live(state=request, params=params, tokens=tokens, hashed_pages=len(hashes))
            live.parent = hashes[-1] if hashes else b""
            self._live[request_id] = live
        return answer

    def on_committed(
        self, request: pb.RequestState, token_id: int, num_tokens: int, receipt: generate_pb2.HandoffReceipt
    ) -> None:
        live = self._live[request.request_id]
        assert num_tokens == len(live.tokens), f"{live.id}: {num_tokens} tokens committed, {len(live.tokens)} reserved"
        live.tokens.append(token_id)
        self.policy.on_committed(live.id)
        self._event(live, pb.EVENT_KIND_DECODE_READY, receipt=receipt)
        self._service.flush()
        self._wake.set()

    def on_lease_released(self, request: pb.RequestState, reason: str) -> None:
        live = self._live.get(request.request_id)
        if live is None or live.state.attempt != request.attempt:
            return
        log.info("%s: the lease of %s is over: %s", self.options.name, live.id, reason)
        self._end(live)  # the prefill worker tells the router, if it still matters
        self._service.flush()

    # The step loop

    async def _run(self) -> None:
        if self.engine.can_overlap:
            await self._run_ahead()
            return
        while not self._is_stopping:
            batch = self.policy.next_batch()
            self._announce(batch)
            if not batch.entries:
                await self._sleep()
                continue
            self._process(batch, await self._flights.run(self._step(batch)))

    async def _run_ahead(self) -> None:
        """On a GPU the next step is begun while the last one runs, with its tokens still to come: the GPU never waits
        for what is done here. The second of two may compute a token for a request that has ended with the first,
        which nobody reads."""
        first: _Flight | None = None
        while not self._is_stopping or first is not None:
            if first is not None and (first.step.must_land or self._must_know_tokens()):
                self._process(first.batch, await self._flights.land(first.step))
                first = None
            batch = _NOTHING if self._is_stopping else self.policy.next_batch()
            self._announce(batch)
            second = await self._take_off(batch, first) if batch.entries else None
            if first is not None:
                self._process(first.batch, await self._flights.land(first.step))
            elif second is None:
                await self._sleep()
            first = second

    def _must_know_tokens(self) -> bool:
        """Penalties look at every token so far: such a request's next step is made only when it has landed."""
        return any(live.params.has_penalties for live in self._live.values())

    async def _take_off(self, batch: DecodeBatch, before: _Flight | None) -> _Flight:
        step = await self._flights.take_off(lambda: self._step(batch), before.step if before is not None else None)
        return _Flight(batch=batch, step=step)

    def _step(self, batch: DecodeBatch) -> Step:
        """Of those entries whose requests are still wanted: all of them, when the batch was just made."""
        return Step(chunks=[self._chunk(entry) for entry in batch.entries if entry.request_id in self._live])

    async def _sleep(self) -> None:
        """Until something has changed."""
        self._wake.clear()
        if not self._is_stopping:
            await self._wake.wait()

    def _announce(self, batch: DecodeBatch) -> None:
        for request_id in batch.preempted:
            live = self._live.pop(request_id)
            self._event(live, pb.EVENT_KIND_PREEMPTED)
        for request_id in batch.joined:
            self._event(self._live[request_id], pb.EVENT_KIND_DECODE_STARTED)
        if batch.preempted:
            self._grant_queued()
        if batch.preempted or batch.joined:
            self._service.flush()

    def _chunk(self, entry: DecodeEntry) -> Chunk:
        live = self._live[entry.request_id]
        params = live.params
        spec = SampleSpec(
            params=params,
            position=entry.position + 1,
            prompt_ids=live.state.prompt_ids if params.has_penalties else (),
            output_ids=live.tokens[live.prompt_len :] if params.has_penalties else (),
            banned_ids=banned_token_ids(params, entry.position + 1 - live.prompt_len, self.engine.info.eos_token_ids),
        )
        is_known = entry.position < len(live.tokens)
        return Chunk(
            request_id=live.id,
            token_ids=(live.tokens[entry.position] if is_known else PENDING,),
            start=entry.position,
            block_table=entry.pages,
            sample=spec,
        )

    def _process(self, batch: DecodeBatch, sampled: list[SampledToken]) -> None:
        self.counters["steps"] += 1
        self.policy.on_batch_done(batch)
        for token in sampled:
            live = self._live.get(token.request_id)
            if live is not None and self.policy.holds(live.id):  # else: cancelled while it ran
                self._on_token(live, token)
        self._grant_queued()
        self._service.flush()

    def _on_token(self, live: _Live, token: SampledToken) -> None:
        if token.error:
            self._event(live, pb.EVENT_KIND_FAILED, reason=f"{self.options.name}: {token.error}")
            self._end(live, is_step=True)
            return
        self._publish_full_pages(live)
        live.tokens.append(token.token_id)
        self.counters["generated_tokens"] += 1
        reason = finish_reason(live.params, token.token_id, live.num_outputs, self.engine.info.eos_token_ids)
        link = self._service.link(live.state.router_id)
        if link is not None:
            link.token(token_output(live.state, live.num_outputs - 1, token, reason))
        if reason is not None:
            self._end(live, is_step=True)

    def _publish_full_pages(self, live: _Live) -> None:
        """Every token in `tokens` has its KV by now; say what the pages that this filled hold."""
        page_size = self.policy.pool.page_size
        if not self.options.prefix_cache or len(live.tokens) // page_size == live.hashed_pages:
            return
        new = page_hashes(
            live.tokens[live.hashed_pages * page_size :],
            page_size,
            salt=self._salt,
            parent=live.parent,
        )
        for page_hash in new:
            self.policy.on_page_filled(live.id, page_hash)
        live.parent, live.hashed_pages = new[-1], live.hashed_pages + len(new)

    def _end(self, live: _Live, *, is_step: bool = False) -> None:
        """Forget a request; its pages go as soon as no batch uses them."""
        self._live.pop(live.id, None)
        self.policy.on_cancelled(live.id)
        if not is_step:
            self._grant_queued()
            self._wake.set()

    def _grant_queued(self) -> None:
        for request_id, granted in self.policy.next_grants():
            live = self._live[request_id]
            self.handoffs.leases.grant(request_id, live.state.attempt, granted)

    def _remember_cancelled(self, request_id: str) -> None:
        self._cancelled[request_id] = None
        while len(self._cancelled) > CANCELLED_REMEMBERED:
            self._cancelled.popitem(last=False)

    def _event(
        self, live: _Live, kind: pb.EventKind, *, reason: str = "", receipt: generate_pb2.HandoffReceipt | None = None
    ) -> None:
        link = self._service.link(live.state.router_id)
        if link is not None:
            link.event(live.state, kind, reason=reason, receipt=receipt)

    @property
    def _salt(self) -> bytes:
        return self.engine.info.fingerprint.encode()

    def _hashes(self, tokens: list[int]) -> list[PageHash]:
        return page_hashes(tokens, self.policy.pool.page_size, salt=self._salt)

    def _all_counters(self) -> dict[str, int]:
        pool = self.policy.pool
        return {
            **self.counters,
            **self.handoffs.counters,
            "preemptions": self.policy.preemptions,
            "prefix_hit_tokens": pool.hit_tokens,
            "prefix_lookup_tokens": pool.lookup_tokens,
        }

"""PrefillWorker drives one engine by a PrefillPolicy: prompts in, first tokens and KV out.

    submit --> [connecting to the decode worker] --> policy --> step --> first token to the router
                                                       \\-- layer groups to the decode worker, as computed --> commit
The loop: take the next batch, run it in the engine's thread, report what it brought. While a step runs, every layer
group it completes is put into the pages of the decode worker by the pair's own thread (kv_transfer.prefill_side).

What fails, fails for one request: the router is told, with a reason and whether another attempt may do better, and
the pages come back once neither the engine nor a handoff reads them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from engine.engine import Engine
from engine.execution import wait_broken
from engine.pages.pool import PagePool, page_hashes, pages_for
from engine.types import (
    Chunk,
    SampledToken,
    SampleSpec,
    SamplingParams,
    Step,
    banned_token_ids,
    finish_reason,
)
from kv_transfer.plan import layer_groups
from kv_transfer.prefill_side.connect import connect
from kv_transfer.prefill_side.errors import HandoffDenied, HandoffFailed, HandoffLost, HandoffRefused
from kv_transfer.prefill_side.handoff import Handoff
from kv_transfer.prefill_side.pair import PrefillPair
from kv_transfer.transports.faulty import Faults
from kv_transfer.transports.registry import nccl_counters
from kvrelay.v1 import generate_pb2, worker_pb2_grpc
from kvrelay.v1 import worker_pb2 as pb
from prefill_worker.policy import ChunkPlan, PrefillBatch, PrefillPolicy
from worker.convert import model_info_to_proto, sampling_from_proto, token_output
from worker.options import WorkerOptions
from worker.recording import record_calls
from worker.router_streams import RouterLink, WorkerService
from worker.rpc import bind, handoff_dial, make_server
from worker.run_ahead import Flights, StepInFlight

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Live:
    """A request as the driver knows it. `sent_pages` are those whose segments were given to the handoff."""

    state: pb.RequestState
    link: RouterLink
    params: SamplingParams
    tokens: list[int]
    decode: pb.WorkerAddress
    handoff: Handoff | None = None
    sent_pages: int = 0
    is_stalled: bool = False
    moving_to: pb.WorkerAddress | None = None
    task: asyncio.Task[None] | None = None
    is_cancelled: bool = False  # or over for another reason: nothing more is sent to the router

    @property
    def id(self) -> str:
        return self.state.request_id

    @property
    def new_tokens_left(self) -> int:
        return self.params.max_tokens - len(self.state.output_ids)


@dataclass(slots=True, kw_only=True)
class _Flight:
    """A batch in the engine."""

    batch: PrefillBatch
    step: Step


class PrefillWorker:
    def __init__(self, options: WorkerOptions, engine: Engine, *, faults: Faults | None = None) -> None:
        self.options = options
        self.engine = engine
        self.address = pb.WorkerAddress(
            name=options.name, incarnation=options.incarnation or secrets.token_hex(8), address=""
        )
        layout = engine.layout
        self.policy = PrefillPolicy(
            PagePool(layout.num_pages, layout.page_size),
            options.policy,
        )
        if options.record:
            record_calls(self.policy, options.record, options.name)
        self.counters: Counter[str] = Counter(nccl_counters(options.transfer.nccl, engine.memory))
        self._live: dict[str, _Live] = {}
        self._peers: dict[tuple[str, str], asyncio.Task[PrefillPair]] = {}
        self._faults = faults
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._flights = Flights(engine, self._thread)
        self._wake = asyncio.Event()
        self._is_draining = False
        self._is_stopping = False
        self._service = WorkerService(self, report_interval_s=options.report_interval_s)
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop_task: asyncio.Task[None] | None = None

    async def start(self) -> pb.WorkerAddress:
        """Listen and run. Raises OSError when the port is taken."""
        self._server = make_server(self.options.secret, ["kvrelay.v1.Worker"])
        worker_pb2_grpc.add_WorkerServicer_to_server(self._service, self._server)
        port = bind(self._server, self.options.host, self.options.port)
        self.address.address = f"{self.options.host}:{port}"
        await self._server.start()
        self._service.start()
        self._loop_task = asyncio.get_running_loop().create_task(self._run())
        log.info("%s serves prefill on %s", self.options.name, self.address.address)
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
        await self._server.stop(0)
        self._is_stopping = True
        self._wake.set()
        if self._loop_task is not None:
            await asyncio.gather(self._loop_task, return_exceptions=True)  # a step in flight ends, and frees its pages
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(peer.result().close() for peer in self._peers.values() if _is_open(peer)))
        self._thread.shutdown(wait=True)

    async def wait_broken(self) -> None:
        """Raises what broke the step loop, if ever: whoever keeps the worker must end it, for it serves nothing."""
        assert self._loop_task is not None, "wait_broken before start"
        await wait_broken(self._loop_task, self.engine)

    # What routers send: WorkerHost

    def hello(self) -> pb.WorkerHello:
        return pb.WorkerHello(
            worker=self.address,
            role="prefill",
            model=model_info_to_proto(self.engine.info),
            num_pages=self.policy.pool.num_pages,
            page_size=self.policy.pool.page_size,
            max_batch=self.policy.options.max_batch_tokens,
            limits=self.options.limits,
        )

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        state = submit.request
        if self._is_draining or state.request_id in self._live:
            why = "is stopping" if self._is_draining else f"has {state.request_id} already"
            link.event(state, pb.EVENT_KIND_FAILED, reason=f"{self.options.name} {why}", retryable=True)
            self._service.flush()
            return
        live = _Live(
            state=state,
            link=link,
            params=sampling_from_proto(state.sampling),
            tokens=[*state.prompt_ids, *state.output_ids],
            decode=submit.decode,
        )
        pool = self.policy.pool
        if pages_for(len(live.tokens), pool.page_size) > pool.num_pages:
            reason = f"{self.options.name}: the prompt of {len(live.tokens)} tokens needs more pages than exist"
            link.event(state, pb.EVENT_KIND_FAILED, reason=reason)
            self._service.flush()
            return
        self._live[live.id] = live
        peer = self._peer(live.decode)
        if live.new_tokens_left <= 1 or _is_open(peer):
            self._enqueue(live)
        else:
            self._spawn(self._enqueue_when_connected(live, peer))

    def on_cancel(self, cancel: pb.Cancel) -> None:
        live = self._live.get(cancel.request_id)
        if live is not None:
            self._stop(live, cancel.reason)

    def _stop(self, live: _Live, reason: str) -> None:
        if live.is_cancelled:
            return
        live.is_cancelled = True
        self.counters["cancelled"] += 1
        self._spawn(self._cancel(live, reason))

    def on_reassign(self, reassign: pb.Reassign) -> None:
        live = self._live.get(reassign.request_id)
        if live is None or live.is_cancelled or not live.is_stalled:
            return
        if live.handoff is not None and live.handoff.is_granted:
            return  # pages came meanwhile; moved now, it might run on both workers. The first one tells the router
        live.moving_to = reassign.decode
        if live.task is not None and live.handoff is not None:  # its commit ends, and looks at moving_to
            self._spawn(live.handoff.abort("reassigned"))

    def on_router_lost(self, router_id: str) -> None:
        for live in [live for live in self._live.values() if live.state.router_id == router_id]:
            self._stop(live, f"router {router_id} is lost")

    def report(self) -> pb.WorkerReport:
        usage = self.policy.pool.usage
        return pb.WorkerReport(
            num_waiting=self.policy.num_waiting,
            num_running=self.policy.num_running,
            waiting_tokens=self.policy.waiting_tokens,
            available_pages=usage.available,
            cached_pages=usage.cached,
            total_pages=usage.total,
            counters=self._all_counters(),
            draining=self._is_draining,
            request_ids=list(self._live),
        )

    def check_invariants(self) -> None:
        self.policy.check_invariants()

    # The step loop

    async def _run(self) -> None:
        if self.engine.can_overlap:
            await self._run_ahead()
            return
        while not self._is_stopping:
            batch = self.policy.next_batch()
            if batch is None:
                await self._sleep()
                continue
            flight = self._prepare(batch)
            self._process(flight, await self._flights.run(flight.step))

    async def _run_ahead(self) -> None:
        """On a GPU the next step is prepared and begun while the last one runs."""
        first: tuple[_Flight, StepInFlight] | None = None
        while not self._is_stopping or first is not None:
            if first is not None and first[1].must_land:
                self._process(first[0], await self._flights.land(first[1]))
                first = None
            batch = None if self._is_stopping else self.policy.next_batch()
            second = await self._take_off(batch, first) if batch is not None else None
            if first is not None:
                self._process(first[0], await self._flights.land(first[1]))
            elif second is None:
                await self._sleep()
            first = second

    async def _take_off(
        self, batch: PrefillBatch, before: tuple[_Flight, StepInFlight] | None
    ) -> tuple[_Flight, StepInFlight]:
        flight = self._prepare(batch)
        return flight, await self._flights.take_off(lambda: flight.step, before[1] if before is not None else None)

    async def _sleep(self) -> None:
        """Until something has changed."""
        self._wake.clear()
        if not self._is_stopping:
            await self._wake.wait()

    def _prepare(self, batch: PrefillBatch) -> _Flight:
        chunks: list[Chunk] = []
        segments: list[tuple[Handoff, int, int, list[int]]] = []
        for plan in batch.chunks:
            live = self._live[plan.request_id]
            if plan.is_first:
                self._begin(live)
            chunks.append(self._chunk(live, plan))
            if live.handoff is not None:
                segments.append(self._next_segment(live, live.handoff, plan))
        self._service.flush()
        ends = {group.stop - 1: group for group in self._groups(segments)}

        def on_layer(layer: int) -> None:  # in the engine's thread
            group = ends.get(layer)
            if group is None:
                return
            computed = self.engine.memory.mark()
            for handoff, begin, end, pages in segments:
                if end > begin:
                    handoff.segment_ready(group, begin, end, pages, computed)

        step = Step(chunks=chunks, on_layer=on_layer if segments else None)
        return _Flight(batch=batch, step=step)

    def _begin(self, live: _Live) -> None:
        live.link.event(live.state, pb.EVENT_KIND_PREFILL_STARTED, cached_tokens=self.policy.cached_len_of(live.id))
        if live.new_tokens_left > 1 and not live.is_cancelled:
            self._open_handoff(live)

    def _chunk(self, live: _Live, plan: ChunkPlan) -> Chunk:
        end = plan.start + plan.length
        return Chunk(
            request_id=live.id,
            token_ids=live.tokens[plan.start : end],
            start=plan.start,
            block_table=self.policy.pages_of(live.id)[: pages_for(end, self.policy.pool.page_size)],
            sample=self._sample_spec(live) if plan.is_last else None,
        )

    def _sample_spec(self, live: _Live) -> SampleSpec:
        outputs = live.state.output_ids
        return SampleSpec(
            params=live.params,
            position=len(live.tokens),
            prompt_ids=live.state.prompt_ids if live.params.has_penalties else (),
            output_ids=outputs if live.params.has_penalties else (),
            banned_ids=banned_token_ids(live.params, len(outputs), self.engine.info.eos_token_ids),
        )

    def _next_segment(self, live: _Live, handoff: Handoff, plan: ChunkPlan) -> tuple[Handoff, int, int, list[int]]:
        """The pages that this chunk completes; the last chunk takes the partly filled page along."""
        end = plan.start + plan.length
        page_size = self.policy.pool.page_size
        begin, live.sent_pages = live.sent_pages, pages_for(end, page_size) if plan.is_last else end // page_size
        return handoff, begin, live.sent_pages, list(self.policy.pages_of(live.id)[begin : live.sent_pages])

    def _groups(self, segments: list[tuple[Handoff, int, int, list[int]]]) -> list[range]:
        pages = sum(end - begin for _, begin, end, _ in segments)
        return layer_groups(self.engine.layout, max(1, pages), self.options.transfer.layers_per_group)

    def _process(self, flight: _Flight, sampled: list[SampledToken]) -> None:
        computed_ns = time.monotonic_ns()
        self.counters["steps"] += 1
        self.counters["prompt_tokens"] += flight.batch.num_tokens
        tokens = {token.request_id: token for token in sampled}
        for plan in flight.batch.chunks:
            live, token = self._live.get(plan.request_id), tokens.get(plan.request_id)
            if token is None:
                continue
            if token.error:
                self.policy.on_failed(plan.request_id)  # cancelled or not: nobody may find these pages in the cache
            if live is None or live.is_cancelled:
                continue
            if token.error:
                self._fail(live, f"{self.options.name}: {token.error}")
            else:
                self._on_first_token(live, token, computed_ns)
        self.policy.on_batch_done(flight.batch)
        for plan in flight.batch.chunks:
            self._forget_if_gone(plan.request_id)
        self._service.flush()

    def _on_first_token(self, live: _Live, token: SampledToken, computed_ns: int) -> None:
        index = len(live.state.output_ids)
        reason = finish_reason(live.params, token.token_id, index + 1, self.engine.info.eos_token_ids)
        live.link.event(live.state, pb.EVENT_KIND_FIRST_TOKEN, at_ns=computed_ns)
        live.link.token(token_output(live.state, index, token, reason))
        self.counters["generated_tokens"] += 1
        if reason is None:
            live.task = self._spawn(self._hand_off(live, token.token_id, computed_ns))
        else:
            live.is_cancelled = True
            self._spawn(self._let_go(live, f"finished: {reason}"))

    def _fail(self, live: _Live, reason: str) -> None:
        """End a request for good, whose chunk the engine cannot compute: another worker could not, either."""
        live.link.event(live.state, pb.EVENT_KIND_FAILED, reason=reason)
        live.is_cancelled = True
        self._spawn(self._let_go(live, reason))

    # The handoff of one request

    def _open_handoff(self, live: _Live) -> None:
        peer = self._peer(live.decode)
        if not _is_open(peer):
            return  # it was lost since: _hand_off opens another one
        live.handoff = peer.result().reserve(live.state, on_stalled=lambda reason: self._on_stalled(live, reason))
        self.policy.on_handoff_opened(live.id)

    def _on_stalled(self, live: _Live, reason: str) -> None:
        live.is_stalled = True
        self.counters["handoffs_stalled"] += 1
        live.link.event(live.state, pb.EVENT_KIND_HANDOFF_STALLED, reason=reason)
        self._service.flush()

    async def _hand_off(self, live: _Live, token_id: int, computed_ns: int) -> None:
        failure: tuple[str, bool] | None = None
        while True:
            try:
                if live.handoff is None or live.moving_to is not None:
                    await self._move(live)
                assert live.handoff is not None
                receipt = await live.handoff.commit(
                    token_id=token_id, num_tokens=len(live.tokens), computed_ns=computed_ns
                )
            except (HandoffDenied, HandoffLost, HandoffFailed, HandoffRefused) as error:
                if live.moving_to is not None and not live.is_cancelled:
                    continue
                failure = (str(error), not isinstance(error, HandoffRefused) and getattr(error, "retryable", True))
            except Exception as error:  # a bug must fail one request, not leave it waiting
                log.exception("the handoff of %s broke", live.id)
                failure = (f"{self.options.name}: {type(error).__name__}: {error}", True)
            else:
                self._count_receipt(live, receipt)
            break
        if live.is_cancelled:
            return
        if failure is not None:
            self.counters["handoffs_failed"] += 1
            live.link.event(live.state, pb.EVENT_KIND_FAILED, reason=failure[0], retryable=failure[1])
            live.is_cancelled = True
            await self._let_go(live, failure[0])
        else:
            self._close_handoff(live)
            self._finish(live)
        self._service.flush()

    async def _move(self, live: _Live) -> None:
        """Open a handoff, to another worker if one was named, and give it all that was computed before."""
        if live.handoff is not None:
            await live.handoff.abort("reassigned")
            self._close_handoff(live)
        if live.moving_to is not None:
            live.decode, live.moving_to, live.is_stalled = live.moving_to, None, False
            self.counters["reassigned"] += 1
        peer = await asyncio.shield(self._peer(live.decode))
        if live.is_cancelled:
            raise HandoffDenied("cancelled", retryable=False)
        live.handoff = peer.reserve(live.state, on_stalled=lambda reason: self._on_stalled(live, reason))
        self.policy.on_handoff_opened(live.id)
        pages = list(self.policy.pages_of(live.id))
        for group in layer_groups(self.engine.layout, len(pages), self.options.transfer.layers_per_group):
            live.handoff.segment_ready(group, 0, len(pages), pages)

    def _count_receipt(self, live: _Live, receipt: generate_pb2.HandoffReceipt) -> None:
        self.counters["receipts_good"] += 1
        self.counters["pages_sent"] += receipt.pages
        self.counters["bytes_sent"] += receipt.bytes
        self.counters["resends"] += receipt.resends
        live.link.event(live.state, pb.EVENT_KIND_HANDED_OFF, receipt=receipt, decode_worker=live.decode.name)

    async def _cancel(self, live: _Live, reason: str) -> None:
        await self._let_go(live, reason)
        live.link.event(live.state, pb.EVENT_KIND_CANCELLED, reason=reason)
        self._service.flush()

    async def _let_go(self, live: _Live, reason: str) -> None:
        """End a request that is cancelled, failed or finished here; its pages go once nobody reads them."""
        if live.handoff is not None:
            await live.handoff.abort(reason)
        self._close_handoff(live)
        self._finish(live)

    def _close_handoff(self, live: _Live) -> None:
        if live.handoff is not None:
            live.handoff = None
            self.policy.on_handoff_closed(live.id)

    def _finish(self, live: _Live) -> None:
        self.policy.on_cancelled(live.id)
        self._forget_if_gone(live.id)
        self._wake.set()

    def _forget_if_gone(self, request_id: str) -> None:
        if not self.policy.holds(request_id):
            self._live.pop(request_id, None)

    # Peers

    def _peer(self, decode: pb.WorkerAddress) -> asyncio.Task[PrefillPair]:
        """The pair with a decode worker, opened at first use and again after it was lost."""
        key = (decode.name, decode.incarnation)
        task = self._peers.get(key)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._connect(decode, key))
            self._peers[key] = task
        return task

    async def _connect(self, decode: pb.WorkerAddress, key: tuple[str, str]) -> PrefillPair:
        """What cannot be connected, or is lost, is forgotten: a restarted decode worker has another key."""
        try:
            peer = await connect(
                decode,
                me=self.address,
                model_fingerprint=self.engine.info.fingerprint,
                memory=self.engine.memory,
                dial=handoff_dial(self.options.secret),
                options=self.options.transfer,
                host=self.options.host,
                faults=self._faults,
            )
        except BaseException:
            self._peers.pop(key, None)
            raise
        peer.on_lost = lambda _: self._peers.pop(key, None)
        return peer

    async def _enqueue_when_connected(self, live: _Live, peer: asyncio.Task[PrefillPair]) -> None:
        try:
            await asyncio.shield(peer)
        except (HandoffLost, HandoffRefused) as error:
            self._on_unconnected(live, str(error), is_retryable=not isinstance(error, HandoffRefused))
            return
        except Exception as error:  # a bug must fail one request, not leave it waiting
            log.exception("%s cannot connect to %s", self.options.name, live.decode.name)
            self._on_unconnected(live, f"{self.options.name}: {type(error).__name__}: {error}", is_retryable=True)
            return
        if live.is_cancelled:
            self._live.pop(live.id, None)
            return
        self._enqueue(live)

    def _on_unconnected(self, live: _Live, reason: str, *, is_retryable: bool) -> None:
        self._live.pop(live.id, None)
        if not live.is_cancelled:
            self.counters["handoffs_failed"] += 1
            live.link.event(live.state, pb.EVENT_KIND_FAILED, reason=reason, retryable=is_retryable)
            self._service.flush()

    def _enqueue(self, live: _Live) -> None:
        hashes = self._hashes(live.tokens) if self.options.prefix_cache else []
        self.policy.add(live.id, len(live.tokens), hashes)
        self._wake.set()

    def _hashes(self, tokens: list[int]) -> list[bytes]:
        return page_hashes(tokens, self.policy.pool.page_size, salt=self.engine.info.fingerprint.encode())

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_done)
        return task

    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            log.error("a handoff task of %s failed", self.options.name, exc_info=task.exception())

    def _all_counters(self) -> dict[str, int]:
        pool = self.policy.pool
        return {**self.counters, "prefix_hit_tokens": pool.hit_tokens, "prefix_lookup_tokens": pool.lookup_tokens}


def _is_open(peer: asyncio.Task[PrefillPair]) -> bool:
    """Whether the pair is connected and stands."""
    return peer.done() and not peer.cancelled() and peer.exception() is None and not peer.result().is_lost

"""Workers that fail, die of a request, say nothing or cannot reach each other: who pays for it, and who does not."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
import pytest

from cluster.front.server import server_options
from cluster.router import driver
from cluster.router.health.circuits import MIN_OPEN_S
from cluster.router.live.requests import RequestFailed
from engine.types import SamplingParams
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from tests.cluster.harness import Harness, collect, request, serving, tokens_of
from tests.fakes import FakeDecodeWorker, FakePrefillWorker, scripted_tokens
from worker.awake import STILL_S

QUICK = server_options(port=0, dead_after_s=0.5)
POISON = [666, 6, 6]


async def test_a_poison_prompt_ends_two_workers_and_no_bystander(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(4, 1, options=QUICK) as h:
        prefills = [h.prefill(i) for i in range(4)]
        deaths: list[str] = []
        for prefill in prefills:
            prefill.is_holding = True
            monkeypatch.setattr(prefill, "compute", partial(_compute_or_die, prefill, deaths))
        poison = asyncio.ensure_future(h.generate.GenerateOnce(request(POISON, max_tokens=4)))
        await h.until(lambda: any(p.held for p in prefills))
        calls = [h.generate.GenerateOnce(request([5, 6, i], max_tokens=4)) for i in range(20)]
        await h.until(lambda: sum(len(p.held) for p in prefills) == 21)
        for prefill in prefills:
            prefill.release()
        for i, answer in enumerate(await asyncio.gather(*calls)):
            assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, i], 4)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await poison
        assert failure.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "2 workers died while they computed it (" in str(failure.value.details())
        assert "do not send it again" in str(failure.value.details())
        assert len(deaths) == 2


def _compute_or_die(prefill: FakePrefillWorker, deaths: list[str], submit: pb.Submit) -> None:
    """All that came with the prompt, and after it, dies with the worker: nothing of it is said."""
    if prefill.name in deaths:
        return
    if list(submit.request.prompt_ids) == POISON:
        deaths.append(prefill.name)
        asyncio.get_running_loop().create_task(prefill.kill())
    else:
        FakePrefillWorker.compute(prefill, submit)


async def test_a_worker_whose_steps_fail_costs_no_request_while_another_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(2, 1) as h:
        monkeypatch.setattr(h.prefill(0), "compute", partial(_fail_step, h.prefill(0)))
        for i in range(12):
            answer = await h.generate.GenerateOnce(request([5, 6, i], max_tokens=4))
            assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, i], 4)
        assert 3 <= len(h.prefill(0).submits) < 12  # its circuit opened
        assert h.count("circuits_opened") >= 1
        [circuit] = {w.circuit for w in (await h.status()).workers if w.name == "prefill-0"}
        assert circuit in ("open", "half_open")


def _fail_step(prefill: FakePrefillWorker, submit: pb.Submit) -> None:
    failed = prefill.event(submit.request, pb.EVENT_KIND_FAILED, reason="CUDA error", cause=pb.FAILURE_CAUSE_STEP)
    prefill.emit(submit.request.router_id, events=[failed])


async def test_a_worker_that_cannot_serve_a_request_costs_it_nothing_while_another_can(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(2, 2, options=server_options(port=0, max_attempts=1)) as h:
        monkeypatch.setattr(h.prefill(0), "compute", partial(_cannot_serve, h.prefill(0), ""))
        monkeypatch.setattr(h.prefill(1), "compute", partial(_cannot_serve, h.prefill(1), "decode-0"))
        answer = await h.generate.GenerateOnce(request(max_tokens=4))
        assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, 7], 4)
        assert (answer.timeline.prefill_worker, answer.timeline.decode_worker) == ("prefill-1", "decode-1")
        monkeypatch.setattr(h.prefill(1), "compute", partial(_cannot_serve, h.prefill(1), ""))
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await h.generate.GenerateOnce(request(max_tokens=4))
        assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert failure.value.details() == "prefill-1: it cannot"


async def test_choices_that_nobody_can_serve_any_more_fail_with_their_call_and_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving(2, 1, options=server_options(port=0, unavailable_grace_s=0.6)) as h:
        h.prefill(1).is_holding = True
        monkeypatch.setattr(h.prefill(0), "compute", partial(_cannot_serve, h.prefill(0), ""))
        asked = request(max_tokens=4)
        asked.sampling.n = 2
        asked.kv_policy.window_tokens = 64
        call = asyncio.ensure_future(h.generate.GenerateOnce(asked))
        await h.prefill(1).wait_for(lambda: len(h.prefill(1).held) == 2)
        with pytest.raises(RequestFailed, match=r"prefill-1 is the only worker for prefill .* requests of kv_policy; "):
            h.router.drain("prefill-1")
        await h.prefill(1).kill()
        await h.until(lambda: h.router.policy.num_aside == 2)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert "prefill-0 cannot serve it" in (failure.value.details() or "")
        monkeypatch.undo()
        await h.generate.GenerateOnce(request(max_tokens=4))
        assert h.count("workers_lost") == 1


def _cannot_serve(prefill: FakePrefillWorker, peer: str, submit: pb.Submit) -> None:
    """Or the decode worker of that name cannot."""
    if peer and submit.decode.name != peer:
        FakePrefillWorker.compute(prefill, submit)
        return
    state, cause = submit.request, pb.FAILURE_CAUSE_WORKER
    failed = prefill.event(state, pb.EVENT_KIND_FAILED, reason="it cannot", cause=cause, peer=peer)
    prefill.emit(state.router_id, events=[failed])


async def test_a_pair_that_cannot_hand_over_is_avoided_and_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1, 2) as h:
        monkeypatch.setattr(h.prefill(), "compute", partial(fail_to_reach, h.prefill(), "decode-0"))
        attempts, began_s = [], time.monotonic()
        for i in range(8):
            answer = await h.generate.GenerateOnce(request([5, 6, i], max_tokens=4))
            assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, i], 4)
            attempts.append(answer.timeline.attempts)
        assert attempts[0] == 2
        tries = 2 + (time.monotonic() - began_s) / MIN_OPEN_S  # now and then at most, however slow the machine is
        assert sum(attempts) <= len(attempts) + tries
        [[pair]] = [list(w.pairs) for w in (await h.status()).workers if w.name == "prefill-0"]
        assert (pair.peer, pair.reason) == ("decode-0", "prefill-0: no route")


def fail_to_reach(prefill: FakePrefillWorker, peer: str, submit: pb.Submit) -> None:
    if submit.decode.name != peer:
        FakePrefillWorker.compute(prefill, submit)
        return
    state, cause = submit.request, pb.FAILURE_CAUSE_PEER
    events = [
        prefill.event(state, pb.EVENT_KIND_FIRST_TOKEN),
        prefill.event(state, pb.EVENT_KIND_FAILED, reason="no route", cause=cause, peer=peer),
    ]
    prefill.emit(state.router_id, tokens=[prefill.token(state, SamplingParams(max_tokens=4), 0)], events=events)


async def _decoding(
    h: Harness, max_tokens: int = 6
) -> tuple[pb.RequestState, asyncio.Task[list[generate_pb2.GenerateResponse]]]:
    """A request that the decode worker has begun and does not go on with."""
    h.decode().max_steps = 2
    reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=max_tokens))))
    await h.until(lambda: h.decode().steps == 2)
    [live] = h.router._dispatcher._live.values()
    await h.until(lambda: live.is_handed_off)
    return h.prefill().submits[0].request, reader


async def test_a_late_failure_of_prefill_does_not_end_a_decode_that_has_the_kv() -> None:
    async with serving() as h:
        state, reader = await _decoding(h)
        failed = h.prefill().event(state, pb.EVENT_KIND_FAILED, reason="no receipt")
        h.prefill().emit(state.router_id, events=[failed])
        h.prefill().is_holding = True  # a second attempt would stop here
        marker = h.generate.GenerateOnce(request([9, 9], max_tokens=1))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        h.decode().resume()
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 6)
        assert responses[-1].timeline.attempts == 1
        h.prefill().release()
        await marker


async def test_what_prefill_says_of_a_dead_peer_is_no_failure_of_the_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """However late the router hears of that death: it may be the request's doing, and costs it no attempt."""
    monkeypatch.setattr(driver, "SETTLE_S", 3600.0)
    async with serving(1, 2, options=server_options(port=0, max_attempts=1)) as h:
        monkeypatch.setattr(h.prefill(), "compute", partial(fail_to_reach, h.prefill(), "decode-0"))
        call = asyncio.ensure_future(h.generate.GenerateOnce(request(max_tokens=4)))
        await h.until(lambda: any(live.has_first_token for live in h.router._dispatcher._live.values()))
        await h.decode(0).kill()
        answer = await call
        assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, 7], 4)
        assert answer.timeline.attempts == 2
        assert h.prefill().submits[1].request.held


async def test_a_worker_that_stops_costs_its_requests_no_attempt() -> None:
    async with serving(1, 2, options=server_options(port=0, max_attempts=1)) as h:
        state, reader = await _decoding(h)
        h.decode().on_cancel(state.request_id)
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 6)
        assert (responses[-1].timeline.decode_worker, responses[-1].timeline.attempts) == ("decode-1", 2)


async def test_the_only_worker_of_its_kind_is_doubted_before_it_is_given_up() -> None:
    async with serving(1, 1, options=QUICK) as h:
        _, reader = await _decoding(h)
        h.decode().is_silent = True
        await h.until(lambda: bool(h.router.policy.health.doubt("decode-0")))
        [(state, reason)] = [(w.state, w.reason) for w in (await h.status()).workers if w.name == "decode-0"]
        assert state == "suspect"
        assert "it has said nothing for" in reason
        h.decode().is_silent = False
        h.decode().resume()
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 6)
        assert responses[-1].timeline.attempts == 1
        assert h.count("workers_lost") == 0
        assert not h.router.policy.health.doubt("decode-0")


def _has_stepped(decode: FakeDecodeWorker) -> bool:
    return decode.steps == 2


async def test_connections_that_break_as_the_router_stands_still_are_nobodys_death() -> None:
    """Whatever stood still with it: at waking, gRPC's ping timeouts break the connections to workers that live."""
    async with serving(1, 3, options=server_options(port=0)) as h:
        h.decode(1).max_steps = 2
        _, reader = await _decoding(h, max_tokens=12)
        for decode in (h.decode(0), h.decode(1)):
            await h.until(partial(_has_stepped, decode))
            time.sleep(STILL_S + 0.3)  # noqa: ASYNC251 - the whole process stands still
            await decode.kill()
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 12)
        assert responses[-1].timeline.decode_worker == "decode-2"


async def test_silence_has_an_end_for_the_only_worker_too() -> None:
    options = server_options(port=0, dead_after_s=0.2, lost_after_s=0.4, unavailable_grace_s=0.0)
    async with serving(1, 1, options=options) as h:
        _, reader = await _decoding(h)
        h.decode().is_silent = True
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await reader
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert [w.reason for w in (await h.status()).workers if w.name == "decode-0"] == ["it said nothing for 0.4 s"]
        h.decode().is_silent = False


@pytest.mark.parametrize(("grace_s", "changed_s"), [(60.0, 0.2), (0.2, 0.4)])
async def test_who_waits_for_a_worker_does_so_for_as_long_as_the_newest_options_say(
    grace_s: float, changed_s: float
) -> None:
    async with serving(1, 1, options=server_options(port=0, unavailable_grace_s=grace_s)) as h:
        await h.decode().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        call = h.generate.GenerateOnce(request())
        await h.until(lambda: h.router.policy.num_queued == 1)
        options = h.server.options
        h.server.take_options(replace(options.router, unavailable_grace_s=changed_s), options.front, "")
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await asyncio.wait_for(call, 10.0)
        assert failure.value.details() == "no decode worker is ready; try again later"


async def test_cancel_and_deadline_reach_a_request_that_waits_for_a_worker() -> None:
    async with serving(1, 1, options=QUICK) as h:
        await h.decode().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        cancelled = h.generate.GenerateOnce(request())
        await h.until(lambda: h.router.policy.num_queued == 1)
        cancelled.cancel()
        await h.until(lambda: h.router.policy.num_queued == 0)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await h.generate.GenerateOnce(request(), timeout=0.2)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await h.until(lambda: h.router.num_submissions == 0)


async def test_a_router_that_stumbles_over_a_loss_dials_the_worker_again(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(1, 1, options=QUICK) as h:
        on_worker_lost = h.router.policy.on_worker_lost

        def stumble(*args: Any, **more: Any) -> None:
            monkeypatch.undo()
            on_worker_lost(*args, **more)
            raise KeyError("a bug")

        monkeypatch.setattr(h.router.policy, "on_worker_lost", stumble)
        await h.decode().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        await h.decode().start()
        await h.ready()


async def test_a_broken_stream_to_a_worker_that_lives_is_no_death() -> None:
    """It is connected again under the same incarnation: no request is to blame, however often."""
    async with serving(1, 1, options=QUICK) as h:
        incarnation = h.decode().incarnation
        _, reader = await _decoding(h, max_tokens=20)
        for losses in (1, 2, 3):
            await h.decode().kill()
            h.decode().incarnation = incarnation
            await h.until(partial(_has_lost, h, losses))
            h.decode().max_steps = h.decode().steps + 1
            await h.decode().start()
            await h.until(partial(_stands, h))
        h.decode().resume()
        assert tokens_of(await reader) == scripted_tokens([5, 6, 7], 20)


def _has_lost(h: Harness, losses: int) -> bool:
    return h.count("workers_lost") == losses


def _stands(h: Harness) -> bool:
    return h.decode().steps == h.decode().max_steps


async def test_a_decode_that_was_given_up_too_early_is_cancelled_and_its_tokens_dropped() -> None:
    """Prefill said that it failed before the decode worker said that it has the KV: the second attempt counts."""
    async with serving(1, 2) as h:
        h.prefill().is_holding = True
        h.decode(0).max_steps = h.decode(1).max_steps = 0
        reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=6))))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        first = h.prefill().held.pop()
        lost = {"reason": "no receipt", "cause": pb.FAILURE_CAUSE_PEER, "peer": "decode-0"}
        failed = h.prefill().event(first.request, pb.EVENT_KIND_FAILED, **lost)
        h.prefill().emit(first.request.router_id, events=[failed])
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        h.decode(0).cancels.clear()
        h.decode(0).take(first.request, generate_pb2.HandoffReceipt())
        await h.decode(0).wait_for(lambda: first.request.request_id in h.decode(0).cancels)
        assert not h.decode(0).running
        h.decode(1).resume()
        h.prefill().release()
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 6)
        assert (responses[-1].timeline.decode_worker, responses[-1].timeline.attempts) == ("decode-1", 2)

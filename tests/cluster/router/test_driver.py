"""The router between workers that compute nothing: every token once and in order, whatever is lost on the way."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from dataclasses import replace
from functools import partial

import grpc
import pytest

from cluster.front.server import server_options
from cluster.router.decisions import Assigned
from cluster.router.dispatch import SENDS_AT_ONCE, Dispatcher
from cluster.router.links.clock_offset import ClockOffset
from cluster.router.live.requests import LiveRequest, RequestFailed
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from tests.cluster.harness import Harness, collect, request, serving, tokens_of
from tests.fakes import EOS, FakeDecodeWorker, scripted_token, scripted_tokens

QUICK = server_options(port=0, dead_after_s=0.5)
NO_GRACE = server_options(port=0, dead_after_s=0.5, unavailable_grace_s=0.0)


def named(request_id: str, ids: list[int]) -> generate_pb2.GenerateRequest:
    message = request(ids, max_tokens=4)
    message.request_id = request_id
    return message


async def test_tokens_of_both_workers_come_in_order_with_usage_timeline_and_receipt() -> None:
    async with serving() as h:
        responses = await collect(h.generate.Generate(request(max_tokens=8)))
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 8)
        last = responses[-1]
        assert last.finish_reason == generate_pb2.FINISH_REASON_LENGTH
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 8)
        assert (last.timeline.prefill_worker, last.timeline.decode_worker) == ("prefill-0", "decode-0")
        assert last.timeline.attempts == 1
        assert [p.name for p in last.timeline.phases][-1] == "decode"
        assert sum(p.seconds for p in last.timeline.phases) == pytest.approx(last.timeline.e2e_s)
        assert last.timeline.ttft_s <= last.timeline.e2e_s
        assert (last.receipt.transport, last.receipt.pages, last.receipt.checksums_ok) == ("loopback", 1, True)


async def test_a_request_of_one_token_ends_at_prefill() -> None:
    async with serving() as h:
        responses = await collect(h.generate.Generate(request(max_tokens=1)))
        assert tokens_of(responses) == [scripted_token([5, 6, 7], 0)]
        assert responses[-1].timeline.decode_worker == ""
        assert not responses[-1].HasField("receipt")


async def test_an_end_of_sequence_ends_it() -> None:
    def script(prompt: object, index: int) -> int:
        return EOS if index == 3 else 50 + index

    async with serving(worker={"script": script}) as h:
        responses = await collect(h.generate.Generate(request(max_tokens=20)))
        assert tokens_of(responses) == [50, 51, 52, EOS]
        assert responses[-1].finish_reason == generate_pb2.FINISH_REASON_STOP


async def test_many_requests_over_two_and_two_workers_each_get_their_own_tokens() -> None:
    async with serving(2, 2) as h:
        prompts = [list(range(3, 5 + i)) for i in range(40)]
        calls = [h.generate.GenerateOnce(request(prompt, max_tokens=12)) for prompt in prompts]
        answers = await asyncio.gather(*calls)
        for prompt, answer in zip(prompts, answers, strict=True):
            assert list(answer.choices[0].token_ids) == scripted_tokens(prompt, 12)
        assert {w.submits[0].decode.name for w in (h.prefill(0), h.prefill(1))} <= {"decode-0", "decode-1"}
        assert h.prefill(0).submits
        assert h.prefill(1).submits


async def test_choices_draw_with_seeds_of_their_own() -> None:
    async with serving() as h:
        responses = await collect(h.generate.Generate(request(max_tokens=5, n=3, seed=2**63 - 2)))
        assert [tokens_of(responses, i) for i in range(3)] == [scripted_tokens([5, 6, 7], 5)] * 3
        assert sorted(r.index for r in responses if r.finish_reason) == [0, 1, 2]
        assert [r.HasField("usage") for r in responses].count(True) == 1
        assert responses[-1].usage.completion_tokens == 15
        states = [submit.request for submit in h.prefill().submits]
        assert [s.sampling.seed for s in states] == [2**63 - 2, 2**63 - 1, 0]
        assert [s.sampling.n for s in states] == [1, 1, 1]
        assert [s.request_id[-2:] for s in states] == ["-0", "-1", "-2"]


async def test_a_first_token_that_is_overtaken_is_delivered_first() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        call = h.generate.Generate(request(max_tokens=3))
        await h.prefill().wait_for(lambda: len(h.prefill().held) == 1)
        submit = h.prefill().held.pop()
        h.decode().take(submit.request, generate_pb2.HandoffReceipt())
        await h.until(lambda: h.decode().steps == 2)
        h.prefill().emit(
            submit.request.router_id,
            tokens=[pb.TokenOutput(request_id=submit.request.request_id, attempt=1, index=0, token_id=11)],
        )
        responses = await collect(call)
        assert tokens_of(responses) == [11, *scripted_tokens([5, 6, 7], 3)[1:]]


# loss


async def test_a_killed_decode_worker_costs_no_token_and_repeats_none() -> None:
    async with serving(1, 2, options=QUICK) as h:
        for decode in (h.decode(0), h.decode(1)):
            decode.max_steps = 4
        calls = [h.generate.Generate(request([5, 6, i], max_tokens=12)) for i in range(6)]
        readers = [asyncio.create_task(collect(call)) for call in calls]
        await h.until(lambda: [len(d.running) for d in (h.decode(0), h.decode(1))] == [3, 3])
        await h.until(lambda: all(live.has_first_token for live in h.router._dispatcher._live.values()))
        await h.decode(0).kill()
        h.decode(1).resume()
        answers = await asyncio.gather(*readers)
        for i, responses in enumerate(answers):
            assert tokens_of(responses) == scripted_tokens([5, 6, i], 12)
            assert responses[-1].timeline.decode_worker == "decode-1"
        moved = [r[-1] for r in answers if r[-1].timeline.attempts == 2]
        assert len(moved) == 3
        assert all(m.receipt.recomputed_tokens > 0 for m in moved)
        assert all(sum(p.seconds for p in m.timeline.phases) == pytest.approx(m.timeline.e2e_s) for m in moved)
        assert h.count("retries") == 3


async def test_all_of_a_killed_decode_worker_are_handed_over_at_once_and_begin_one_by_one() -> None:
    async with serving(1, 2, options=QUICK) as h:
        for decode in (h.decode(0), h.decode(1)):
            decode.max_steps = 2
        calls = [h.generate.Generate(request([5, 6, i], max_tokens=12)) for i in range(32)]
        readers = [asyncio.create_task(collect(call)) for call in calls]
        await h.until(lambda: [h.decode(0).steps, h.decode(1).steps] == [2, 2])
        await h.until(lambda: len(h.decode(0).running) + len(h.decode(1).running) == 32)
        await h.until(lambda: all(live.has_first_token for live in h.router._dispatcher._live.values()))
        left, begun = h.decode(1), len(h.decode(1).running)
        await h.decode(0).kill()
        await h.until(lambda: (len(left.running), len(left.held)) == (begun + 1, 31 - begun))  # one is tried
        readers[0].cancel()  # wherever it is
        left.resume()
        for i, reader in enumerate(readers[1:], 1):
            assert tokens_of(await reader) == scripted_tokens([5, 6, i], 12)
        assert not left.held


async def test_a_killed_prefill_worker_loses_no_request() -> None:
    async with serving(2, 1, options=QUICK) as h:
        h.prefill(0).is_holding = h.prefill(1).is_holding = True
        calls = [h.generate.GenerateOnce(request([5, 6, i], max_tokens=4)) for i in range(6)]
        await h.until(lambda: len(h.prefill(0).held) + len(h.prefill(1).held) == 6)
        assert h.prefill(0).held
        h.prefill(1).release()
        await h.prefill(0).kill()
        for i, answer in enumerate(await asyncio.gather(*calls)):
            assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, i], 4)
            assert answer.receipt.recomputed_tokens == 0  # nothing had been computed


async def test_requests_that_were_handed_over_do_not_notice_the_loss_of_their_prefill_worker() -> None:
    async with serving(1, 1, options=QUICK) as h:
        h.decode().max_steps = 2
        reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=6))))
        await h.until(lambda: h.count("generation_tokens") == 3)  # the prefill worker's own, too
        await h.prefill().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        h.decode().resume()
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 6)
        assert responses[-1].timeline.attempts == 1


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_without_another_worker_and_without_a_grace_requests_fail_at_once(role: str) -> None:
    async with serving(1, 1, options=NO_GRACE) as h:
        if role == "prefill":
            h.prefill().is_holding = True
        h.decode().max_steps = 2
        call = h.generate.Generate(request(max_tokens=20))
        reader = asyncio.create_task(collect(call))
        await h.until(lambda: h.decode().steps == 2 or bool(h.prefill().held))
        await h.workers[f"{role}-0"].kill()
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await reader
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert failure.value.details() == f"no {role} worker is ready; try again later"
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await h.generate.GenerateOnce(request())
        assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_worker_that_comes_back_takes_requests_again() -> None:
    async with serving(1, 1, options=QUICK) as h:
        await h.decode().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        await h.decode().start()
        await h.ready()
        answer = await h.generate.GenerateOnce(request(max_tokens=4))
        assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, 7], 4)
        status = await h.status()
        assert [(w.name, w.state, w.losses) for w in status.workers] == [
            ("prefill-0", "ready", 0),
            ("decode-0", "ready", 1),
        ]


async def test_many_that_waited_for_a_worker_are_not_sent_in_one_turn_of_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns: Counter[int] = Counter()
    send, turn = Dispatcher._send, 0

    def noted(dispatcher: Dispatcher, live: LiveRequest, assigned: Assigned) -> None:
        turns[turn] += 1
        send(dispatcher, live, assigned)

    async def count_turns() -> None:
        nonlocal turn
        while True:
            turn += 1
            await asyncio.sleep(0)

    options = server_options(port=0, dead_after_s=0.5, unavailable_grace_s=15)
    async with serving(worker={"num_pages": 4096}, options=options) as h:
        await h.prefill().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        calls = [h.generate.GenerateOnce(request(max_tokens=2)) for _ in range(3 * SENDS_AT_ONCE)]
        await h.until(lambda: h.server.router.policy.num_queued == len(calls))
        monkeypatch.setattr(Dispatcher, "_send", noted)
        counting = asyncio.ensure_future(count_turns())
        await h.prefill().start()
        await asyncio.gather(*calls)
        counting.cancel()
        assert turns.total() == len(calls)
        assert max(turns.values()) <= SENDS_AT_ONCE


async def test_within_the_grace_a_request_waits_for_a_worker_to_come_back() -> None:
    options = server_options(port=0, dead_after_s=0.5, unavailable_grace_s=15)
    async with serving(1, 1, options=options) as h:
        h.decode().max_steps = 2
        reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=6))))
        await h.until(lambda: h.decode().steps == 2)
        await h.decode().kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        h.decode().resume()
        await h.decode().start()
        assert tokens_of(await reader) == scripted_tokens([5, 6, 7], 6)


async def test_a_worker_that_says_nothing_is_lost() -> None:
    """A stopped process keeps its connections: only the heartbeat notices."""
    async with serving(1, 2, options=QUICK) as h:
        h.decode(0).max_steps = h.decode(1).max_steps = 3
        readers = [asyncio.create_task(collect(h.generate.Generate(request([9, i], max_tokens=8)))) for i in range(2)]
        await h.until(lambda: h.decode(0).steps == 3 and h.decode(1).steps == 3)
        h.decode(0).is_silent = True
        await h.until(lambda: h.count("workers_lost") == 1)
        h.decode(1).resume()
        for i, responses in enumerate(await asyncio.gather(*readers)):
            assert tokens_of(responses) == scripted_tokens([9, i], 8)
        status = await h.status()
        assert [w.reason for w in status.workers if w.name == "decode-0"] == ["it said nothing for 0.5 s"]
        h.decode(0).is_silent = False


# what workers say


async def test_a_preempted_request_goes_on_where_it_was() -> None:
    async with serving() as h:
        h.decode().max_steps = 3
        reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=9))))
        await h.until(lambda: h.decode().steps == 3)
        h.decode().preempt(next(iter(h.decode().running)))
        h.decode().resume()
        responses = await reader
        assert tokens_of(responses) == scripted_tokens([5, 6, 7], 9)
        assert responses[-1].timeline.attempts == 2
        assert h.count("preempted") == 1
        again = h.prefill().submits[-1].request
        assert (again.attempt, len(again.output_ids)) == (2, 4)


async def test_preemption_is_no_failure_and_may_happen_any_number_of_times() -> None:
    async with serving(options=server_options(port=0, max_attempts=2)) as h:
        h.decode().max_steps = 0
        reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=9))))

        def runs_again(attempt: int) -> bool:
            return len(h.prefill().submits) == attempt and bool(h.decode().running)

        for attempt in range(1, 6):
            await h.until(partial(runs_again, attempt))
            h.decode().preempt(next(iter(h.decode().running)))
        await h.until(lambda: bool(h.decode().running))
        h.decode().resume()
        assert tokens_of(await reader) == scripted_tokens([5, 6, 7], 9)


async def test_a_failed_handoff_is_tried_again_and_given_up_after_so_many_attempts() -> None:
    async with serving(options=server_options(port=0, max_attempts=2)) as h:
        h.prefill().fail_with = "decode-0 did not answer"
        answer = await h.generate.GenerateOnce(request(max_tokens=4))
        assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, 7], 4)
        assert answer.timeline.attempts == 2
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request(max_tokens=4))
        for _ in range(2):
            await h.prefill().wait_for(lambda: bool(h.prefill().held))
            submit = h.prefill().held.pop()
            failed = h.prefill().event(submit.request, pb.EVENT_KIND_FAILED, reason="no luck")
            h.prefill().emit(submit.request.router_id, events=[failed])
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code() is grpc.StatusCode.UNAVAILABLE
        assert failure.value.details() == "given up after 2 failed attempts; the last: prefill-0: no luck"


async def test_a_failure_that_is_the_requests_own_ends_it() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request())
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        own = {"reason": "more pages than exist", "cause": pb.FAILURE_CAUSE_REQUEST}
        failed = h.prefill().event(submit.request, pb.EVENT_KIND_FAILED, **own)
        h.prefill().emit(submit.request.router_id, events=[failed])
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert (failure.value.code(), failure.value.details()) == (
            grpc.StatusCode.INVALID_ARGUMENT,
            "prefill-0: more pages than exist",
        )


@pytest.mark.parametrize(
    ("cause", "code", "told"),
    [
        (pb.FAILURE_CAUSE_WORKER, "INVALID_ARGUMENT", "decode-0: no such adapter"),
        (pb.FAILURE_CAUSE_PEER, "UNAVAILABLE", "prefill-0: decode-0: no such adapter"),
    ],
)
async def test_who_is_named_first_is_who_says_it(cause: pb.FailureCause, code: str, told: str) -> None:
    async with serving(options=server_options(port=0, max_attempts=1)) as h:
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request())
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        why = {"reason": "decode-0: no such adapter", "cause": cause, "peer": "decode-0"}
        failed = h.prefill().event(submit.request, pb.EVENT_KIND_FAILED, **why)
        h.prefill().emit(submit.request.router_id, events=[failed])
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await call
        assert failure.value.code().name == code
        assert (failure.value.details() or "").endswith(told)
        assert ("prefill-0" in (failure.value.details() or "")) == ("prefill-0" in told)


async def test_messages_of_an_earlier_attempt_are_dropped() -> None:
    async with serving() as h:
        h.decode().max_steps = 2
        reader = asyncio.create_task(collect(h.generate.Generate(request(max_tokens=8))))
        await h.until(lambda: h.decode().steps == 2)
        old = h.prefill().submits[0].request
        h.decode().preempt(old.request_id)
        await h.until(lambda: len(h.prefill().submits) == 2)
        stale = [pb.TokenOutput(request_id=old.request_id, attempt=1, index=i, token_id=1) for i in range(3, 8)]
        gone = h.decode().event(old, pb.EVENT_KIND_FAILED, reason="too late", cause=pb.FAILURE_CAUSE_REQUEST)
        h.decode().emit(old.router_id, tokens=stale, events=[gone])
        h.decode().resume()
        assert tokens_of(await reader) == scripted_tokens([5, 6, 7], 8)
        assert h.count("stale_tokens") in (5, 6)  # those, and one that may have been on its way


async def test_a_token_of_an_earlier_request_never_reaches_one_that_took_its_id() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        first = h.generate.GenerateOnce(named("mine", [5]))
        await h.prefill().wait_for(lambda: len(h.prefill().submits) == 1)
        first.cancel()
        await h.prefill().wait_for(lambda: bool(h.prefill().cancels))
        second = h.generate.GenerateOnce(named("mine", [6]))
        await h.prefill().wait_for(lambda: len(h.prefill().submits) == 2)
        old = h.prefill().submits[0].request
        stale = [pb.TokenOutput(request_id=old.request_id, attempt=1, index=i, token_id=1) for i in range(4)]
        h.prefill().emit(old.router_id, tokens=stale)
        h.prefill().release()
        assert list((await second).choices[0].token_ids) == scripted_tokens([6], 4)


async def test_a_second_attempt_is_not_taken_for_a_request_whose_id_looks_like_one() -> None:
    async with serving() as h:
        h.decode().max_steps = 1
        calls = [h.generate.GenerateOnce(named(id, ids)) for id, ids in (("a", [5]), ("a#2", [6]))]
        await h.until(lambda: h.decode().steps == 1 and len(h.decode().running) == 2)
        for request_id in list(h.decode().running):
            h.decode().preempt(request_id)
        h.decode().resume()
        answers = await asyncio.gather(*calls)
        assert [list(answer.choices[0].token_ids) for answer in answers] == [
            scripted_tokens([5], 4),
            scripted_tokens([6], 4),
        ]


def _stall(h: Harness, submit: pb.Submit, reason: str, **more: object) -> None:
    """Its decode worker has no pages."""
    stalled = h.prefill().event(submit.request, pb.EVENT_KIND_HANDOFF_STALLED, reason=reason, **more)
    h.prefill().emit(submit.request.router_id, events=[stalled])


async def test_a_stalled_handoff_moves_to_a_decode_worker_with_pages() -> None:
    async with serving(1, 2) as h:
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request(max_tokens=4))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        _stall(h, submit, "0 of 4 pages free")
        await h.prefill().wait_for(lambda: bool(h.prefill().reassigns))
        assert submit.decode.name == "decode-0"
        moved = h.prefill().reassigns[0]
        assert moved.decode.name == "decode-1"
        h.prefill().compute(pb.Submit(request=submit.request, decode=moved.decode))
        answer = await call
        assert answer.timeline.decode_worker == "decode-1"
        assert h.count("reassigned") == 1


async def test_a_stalled_handoff_moves_once_another_worker_reports_free_pages() -> None:
    async with serving(1, 2, worker={"num_pages": 8}) as h:
        h.prefill().is_holding = True
        h.decode(1).max_steps = 0
        blocker = pb.RequestState(request_id="another router's", prompt_ids=range(120), router_id="another")
        h.decode(1).take(blocker, generate_pb2.HandoffReceipt())
        await h.until(lambda: h.router.policy.workers.decode.accounts["decode-1"].free_pages == 0)
        call = h.generate.GenerateOnce(request(max_tokens=4))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        _stall(h, submit, "0 of 8 pages free")
        await h.until(lambda: bool(h.router._dispatcher._stalled))
        assert not h.prefill().reassigns
        h.decode(1).running.clear()
        await h.prefill().wait_for(lambda: bool(h.prefill().reassigns))
        h.prefill().compute(pb.Submit(request=submit.request, decode=h.prefill().reassigns[0].decode))
        h.decode(1).resume()
        assert (await call).timeline.decode_worker == "decode-1"


async def test_no_stalled_handoff_is_looked_at_while_no_worker_has_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each report of each decode worker would look at all of them."""
    async with serving(1, 2, worker={"num_pages": 1}) as h:
        h.prefill().is_holding = True
        calls = [h.generate.GenerateOnce(request(max_tokens=4)) for _ in range(2)]
        await h.prefill().wait_for(lambda: len(h.prefill().held) == 2)
        submit = h.prefill().held[0]
        _stall(h, submit, "0 of 1 pages free")
        await h.until(lambda: bool(h.router._dispatcher._stalled))
        looked: list[str] = []
        monkeypatch.setattr(h.router.policy, "reassign", lambda request_id, *_: looked.append(request_id))
        h.router._dispatcher.move_stalled()
        assert not looked
        h.prefill().release()
        await asyncio.gather(*calls)


async def test_a_reassignment_that_comes_too_late_does_no_harm() -> None:
    async with serving(1, 2) as h:
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request(max_tokens=4))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        _stall(h, submit, "0 of 4 pages free")
        await h.prefill().wait_for(lambda: bool(h.prefill().reassigns))
        h.prefill().compute(submit)  # the first one had granted the pages meanwhile
        answer = await call
        assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, 7], 4)
        assert answer.timeline.decode_worker == submit.decode.name


async def test_a_stall_at_a_worker_that_it_is_no_longer_for_names_the_new_one_again() -> None:
    async with serving(1, 3) as h:
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request(max_tokens=4))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        for _ in range(2):
            _stall(h, submit, "full", decode_worker=submit.decode.name)
        await h.prefill().wait_for(lambda: len(h.prefill().reassigns) == 2)
        first, again = h.prefill().reassigns
        assert first.decode.name == again.decode.name != submit.decode.name
        h.prefill().compute(pb.Submit(request=submit.request, decode=again.decode))
        assert (await call).timeline.decode_worker == again.decode.name
        assert h.count("reassigned") == 1


async def test_a_handoff_to_a_worker_that_was_moved_away_from_and_died_is_sent_again() -> None:
    async with serving(1, 2) as h:
        h.prefill().is_holding = True
        call = h.generate.GenerateOnce(request(max_tokens=4))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held.pop()
        _stall(h, submit, "0 of 4 pages free")
        await h.prefill().wait_for(lambda: bool(h.prefill().reassigns))
        first = next(i for i in range(2) if h.decode(i).name == submit.decode.name)
        await h.decode(first).kill()  # it had granted the pages and taken the KV
        await h.until(lambda: h.count("workers_lost") == 1)
        taken = h.prefill().event(submit.request, pb.EVENT_KIND_HANDED_OFF, decode_worker=submit.decode.name)
        h.prefill().emit(submit.request.router_id, events=[taken])
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        h.prefill().release()
        answer = await call
        assert list(answer.choices[0].token_ids) == scripted_tokens([5, 6, 7], 4)
        assert (answer.timeline.decode_worker, answer.timeline.attempts) == (h.decode(1 - first).name, 2)


# cancel, deadline, who the workers are


async def test_a_client_that_leaves_is_cancelled_at_both_workers() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        call = h.generate.Generate(request(max_tokens=50))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        call.cancel()
        await h.prefill().wait_for(lambda: bool(h.prefill().cancels))
        await h.decode().wait_for(lambda: bool(h.decode().cancels))
        assert h.prefill().held == []
        assert h.count("cancelled") == 1


async def test_a_client_that_leaves_when_its_first_token_is_late_has_missed_its_target() -> None:
    """Whoever plans by what came must see it; of one who leaves in time nobody knows."""
    async with serving() as h:
        h.prefill().is_holding = True
        for target_ms, missed in ((1.0, 1), (1e6, 1), (0.0, 1)):
            asked = request(max_tokens=50)
            asked.slo_ttft_ms = target_ms
            call = h.generate.Generate(asked)
            await h.prefill().wait_for(lambda: bool(h.prefill().held))
            await asyncio.sleep(0.01)
            call.cancel()
            await h.until(lambda: h.router.num_submissions == 0)
            assert [ended.failed for ended in h.router.metrics.load] == [True] * missed
            await h.prefill().wait_for(lambda: not h.prefill().held)


async def test_a_client_that_leaves_while_tokens_come_frees_the_decode_worker() -> None:
    async with serving() as h:
        h.decode().max_steps = 5
        call = h.generate.Generate(request(max_tokens=50))
        await anext(aiter(call))
        await h.until(lambda: h.decode().steps == 5)
        call.cancel()
        await h.until(lambda: not h.decode().running)
        await h.until(lambda: h.router.num_submissions == 0)


async def test_a_request_that_was_cancelled_too_early_is_cancelled_again_when_it_shows_up() -> None:
    async with serving() as h:
        h.prefill().is_holding = True
        call = h.generate.Generate(request(max_tokens=50))
        await h.prefill().wait_for(lambda: bool(h.prefill().held))
        submit = h.prefill().held[0]
        call.cancel()
        await h.decode().wait_for(lambda: len(h.decode().cancels) == 1)
        h.decode().max_steps = 0
        h.decode().take(submit.request, generate_pb2.HandoffReceipt())  # its KV was on the way
        await h.decode().wait_for(lambda: len(h.decode().cancels) == 2)
        assert not h.decode().running


async def test_a_deadline_reaches_the_workers() -> None:
    async with serving() as h:
        h.decode().max_steps = 2
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await collect(h.generate.Generate(request(max_tokens=50), timeout=1.0))
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await h.until(lambda: not h.decode().running)


async def test_a_removed_worker_is_not_used_any_more_and_an_added_one_is() -> None:
    async with serving(1, 1) as h:
        other = FakeDecodeWorker(name="decode-1")
        h.prefill().decodes = [h.decode(), other]
        h.workers["decode-1"] = other
        h.server.set_workers([h.prefill().endpoint, await other.start()])
        await h.ready()
        answer = await h.generate.GenerateOnce(request(max_tokens=4))
        assert answer.timeline.decode_worker == "decode-1"
        assert [w.name for w in (await h.status()).workers] == ["prefill-0", "decode-1"]
        await other.kill()


async def test_of_the_last_two_of_a_phase_one_stays() -> None:
    """Before the first one has said that it drains, too."""
    only = "decode-1 is the only worker for decode that takes requests; start another one, or force it"
    async with serving(1, 2) as h:
        router, links = h.router, {link.name: link for link, *_ in h.router.workers()}
        router.drain("decode-0")
        with pytest.raises(RequestFailed, match=only):
            router.drain("decode-1")
        with pytest.raises(RequestFailed, match=only):
            router.set_role("decode-1", "prefill")
        router.drain("decode-0", undo=True)
        router.set_role("decode-0", "prefill")
        with pytest.raises(RequestFailed, match=only):
            router.drain("decode-1")
        router.drain("decode-0")
        await h.until(lambda: not links["decode-0"].is_leaving)  # a report says that it takes requests all the same
        router.drain("decode-0")
        assert links["decode-0"].is_leaving
        await h.decode(0).kill()
        await h.decode(0).start()
        await h.until(lambda: links["decode-0"].losses == 1 and links["decode-0"].state == "ready")
        assert not links["decode-0"].is_leaving, "it is another process"
        router.drain("decode-1", force=True)


async def test_one_that_leaves_for_good_counts_no_more() -> None:
    async with serving(1, 2) as h:
        goes = replace(h.decode(0).endpoint, is_leaving=True)
        h.server.set_workers([h.prefill().endpoint, goes, h.decode(1).endpoint])
        with pytest.raises(RequestFailed, match="decode-1 is the only worker for decode that takes requests"):
            h.router.drain("decode-1")
        assert h.router.takers == {"prefill": {"prefill-0": True}, "decode": {"decode-1": True}}


async def test_the_status_tells_what_the_deployment_has_against_a_worker() -> None:
    async with serving(1, 1) as h:
        troubled = replace(h.decode().endpoint, trouble="it died once; the last time: no memory")
        h.server.set_workers([h.prefill().endpoint, troubled])
        [status] = [w for w in (await h.status()).workers if w.name == "decode-0"]
        assert (status.state, status.losses) == ("ready", 0)
        assert status.reason == "it died once; the last time: no memory"


async def test_a_worker_that_comes_back_at_another_port_has_been_lost_as_often() -> None:
    """By that an alert tells who dies again and again."""
    async with serving(1, 1) as h:
        for losses in (1, 2):
            await h.decode().kill()
            await h.until(lambda: h.router.workers()[-1][0].state == "lost")
            h.decode().port = 0
            h.server.set_workers([h.prefill().endpoint, await h.decode().start()])
            await h.ready()
            assert {w.name: w.losses for w in (await h.status()).workers} == {"prefill-0": 0, "decode-0": losses}


async def test_a_worker_with_another_model_is_refused_with_both_named() -> None:
    async with serving(1, 1) as h:
        other = FakeDecodeWorker(name="decode-1", fingerprint="f2")
        h.server.set_workers([h.prefill().endpoint, h.decode().endpoint, await other.start()])
        await h.until(lambda: "serves" in h.router.workers()[-1][0].reason)
        [status] = [w for w in (await h.status()).workers if w.name == "decode-1"]
        assert status.state == "connecting"
        assert "it serves fake (f2)" in status.reason
        assert "serves fake (f1)" in status.reason
        await other.kill()


async def test_a_wrong_secret_keeps_a_worker_out() -> None:
    async with serving(1, 1) as h:
        other = FakeDecodeWorker(name="decode-1", secret="s")
        h.server.set_workers([h.prefill().endpoint, h.decode().endpoint, await other.start()])
        await h.until(lambda: "UNAUTHENTICATED" in h.router.workers()[-1][0].reason)
        await other.kill()


def test_a_workers_clock_is_read_from_the_quickest_round_trip() -> None:
    clock = ClockOffset()
    assert clock.to_router_s(5_000_000_000, now_s=3.0) == 3.0
    clock.add(sent_ns=0, worker_ns=100_000_000_000, received_ns=1_000_000_000)  # slow: half a second off
    clock.add(sent_ns=2_000_000_000, worker_ns=101_500_000_500, received_ns=2_000_001_000)
    assert clock.to_router_s(101_500_000_500, now_s=9.0) == pytest.approx(2.0000005, abs=1e-9)
    assert clock.to_router_s(200_000_000_000, now_s=9.0) == 9.0  # nothing happened later than now


# everything at once


@pytest.mark.parametrize("seed", range(2))
async def test_under_loss_preemption_and_cancels_every_answer_is_whole_and_nothing_is_left(seed: int) -> None:
    rng = random.Random(seed)
    async with serving(2, 3, options=server_options(port=0, dead_after_s=1.0, max_attempts=50)) as h:
        decodes = [h.decode(i) for i in range(3)]
        for decode in decodes:
            decode.step_s = 0.002
        outcomes: Counter[str] = Counter()

        async def one(i: int) -> None:
            prompt = [rng.randrange(3, 900) for _ in range(rng.randrange(1, 60))]
            count, choices = rng.randrange(1, 40), rng.choice((1, 1, 2))
            call = h.generate.Generate(
                request(prompt, max_tokens=count, n=choices), timeout=0.05 if i % 17 == 0 else 30
            )
            if i % 7 == 0:
                asyncio.get_running_loop().call_later(rng.random() * 0.1, call.cancel)
            try:
                responses = await collect(call)
            except asyncio.CancelledError:
                outcomes["cancelled"] += 1
            except grpc.aio.AioRpcError as error:
                outcomes[error.code().name] += 1
            else:
                outcomes["whole"] += 1
                for choice in range(choices):
                    assert tokens_of(responses, choice) == scripted_tokens(prompt, count)

        over = asyncio.Event()

        async def trouble() -> None:
            while not over.is_set():
                await asyncio.sleep(0.03)
                decode = rng.choice(decodes)
                if decode.running and rng.random() < 0.7:
                    decode.preempt(rng.choice(sorted(decode.running)))
                elif rng.random() < 0.4:
                    victim = rng.choice([*decodes, h.prefill(0), h.prefill(1)])
                    await victim.kill()
                    await victim.start()
                h.router.check_invariants()

        troubles = asyncio.create_task(trouble())
        for wave in range(4):
            await asyncio.gather(*(one(wave * 40 + i) for i in range(40)))
        over.set()  # not cancelled: a server cancelled within its stop can never be stopped again
        await troubles
        await h.until(lambda: h.router.num_submissions == 0 and not any(d.running for d in decodes))
        assert outcomes["whole"] > 80
        documented = {"CANCELLED", "DEADLINE_EXCEEDED", "UNAVAILABLE", "FAILED_PRECONDITION"}
        assert set(outcomes) <= {"whole", "cancelled"} | documented
        assert h.count("retries") > 0


async def test_targets_that_are_missed_are_counted_by_the_requests_own_or_the_routers() -> None:
    async with serving(options=server_options(port=0, slo_ttft_ms=1e-6)) as h:
        await h.generate.GenerateOnce(request(max_tokens=4))
        own = request(max_tokens=4)
        own.slo_ttft_ms, own.slo_tpot_ms = 60_000.0, 1e-6
        await h.generate.GenerateOnce(own)
        counted = [h.count(f"slo_{name}") for name in ("choices", "ttft_missed", "tpot_missed")]
        assert counted == [2, 1, 1]

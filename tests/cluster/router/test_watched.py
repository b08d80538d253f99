"""What people watch of a router: what each pair of workers handed over, and what was decided lately."""

from __future__ import annotations

from typing import Any

import grpc
import pytest

from cluster.front.operating.operate import ClusterService
from cluster.router.monitoring import receipts
from cluster.router.monitoring.chronicle import KEPT, MOST_CHARACTERS, SAME_S, Chronicle
from cluster.router.monitoring.receipts import Receipts
from kvrelay.v1 import cluster_pb2
from kvrelay.v1.generate_pb2 import HandoffReceipt
from kvrelay.v1.worker_pb2 import EVENT_KIND_FAILED, FAILURE_CAUSE_PEER
from tests.cluster.harness import collect, request, serving
from worker.wire.door import CALLER

pytestmark = pytest.mark.unit


async def test_each_pair_counts_what_it_handed_over() -> None:
    async with serving(1, 2) as h:
        for _ in range(6):
            await collect(h.generate.Generate(request(max_tokens=3)))
        await h.until(lambda: sum(counts.good for _, counts in h.router.metrics.receipts.of("prefill-0")) == 6)
        told = {each.peer: each for each in (await h.status()).workers[0].receipts}
        assert sum(each.good for each in told.values()) == 6
        assert sum(each.bytes for each in told.values()) == 6 * 1024
        assert sum(each.bad for each in told.values()) == 0
        h.server.set_workers([h.workers["prefill-0"].endpoint])
        assert not h.router.metrics.receipts.of("prefill-0"), "its peers have left"


async def test_a_handoff_that_fails_counts_against_its_pair() -> None:
    async with serving(1, 2) as h:
        prefill = h.prefill()
        prefill.is_holding = True
        call = h.generate.Generate(request(max_tokens=3))
        await h.until(lambda: bool(prefill.held))
        [submit] = prefill.held
        prefill.held.clear()
        why: dict[str, Any] = {"reason": "no way", "cause": FAILURE_CAUSE_PEER, "peer": submit.decode.name}
        prefill.emit(submit.request.router_id, events=[prefill.event(submit.request, EVENT_KIND_FAILED, **why)])
        prefill.is_holding = False
        await collect(call)
        await h.until(lambda: sum(counts.good for _, counts in h.router.metrics.receipts.of("prefill-0")) == 1)
        told = dict(h.router.metrics.receipts.of("prefill-0"))
        assert told[submit.decode.name].bad == 1
        assert sum(counts.good for counts in told.values()) == 1


def test_pairs_are_bounded_and_what_stays_where_it_is_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts, "MOST_PAIRS", 2)
    counted = Receipts()
    counted.note("mixed-0", "mixed-0", HandoffReceipt(checksums_ok=True))
    assert counted.of("mixed-0") == []
    for peer in ("c", "b", "d"):
        counted.note("a", peer, HandoffReceipt(bytes=5, checksums_ok=peer == "b"))  # of the other they are off
    assert [(peer, each.good, each.bad, each.bytes) for peer, each in counted.of("a")] == [
        ("b", 1, 0, 5),
        ("c", 1, 0, 5),
    ]
    counted.keep(("a", "b"))
    counted.note_failure("b", "a")
    assert [peer for peer, _ in counted.of("a")] == ["b"]
    assert [(peer, each.bad) for peer, each in counted.of("b")] == [("a", 1)]


def test_what_happens_again_is_counted_and_the_oldest_is_dropped() -> None:
    chronicle = Chronicle()
    for at_s in (1.0, 2.0):
        chronicle.note("router", "moves a request from decode-0 to decode-1", f"reason {at_s}", at_s)
    [deed] = chronicle
    assert (deed.times, deed.reason, deed.at_s) == (2, "reason 2.0", 2.0)
    chronicle.note("router", deed.what, "later", 2.0 + SAME_S)
    chronicle.note("router", deed.what, "advised", 2.0 + SAME_S, acted=False)
    assert [each.times for each in chronicle] == [1, 1, 2]
    for number in range(KEPT):
        chronicle.note("planner", f"change {number}", "x" * 1000, 100.0)
    kept = list(chronicle)
    assert [kept[0].what, kept[-1].what, len(kept)] == [f"change {KEPT - 1}", "change 0", KEPT]
    assert len(kept[0].reason) == MOST_CHARACTERS


async def test_a_planner_tells_its_decision_and_others_may_not() -> None:
    async with serving() as h:
        handler: Any = ClusterService(h.server.catalog).handlers()["NoteDecision"]
        asked = cluster_pb2.NoteDecisionRequest(by="planner", what="decode-1 should become", reason="61% met theirs")
        await handler.unary_unary(asked, None)
        deed = next(iter(h.router.metrics.chronicle))
        assert (deed.by, deed.what, deed.reason, deed.acted) == ("planner", asked.what, asked.reason, False)
        context = Refusals()
        with pytest.raises(AbortedError):
            await handler.unary_unary(cluster_pb2.NoteDecisionRequest(), context)
        CALLER.set("somebody")
        with pytest.raises(AbortedError):
            await handler.unary_unary(asked, context)
        assert context.codes == [grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.PERMISSION_DENIED]


async def test_the_loss_of_a_worker_and_its_return_are_told() -> None:
    async with serving(1, 2) as h:
        await h.decode(1).kill()
        await h.until(lambda: any(deed.what == "decode-1 is lost" for deed in h.router.metrics.chronicle))
        ready = [deed.what for deed in h.router.metrics.chronicle if deed.what.endswith("is ready")]
        assert sorted(ready) == ["decode-0 is ready", "decode-1 is ready", "prefill-0 is ready"]


class AbortedError(Exception):
    pass


class Refusals:
    def __init__(self) -> None:
        self.codes: list[grpc.StatusCode] = []

    def trailing_metadata(self) -> None:
        """None was set."""

    async def abort(self, code: grpc.StatusCode, *_: Any) -> None:
        self.codes.append(code)
        raise AbortedError

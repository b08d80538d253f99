"""Pairs that cannot be opened: one request finds it out, the others are told, and nobody has to ask again."""

from __future__ import annotations

import asyncio
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side.errors import HandoffLost
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt
from worker.peers import peers as peers_module
from worker.peers.peers import Peers

DECODE = pb.WorkerAddress(name="decode-0", address="127.0.0.1:9", incarnation="d1")


class FakePair:
    is_lost, lost_reason, on_lost = False, "", None

    async def close(self) -> None: ...


def make_peers(monkeypatch: pytest.MonkeyPatch, connect: Any) -> Peers:
    monkeypatch.setattr(peers_module, "connect", connect)
    options = SimpleNamespace(secret="", tls=None, transfer=TransferOptions(), host="127.0.0.1")
    engine = SimpleNamespace(info=SimpleNamespace(fingerprint="m"), memory=None)
    host: Any = SimpleNamespace(
        options=options, engine=engine, address=pb.WorkerAddress(), faults=None, counters=Counter()
    )
    return Peers(host)


async def test_a_pair_known_to_be_bad_fails_soon_and_is_tried_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    attempts = 0
    is_cut, answer = True, asyncio.Event()

    async def connect(*_: object, **__: object) -> FakePair:
        nonlocal attempts
        attempts += 1
        if attempts > 1:  # the first fails at once; the next hangs, as behind a cut cable
            await answer.wait()
        if is_cut:
            raise HandoffLost("decode-0 did not answer for 3 s")
        return FakePair()

    monkeypatch.setattr(peers_module, "UNREACHABLE_WAIT_S", 0.01)
    peers = make_peers(monkeypatch, connect)
    with pytest.raises(HandoffLost, match="did not answer for 3 s"):
        await peers.pair(DECODE)
    (health,) = peers.report()
    assert (health.name, health.incarnation, health.failures) == ("decode-0", "d1", 1)
    assert health.reason == "decode-0 did not answer for 3 s"
    for _ in range(5):
        with pytest.raises(HandoffLost, match="could not be reached lately: decode-0 did not answer for 3 s") as failed:
            await asyncio.wait_for(peers.pair(DECODE), 5)
        assert failed.value.cause == pb.FAILURE_CAUSE_ROOM, "what was not tried is no attempt of the request's"
    is_cut = False
    answer.set()
    async with asyncio.timeout(10):
        while peers.report():
            await asyncio.sleep(0.01)
    assert peers.open_pair(DECODE) is await peers.pair(DECODE) is not None
    assert attempts == 2
    await peers.close()


async def test_a_lost_pair_is_opened_again_before_a_request_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[FakePair] = []

    async def connect(*_: object, **__: object) -> FakePair:
        opened.append(FakePair())
        return opened[-1]

    peers = make_peers(monkeypatch, connect)
    first: Any = await peers.pair(DECODE)
    first.is_lost = True
    first.on_lost("the cable is cut")
    assert [health.reason for health in peers.report()] == ["the cable is cut"]
    second: object = await peers.pair(DECODE)
    assert second is opened[1]
    assert [health.failures for health in peers.report()] == [1]  # until KV has come over it
    peers.on_receipt(DECODE, HandoffReceipt())
    assert not peers.report()
    await peers.close()


async def test_what_nobody_asks_for_any_more_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    async def connect(*_: object, **__: object) -> FakePair:
        raise HandoffLost("gone")

    monkeypatch.setattr(peers_module, "WANTED_S", 0.0)
    peers = make_peers(monkeypatch, connect)
    with pytest.raises(HandoffLost, match="gone"):
        await peers.pair(DECODE)
    assert not peers._connections
    assert not peers._wanted_s

"""What a controller keeps in Ray's store, which is a fake."""

from __future__ import annotations

import asyncio
import threading
from functools import partial

import pytest
from ray.exceptions import RpcError
from ray.experimental import internal_kv

from cluster.deploy.checkpoint import Checkpoint

pytestmark = pytest.mark.unit


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    kept: dict[bytes, bytes] = {}
    monkeypatch.setattr(internal_kv, "_internal_kv_get", lambda key, namespace: kept.get(key))
    monkeypatch.setattr(internal_kv, "_internal_kv_put", lambda key, value, namespace: kept.update({key: value}))
    context = type("Context", (), {"get_actor_id": lambda _: "a"})
    monkeypatch.setattr("ray.get_runtime_context", context)
    return kept


async def test_a_controller_that_was_replaced_overwrites_nothing(store: dict[bytes, bytes]) -> None:
    cut_off, later = Checkpoint(), Checkpoint()
    assert await cut_off.epoch() == 0
    await cut_off.save(lambda: {"epoch": 1})
    await later.save(lambda: {"epoch": 2, "members": "new"})
    await cut_off.save(lambda: {"epoch": 1, "members": "old"})
    assert later.load() == {"epoch": 2, "members": "new"}
    assert await cut_off.epoch() == 2


async def test_what_is_saved_while_the_store_hangs_is_not_overwritten_by_what_was_before(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    answers, put, written = threading.Event(), internal_kv._internal_kv_put, list[bytes]()

    def put_late(key: bytes, value: bytes, namespace: bytes) -> None:
        if b"old" in value:
            answers.wait(10.0)
        put(key, value, namespace=namespace)
        written.append(value)

    monkeypatch.setattr(internal_kv, "_internal_kv_put", put_late)
    monkeypatch.setattr("cluster.deploy.checkpoint.TIMEOUT_S", 0.05)
    checkpoint = Checkpoint()
    for members in ("old", "new"):
        await checkpoint.save(partial(dict, epoch=1, members=members))
    answers.set()
    async with asyncio.timeout(10.0):
        while len(written) < 2:
            await asyncio.sleep(0.01)
    assert checkpoint.load() == {"epoch": 1, "members": "new"}


async def test_a_store_that_does_not_answer_has_no_epoch(
    store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> bytes:
        raise RpcError("the GCS is away")

    monkeypatch.setattr(internal_kv, "_internal_kv_get", fail)
    assert await Checkpoint().epoch() is None

"""What a decode worker takes from prefill workers: only what a step can compute, in pages that can exist."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.driver import DecodeRole
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from decode_worker.reservations import ANY_MOVE, Reservations
from engine.adapters.files import AdapterError
from engine.pages.pool import PagePool, page_hashes
from engine.types import Adapter
from kv_transfer.lease import Denied, Granted
from kv_transfer.options import TransferOptions
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from tests.kv_transfer.sides import PAGE_SIZE, random_memory

PAGES = 8


async def make_reservations() -> Reservations:
    return make_role().reservations


def make_role() -> DecodeRole:
    pool = PagePool(PAGES, PAGE_SIZE)

    def hashed(tokens: list[int], parent: bytes) -> list[bytes]:
        assert len(tokens) <= PAGES * PAGE_SIZE, "what can never fit is hashed"
        return page_hashes(tokens, PAGE_SIZE, parent=parent)

    options = SimpleNamespace(name="decode-0", transfer=TransferOptions(), host="127.0.0.1", tls=None)
    host: Any = SimpleNamespace(
        options=options,
        pool=pool,
        engine=SimpleNamespace(
            num_stages=1,
            info=SimpleNamespace(fingerprint="m", vocab_size=100, max_model_len=30, eos_token_ids=[], rope=None),
            memory=random_memory(PAGES),
        ),
        address=pb.WorkerAddress(name="decode-0"),
        is_draining=False,
        is_stopping=False,
        streams=SimpleNamespace(link=lambda _: object(), event=lambda *_, **more: None, flush=lambda: None),
        counters=Counter(),
        wake=lambda: None,
        page_hashes=hashed,
    )
    return DecodeRole(host, DecodePolicy(pool, DecodeOptions()))


def state(tokens: list[int], *, salt: str = "", dropped: int = 0, window: int = 0, **sampling: Any) -> pb.RequestState:
    params = generate_pb2.SamplingParams(**{"max_tokens": 4, **sampling})
    return pb.RequestState(
        request_id="a",
        router_id="r",
        prompt_ids=tokens,
        sampling=params,
        attempt=1,
        cache_salt=salt,
        kv_policy=generate_pb2.KvPolicy(window_tokens=window) if window else None,
        dropped_tokens=dropped,
    )


@pytest.mark.parametrize(
    ("request_state", "sentence"),
    [
        (state([1, 2, 100]), "have id 100"),
        (state([]), "prompt_ids is empty"),
        (state([1] * 10_000), "the model takes 30"),
        (state([1, 2], temperature=-1.0), "temperature is -1"),
        (state([1, 2], stop_token_ids=[100]), "stop_token_ids has 100"),
        (state([1] * 20, dropped=16), "16 tokens of it are dropped, and at most 0 can be"),
        (state([1] * 20, dropped=20, window=1), "20 tokens of it are dropped, and at most 16 can be"),
    ],
)
async def test_what_no_router_sends_is_denied_for_good(request_state: pb.RequestState, sentence: str) -> None:
    answer = (await make_reservations()).reserve(request_state)
    assert isinstance(answer, Denied)
    assert sentence in answer.reason
    assert not answer.retryable
    assert not answer.unable


async def test_an_adapter_that_it_cannot_have_is_no_fault_of_the_request() -> None:
    def check(_: Adapter) -> None:
        raise AdapterError("adapter 'sql' cannot be served: its directory has no adapter_config.json")

    reservations = await make_reservations()
    reservations._host.engine.adapters = SimpleNamespace(check=check)  # type: ignore[assignment]
    adapted = state([1, 2, 3])
    adapted.adapter.name = "sql"
    why = "decode-0: adapter 'sql' cannot be served: its directory has no adapter_config.json"
    assert reservations.reserve(adapted) == Denied(reason=why, retryable=False, unable=True)


async def test_a_reservation_has_the_priority_of_its_request() -> None:
    reservations = await make_reservations()
    urgent = state([1, 2, 3])
    urgent.priority = -2
    assert isinstance(reservations.reserve(urgent), Granted)
    assert reservations._policy._requests[urgent.request_id].priority == -2


async def test_a_cancel_that_came_first_is_of_what_it_names() -> None:
    reservations = await make_reservations()
    moved = state([1, 2, 3])
    reservations.remember_cancelled("a", 1)
    for number, is_denied in ((0, True), (1, True), (2, False)):
        moved.move = number
        answer = reservations.reserve(moved, room_tokens=2)
        assert isinstance(answer, Denied) == is_denied, number
    moved.move = 3
    answer = reservations.reserve(moved, room_tokens=2)
    assert isinstance(answer, Denied)
    assert answer.retryable, "it is there by another move, and may come by the next"
    reservations.forget(reservations.requests["a"])
    reservations.remember_cancelled("a", ANY_MOVE)
    reservations.remember_cancelled("a", 1)
    assert isinstance(reservations.reserve(moved, room_tokens=2), Denied), "it is over"


async def test_a_cancel_of_a_move_ends_nothing_that_came_by_a_later_one() -> None:
    role = make_role()
    moved = state([1, 2, 3])
    moved.move = 2
    assert isinstance(role.reservations.reserve(moved, room_tokens=2), Granted)
    role.policy.on_committed("a", 0)
    role.on_cancel(pb.Cancel(request_id="a", last_move=1))
    assert role.requests
    role.on_cancel(pb.Cancel(request_id="a", last_move=2))
    assert not role.requests
    moved.move = 3
    assert isinstance(role.reservations.reserve(moved, room_tokens=2), Granted)
    role.policy.on_committed("a", 0)
    role.on_cancel(pb.Cancel(request_id="a"))
    assert not role.requests


async def test_pages_are_only_found_under_the_same_salt() -> None:
    reservations = await make_reservations()
    tokens = list(range(8))
    for salt, cached_pages in (("ours", 0), ("theirs", 0), ("ours", 2), ("", 0)):
        request = state(tokens, salt=salt)
        answer = reservations.reserve(request)
        assert isinstance(answer, Granted)
        assert answer.cached_pages == cached_pages
        reservations._policy.on_committed("a")
        reservations.forget(reservations.requests["a"])

"""What a decode worker takes from prefill workers: only what a step can compute, in pages that can exist."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from decode_worker.reservations import Reservations
from engine.pages.pool import PagePool, page_hashes
from kv_transfer.lease import Denied, Granted
from kv_transfer.options import TransferOptions
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb
from tests.kv_transfer.sides import PAGE_SIZE, random_memory

PAGES = 8


async def make_reservations() -> Reservations:
    pool = PagePool(PAGES, PAGE_SIZE)

    def hashed(tokens: list[int], parent: bytes) -> list[bytes]:
        assert len(tokens) <= PAGES * PAGE_SIZE, "what can never fit is hashed"
        return page_hashes(tokens, PAGE_SIZE, parent=parent)

    options = SimpleNamespace(name="decode-0", transfer=TransferOptions(), host="127.0.0.1", tls=None)
    host: Any = SimpleNamespace(
        options=options,
        pool=pool,
        engine=SimpleNamespace(
            info=SimpleNamespace(fingerprint="m", vocab_size=100, max_model_len=30), memory=random_memory(PAGES)
        ),
        address=pb.WorkerAddress(name="decode-0"),
        is_draining=False,
        is_stopping=False,
        streams=SimpleNamespace(link=lambda _: object()),
        page_hashes=hashed,
    )
    return Reservations(host, DecodePolicy(pool, DecodeOptions()))


def state(tokens: list[int], *, salt: str = "", **sampling: Any) -> pb.RequestState:
    params = generate_pb2.SamplingParams(**{"max_tokens": 4, **sampling})
    return pb.RequestState(
        request_id="a", router_id="r", prompt_ids=tokens, sampling=params, attempt=1, cache_salt=salt
    )


@pytest.mark.parametrize(
    ("request_state", "sentence"),
    [
        (state([1, 2, 100]), "have id 100"),
        (state([]), "prompt_ids is empty"),
        (state([1] * 10_000), "the model takes 30"),
        (state([1, 2], temperature=-1.0), "temperature is -1"),
        (state([1, 2], stop_token_ids=[100]), "stop_token_ids has 100"),
    ],
)
async def test_what_no_router_sends_is_denied_for_good(request_state: pb.RequestState, sentence: str) -> None:
    answer = (await make_reservations()).reserve(request_state)
    assert isinstance(answer, Denied)
    assert sentence in answer.reason
    assert not answer.retryable


async def test_a_reservation_has_the_priority_of_its_request() -> None:
    reservations = await make_reservations()
    urgent = state([1, 2, 3])
    urgent.priority = -2
    assert isinstance(reservations.reserve(urgent), Granted)
    assert reservations._policy._requests[urgent.request_id].priority == -2


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

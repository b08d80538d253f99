"""Exactly-once, in-order delivery, and what an attempt leaves to the next."""

from __future__ import annotations

import random

import pytest

from cluster.router.accounts import Past
from cluster.router.live.prompt_hashes import PromptHashes
from cluster.router.live.requests import LiveRequest
from cluster.router.live.timeline import Timeline
from kvrelay.v1 import generate_pb2
from kvrelay.v1 import worker_pb2 as pb


def live(prompt_len: int = 8, max_tokens: int = 10) -> LiveRequest:
    sampling = generate_pb2.SamplingParams(max_tokens=max_tokens)
    prompt_ids = range(prompt_len)
    hashes = PromptHashes(prompt_ids, "")
    return LiveRequest(
        id="r/a", call_id="a", choice=0, prompt_ids=prompt_ids, sampling=sampling, hashes=hashes, timeline=Timeline(0.0)
    )


def taken(request: LiveRequest, index: int) -> list[int]:
    """The indexes of what the token lets out."""
    ready = request.take(index, 100 + index)
    return [] if ready is None else [token_id - 100 for token_id in ready.ids]


def test_an_early_token_waits_and_a_late_one_is_dropped() -> None:
    request = live()
    assert taken(request, 1) == []
    assert taken(request, 2) == []
    assert taken(request, 0) == [0, 1, 2]
    assert taken(request, 1) == []
    assert taken(request, 3) == [3]
    assert request.output_ids == [100, 101, 102, 103]


@pytest.mark.parametrize("seed", range(10))
def test_any_order_with_repeats_is_delivered_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    arrivals = [index for index in range(20) for _ in range(rng.randint(1, 3))]
    rng.shuffle(arrivals)
    request, delivered = live(max_tokens=20), []
    for index in arrivals:
        delivered += taken(request, index)
    assert delivered == list(range(20))


def test_a_new_attempt_has_a_name_of_its_own_and_carries_the_tokens_so_far() -> None:
    request = live()
    taken(request, 0)
    taken(request, 1)
    taken(request, 5)  # early: it will be made again
    request.begin_attempt(1.0, past=Past(failures=1))
    state = pb.RequestState()
    request.write(state, "router")
    assert (state.request_id, state.attempt) == ("r/a#2", 2)
    assert list(state.output_ids) == [100, 101]
    assert taken(request, 2) == [2]
    assert request.tokens_left == 7


def test_recomputed_tokens_are_those_that_an_earlier_attempt_had_computed_and_no_cache_holds() -> None:
    request = live(prompt_len=100)
    request.begin_attempt(0.5, past=Past(failures=1))  # lost while it waited: nothing was computed
    request.on_prefill_started(cached_tokens=0)
    assert request.recomputed_tokens == 0
    for index in range(5):
        taken(request, index)
    request.begin_attempt(1.0, past=Past(failures=1))
    request.on_prefill_started(cached_tokens=64)
    assert request.recomputed_tokens == 104 - 64  # the KV of the last token had not been computed
    receipt = request.receipt_to_proto()
    assert receipt is not None
    assert receipt.recomputed_tokens == 40
    assert receipt.checksums_ok, "nothing was moved, and nothing was damaged"


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    request = live(prompt_len=100)
    request.on_prefill_started(cached_tokens=16)
    request.begin_attempt(1.0, past=Past(failures=1))
    request.on_prefill_started(cached_tokens=96)
    assert request.cached_tokens == 16

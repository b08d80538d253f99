"""The protocol of requests and leases, by the real objects in every order: no token lost or doubled, no page in two
places, nothing written but leased pages, no lease and no request without an end.

`python -m bench.protocol` goes through larger settings, and further.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from cluster.router.live.requests import ChoiceUpdate, LiveRequest
from engine.pages.rows import PageRows
from kv_transfer.lease import Ended, LeaseTable
from kvrelay.v1 import worker_pb2 as pb
from tests.protocol.explore import Broken, Explorer, replay, walk
from tests.protocol.faults import KINDS
from tests.protocol.process import Process
from tests.protocol.setting import Setting
from worker.convert import FINISH_REASON_FROM_PROTO

ALL = tuple(KINDS)
MOVES = Setting(decode=2, max_tokens=8, faults=("drain",), reports=True)
CROWD = Setting(prompts=(4, 4, 8), decode_pages=4, arrivals=True, reports=True, options={"overcommit": 2.0})


@pytest.fixture(autouse=True)
def _no_log() -> Iterator[None]:
    """Faults are told at every one of them."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def test_without_a_fault_every_order_brings_the_answer() -> None:
    seen = explored_in(Setting())
    assert len(seen) > 100
    assert seen == explored_in(Setting(), every_order=True), "choices that are taken to commute do not"


def explored_in(setting: Setting, *, every_order: bool = False) -> set[bytes]:
    explorer = Explorer(setting, every_order=every_order)
    explored = explorer.explore(lambda so_far: so_far.states > 2_000)  # something that only counts would have no end
    assert explored.left == 0
    return explorer.seen


@pytest.mark.parametrize("fault", ["cancel", "sever"])
def test_what_is_taken_to_commute_does_after_a_fault(fault: str) -> None:
    setting = Setting(prompts=(1,), max_tokens=1, faults=(fault,))
    assert explored_in(setting) == explored_in(setting, every_order=True)


@pytest.mark.parametrize(
    "setting",
    [
        Setting(faults=ALL),
        Setting(prefill=2, decode=2, faults=ALL, num_faults=2),
        replace(CROWD, decode=2, faults=ALL, num_faults=3, prefix_cache=True),
        Setting(poison=(0, "prefill"), prompts=(4, 5)),
        Setting(poison=(1, "decode"), prompts=(4, 5), decode=2),
        Setting(prefill=0, decode=0, mixed=1, prompts=(5, 9), faults=ALL),
        replace(CROWD, decode=0, mixed=2, mixed_pages=4, faults=ALL, num_faults=2, prefix_cache=True),
        replace(CROWD, prefill=0, mixed=1, mixed_pages=5, faults=ALL, num_faults=2),
        replace(MOVES, prompts=(5, 9), faults=("drain", *ALL), num_faults=3, prefix_cache=True),
        replace(MOVES, prompts=(5, 9, 3), faults=("drain", "drain", *ALL), num_faults=5, max_tokens=10),
    ],
    ids=[
        "one pair",
        "two pairs",
        "a crowd",
        "a poison at prefill",
        "a poison at decode",
        "mixed",
        "read",
        "written",
        "moves",
        "many moves",
    ],
)
def test_faults_at_any_place_lose_nothing(setting: Setting) -> None:
    for seed in range(30):
        walk(setting, seed)


def end_at_once(table: LeaseTable[str], key: str, *args: object) -> Ended[str] | None:
    lease = table.get(key)
    return Ended(lease=table._remove(lease), released=True) if lease is not None else None


def take_twice(live: LiveRequest, _: int, token_id: int, details: pb.TokenOutput | None) -> ChoiceUpdate:
    live.output_ids.append(token_id)
    last = None if details is None else FINISH_REASON_FROM_PROTO.get(details.finish_reason)
    return ChoiceUpdate(live.choice, [token_id], finish=last)


def move_nothing(*_: object) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "wrong"),
    [(LeaseTable, "end", end_at_once), (LiveRequest, "take", take_twice), (PageRows, "copy_from", move_nothing)],
    ids=["pages come back while their sender still writes", "a token is taken twice", "no KV is moved"],
)
def test_what_would_be_wrong_is_found(owner: type, name: str, wrong: Callable[..., Any]) -> None:
    """That the exploring can fail."""
    setting = Setting(faults=("sever",) if owner is LeaseTable else ())
    with mock.patch.object(owner, name, wrong), pytest.raises(Broken, match="AssertionError"):
        Explorer(setting).explore(lambda so_far: so_far.states > 2_000)


def test_a_history_is_told_and_played_again() -> None:
    world = replay(Setting(faults=("cancel",)), ["router-0>prefill-0", "cancel 0"])
    assert world.clients[0].given_up == "cancel"
    world.cluster.loop.close()


async def test_what_both_sides_of_a_handoff_count_is_added() -> None:
    """A mixed worker is on either."""
    worker = Process("mixed-0", "mixed", "1", num_pages=8, prefix_cache=False)
    worker.counters["resends"] += 2
    worker.reservations.handoffs.counters["resends"] += 3
    assert worker.report().counters["resends"] == 5

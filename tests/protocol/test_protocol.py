"""The protocol of requests and leases, by the real objects in every order: no token lost or doubled, no page in two
places, nothing written but leased pages, no lease and no request without an end.

`python -m bench.protocol` visits every state of larger settings.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest

from kv_transfer.lease import Ended, LeaseTable
from tests.protocol.explore import Broken, explore, replay, walk
from tests.protocol.world import Setting

FAULTS = ("kill", "cut", "sever", "cancel", "expire")


def test_without_a_fault_every_order_brings_the_answer() -> None:
    explored = explore(Setting(), lambda so_far: so_far.states > 2_000)  # something that only counts would have no end
    assert explored.left == 0
    assert explored.states > 100


@pytest.mark.parametrize(
    "setting",
    [
        Setting(faults=FAULTS, num_faults=1),
        Setting(prefill=2, decode=2, faults=FAULTS, num_faults=2),
        Setting(prefill=1, decode=2, faults=FAULTS, num_faults=3, prefix_cache=True),
    ],
    ids=["one pair, one fault", "two and two, two faults", "two decode workers, three faults"],
)
def test_faults_at_any_place_lose_nothing(setting: Setting) -> None:
    for seed in range(40):
        walk(setting, seed)


def test_a_fence_that_is_left_out_is_found() -> None:
    """That the exploring can fail: pages come back while their sender still writes."""

    def end_at_once(table: LeaseTable[str], key: str, *args: object) -> Ended[str] | None:
        lease = table.get(key)
        return Ended(lease=table._remove(lease), released=True) if lease is not None else None

    setting = Setting(faults=("expire", "cancel"), num_faults=1)
    with mock.patch.object(LeaseTable, "end", end_at_once), pytest.raises(Broken, match="AssertionError"):
        explore(setting)


def test_a_history_is_told_and_played_again() -> None:
    world = replay(replace(Setting(), faults=("cancel",)), ["router>prefill-0", "cancel"])
    assert world.is_cancelled
    world.close()

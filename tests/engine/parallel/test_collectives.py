"""What the ranks of a worker meet in: sums and gathers of any size, and a rank that is lost or late."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from engine.parallel import collectives
from engine.parallel.collectives import Collectives, make_seats
from engine.parallel.shard import Shard

SLOT_BYTES = 4096
ROWS = (1, 3, 400)  # of 24 numbers: from a corner of a slot to many slots


@pytest.fixture(autouse=True)
def _small_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SLOT_BYTES", SLOT_BYTES)


def ranks_of(size: int, timeout_s: float = 10.0) -> list[Collectives]:
    return [Collectives(seat, Shard(rank, size), timeout_s) for rank, seat in enumerate(make_seats(size))]


def at_once(
    ranks: list[Collectives], act: Callable[[Collectives, torch.Tensor], torch.Tensor], parts: list[torch.Tensor]
) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(act, ranks, parts))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [2, 3])
def test_every_rank_has_the_sum_in_the_order_of_the_ranks(size: int, dtype: torch.dtype) -> None:
    ranks = ranks_of(size)
    for rows in ROWS * 3:
        parts = [torch.randn(24, rows).to(dtype).T for _ in range(size)]  # not contiguous
        wanted = torch.zeros(rows, 24)
        for part in parts:
            wanted = wanted + part.float()
        for total in at_once(ranks, Collectives.sum, parts):
            assert torch.equal(total, wanted.to(dtype))
    for rank in ranks:
        rank.close()


def test_the_first_has_all_parts_side_by_side() -> None:
    ranks = ranks_of(3)
    for rows in ROWS:
        parts = [torch.randn(rows, 24) for _ in ranks]
        first, *others = at_once(ranks, Collectives.gather, parts)
        assert torch.equal(first, torch.cat(parts, dim=-1))
        assert all(torch.equal(other, part) for other, part in zip(others, parts[1:], strict=True))
    for rank in ranks:
        rank.close()


def test_a_lost_rank_is_noticed_at_once_and_a_late_one_in_time() -> None:
    first, second = ranks_of(2, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        first.sum(torch.ones(1))
    with ThreadPoolExecutor(1) as pool:
        patient, other = ranks_of(2, timeout_s=60.0)
        waiting = pool.submit(patient.sum, torch.ones(1))
        other.close()
        with pytest.raises(ConnectionError):
            waiting.result(10)
    first.close()
    second.close()


def test_ranks_that_are_at_different_meetings_do_not_meet() -> None:
    first, second = ranks_of(2, timeout_s=0.05)
    with pytest.raises(TimeoutError):
        first.sum(torch.ones(1))
    second.sum(torch.ones(1))
    with pytest.raises(RuntimeError, match="rank 1 is at meeting 0, and this rank at 1"):
        first.sum(torch.ones(1))
    first.close()
    second.close()

"""DecodeRun: many steps at once leave a policy as the same steps do one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from decode_worker.policy import DecodePolicy
from decode_worker.run import DecodeRun
from tests.policies.test_decode_policy import make

pytestmark = pytest.mark.unit


def state(policy: DecodePolicy) -> object:
    """All that later decisions depend on."""
    policy.check_invariants()
    return (
        {
            name: (r.stage, list(r.pages), r.computed_len, r.scheduled_len, r.is_over)
            for name, r in policy._requests.items()
        },
        list(policy._running),
        list(policy._ready),
        list(policy._queued),
        list(policy.pool._free),
        policy.preemptions,
    )


@pytest.mark.parametrize("seed", range(30))
def test_a_run_is_its_single_steps(seed: int) -> None:
    """Two policies see the same; one takes steps one by one, the other many at once, with reservations in between."""
    rng = random.Random(seed)
    num_pages = rng.choice([24, 80])
    single, many = (make(num_pages=num_pages, max_batch_size=5) for _ in range(2))
    run = DecodeRun(many)
    advanced = 0
    for event in range(100):
        assert single.next_grants() == many.next_grants()
        for name in [name for name, r in single._requests.items() if r.stage.value == "reserved"]:
            single.on_committed(name)
            many.on_committed(name)
        batch, schedule = single.next_batch(), run.begin()
        names = [entry.request_id for entry in batch.entries]
        assert names == [r.request_id for r in schedule.requests]
        assert (batch.joined, batch.preempted) == (schedule.joined, schedule.preempted)
        assert run.context_tokens == sum(e.position + 1 for e in batch.entries)
        room = min((r.max_len - r.scheduled_len for r in map(single._requests.__getitem__, names)), default=0)
        for part in range(3):
            steps = rng.randint(0, max(0, min(room, run.steps_ahead)))
            room, advanced = room - steps, advanced + steps
            for _ in range(steps):
                single.on_batch_done(batch)
                batch = single.next_batch()
            run.advance(steps)
            wanted: dict[str, Any] = {
                "num_tokens": rng.randint(1, 20),
                "max_new_tokens": rng.randint(2, 30),
                "hashes": [],
            }
            if rng.random() < 0.2:
                name = f"{event}.{part}"
                assert single.reserve(name, **wanted) == many.reserve(name, **wanted)
        if rng.random() < 0.2 and names:  # a cancel in the middle
            single.on_cancelled(names[0])
            many.on_cancelled(names[0])
        single.on_batch_done(batch)
        run.end()
        for name in names:
            request = single._requests.get(name)
            if request is not None and (request.computed_len >= request.max_len or rng.random() < 0.1):
                run.leave(name)
                single.on_finished(name)
                many.on_finished(name)
        if rng.random() < 0.3:
            run.settle()
            assert state(single) == state(many)
    assert advanced > 10

"""Simulated workers that change their roles: drained first, as in life, and no request notices."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cluster.router.decisions import Assigned
from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.simulator.cluster import Loss, RoleChange, SetupError, SharedHost, SimCluster
from placement.simulator.machines.decode import DecodeMachine
from placement.simulator.machines.mixed import MixedMachine
from placement.simulator.machines.prefill import PrefillMachine
from placement.simulator.simulate import Simulation
from prefill_worker.options import PrefillOptions
from tests.placement.simulator.test_cancels import drawn, ended
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, workers

pytestmark = pytest.mark.unit

POLICIES: dict[str, Any] = {
    "prefill": PrefillOptions(max_batch_tokens=256, pack_tokens=None),
    "decode": DecodeOptions(max_batch_size=16),
    "mixed": MixedOptions(max_batch_tokens=256, max_batch_size=16, chunk_tokens=64),
}
MACHINES = {"prefill": PrefillMachine, "decode": DecodeMachine, "mixed": MixedMachine}


def change(worker: str, role: str, at_s: float = 5.0) -> RoleChange:
    return RoleChange(worker=worker, at_s=at_s, role=role, policy=POLICIES[role])


def two_of_each(**given: Any) -> SimCluster:
    return cluster(*(workers(role, 2) for role in MACHINES), **given)


@pytest.mark.parametrize("before", MACHINES)
@pytest.mark.parametrize("after", MACHINES)
def test_no_request_notices(before: str, after: str) -> None:
    simulation, outcome = play(two_of_each(role_changes=(change(f"{before}-1", after),)), requests(rate=15))
    assert outcome.served == 200
    assert outcome.counters["role_changes"] == 1
    assert {"retries", "preempted", "recomputed_tokens", "workers_lost"}.isdisjoint(outcome.counters)
    machine = simulation.machines[f"{before}-1"]
    assert type(machine) is MACHINES[after]
    assert (machine.worker.role, machine.worker.policy) == (after, POLICIES[after])


def test_it_takes_nothing_until_it_is_empty_and_soon_the_work_of_its_role() -> None:
    """decode-1, which writes when it is told to go; then it reads, after a ping and a few messages."""
    taken: list[tuple[float, Assigned]] = []
    setup = cluster(workers("prefill"), workers("decode", 2), role_changes=(change("decode-1", "prefill"),))
    simulation = Simulation(
        setup, requests(rate=15), lambda _, assigned: taken.append((simulation.clock.now, assigned))
    )
    outcome = simulation.play()
    assert outcome.served == 200
    assert outcome.counters["moved"] > 0
    written = [at_s for at_s, assigned in taken if assigned.decode == "decode-1"]
    read = [at_s for at_s, assigned in taken if assigned.prefill == "decode-1"]
    assert 4.0 < max(written) < 5.0 + 0.03
    assert 5.2 < min(read) < 6.5
    assert len(read) > 30


def test_pages_stay_with_what_they_hold_and_routers_know_of_it() -> None:
    """After the change one more comes to each router, short and much later: it hears all reports then."""
    plain = requests(62, rate=8)
    is_last = np.arange(62) >= 60
    workload = replace(
        plain,
        arrival_s=np.where(is_last, 100.0, plain.arrival_s),
        prompt_len=np.where(is_last, 10, 256),
        blocks=[(i % 5,) for i in range(62)],
        block_len=240,
    )
    setup = cluster(workers("prefill"), workers("decode", 2), role_changes=(change("decode-1", "prefill", 40.0),))
    for num_routers in (1, 2):
        simulation, _ = play(replace(setup, num_routers=num_routers), workload)
        pool = simulation.machines["decode-1"].policy.pool
        assert pool.usage.cached > 5
        for router in simulation.routers:
            known = router.policy.workers.prefill.accounts["decode-1"].prefixes
            assert pool.count_matching(list(known)[:1]) == 1
            assert len(known) == pool.usage.cached


@pytest.mark.parametrize("at_s", [5.05, 9.0])
def test_who_dies_is_back_as_it_was_at_first(at_s: float) -> None:
    """While it drains, and as what it has become."""
    losses = (Loss(worker="decode-1", at_s=at_s, back_s=10.0),)
    setup = two_of_each(role_changes=(change("decode-1", "prefill"),), losses=losses)
    simulation, outcome = play(setup, requests(rate=15))
    assert outcome.served == 200
    assert outcome.counters.get("role_changes", 0) == (at_s > 6)
    machine = simulation.machines["decode-1"]
    assert isinstance(machine, DecodeMachine)
    assert not machine.is_draining


@pytest.mark.parametrize("role", ["prefill", "mixed"])
def test_passing_over_steps_changes_nothing(role: str) -> None:
    many, single = (
        play(
            cluster(
                workers("prefill", latency=latency),
                workers("decode", 3, latency=latency),
                role_changes=(change("decode-1", role, 3.0), change("decode-1", "decode", 9.0)),
                report_gap_s=1e-5,
                message_s=1e-6,
            ),
            requests(rate=15),
        )[1]
        for latency in (Plain(), Plain(single_steps=True))
    )
    assert many.counters["role_changes"] == 2
    assert many.finish_s == pytest.approx(single.finish_s, rel=1e-9)
    assert many.counters == single.counters


@pytest.mark.parametrize("seed", range(100, 150))
def test_nothing_is_left_in_any_cluster(seed: int) -> None:
    """A worker for each phase keeps its role; all others may change theirs, twice."""
    setup, workload = drawn(seed)
    rng = random.Random(seed)
    names = [worker.name for worker in setup.workers]
    keep = {"prefill-0", [name for name in names if not name.startswith("prefill")][-1]}
    changes = tuple(
        change(name, rng.choice(list(MACHINES)), rng.uniform(0, 12))
        for name in (*names, *names)
        if name not in keep and rng.random() < 0.6
    )
    _, outcome = play(replace(setup, role_changes=changes, num_routers=1 + seed % 2), workload)
    assert ended(outcome) == 80
    assert outcome.counters.get("role_changes", 0) <= len(changes)


def test_changes_that_cannot_be_are_refused_with_a_sentence() -> None:
    with pytest.raises(SetupError, match="a role change names decode-9; the workers are"):
        two_of_each(role_changes=(change("decode-9", "mixed"),))
    with pytest.raises(SetupError, match="takes decode-0 away, the only worker for decode; add another one"):
        cluster(workers("prefill"), workers("decode"), role_changes=(change("decode-0", "mixed"),))
    both = (change("decode-0", "prefill"), change("decode-1", "prefill", 6.0))
    with pytest.raises(SetupError, match="takes decode-1 away, the only worker for decode"):
        cluster(workers("prefill"), workers("decode", 2), role_changes=both)
    with pytest.raises(SetupError, match="gives decode-0 DecodeOptions; a mixed worker has MixedOptions"):
        two_of_each(role_changes=(replace(change("decode-0", "mixed"), policy=POLICIES["decode"]),))
    host = SharedHost(workers=("prefill-0", "decode-0"), by_batch=((1, 1.2, 1.1),))
    with pytest.raises(SetupError, match="which is on a shared host"):
        two_of_each(role_changes=(change("decode-0", "mixed"),), hosts=(host,))
    with pytest.raises(SetupError, match="has the role eager, which is not simulated"):
        two_of_each(role_changes=(RoleChange(worker="decode-0", at_s=1.0, role="eager", policy=POLICIES["decode"]),))

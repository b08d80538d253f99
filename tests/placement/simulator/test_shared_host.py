"""Workers of one host slow each other by what was measured, for as long as both compute, and by nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from placement.simulator.cluster import SetupError, SharedHost, SimCluster
from placement.workload.requests import from_rows
from tests.placement.simulator.test_simulate import Plain, cluster, play, requests, workers

pytestmark = pytest.mark.unit

PAIR = ("prefill-0", "decode-0")


def pair(latency: Plain | None = None, *rows: tuple[int, float, float]) -> SimCluster:
    hosts = (SharedHost(workers=PAIR, by_batch=rows),) if rows else ()
    return cluster(workers("prefill", latency=latency), workers("decode", latency=latency), hosts=hosts, message_s=0.0)


def test_a_host_on_which_nothing_slows_changes_nothing() -> None:
    workload = requests()
    _, alone = play(pair(), workload)
    _, shared = play(pair(None, (1, 1.0, 1.0), (8, 1.0, 1.0)), workload)
    np.testing.assert_array_equal(alone.finish_s, shared.finish_s)


def test_a_prefill_step_is_slower_for_as_long_as_somebody_decodes() -> None:
    """The first request decodes from 0.02 s on for a long time; the second one's prompt takes 3 times 0.02 s."""
    workload = from_rows([[0.0, 100, 100], [0.5, 100, 1]])
    _, outcome = play(pair(None, (1, 3.0, 1.0)), workload)
    assert outcome.ttft_s[0] == pytest.approx(0.02)
    assert outcome.ttft_s[1] == pytest.approx(0.06)


def test_a_prefill_step_goes_on_as_alone_when_decode_has_ended() -> None:
    """Decode ends 0.1 s after the second prompt began: a third of that counted, and what was left is as alone."""
    first = from_rows([[0.0, 100, 100]])
    _, alone = play(pair(), first)
    begin_s = float(alone.finish_s[0]) - 0.1
    _, outcome = play(pair(None, (1, 3.0, 1.0)), from_rows([[0.0, 100, 100], [begin_s, 1000, 1]]))
    long_s = Plain().prefill_s([(256, 0)])
    steps_s = [long_s, long_s, long_s, Plain().prefill_s([(232, 0)])]
    assert outcome.ttft_s[1] == pytest.approx(sum(steps_s) + 0.1 * 2 / 3)


def test_a_decode_step_is_slower_for_as_long_as_somebody_computes_a_prompt() -> None:
    """A prompt of 100 tokens computes for 0.02 s. In that time decode does half of what it would."""
    one = from_rows([[0.0, 100, 200]])
    both = from_rows([[0.0, 100, 200], [0.333, 100, 1]])
    _, alone = play(pair(), one)
    _, outcome = play(pair(None, (1, 1.0, 2.0)), both)
    assert outcome.finish_s[0] - alone.finish_s[0] == pytest.approx(0.01)


def test_factors_lie_between_the_measured_batches_and_are_level_beyond() -> None:
    rows = [[0.0, 10, 400]] * 3 + [[1.0, 100, 1]]
    _, outcome = play(pair(None, (2, 2.0, 1.0), (4, 4.0, 1.0)), from_rows(rows))
    assert outcome.ttft_s[3] == pytest.approx(3 * 0.02)
    _, outcome = play(pair(None, (1, 2.0, 1.0), (2, 2.5, 1.0)), from_rows(rows))
    assert outcome.ttft_s[3] == pytest.approx(2.5 * 0.02)


def test_two_prefill_workers_slow_decode_by_their_share() -> None:
    groups = (workers("prefill", 2), workers("decode"))
    host = SharedHost(workers=("prefill-0", "prefill-1", "decode-0"), by_batch=((1, 1.0, 2.0),))
    one = from_rows([[0.0, 100, 200]])
    both = from_rows([[0.0, 100, 200], [0.333, 100, 1]])
    _, alone = play(cluster(*groups, message_s=0.0), one)
    _, outcome = play(cluster(*groups, message_s=0.0, hosts=(host,)), both)
    assert outcome.finish_s[0] - alone.finish_s[0] == pytest.approx(0.02 * (1 - 1 / 1.5))


def test_whole_runs_and_single_steps_agree() -> None:
    rows = ((1, 1.2, 1.1), (8, 1.6, 1.3))
    workload = requests(300, 10.0)
    _, runs = play(pair(None, *rows), workload)
    _, steps = play(pair(Plain(single_steps=True), *rows), workload)
    np.testing.assert_allclose(runs.finish_s, steps.finish_s, rtol=1e-9)
    assert runs.busy_s["decode"] == pytest.approx(steps.busy_s["decode"])
    assert runs.busy_s["prefill"] == pytest.approx(steps.busy_s["prefill"])


def test_the_same_workload_gives_the_same_outcome() -> None:
    setup, workload = pair(None, (1, 1.2, 1.1), (8, 1.6, 1.3)), requests(100)
    np.testing.assert_array_equal(play(setup, workload)[1].finish_s, play(setup, workload)[1].finish_s)


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        ((("prefill-0", "decode-7"),), "names decode-7"),
        ((PAIR, ("decode-0",)), "two shared hosts"),
    ],
)
def test_a_host_that_cannot_be_is_named(hosts: tuple[tuple[str, ...], ...], says: str) -> None:
    shared = tuple(SharedHost(workers=names, by_batch=((1, 1.1, 1.1),)) for names in hosts)
    with pytest.raises(SetupError, match=says):
        cluster(workers("prefill"), workers("decode"), hosts=shared)


@pytest.mark.parametrize("rows", [(), ((4, 1.0, 1.0), (2, 1.0, 1.0)), ((1, 0.0, 1.0),)])
def test_factors_that_cannot_be_are_named(rows: tuple[tuple[int, float, float], ...]) -> None:
    with pytest.raises(SetupError, match="by_batch"):
        SharedHost(workers=PAIR, by_batch=rows)

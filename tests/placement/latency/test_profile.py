"""A profile is read back as it was written, says what is wrong with it, and answers by what was measured."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from decode_worker.options import DecodeOptions
from mixed_worker.options import MixedOptions
from placement.build.from_profile import sim_cluster
from placement.catalogs.base import Degrees, PlanError
from placement.catalogs.profile import ProfileCatalog
from placement.latency.base import decode_run_s
from placement.latency.profile import (
    DecodePoint,
    Fault,
    MixedPoint,
    PoolFacts,
    PrefillPoint,
    Profile,
    ProfileError,
    SlowdownPoint,
    TransferPoint,
)
from placement.latency.profile_file import profile_from, profile_object, read_profile, write_profile
from placement.latency.profile_latency import ProfileLatency
from placement.latency.under_load import LoadRun, PhaseUnderLoad, UnderLoad
from placement.simulator.simulate import simulate
from placement.workload.requests import from_rows
from prefill_worker.options import PrefillOptions

pytestmark = pytest.mark.unit


def prefill_s(length: int, start: int) -> float:
    """10 ms, 0.1 ms a token, 0.2 us a pair of tokens."""
    return 0.01 + 1e-4 * length + 2e-7 * length * (start + (length + 1) / 2)


def profile(**changed: Any) -> Profile:
    """Round figures, on a grid that none of the questions below lies on."""
    chunks = [(n, start) for n in (1, 100, 400) for start in (0, 600)]
    values: dict[str, Any] = {
        "model": {"name": "a-model"},
        "machine": {"cpu": "a-cpu"},
        "date": "2026-11-23T10:00:00+00:00",
        "commit": "abc",
        "page_size": 16,
        "prefill_pool": PoolFacts(
            count=1, num_pages=200, options={"max_batch_tokens": 400, "pack_tokens": 100, "prefix_cache": False}
        ),
        "decode_pool": PoolFacts(count=1, num_pages=300, options={"max_batch_size": 32, "admission": "worst_case"}),
        "prefill": tuple(PrefillPoint(chunks=(chunk,), seconds=prefill_s(*chunk), repeats=3) for chunk in chunks),
        "decode": tuple(
            DecodePoint(batch_size=b, context_tokens=b * m, seconds=0.01 + 1e-3 * b + 1e-6 * b * m)
            for b in (1, 8, 32)
            for m in (50, 900)
        ),
        "transfer": (
            TransferPoint(tokens=100, bytes=1000, seconds=0.002, exposed_s=0.001),
            TransferPoint(tokens=300, bytes=3000, seconds=0.004, exposed_s=0.001),
        ),
        "router": {"max_queued_requests": 7},
        "error": Fault(prefill=0.02, decode=0.05, transfer=0.1),
        "name": "p.json",
    }
    return Profile(**values | changed)


# The latency model


@pytest.mark.parametrize("chunk", [(1, 0), (37, 200), (100, 600), (250, 0), (400, 300), (800, 0)])
def test_a_prefill_step_between_and_beyond_the_measured_ones(chunk: tuple[int, int]) -> None:
    """Exact where the truth is a line in each axis; between two sums of tokens the pairs grow a little faster."""
    assert ProfileLatency(profile()).prefill_s([chunk]) == pytest.approx(prefill_s(*chunk), rel=0.06)


def test_a_measured_step_is_answered_as_it_was_measured() -> None:
    made = profile()
    latency = ProfileLatency(made)
    for point in made.prefill:
        assert latency.prefill_s(point.chunks) == pytest.approx(point.seconds)
    for decode in made.decode:
        assert latency.decode_line(decode.batch_size, decode.context_tokens).step_s == pytest.approx(decode.seconds)


def test_chunks_of_one_step_count_by_their_sum_and_what_they_attend_to() -> None:
    latency = ProfileLatency(profile())
    together = latency.prefill_s([(50, 0), (50, 0)])
    assert together < latency.prefill_s([(100, 0)])  # each attends to less
    assert together == pytest.approx(0.01 + 1e-4 * 100 + 2e-7 * 100 * 25.5)


def test_each_prompt_beyond_the_first_costs_what_was_measured() -> None:
    four = PrefillPoint(chunks=((25, 0),) * 4, seconds=0.01 + 1e-4 * 100 + 2e-7 * 100 * 13 + 3 * 0.002)
    latency = ProfileLatency(profile(prefill=(*profile().prefill, four)))
    assert latency.prefill_s(four.chunks) == pytest.approx(four.seconds)
    assert latency.prefill_s([(100, 0)]) == pytest.approx(prefill_s(100, 0))


def test_what_lies_between_two_steps_belongs_to_a_step() -> None:
    longer = ProfileLatency(profile(prefill_overhead_s=0.003)).prefill_s([(100, 0)])
    assert longer == pytest.approx(prefill_s(100, 0) + 0.003)


@pytest.mark.parametrize(("batch", "mean"), [(1, 500), (4, 50), (20, 700), (32, 2000), (64, 100)])
def test_a_decode_step_is_affine_in_the_context(batch: int, mean: int) -> None:
    context = batch * mean
    line = ProfileLatency(profile()).decode_line(batch, context)
    assert line.step_s == pytest.approx(0.01 + 1e-3 * batch + 1e-6 * context, rel=0.02)
    later = ProfileLatency(profile()).decode_line(batch, context + 10 * batch)
    assert decode_run_s(line, batch, 11) - decode_run_s(line, batch, 10) == pytest.approx(later.step_s)


def test_times_never_fall_with_the_context_however_noisy_the_points() -> None:
    falling = tuple(
        replace(point, seconds=0.02 - 1e-6 * point.context_tokens / point.batch_size) for point in profile().decode
    )
    assert ProfileLatency(profile(decode=falling)).decode_line(8, 800).per_token_s == 0.0


def test_points_held_out_change_no_answer() -> None:
    wild = PrefillPoint(chunks=((200, 0),), seconds=9.0, held_out=True)
    with_it = ProfileLatency(profile(prefill=(*profile().prefill, wild)))
    assert with_it.prefill_s([(200, 0)]) == ProfileLatency(profile()).prefill_s([(200, 0)])


def test_a_length_seen_with_one_context_only_has_the_slope_of_the_others() -> None:
    fewer = tuple(point for point in profile().prefill if point.chunks != ((100, 600),))
    assert ProfileLatency(profile(prefill=fewer)).prefill_s([(100, 600)]) == pytest.approx(
        prefill_s(100, 600), rel=0.05
    )


def test_a_transfer_is_a_line_and_takes_no_time_for_nothing() -> None:
    latency = ProfileLatency(profile())
    assert [latency.transfer_s(n) for n in (0, 200, 500)] == pytest.approx([0.0, 0.003, 0.006])


def test_a_mixed_step_takes_what_both_take_less_the_step_they_share() -> None:
    latency = ProfileLatency(profile())
    decode = latency.decode_line(8, 400).step_s
    assert latency.mixed_s([], 8, 400) == decode
    assert latency.mixed_s([(100, 0)], 0, 0) == latency.prefill_s([(100, 0)])
    assert latency.mixed_s([(100, 0)], 8, 400) == pytest.approx(
        decode + latency.prefill_s([(100, 0)]) - latency.prefill_s([(1, 0)])
    )


def mixed_profile(share: float, **changed: Any) -> Profile:
    """Of one mixed worker, in whose steps of both a prompt takes that share of what it takes alone."""
    limits = {"max_batch_tokens": 400, "pack_tokens": 100, "max_batch_size": 32, "chunk_tokens": 64}
    pool, latency = PoolFacts(count=1, num_pages=250, options=limits), ProfileLatency(profile(), share)
    points = tuple(
        MixedPoint(
            chunks=((length, 0),),
            batch_size=batch,
            context_tokens=50 * batch,
            seconds=latency.mixed_s([(length, 0)], batch, 50 * batch),
        )
        for length in (16, 64)
        for batch in (1, 8)
    )
    given: dict[str, Any] = {"prefill_pool": pool, "decode_pool": pool, "transfer": (), "mixed": points}
    return profile(**given | changed)


def test_a_mixed_step_takes_the_share_that_was_measured() -> None:
    latency = ProfileLatency(mixed_profile(0.7))
    assert latency.prompt_share == pytest.approx(0.7)
    assert latency.mixed_s([(40, 0)], 4, 200) == pytest.approx(
        ProfileLatency(profile(), 0.7).mixed_s([(40, 0)], 4, 200)
    )
    wild = replace(mixed_profile(0.7).mixed[0], seconds=9.0, held_out=True)
    held = ProfileLatency(mixed_profile(0.7, mixed=(*mixed_profile(0.7).mixed, wild)))
    assert held.prompt_share == pytest.approx(0.7)


# The file


@pytest.mark.parametrize("made", [profile(), mixed_profile(0.7)], ids=["pair", "mixed"])
def test_a_profile_comes_back_as_it_was_written(tmp_path: Path, made: Profile) -> None:
    made = replace(
        made, slowdown=(SlowdownPoint(batch_size=4, prefill=1.2, decode=1.1),), notes={"load": 0.1}, threads=2
    )
    write_profile(made, tmp_path / "p.json")
    assert read_profile(tmp_path / "p.json") == made


def test_what_a_load_showed_comes_back_and_is_in_the_times() -> None:
    phase = PhaseUnderLoad(alone=1.2, beside=1.5, more_s=0.004, bias=0.01, swing=0.03, noise=0.2)
    run = LoadRun(
        at_s=1.0,
        rate=2.0,
        tokens_per_s=60.0,
        busy=0.5,
        requests=30,
        prefill=1.1,
        decode=0.9,
        prefill_noise=(0.9, 1.1),
        decode_noise=(0.8, 1.2),
        client_s=(0.001, 0.002),
        client_rest_s=(0.0, -0.001),
    )
    load = UnderLoad(prefill=phase, decode=replace(phase, alone=1.1), gap_s=0.002, handoff_s=0.003, runs=(run,))
    slowdown = (SlowdownPoint(batch_size=4, prefill=1.2, decode=1.1),)
    made = profile(load=load, slowdown=slowdown)
    written = json.loads(json.dumps(profile_object(made)))
    assert profile_from(written) == replace(made, name="profile")
    for name in ("prefill", "decode"):
        del written["load"][name]["more_s"]  # a file of before
    earlier = profile_from(written).load
    del written["load"]["runs"][0]["client_rest_s"][1]
    with pytest.raises(ProfileError, match="2 in client_s and 1 in client_rest_s, which belong together"):
        profile_from(written)
    assert earlier is not None
    assert earlier.prefill == replace(phase, more_s=0.0)
    loaded, bare = ProfileLatency(made), ProfileLatency(replace(made, load=None))
    assert loaded.prefill_s([(100, 0)]) == pytest.approx(1.2 * bare.prefill_s([(100, 0)]) + 0.004 + 0.002)
    assert loaded.decode_line(8, 400).step_s == pytest.approx(1.1 * bare.decode_line(8, 400).step_s + 0.004)
    assert loaded.decode_line(8, 400).per_token_s == pytest.approx(1.1 * bare.decode_line(8, 400).per_token_s)
    assert made.by_batch[0] == pytest.approx((1, 1.25, 1.5 / 1.1))
    assert sim_cluster(made).handoff_s == 0.003
    prefill, decode = made.wrong_by
    assert prefill == decode == pytest.approx(np.expm1(1.645 * np.hypot(0.01, 0.03)), rel=1e-3)
    assert replace(made, load=None).wrong_by == (0.02, 0.05)  # its tables'
    assert replace(made, slowdown=()).by_batch == ()  # no host is shared


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"gap_s": -1}, "load.gap_s is -1"),
        ({"prefill": {"alone": 0}}, "load.prefill.alone is 0"),
        ({"runs": [{"at_s": 0.0}]}, r"load.runs\[0\].prefill_noise is missing"),
        ({"runs": None}, "load.runs is None; give a list"),
    ],
)
def test_a_load_that_is_not_one_is_told_by_its_key(change: dict[str, Any], says: str) -> None:
    phase: dict[str, Any] = {"alone": 1.0, "beside": 1.0, "bias": 0.0, "swing": 0.0, "noise": 0.0}
    good: dict[str, Any] = {"prefill": phase, "decode": phase, "gap_s": 0.0, "handoff_s": 0.0, "runs": []}
    with pytest.raises(ProfileError, match=says):
        profile_from(json.loads(json.dumps(profile_object(profile()) | {"load": good | change})))


def test_a_profile_of_before_there_were_threads_and_mixed_steps_is_read() -> None:
    data = profile_object(profile())
    del data["threads"], data["mixed"]
    assert profile_from(json.loads(json.dumps(data))) == replace(profile(), name="profile")


Change = Callable[[dict[str, Any]], object]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(format="x"), "format is not kvrelay-profile"),
        (lambda d: d.update(version=2), "version is 2, this kvrelay reads 1"),
        (lambda d: d.pop("decode"), "decode is missing"),
        (lambda d: d.update(prefill=[]), "prefill has no points"),
        (lambda d: d["prefill"][1].update(seconds="soon"), r"prefill\[1\].seconds is 'soon'; give a number"),
        (lambda d: d["prefill"][0].update(seconds=0), r"prefill\[0\].seconds is 0"),
        (lambda d: d["prefill"][0].update(seconds=10**400), r"prefill\[0\].seconds is 1000"),
        (lambda d: d["prefill"][0].update(chunks=[[math.inf, 0]]), r"prefill\[0\].chunks is \[\[inf, 0\]\]"),
        (lambda d: d["decode"][0].update(repeats="often"), r"decode\[0\].repeats is 'often'; give a whole number"),
        (lambda d: d["prefill"][0].update(chunks=[[0, 1]]), r"prefill\[0\].chunks is \[\[0, 1\]\]"),
        (lambda d: d["decode"][2].update(batch_size=0), r"decode\[2\].batch_size is 0; give a whole number"),
        (lambda d: d["decode_pool"].update(num_pages=1.5), "decode_pool.num_pages is 1.5"),
        (lambda d: d["error"].update(decode=float("nan")), "error.decode is nan"),
        (lambda d: d.update(page_size=True), "page_size is True"),
        (lambda d: d.update(threads=-1), "threads is -1"),
        (lambda d: d.update(mixed=[{"chunks": [[8, 0]], "seconds": 1}]), r"mixed\[0\].batch_size is missing"),
        (lambda d: d.update(slowdown=[{"batch_size": 1, "prefill": 0, "decode": 1}]), r"slowdown\[0\].prefill is 0"),
    ],
)
def test_what_is_wrong_with_a_profile_is_said_with_its_key(change: Change, says: str) -> None:
    data = json.loads(json.dumps(profile_object(profile())))
    change(data)
    with pytest.raises(ProfileError, match=says):
        profile_from(data)


@pytest.mark.parametrize(("text", "says"), [("{", "is not JSON"), ("[]", "format is not")])
def test_a_file_that_is_no_profile_is_named(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ProfileError, match=rf"broken.json:? ?.*{says}"):
        read_profile(path)
    with pytest.raises(ProfileError, match=r"nowhere.json cannot be read"):
        read_profile(tmp_path / "nowhere.json")


# The catalogue, and the cluster that is simulated


def test_the_catalogue_offers_the_degrees_that_were_measured_and_says_why_no_other() -> None:
    catalog = ProfileCatalog(profile())
    assert list(catalog.degrees(8)) == [Degrees(1, 1)]
    offer = catalog.offer(Degrees(1, 1))
    assert not isinstance(offer, str)
    assert (offer.num_pages, offer.page_size, offer.max_batch_tokens, offer.max_batch_size) == (200, 16, 400, 32)
    assert (offer.error, offer.pack_tokens) == (0.05, 100)
    assert "TP 2 was not measured, only TP 1" in str(catalog.offer(Degrees(2, 1)))


def two_cores() -> tuple[Profile, Profile]:
    """One thread each for a pair, and a mixed worker of two."""
    machine = {"cpu": "a-cpu", "cores": 2}
    slowdown = (SlowdownPoint(batch_size=4, prefill=1.2, decode=1.1),)
    pair = profile(threads=1, machine=machine, slowdown=slowdown, handoff_s=0.003, name="pair.json")
    return pair, mixed_profile(0.7, threads=2, machine=machine, name="both.json")


def test_profiles_of_workers_that_differ_in_threads_are_one_catalogue() -> None:
    catalog = ProfileCatalog(*reversed(two_cores()))
    one, two = Degrees(threads=1), Degrees(threads=2)
    assert list(catalog.degrees(2)) == [one, two]
    assert list(catalog.degrees(1)) == [one]
    assert (catalog.gpus_per_node, [degrees.gpus for degrees in (one, two)]) == (2, [1, 2])
    offers = [catalog.offer(degrees) for degrees in (one, two)]
    assert not any(isinstance(offer, str) for offer in offers)
    assert "4 threads was not measured, only 2 threads and 1 thread" in str(catalog.offer(Degrees(threads=4)))


def test_what_one_worker_could_not_measure_it_has_from_the_other() -> None:
    """A lone mixed worker: handoffs, and what sharing a host costs. A pair: what a chunk takes beside answers."""
    pair, both = two_cores()
    catalog = ProfileCatalog(pair, both)
    two, one = (catalog.offer(Degrees(threads=threads)) for threads in (2, 1))
    assert not isinstance(one, str)
    assert not isinstance(two, str)
    assert (two.handoff_s, two.slowdown) == (0.003, ((4, 1.2, 1.1),))
    assert two.latency.transfer_s(200) == ProfileLatency(pair).transfer_s(200)
    chunks = [(40, 0)]
    assert one.latency.mixed_s(chunks, 4, 200) == pytest.approx(ProfileLatency(pair, 0.7).mixed_s(chunks, 4, 200))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"threads": 0}, "^both.json does not say its workers' threads; measure again"),
        ({"threads": 1}, "^pair.json and both.json are both of 1 thread; give one of them"),
        ({"page_size": 32}, "^page_size is 32 in both.json and 16 in pair.json; give profiles of one model"),
        ({"model": {"name": "b-model"}}, "^model.name is b-model in both.json and a-model in pair.json"),
        ({"machine": {"cpu": "b-cpu"}}, "^machine.cpu is b-cpu in both.json and a-cpu in pair.json"),
    ],
)
def test_profiles_that_do_not_go_together_are_told(change: dict[str, Any], says: str) -> None:
    pair, both = two_cores()
    with pytest.raises(PlanError, match=says):
        ProfileCatalog(pair, replace(both, **change))


def test_a_mixed_worker_alone_is_no_catalogue() -> None:
    with pytest.raises(PlanError, match=r"^both.json is of a mixed worker, which hands nothing over; give one of a"):
        ProfileCatalog(two_cores()[1])


def test_the_measured_cluster_is_simulated_with_the_limits_that_it_keeps() -> None:
    cluster = sim_cluster(profile(slowdown=(SlowdownPoint(batch_size=4, prefill=1.2, decode=1.1),)), num_decode=2)
    prefill, decode, other = cluster.workers
    assert isinstance(prefill.policy, PrefillOptions)
    assert isinstance(decode.policy, DecodeOptions)
    assert (prefill.policy.max_batch_tokens, prefill.policy.pack_tokens, prefill.prefix_cache) == (400, 100, False)
    assert (decode.policy.max_batch_size, decode.policy.admission, decode.num_pages) == (32, "worst_case", 300)
    assert other.name == "decode-1"
    assert cluster.router.max_queued_requests == 7
    assert [host.workers for host in cluster.hosts] == [("prefill-0", "decode-0"), ("decode-1",)]
    assert cluster.hosts[0].by_batch == ((4, 1.2, 1.1),)
    assert not sim_cluster(profile()).hosts


def test_the_measured_mixed_worker_is_simulated_as_one() -> None:
    made = mixed_profile(0.7, message_s=0.0)
    cluster = sim_cluster(made)
    (worker,) = cluster.workers
    assert isinstance(worker.policy, MixedOptions)
    assert (worker.name, worker.role, worker.num_pages, worker.policy.chunk_tokens) == ("mixed-0", "mixed", 250, 64)
    outcome = simulate(cluster, from_rows([[0.0, 100, 11]]))
    assert outcome.ttft_s[0] == pytest.approx(prefill_s(100, 0))


def test_a_lone_request_takes_in_the_simulator_what_was_measured() -> None:
    cluster = sim_cluster(profile(message_s=0.0))
    outcome = simulate(cluster, from_rows([[0.0, 100, 11]]))
    assert outcome.ttft_s[0] == pytest.approx(prefill_s(100, 0))
    first = ProfileLatency(profile()).decode_line(1, 101)
    assert outcome.phases["decode"][0] == pytest.approx(decode_run_s(first, 1, 10))

"""What is said of a cluster whose status and measured times are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from cluster.spec.assumed import Assumed
from kvrelay.bench.metrics import Outcome
from kvrelay.calibrate.probes import Prober
from kvrelay.client.types import ClusterStatus, PairTrouble, Timeline, Usage, WorkerState
from kvrelay.doctor.finding import Finding
from kvrelay.doctor.live.cluster import cluster, missing
from kvrelay.doctor.live.judging import Terms, judged
from kvrelay.doctor.live.probing import Pair, PairSample, pairs_of, probe, prompt_tokens
from tests.served import served_model

pytestmark = pytest.mark.unit

TOKENS = 512
MODEL = served_model(vocab_size=9, max_model_len=4096)


def worker(name: str, **changes: Any) -> WorkerState:
    told: dict[str, Any] = dict.fromkeys(("num_waiting", "num_running", "waiting_tokens", "cached_pages"), 0)
    told |= {"leased_pages": 0, "losses": 0, "available_pages": 100, "total_pages": 1000, "page_size": 16}
    told |= {"name": name, "role": name.split("-")[0], "address": "10.0.0.1:1", "state": "ready", "reason": ""}
    return WorkerState(**told | {"report_age_s": 0.1, "circuit": "closed", "round_trip_s": 1e-3} | changes)


def status(*workers: WorkerState, **changes: Any) -> ClusterStatus:
    told: dict[str, Any] = {"router_id": "router-0", "model": "m", "uptime_s": 9.0, "num_queued": 0, "num_in_flight": 0}
    return ClusterStatus(**told | {"workers": workers} | changes)


def verdicts(findings: Any) -> dict[str, str]:
    found: list[Finding] = list(findings)
    assert all(finding.mend for finding in found if finding.verdict in ("bad", "doubtful")), "each has a mend"
    return {finding.name: finding.verdict for finding in found}


# what the router knows


def test_a_cluster_that_is_well() -> None:
    found = verdicts(cluster(status(worker("prefill-0"), worker("decode-0"))))
    assert found == dict.fromkeys(("router-0", "prefill-0", "decode-0", "clocks"), "good")


def test_clocks_are_as_far_apart_as_the_two_that_are_farthest() -> None:
    either_side = worker("prefill-0", clock_ahead_s=0.3), worker("decode-0", clock_ahead_s=-0.4)
    [clocks] = [each for each in cluster(status(*either_side)) if each.name == "clocks"]
    assert clocks.found.startswith("within 700.0 ms of each other")
    behind = worker("prefill-0", clock_ahead_s=-0.3), worker("decode-0", clock_ahead_s=-0.4)
    [clocks] = [each for each in cluster(status(*behind)) if each.name == "clocks"]
    assert clocks.found.startswith("within 400.0 ms of each other"), "the router's is one of them"


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"state": "lost", "reason": "it said nothing"}, "decode-0", "bad"),
        ({"state": "connecting"}, "decode-0", "bad"),
        ({"state": "draining"}, "decode-0", "doubtful"),
        ({"circuit": "open"}, "decode-0", "bad"),
        ({"pairs": (PairTrouble(peer="decode-1", failures=3, reason="no route", age_s=1.0),)}, "decode-0", "bad"),
        ({"losses": 2}, "decode-0", "doubtful"),
        ({"report_age_s": 9.0}, "decode-0", "doubtful"),
        ({"loop_lag_s": 2.0}, "decode-0", "doubtful"),
        ({"step_age_s": 60.0}, "decode-0", "doubtful"),
        ({"quarantined_pages": 4}, "decode-0", "doubtful"),
        ({"losses": 2, "circuit": "open"}, "decode-0", "bad"),
        ({"clock_ahead_s": -90.0}, "decode-0's clock", "doubtful"),
        ({"round_trip_s": 0.2}, "decode-0's way", "doubtful"),
    ],
)
def test_a_worker_that_is_not(changes: dict[str, Any], name: str, verdict: str) -> None:
    assert verdicts(cluster(status(worker("prefill-0"), worker("decode-0", **changes))))[name] == verdict


def test_a_phase_that_nobody_computes_and_workers_that_never_came() -> None:
    assert verdicts(cluster(status(worker("prefill-0"))))["decode"] == "bad"
    assert "decode" not in verdicts(cluster(status(worker("mixed-0"))))
    here = status(worker("prefill-0"), worker("decode-0"))
    assert verdicts(missing(here, {"prefill": 1, "decode": 3})) == {"decode": "doubtful"}


def test_a_router_that_is_late_or_busy_says_so() -> None:
    pair = worker("prefill-0"), worker("decode-0")
    assert verdicts(cluster(status(*pair, loop_lag_s=2.0)))["router-0"] == "doubtful"
    busy = next(iter(cluster(status(*pair, num_in_flight=3))))
    assert (busy.verdict, "figures include their load" in busy.found) == ("good", True)


# what is measured


def test_all_workers_come_before_any_comes_twice() -> None:
    names = ("prefill-0", "prefill-1", "decode-0", "decode-1", "decode-2")
    pairs = pairs_of([*map(worker, names), worker("decode-3", state="lost")])
    assert len(pairs) == len(set(pairs)) == 6
    assert {name for pair in pairs[:4] for name in pair} == set(names)


def test_a_probe_is_as_long_as_the_smallest_allows() -> None:
    workers = [worker("prefill-0", limits={"max_batch_tokens": "256"}), worker("decode-0")]
    assert prompt_tokens(MODEL, workers[1:], TOKENS) == TOKENS
    assert prompt_tokens(MODEL, workers, TOKENS) == 256
    assert prompt_tokens(replace(MODEL, max_model_len=100), workers, TOKENS) == 88
    assert prompt_tokens(MODEL, [worker("decode-0", total_pages=40)], TOKENS) == 160


async def test_steps_are_told_by_the_router_however_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does a probe have targets, which it would miss: an alert and `kvrelay replan` go by those."""
    timeline = Timeline(
        phases_s={"prefill": 0.1, "decode": 0.18},
        ttft_s=0.1,
        tpot_s=0.02,
        e2e_s=0.28,
        prefill_worker="prefill-0",
        decode_worker="decode-0",
        attempts=1,
    )

    async def play(client: Any, plan: Any, **terms: Any) -> tuple[list[Outcome], float]:
        assert (plan[0].request.slo_ttft_ms, plan[0].request.slo_tpot_ms) == (0, 0)
        at_once = [0.1, *[0.28] * 9]
        outcome = Outcome(index=0, due_s=0, input_len=9, token_times_s=at_once, output_len=10)
        outcome.usage, outcome.timeline = Usage(prompt_tokens=9, completion_tokens=10, cached_tokens=0), timeline
        return [outcome], 0.28

    monkeypatch.setattr("kvrelay.calibrate.probes.play", play)
    prober = Prober(None, MODEL, seed=0)  # type: ignore[arg-type]
    samples = await probe(prober, [("prefill-0", "decode-0")], tokens=9, at_most_s=9)
    assert [each.decode_s for each in samples] == pytest.approx([0.02] * len(samples))


PAIRS: list[Pair] = [("prefill-0", f"decode-{i}") for i in range(3)]
WORKERS = {name: worker(name) for name in ("prefill-0", "decode-0", "decode-1", "decode-2")}
PLANNED = Assumed(prompt_tokens=TOKENS, prefill_s=0.1, decode_s=0.02, transfer_s=0.01)


def sample(pair: Pair, **changes: Any) -> PairSample:
    told: dict[str, Any] = {"prefill_s": 0.1, "decode_s": 0.02, "transport": "tcp", "bytes": 10_000_000}
    return PairSample(pair=pair, **told | {"transfer_s": 0.01, "exposed_s": 0.001} | changes)


def of(samples: list[PairSample], assumed: Mapping[str, Assumed] | None = None, **terms: Any) -> dict[str, str]:
    assumed = {"prefill": PLANNED, "decode": PLANNED} if assumed is None else assumed
    return verdicts(judged(samples, PAIRS, WORKERS, Terms(assumed=assumed, tokens=TOKENS, **terms)))


def with_changed(**changes: Any) -> list[PairSample]:
    """All as planned, but the last pair."""
    return [sample(PAIRS[0]), sample(PAIRS[1]), sample(PAIRS[2], **changes)]


def test_what_is_as_planned_is_good() -> None:
    names = ("prefill-0", "decode-0", "decode-1", "decode-2", *map(" to ".join, PAIRS))
    assert of(with_changed()) == dict.fromkeys(names, "good")


@pytest.mark.parametrize(
    ("changes", "name", "verdict"),
    [
        ({"decode_s": 0.03}, "decode-2", "doubtful"),
        ({"decode_s": 0.06}, "decode-2", "bad"),
        ({"transfer_s": 0.025}, "prefill-0 to decode-2", "doubtful"),
        ({"transfer_s": 0.09}, "prefill-0 to decode-2", "bad"),
        ({"resends": 1}, "prefill-0 to decode-2", "doubtful"),
        ({"error": "no route"}, "prefill-0 to decode-2", "bad"),
        ({"error": "no pages", "has_no_room": True}, "prefill-0 to decode-2", "unknown"),
    ],
)
def test_what_is_slower_than_planned_is_named(changes: dict[str, Any], name: str, verdict: str) -> None:
    found = of(with_changed(**changes))
    assert {each: v for each, v in found.items() if v != "good"} == {name: verdict}


def test_a_prefill_step_is_held_against_the_plan() -> None:
    slow = [sample(pair, prefill_s=0.25) for pair in PAIRS]
    assert of(slow)["prefill-0"] == "bad"
    assert of(slow, is_busy=True)["prefill-0"] == "doubtful"  # of others' requests, perhaps


def test_a_plan_that_knew_its_error_is_held_to_no_less() -> None:
    unsure = {"decode": PLANNED.model_copy(update={"error": 0.5})}
    assert of(with_changed(decode_s=0.029), unsure)["decode-2"] == "good"


def test_without_a_plan_only_an_outlier_is_doubtful() -> None:
    found = of(with_changed(decode_s=0.2, transfer_s=0.2), {})
    assert found["decode-2"] == found["prefill-0 to decode-2"] == "doubtful"
    assert found["decode-0"] == found["prefill-0 to decode-0"] == "good"
    assert found["prefill-0"] == "unknown"  # there is no other


def test_what_is_said_of_other_prompts_does_not_count() -> None:
    other = {"prefill": PLANNED.model_copy(update={"prompt_tokens": 64})}
    assert of(with_changed(), other)["prefill-0"] == "unknown"


def test_a_plan_of_pools_goes_before_one_of_roles() -> None:
    fast = PLANNED.model_copy(update={"decode_s": 0.001})
    assert of(with_changed(), {"decode": fast})["decode-0"] == "bad"
    named = {"decode-fast-0": worker("decode-fast-0", role="decode")}
    terms = Terms(assumed={"decode": PLANNED, "decode-fast": fast}, tokens=TOKENS)
    found = judged([sample(("prefill-0", "decode-fast-0"))], [], WORKERS | named, terms)
    assert verdicts(found)["decode-fast-0"] == "bad"


def test_pairs_that_there_was_no_time_for_are_not_judged() -> None:
    found = of([sample(PAIRS[0])])
    assert found["prefill-0 to decode-1"] == found["prefill-0 to decode-2"] == "unknown"


def test_a_worker_that_keeps_what_it_reads_has_no_link() -> None:
    own = ("mixed-0", "mixed-0")
    workers = {"mixed-0": worker("mixed-0")}
    assert verdicts(judged([sample(own, bytes=0)], [own], workers, Terms(assumed={}, tokens=TOKENS))) == {
        "mixed-0": "unknown"
    }

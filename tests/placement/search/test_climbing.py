"""A worker moves from one pool to the other as long as that is better, from the best of each degrees."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from placement.build.from_offers import mixed_of, pair_of
from placement.goodput.search import Knee
from placement.plan import Candidate, Goodput, Interval, Slo
from placement.search import clusters
from placement.search.clusters import SimulatedCluster
from placement.search.hybrids import shifted
from placement.search.placements import Placement
from placement.search.question import PlanQuestion
from tests.placement.toys import toy_offer

NUM_GPUS = 64


class ByGoodput:
    num_gpus = NUM_GPUS
    question = PlanQuestion(slo=Slo(), num_gpus=NUM_GPUS)

    @staticmethod
    def score(goodput: Goodput) -> tuple[float, float]:
        return goodput.goodput.value / NUM_GPUS, goodput.goodput.value


def simulated(placement: Placement) -> SimulatedCluster:
    """Each pool alone says what the whole is worth."""
    prefill, decode = placement.candidate.pools
    a_gpu = 3.5 if prefill.degrees.gpus == 2 else 2.5
    worth = min(prefill.replicas * prefill.degrees.gpus * a_gpu, decode.replicas * 17.0)
    interval = Interval(worth, worth, worth)
    goodput = Goodput(candidate=placement.candidate, goodput=interval, curve=(), usd_per_hour=0.0, watts=0.0)
    return SimulatedCluster(
        placement=placement, knee=Knee(goodput=interval, estimates=(), num_simulated=0, cpu_s=0.0), goodput=goodput
    )


def placement(prefill: tuple[int, int], decode: tuple[int, int]) -> Placement:
    """GPUs of a worker and how many, of both."""
    (reader, readers), (writer, writers) = prefill, decode
    candidate = pair_of((toy_offer(reader), readers), (toy_offer(writer), writers), "toy")
    return Placement(candidate=candidate, promised=1.0, gpus_per_node=8)


def test_smaller_workers_find_a_proportion_that_the_best_cannot_have(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked_at(search: Any, placements: Sequence[Placement], what: str) -> list[SimulatedCluster]:
        return [simulated(each) for each in placements]

    def with_more_decode(cluster: SimulatedCluster) -> list[Candidate]:
        candidate = shifted(cluster.placement.candidate, 1, NUM_GPUS)
        return [] if candidate is None else [candidate]

    monkeypatch.setattr(clusters, "_looked_at", looked_at)
    coarse, fine = simulated(placement((8, 4), (8, 4))), simulated(placement((2, 15), (8, 4)))
    coarse = replace(coarse, goodput=replace(coarse.goodput, goodput=Interval(68.5, 68.5, 68.5)))
    search: Any = ByGoodput()
    found = clusters._climbed(search, [coarse, fine], with_more_decode, "neighbours")
    best = max(found, key=lambda cluster: cluster.goodput.goodput.value)
    assert [pool.replicas for pool in best.placement.candidate.pools] == [12, 5]


def test_what_two_placements_become_alike_is_tried_once() -> None:
    offer = replace(toy_offer(), max_batch_tokens=2048)
    pair = simulated(replace(placement((1, 1), (1, 1)), candidate=pair_of((offer, 1), (offer, 1), "toy")))
    alone = replace(pair, placement=replace(pair.placement, candidate=mixed_of(offer, 2, "toy", 512)))
    search: Any = ByGoodput()
    labels = [each.candidate.label for each in clusters._hybrids(search, [pair, alone])]
    assert "1 x prefill TP 1 + 1 x mixed TP 1, chunks of 512" in labels
    assert len(labels) == len(set(labels)) == 4

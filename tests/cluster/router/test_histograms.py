"""Histogram says what prometheus_client's own would have said."""

from __future__ import annotations

import random

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client import Histogram as Theirs

from cluster.router.monitoring.histograms import Histogram
from cluster.router.monitoring.metrics import LATENCY_BUCKETS, TOKEN_BUCKETS

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("bounds", [LATENCY_BUCKETS, TOKEN_BUCKETS])
def test_it_says_what_prometheus_clients_says(bounds: tuple[float, ...]) -> None:
    rng = random.Random(1)
    ours = Histogram("Text.", bounds)
    theirs = Theirs("name", "Text.", ("model_name",), buckets=bounds, registry=CollectorRegistry()).labels("m")
    for _ in range(300):
        value, times = rng.choice([rng.expovariate(3), 0.0, *bounds, 1e9]), rng.randrange(1, 4)
        ours.observe(value, times)
        for _ in range(times):
            theirs.observe(value)
    wanted = {
        (suffix, labels.get("le")): value for suffix, labels, value, *_ in theirs._samples() if suffix != "_created"
    }
    said = {(s.name.removeprefix("name"), s.labels.get("le")): s.value for s in ours.family("name", "m").samples}
    assert said.keys() == wanted.keys()
    assert said == pytest.approx(wanted)

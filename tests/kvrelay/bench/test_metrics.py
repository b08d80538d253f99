"""The figures of a benchmark are what their names say."""

from __future__ import annotations

import io
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from kvrelay.bench import metrics
from kvrelay.bench.metrics import MetricsError, Outcome
from kvrelay.bench.report import tables
from kvrelay.client.types import Receipt, Timeline, Usage

pytestmark = pytest.mark.unit


def outcome(due_s: float, times_s: list[float], tokens: int | None = None, **others: object) -> Outcome:
    made = Outcome(index=0, due_s=due_s, input_len=10, token_times_s=times_s, ended_s=times_s[-1] if times_s else due_s)
    made.output_len = len(times_s) if tokens is None else tokens
    for name, value in others.items():
        setattr(made, name, value)
    return made


def receipt(**others: object) -> Receipt:
    values: dict[str, object] = {
        "transport": "loopback",
        "pages": 2,
        "bytes": 3_000_000,
        "checksums_ok": True,
        "cached_pages": 1,
        "recomputed_tokens": 0,
        "resends": 0,
        "transfer_s": 0.001,
        "exposed_s": 0.002,
    }
    return Receipt(**(values | others))  # type: ignore[arg-type]


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=50),
    st.floats(0, 100),
)
def test_percentiles_are_numpys(values: list[float], p: float) -> None:
    expected = float(np.percentile(values, p))
    assert metrics.percentile(sorted(values), p) == pytest.approx(expected, rel=1e-9, abs=1e-6)


def test_latencies_count_from_when_the_request_was_due() -> None:
    one = outcome(1.0, [1.5, 1.75, 2.0])
    assert (one.ttft_s, one.e2e_s, one.tpot_s, one.itls_s) == (0.5, 1.0, 0.25, [0.25, 0.25])


def test_tpot_counts_tokens_and_itl_counts_messages() -> None:
    one = outcome(0.0, [1.0, 2.0], tokens=5)
    assert (one.tpot_s, one.itls_s) == (0.25, [1.0])
    assert outcome(0.0, [1.0]).tpot_s == 0.0


def test_goodput_counts_what_meets_every_target() -> None:
    slos_s = metrics.parse_goodput(["ttft:500", "tpot:50"])
    outcomes = [
        outcome(0.0, [0.5, 0.53]),  # both, the first at its limit
        outcome(0.0, [0.6, 0.61]),  # TTFT too late
        outcome(0.0, [0.1, 0.3]),  # TPOT too slow
        outcome(0.0, [0.1]),  # a single token has no TPOT to miss
        outcome(0.0, [], code="UNAVAILABLE", message="gone"),
    ]
    found = metrics.summarise(outcomes, 4.0, slos_s, ["ttft"], [50])
    assert found["request_goodput"] == 2 / 4.0
    assert found["attainment"] == 2 / 5
    assert found["slos_ms"] == {"ttft": 500.0, "tpot": 50.0}
    assert (found["completed"], found["failed"]) == (4, 1)


def test_without_targets_there_is_no_goodput() -> None:
    assert "attainment" not in metrics.summarise([outcome(0.0, [1.0])], 1.0, {}, [], [])


def test_each_metric_has_mean_median_spread_and_percentiles() -> None:
    outcomes = [outcome(0.0, [0.1, 0.2]), outcome(0.0, [0.3, 0.6]), outcome(0.0, [0.2])]
    found = metrics.summarise(outcomes, 1.0, {}, ["ttft", "tpot", "itl", "e2el"], [50, 99.9])["latency_ms"]
    assert list(found["ttft"]) == ["mean", "median", "std", "p50", "p99.9"]
    assert found["ttft"]["mean"] == pytest.approx(200)
    assert found["ttft"]["median"] == pytest.approx(200)
    assert found["ttft"]["std"] == pytest.approx(np.std([100, 200, 300]))
    assert found["tpot"]["mean"] == pytest.approx(200)  # of the two that have one
    assert found["itl"]["p50"] == pytest.approx(200)
    assert found["e2el"]["mean"] == pytest.approx((200 + 600 + 200) / 3)


def test_rates_count_what_succeeded() -> None:
    usage = Usage(prompt_tokens=11, completion_tokens=2, cached_tokens=4)
    outcomes = [
        outcome(0.0, [0.1, 0.2], usage=usage),
        outcome(0.0, [0.1], usage=usage),
        outcome(0.0, [0.1], code="INTERNAL", message="x"),
    ]
    found = metrics.summarise(outcomes, 2.0, {}, [], [])
    assert (found["total_input_tokens"], found["total_output_tokens"], found["cached_input_tokens"]) == (22, 3, 8)
    assert (found["request_throughput"], found["output_throughput"], found["total_token_throughput"]) == (1, 1.5, 12.5)


def test_failures_are_counted_by_code_with_the_first_reason() -> None:
    outcomes = [
        outcome(0.0, [], code="INTERNAL", message="first"),
        outcome(0.0, [], code="UNAVAILABLE", message="gone"),
        outcome(0.0, [], code="INTERNAL", message="second"),
    ]
    found = metrics.summarise(outcomes, 1.0, {}, ["ttft"], [50])
    assert found["errors"] == {
        "INTERNAL": {"count": 2, "first": "first"},
        "UNAVAILABLE": {"count": 1, "first": "gone"},
    }
    assert found["latency_ms"]["ttft"] == {"mean": None, "median": None, "std": None, "p50": None}
    json.dumps(found, allow_nan=False)


def test_handoffs_add_up() -> None:
    outcomes = [
        outcome(0.0, [0.1], receipt=receipt()),
        outcome(0.0, [0.1], receipt=receipt(checksums_ok=False, resends=2, recomputed_tokens=7, exposed_s=0.004)),
        outcome(0.0, [0.1]),
        outcome(0.0, [], code="INTERNAL", receipt=receipt()),
    ]
    found = metrics.summarise(outcomes, 1.0, {}, [], [50])["handoff"]
    assert (found["receipts_good"], found["receipts_unchecked"], found["without_handoff"]) == (1, 1, 1)
    assert (found["pages"], found["cached_pages"], found["bytes"]) == (4, 2, 6_000_000)
    assert found["gb_per_s"] == pytest.approx(3.0)
    assert found["exposed_ms"]["mean"] == pytest.approx(3.0)
    assert (found["resends"], found["recomputed_tokens"]) == (2, 7)
    assert found["transports"] == {"loopback": 2}


def test_phases_and_the_rest_sum_to_the_whole() -> None:
    def timeline(prefill_s: float, decode_s: float) -> Timeline:
        return Timeline(
            phases_s={"prefill": prefill_s, "decode": decode_s},
            ttft_s=prefill_s,
            tpot_s=0.0,
            e2e_s=prefill_s + decode_s,
            prefill_worker="p",
            decode_worker="d",
            attempts=1,
        )

    outcomes = [
        outcome(0.0, [0.5, 1.0], timeline=timeline(0.4, 0.5)),
        outcome(1.0, [1.5, 3.0], timeline=timeline(0.2, 1.5)),
        outcome(0.0, [9.0]),  # brought none
    ]
    found = metrics.summarise(outcomes, 3.0, {}, [], [])["phases_ms"]
    assert found == pytest.approx({"prefill": 300.0, "decode": 1000.0, "outside": 200.0})
    assert sum(found.values()) == pytest.approx(1500.0)


def test_flags_are_read() -> None:
    assert metrics.parse_goodput(["ttft:500", "e2el:1.5"]) == {"ttft": 0.5, "e2el": 0.0015}
    assert metrics.parse_percentiles("50, 99.9,") == [50.0, 99.9]
    assert metrics.parse_metrics("ttft,itl") == ["ttft", "itl"]


@pytest.mark.parametrize("pair", ["ttft", "ttft:", "ttft:0", "ttft:-1", "ttft:fast", "ttft:inf", "itl:5", "latency:5"])
def test_targets_that_mean_nothing_are_refused(pair: str) -> None:
    with pytest.raises(MetricsError, match="give"):
        metrics.parse_goodput([pair])


@pytest.mark.parametrize("text", ["101", "-1", "x", "nan"])
def test_percentiles_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(MetricsError, match="0 to 100"):
        metrics.parse_percentiles(text)
    with pytest.raises(MetricsError, match="there are"):
        metrics.parse_metrics(text)


def test_no_values_have_no_percentile() -> None:
    assert math.isnan(metrics.percentile([], 50))


def test_a_server_without_handoffs_gets_no_table_of_them() -> None:
    served = Outcome(index=0, due_s=0.0, input_len=4, token_times_s=[0.5, 1.0], output_len=2)
    shown = metrics.summarise([served], 1.0, {}, ["ttft"], [50.0])
    assert [table.title for table in tables(shown)] == ["Serving benchmark", "Latency as the client saw it (ms)"]


def test_every_percentile_is_shown_on_80_columns() -> None:
    served = Outcome(index=0, due_s=0.0, input_len=4, token_times_s=[12.3456, 14.0], output_len=2)
    shown = metrics.summarise([served], 1.0, {}, ["ttft", "tpot"], [50.0, 90.0, 95.0, 99.0])
    console = Console(width=80, record=True, file=io.StringIO())
    for table in tables(shown):
        console.print(table)
    text = console.export_text()
    assert text.count("12345.60") == 5  # and the mean
    assert "P99" in text

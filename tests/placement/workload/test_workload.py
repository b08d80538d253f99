"""Workloads: any CSV, classes, traces with gaps, traffic on paired random numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from placement.goodput.targets import Targets
from placement.plan import RequestClass, Slo
from placement.workload.arrivals import gaps_of
from placement.workload.requests import Workload, from_rows, from_trace
from placement.workload.traces import WorkloadError
from placement.workload.traffic import Traffic, with_classes

pytestmark = pytest.mark.unit


def lognormal(count: int = 4000, correlation: float = 0.6) -> Workload:
    rng = np.random.default_rng(1)
    first, second = rng.standard_normal(count), rng.standard_normal(count)
    second = correlation * first + np.sqrt(1 - correlation**2) * second
    return Workload(
        arrival_s=np.cumsum(rng.exponential(0.5, count)),
        prompt_len=np.rint(np.exp(6 + 0.8 * first)).astype(np.int64) + 1,
        output_len=np.rint(np.exp(5 + 0.5 * second)).astype(np.int64) + 1,
        name="made",
    )


def test_poisson_arrivals_are_told_from_a_trace_with_silent_minutes() -> None:
    rng = np.random.default_rng(2)
    poisson = from_rows([[t, 1, 1] for t in np.cumsum(rng.exponential(0.5, 2000))])
    gaps = gaps_of(poisson)
    assert gaps.cv == pytest.approx(1, abs=0.08)
    assert not gaps.warning
    gappy = from_rows([[120 * (i // 100) + 0.01 * (i % 100), 1, 1] for i in range(1000)])
    gaps = gaps_of(gappy)
    assert gaps.cv > 5
    assert gaps.silent_share > 0.9
    assert gaps.longest_gap_s == pytest.approx(119.01)
    assert "replay its own arrivals" in gaps.warning


def test_arrivals_all_at_once_have_no_gaps() -> None:
    with pytest.raises(WorkloadError, match="come apart"):
        gaps_of(from_rows([[0, 1, 1]] * 5))


def csv(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_any_csv_with_arrivals_lengths_and_classes(tmp_path: Path) -> None:
    text = "request_type,arrival_ms,prompt_tokens,output_tokens\nchat,1000,5,6\ncode,2500,7,8\nchat,2500,9,1\n"
    workload = from_trace(csv(tmp_path, text))
    assert workload.arrival_s.tolist() == [0.0, 1.5, 1.5]
    assert workload.prompt_len.tolist() == [5, 7, 9]
    assert workload.class_names == ("chat", "code")
    assert workload.class_of.tolist() == [0, 1, 0]
    assert workload.first(2).class_of.tolist() == [0, 1]


def test_a_trace_of_splitwises_simulator_is_read(tmp_path: Path) -> None:
    text = "request_id,request_type,application_id,arrival_timestamp,batch_size,prompt_size,token_size\n"
    workload = from_trace(csv(tmp_path, f"{text}0,2,0,1.5,1,374,44\n1,2,0,4,1,396,109\n"))
    assert workload.arrival_s.tolist() == [0.0, 2.5]
    assert workload.prompt_len.tolist() == [374, 396]
    assert workload.output_len.tolist() == [44, 109]


def test_priorities_are_a_column_and_stay_with_their_requests(tmp_path: Path) -> None:
    text = "arrival_s,prompt_len,output_len,priority\n" + "".join(f"{i},{i + 1},1,{i % 3 - 1}\n" for i in range(9))
    workload = from_trace(csv(tmp_path, text))
    assert workload.priority.tolist() == [-1, 0, 1] * 3
    drawn = Traffic(source=workload).draw(1.0, 200, seed=1)
    for made in (workload.first(5), workload.to_rate(3.0), workload.resampled(50, 1.0, seed=2), drawn):
        assert made.priority.tolist() == [(length - 1) % 3 - 1 for length in made.prompt_len]
    assert not len(Traffic(source=lognormal()).draw(1.0, 5, seed=1).priority)
    rows = tmp_path / "trace.jsonl"
    rows.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "priority": -4}\n'
        '{"timestamp": 1, "input_length": 5, "output_length": 1}\n'
    )
    assert from_trace(rows).priority.tolist() == [-4, 0]


def test_a_trace_says_whose_clients_leave_and_when(tmp_path: Path) -> None:
    text = "arrival_s,prompt_len,output_len,cancel_after_s\n0,1,1,0.5\n1,2,1,\n2,3,1,0\n"
    workload = from_trace(csv(tmp_path, text))
    assert workload.cancel_after_s.tolist() == [0.5, np.inf, 0.0]
    drawn = Traffic(source=workload).draw(1.0, 100, seed=1)
    for made in (workload.first(2), workload.faster(3.0), workload.resampled(50, 1.0, seed=2), drawn):
        assert made.cancel_after_s.tolist() == [(0.5, np.inf, 0.0)[length - 1] for length in made.prompt_len]
    rows = tmp_path / "trace.jsonl"
    rows.write_text(
        '{"timestamp": 0, "input_length": 5, "output_length": 1, "cancel_after_s": 2}\n'
        '{"timestamp": 1, "input_length": 5, "output_length": 1}\n'
    )
    assert from_trace(rows).cancel_after_s.tolist() == [2.0, np.inf]
    with pytest.raises(WorkloadError, match="a client leaves before its request comes"):
        replace(workload, cancel_after_s=np.array([1.0, np.nan, 1.0]))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("arrival_s,prompt_len,output_len,cancel_after_s\n0,1,4,-1\n", ":2: cancel_after_s is -1; give seconds"),
        ("arrival_s,prompt_len,output_len,priority\n0,1,4,high\n", ":2: priority is 'high'; give a whole number"),
        ("arrival_s,prompt_len,output_len,priority\n0,1,4,9e9\n", ":2: priority is '9e9'; give a whole number"),
        ("arrival_s,prompt_tokens\n1,2\n", "no column GeneratedTokens"),
        ("arrival_s;prompt_len;output_len\n1;2;3\n", ":1: columns are parted by ';'; put commas"),
        ("arrival_s\tprompt_len\toutput_len\n1\t2\t3\n", "parted by '.t'; put commas"),
        ("arrival_s,prompt_len,output_len\n0,0,4\n", ":2: prompt_len is 0"),
        ("arrival_s,prompt_len,output_len\n5,1,4\n3,1,4\n", ":3: arrival_s is 2 s before"),
        ("arrival_s,prompt_len,output_len\nnan,1,4\n", ":2: arrival_s is 'nan'"),
        ("arrival_ms,prompt_len,output_len\nsoon,1,4\n", "give milliseconds"),
        ("arrival_s,prompt_len,output_len,class\n0,1,4,\n", ":2: class is missing"),
        ("arrival_s,prompt_len,output_len\n", "has no requests"),
    ],
)
def test_what_a_csv_has_wrong_is_named(tmp_path: Path, text: str, named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        from_trace(csv(tmp_path, text))


def test_traffic_at_two_rates_is_the_same_requests() -> None:
    traffic = Traffic(source=lognormal())
    slow, fast = traffic.draw(1.0, 500, seed=3), traffic.draw(4.0, 1000, seed=3)
    assert np.array_equal(slow.prompt_len, fast.prompt_len[:500])
    assert slow.arrival_s == pytest.approx(4 * fast.arrival_s[:500])
    assert fast.rate == pytest.approx(4.0, rel=0.1)


def test_a_replay_keeps_bursts_and_goes_round() -> None:
    rows = [[0, 1, 1], [0, 2, 1], [8, 3, 1], [9, 4, 1]]
    drawn = Traffic(source=from_rows(rows), is_replay=True).draw(2 * 3 / 9, 8, seed=5)
    assert drawn.prompt_len.tolist() == [1, 2, 3, 4] * 2
    assert drawn.arrival_s[:4].tolist() == [0, 0, 4, 4.5]
    assert drawn.arrival_s[4] > drawn.arrival_s[3]


def test_prompts_that_share_prefixes_keep_their_order_and_share_none_with_the_last_lap() -> None:
    source = from_rows([[i, 1024, 1] for i in range(4)])
    source = Workload(
        arrival_s=source.arrival_s,
        prompt_len=source.prompt_len,
        output_len=source.output_len,
        blocks=[(0, 1), (0, 2), (3, 4), (3, 5)],
    )
    drawn = Traffic(source=source).draw(1.0, 8, seed=1)
    laps = [set().union(*drawn.blocks[i : i + 4]) for i in (0, 4)]
    rows = [drawn.blocks[i][0] == drawn.blocks[i + 1][0] for i in range(7)]
    assert sum(rows) >= 3
    assert len(laps[0] | laps[1]) > 6


CHAT = RequestClass(name="chat", share=0.75, slo=Slo(ttft_s=0.1, tpot_s=0.1))
BATCH = RequestClass(name="batch", share=0.25, slo=Slo(ttft_s=10, tpot_s=10, attainment=0.5))


def test_classes_are_drawn_by_their_shares_where_the_trace_names_none() -> None:
    workload = with_classes(lognormal(), (CHAT, BATCH), seed=0)
    assert workload.class_of.mean() == pytest.approx(0.25, abs=0.03)
    ttft_s, _ = Targets(slo=Slo(), classes=(CHAT, BATCH)).limits_s(workload)
    assert set(ttft_s.tolist()) == {0.1, 10.0}
    turned = with_classes(lognormal(), (BATCH, CHAT), seed=0)
    assert turned.slo_ttft_s.tolist() == workload.slo_ttft_s.tolist()


def test_requests_of_a_class_ask_for_its_targets_wherever_they_are_drawn() -> None:
    free = replace(BATCH, slo=Slo(tpot_s=10))
    workload = with_classes(lognormal(), (CHAT, free), seed=0)
    drawn = Traffic(source=workload).draw(1.0, 100, seed=1)
    for made in (workload, workload.first(60), workload.resampled(50, 1.0, seed=2), drawn):
        assert made.slo_ttft_s.tolist() == [(0.1, 0.0)[kind] for kind in made.class_of], "one asks for none"
        assert made.slo_tpot_s.tolist() == [(0.1, 10.0)[kind] for kind in made.class_of]
    assert Targets(slo=Slo(), classes=(CHAT, BATCH)).loosest == Slo(ttft_s=10, tpot_s=10)
    assert Targets(slo=Slo(), classes=(CHAT, free)).loosest == Slo(tpot_s=10)
    ttft_s, tpot_s = workload.targets_s(3.0, 4.0)
    assert (set(ttft_s), set(tpot_s)) == ({0.1, 3.0}, {0.1, 10.0})
    assert set(lognormal().targets_s(3.0, 4.0)[0]) == {3.0}


def test_a_class_of_the_trace_without_targets_is_named(tmp_path: Path) -> None:
    workload = from_trace(csv(tmp_path, "arrival_s,prompt_len,output_len,class\n0,1,1,agent\n1,1,1,chat\n"))
    with pytest.raises(WorkloadError, match="class agent has no targets"):
        with_classes(workload, (CHAT, BATCH), seed=0)


@pytest.mark.parametrize(
    ("chat", "batch", "told"),
    [
        (0.7, 0.3, ""),
        (0.69, 0.31, ""),
        (7, 3, ""),
        (0.3, 0.7, "the share of class chat is 0.3, and 0.7 of the requests of .* are of it; give the trace's share"),
    ],
)
def test_shares_are_those_of_the_traces_classes(tmp_path: Path, chat: float, batch: float, told: str) -> None:
    rows = "".join(f"{i},1,1,{'chat' if i % 10 < 7 else 'batch'}\n" for i in range(5000))
    workload = from_trace(csv(tmp_path, "arrival_s,prompt_len,output_len,class\n" + rows))
    classes = (replace(CHAT, share=chat), replace(BATCH, share=batch))
    if not told:
        assert with_classes(workload, classes, seed=0).class_of.mean() == 0.3
        return
    with pytest.raises(WorkloadError, match=told):
        with_classes(workload, classes, seed=0)


def test_a_class_that_the_trace_has_no_request_of_is_named(tmp_path: Path) -> None:
    workload = from_trace(csv(tmp_path, "arrival_s,prompt_len,output_len,class\n0,1,1,chat\n1,1,1,chat\n"))
    with pytest.raises(WorkloadError, match="no request is of class batch; give its name as there, or take it out"):
        with_classes(workload, (CHAT, BATCH), seed=0)

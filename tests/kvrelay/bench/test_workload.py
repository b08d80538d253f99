"""Workloads: one seed makes one workload, its distributions are what they are called, and a bad trace is named."""

from __future__ import annotations

import math
import os
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvrelay.bench import workload
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import drawn
from kvrelay.bench.workload import Shape, WorkloadError, timed_shapes
from tests.served import served_model

pytestmark = pytest.mark.unit

AZURE = Path(__file__).parents[3] / "configs/workloads/azure-conv-2023.csv"
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_the_spread_asked_for(burstiness: float) -> None:
    times = workload.arrivals_s(40_001, 8.0, burstiness, rng())
    gaps = np.diff(times)
    assert times[0] == 0.0
    assert gaps.min() >= 0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.05)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.05)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert workload.arrivals_s(3, math.inf, 1.0, rng()) == [0.0, 0.0, 0.0]


def test_arrivals_are_made_by_the_seed() -> None:
    assert workload.arrivals_s(9, 2.0, 1.0, rng(1)) == workload.arrivals_s(9, 2.0, 1.0, rng(1))
    assert workload.arrivals_s(9, 2.0, 1.0, rng(1)) != workload.arrivals_s(9, 2.0, 1.0, rng(2))


@pytest.mark.parametrize(("rate", "burstiness"), [(0, 1), (-1, 1), (math.nan, 1), (1, 0), (1, math.inf), (1, math.nan)])
def test_rates_that_mean_nothing_are_refused(rate: float, burstiness: float) -> None:
    with pytest.raises(WorkloadError, match="give"):
        workload.arrivals_s(3, rate, burstiness, rng())


def test_random_lengths_cover_their_range_and_no_more() -> None:
    shapes = workload.random_shapes(2000, 100, 10, 0.5, 7, rng())
    assert {shape.input_len for shape in shapes} == set(range(57, 158))
    assert {shape.output_len for shape in shapes} == set(range(5, 16))
    fixed = workload.random_shapes(3, 100, 10, 0.0, 0, rng())
    assert fixed == [Shape(input_len=100, output_len=10)] * 3


@pytest.mark.parametrize("bad", [(0, 1, 0.0, 0), (1, 0, 0.0, 0), (1, 1, 1.0, 0), (1, 1, -0.1, 0), (1, 1, 0.0, -1)])
def test_random_lengths_that_cannot_be_are_refused(bad: tuple[int, int, float, int]) -> None:
    with pytest.raises(WorkloadError, match="give"):
        workload.random_shapes(1, *bad, rng())


def test_times_of_any_zone_are_read_and_those_of_none_are_utc(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    times = ("2024-05-01T10:00:00-05:00", "2024-05-01T17:00:01+02:00", "2024-05-01 15:00:02", "2024-05-01T15:00:03Z")
    path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{time},5,1\n" for time in times))
    assert [shape.at_s for shape in workload.read_trace(path)] == [0.0, 1.0, 2.0, 3.0]


def test_burstgpt_s_columns_are_read(tmp_path: Path) -> None:
    path = tmp_path / "BurstGPT_without_fails.csv"
    header = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    path.write_text(f"{header}5,ChatGPT,472,18,490,Conversation log\n45,GPT-4,1087,230,1317,API log\n")
    shapes = [Shape(input_len=472, output_len=18), Shape(input_len=1087, output_len=230, at_s=40.0)]
    assert workload.read_trace(path) == shapes


def test_a_prompt_beside_its_length_may_be_long(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(f"TIMESTAMP,ContextTokens,GeneratedTokens,text\n0,5,1,{'word ' * 60_000}\n1,6,1,word\n")
    assert [shape.input_len for shape in workload.read_trace(path)] == [5, 6]


def test_the_azure_trace_reads_as_published() -> None:
    shapes = workload.read_trace(AZURE)
    assert len(shapes) == 2000
    assert shapes[0] == Shape(input_len=374, output_len=44, at_s=0.0)
    assert (shapes[1].input_len, shapes[1].output_len) == (396, 109)
    assert shapes[1].at_s == pytest.approx(50.9951690 - 46.6805900, abs=1e-5)
    assert all(before.at_s <= after.at_s for before, after in pairwise(shapes))
    assert workload.read_trace(AZURE, limit=5) == shapes[:5]


def test_the_2024_form_of_the_times_reads_too(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(HEADER + "2024-05-10 00:00:00.009930+00:00,5,1\n2024-05-10 00:00:01.009930+00:00,6,2\n")
    assert [shape.at_s for shape in workload.read_trace(path)] == [0.0, 1.0]


def test_a_mooncake_trace_reads(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 1000, "input_length": 600, "output_length": 5, "hash_ids": [4, 9]}\n\n'
        '{"timestamp": 3500, "input_length": 10, "output_length": 1}\n'
    )
    assert workload.read_trace(path) == [
        Shape(input_len=600, output_len=5, at_s=0.0, blocks=(4, 9)),
        Shape(input_len=10, output_len=1, at_s=2.5),
    ]


@pytest.mark.parametrize(
    ("lines", "where", "named"),
    [
        ("2023-11-16 18:15:46,5\n", ":2:", "GeneratedTokens is missing"),
        ("2023-11-16 18:15:46,,1\n", ":2:", "ContextTokens is missing"),
        ("2023-11-16 18:15:46,5,1\n2023-11-16 18:15:47,-3,1\n", ":3:", "ContextTokens is -3"),
        ("2023-11-16 18:15:46,5,0\n", ":2:", "GeneratedTokens is 0"),
        ("2023-11-16 18:15:46,5.5,1\n", ":2:", "ContextTokens is '5.5'"),
        ("2023-11-16 18:15:46,many,1\n", ":2:", "ContextTokens is 'many'"),
        ("yesterday,5,1\n", ":2:", "TIMESTAMP is 'yesterday'"),
        ("2023-11-16 18:15:46,5,1\n2023-11-16 18:15:44,5,1\n", ":3:", "TIMESTAMP is 2 s before"),
        ("", "", "no requests"),
    ],
)
def test_a_bad_azure_line_is_named(tmp_path: Path, lines: str, where: str, named: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(HEADER + lines)
    with pytest.raises(WorkloadError) as caught:
        workload.read_trace(path)
    assert f"bad.csv{where}" in str(caught.value)
    assert named in str(caught.value)
    assert "; give" in str(caught.value) or "; sort" in str(caught.value)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ('{"timestamp": 1, "input_length": 5', "not JSON"),
        ('{"timestamp": 1, "input_length": 5}', "output_length is missing"),
        ('{"timestamp": 1, "input_length": 0, "output_length": 5}', "input_length is 0"),
        ('{"timestamp": 1, "input_length": 5.5, "output_length": 5}', "input_length is 5.5"),
        ('{"timestamp": NaN, "input_length": 5, "output_length": 5}', "timestamp is nan"),
        ('{"timestamp": 0, "input_length": 5, "output_length": 5}', "timestamp is 0.001 s before"),
        ('{"timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": 3}', "hash_ids is 3"),
        ("[1]", "is no object"),
        ('{"timestamp": 1, "input_length": true, "output_length": 5}', "input_length is True; give a whole number"),
        (f'{{"timestamp": 1{"0" * 400}, "input_length": 5, "output_length": 5}}', "timestamp is 10000"),
        (f'{{"timestamp": 1{"0" * 5000}, "input_length": 5, "output_length": 5}}', "not JSON"),
        (f'{{"timestamp": 1, "input_length": 1{"0" * 400}, "output_length": 5}}', "input_length is 10000"),
    ],
)
def test_a_bad_mooncake_line_is_named(tmp_path: Path, line: str, named: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"timestamp": 1, "input_length": 5, "output_length": 5}\n' + line)
    with pytest.raises(WorkloadError) as caught:
        workload.read_trace(path)
    assert "bad.jsonl:2: " in str(caught.value)
    assert named in str(caught.value)


def test_blank_lines_before_a_mooncake_trace_make_it_no_table(tmp_path: Path) -> None:
    path = tmp_path / "blank.txt"
    path.write_text('\n  \n{"timestamp": 1, "input_length": 5, "output_length": 5}\n')
    assert [shape.input_len for shape in workload.read_trace(path)] == [5]
    path.write_text('[\n{"timestamp": 1, "input_length": 5, "output_length": 5}\n]')
    with pytest.raises(WorkloadError, match=r"blank.txt:1: not JSON .*; give one object on each line"):
        workload.read_trace(path)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (None, "cannot be read"),
        (b"", "no column"),
        (b"a,b\n1,2\n", "no column TIMESTAMP"),
        (b"\xff\xff", "UTF-8"),
        (b"\x1f\x8b\x08\x00", "is compressed; unpack it first"),
    ],
)
def test_a_file_that_is_no_trace_is_named(tmp_path: Path, content: bytes | None, named: str) -> None:
    path = tmp_path / "odd.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(WorkloadError, match=named):
        workload.read_trace(path)


def test_a_pipe_is_no_trace() -> None:
    reader, writer = os.pipe()
    os.write(writer, b"TIMESTAMP,ContextTokens,GeneratedTokens\n0,100,10\n")
    os.close(writer)
    with pytest.raises(WorkloadError, match=f"trace /dev/fd/{reader} cannot be read: it is a pipe, which is read but"):
        workload.read_trace(Path(f"/dev/fd/{reader}"))
    os.close(reader)


def test_fit_scales_then_cuts_and_never_empties() -> None:
    shapes = [Shape(input_len=1000, output_len=100, at_s=3.0), Shape(input_len=2, output_len=1)]
    fitted = workload.fit(shapes, scale=0.1, max_input_len=60, max_output_len=50)
    assert [(shape.input_len, shape.output_len, shape.at_s) for shape in fitted] == [(60, 10, 3.0), (1, 1, 0.0)]
    assert workload.fit(shapes) == shapes
    with pytest.raises(WorkloadError, match="trace scale"):
        workload.fit(shapes, scale=0)
    with pytest.raises(WorkloadError, match="max input length"):
        workload.fit(shapes, max_input_len=0)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (
            {"random_input_len": 10**30, "random_output_len": 1},
            r"random input length is 10+; give 1000000000 or less",
        ),
        ({"trace": AZURE, "num_prompts": 10**30}, r"--num-prompts is 1000+; give 1000000000 or less"),
        (
            {"trace": AZURE, "trace_scale": 1e300},
            r"scale is 1e\+300.* has 7930 tokens; give 1.26e\+05 or less",
        ),
    ],
)
def test_a_length_that_no_request_has_is_told_and_does_not_overflow(options: dict[str, Any], named: str) -> None:
    with pytest.raises(WorkloadError, match=named):
        workload.source_workload(WorkloadOptions(**options))


def test_what_is_too_long_for_the_model_is_told_with_a_scale_that_fits() -> None:
    shapes = [Shape(input_len=900, output_len=100), Shape(input_len=100, output_len=1)]
    workload.check_lengths(shapes, 1000)
    with pytest.raises(WorkloadError, match=r"1 of 2 requests .* 1000\); .* --trace-scale 0.51"):
        workload.check_lengths(shapes, 512)
    workload.check_lengths(workload.fit(shapes, scale=0.51), 512)


def test_a_trace_plays_at_its_own_times() -> None:
    shapes = [Shape(input_len=1, output_len=1, at_s=at_s) for at_s in (0.0, 1.0, 4.0)]
    assert workload.at_speed(shapes, 2.0) == [0.0, 0.5, 2.0]
    with pytest.raises(WorkloadError, match="speed-up"):
        workload.at_speed(shapes, 0.0)


def test_prompts_have_their_lengths_and_avoid_special_ids() -> None:
    shapes = [Shape(input_len=length, output_len=1) for length in (1, 50, 300)]
    made = workload.prompts(shapes, 20, (0, 2, 19), rng())
    assert [len(prompt) for prompt in made] == [1, 50, 300]
    assert set(made[2]) == set(range(20)) - {0, 2, 19}
    assert made == workload.prompts(shapes, 20, (0, 2, 19), rng())
    assert made != workload.prompts(shapes, 20, (0, 2, 19), rng(1))
    with pytest.raises(WorkloadError, match="nothing is left"):
        workload.prompts(shapes, 2, (0, 1), rng())


def test_prompts_share_the_prefix_and_nothing_else() -> None:
    one, other = workload.prompts([Shape(input_len=40, output_len=1)] * 2, 10_000, (), rng(), prefix_len=16)
    assert one[:16] == other[:16]
    assert one[16:] != other[16:]


def test_equal_hash_ids_give_equal_runs_of_tokens() -> None:
    shapes = [
        Shape(input_len=1100, output_len=1, blocks=(1, 2, 3)),
        Shape(input_len=1024, output_len=1, blocks=(1, 7)),
        Shape(input_len=600, output_len=1, blocks=(2, 1)),
    ]
    first, second, third = workload.prompts(shapes, 1000, (), rng())
    assert [len(first), len(second), len(third)] == [1100, 1024, 600]
    assert first[:512] == second[:512]
    assert first[512:1024] == third[:512]
    assert first[512:1024] != second[512:]
    assert third[512:] == first[:88]
    halved = workload.prompts(workload.fit(shapes, scale=0.5), 1000, (), rng())
    assert halved[0][:256] == halved[1][:256]
    assert halved[0][256:512] == halved[2][:256]


def test_a_traces_priorities_are_sent(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_len,output_len,priority\n0,5,6,0\n1,5,6,-7\n")
    options = WorkloadOptions(trace=tmp_path / "trace.csv")
    model = served_model(eos_token_ids=(1,))
    _, planned = drawn(options, PlayOptions(), model, timed_shapes(options))
    assert [each.request.priority for each in planned] == [0, -7]


def test_who_is_played_stays_to_the_end(tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_text("arrival_s,prompt_len,output_len,cancel_after_s\n0,5,6,1\n1,5,6,\n")
    options = WorkloadOptions(trace=tmp_path / "trace.csv")
    assert len(workload.source_workload(options).cancel_after_s) == 2
    assert not len(workload.timed_workload(options).cancel_after_s)

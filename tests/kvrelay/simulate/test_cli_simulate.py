"""`kvrelay simulate`: a spec and a load become figures with intervals; a mistake is one sentence and exit code 2."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.cli.planning import simulate as command
from kvrelay.simulate.simulation import merged
from placement.latency.profile_file import write_profile
from placement.plan import Interval, RatePoint
from tests.placement.build.test_from_spec import profile

pytestmark = pytest.mark.unit

SPEC = """
model: llama-3.1-8b
pools:
  - {role: prefill, max_batch_tokens: 2048}
  - {role: decode, max_batch_size: 64}
"""
RANDOM = ("--random-input-len", "400", "--random-output-len", "20")
FEW = ("--hardware", "h200-sxm", *RANDOM, "--num-requests", "200", "--ttft", "200ms", "--tpot", "30ms")
AHEAD = ("--num-speculative-tokens", "4")
AZURE = str(Path(__file__).parents[3] / "configs/workloads/azure-conv-2023.csv")


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "cluster.yaml").write_text(SPEC)
    return str(tmp_path / "cluster.yaml")


def run(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    command.register(app)
    return CliRunner().invoke(app, ["simulate", *args])


def run_json(*args: str) -> dict[str, Any]:
    result = run(*args, "--json")
    assert result.exit_code == 0, result.stderr
    loaded: dict[str, Any] = json.loads(result.stdout)
    return loaded


def test_figures_come_by_rate_with_intervals_and_what_they_rest_on(spec: str) -> None:
    found = run_json(spec, *FEW, "--rates", "2,40")
    assert [row["rate"] for row in found["rates"]] == [2, 40]
    assert found["workers"] == {"prefill": 1, "decode": 1}
    assert found["latency"] == ["roofline of llama-3.1-8b on NVIDIA H200 SXM 141 GB, TP 1"]
    assert found["slo"] == {"ttft_s": 0.2, "tpot_s": 0.03, "attainment": 0.9}
    for row in found["rates"]:
        assert row["num_requests"] == row["counted_requests"] == 200
        for name in ("ttft_s", "tpot_s"):
            values = [row[name][at]["value"] for at in ("50", "90", "99")]
            assert values == sorted(values)
            assert all(row[name][at]["low"] <= row[name][at]["value"] <= row[name][at]["high"] for at in row[name])
    slow, fast = found["rates"]
    assert slow["ttft_s"]["90"]["value"] < fast["ttft_s"]["90"]["value"]
    assert slow["busy"]["prefill"] < fast["busy"]["prefill"]


def test_guesses_are_simulated_where_it_is_said_how_often_they_are_right(spec: str) -> None:
    load = (*FEW, "--rate", "1", "--random-output-len", "100")
    plain, unsaid, ahead = (run_json(spec, *load, *more) for more in ((), AHEAD, (*AHEAD, "--acceptance-rate", "0.8")))
    assert unsaid["rates"] == plain["rates"]
    assert ["--acceptance-rate" in note for note in (*plain["notes"], *unsaid["notes"], *ahead["notes"])] == [True]
    tpot_s = [found["rates"][0]["tpot_s"]["50"]["value"] for found in (plain, ahead)]
    assert tpot_s[0] / tpot_s[1] == pytest.approx((1 - 0.8**5) / (1 - 0.8), rel=0.15)
    assert ahead["rates"][0]["counters"]["accepted_tokens"] > 0


def test_clients_who_wait_for_their_answers_set_their_own_rate(spec: str) -> None:
    found = run_json(spec, *FEW, "--max-concurrency", "1,8")
    one, eight = found["rates"]
    assert (one["max_concurrency"], eight["max_concurrency"]) == (1, 8)
    assert 2 * one["rate"] < eight["rate"] < 8 * one["rate"]
    (slow,) = run_json(spec, *FEW, "--max-concurrency", "8", "--think-time", "10s")["rates"]
    assert slow["rate"] == pytest.approx(8 / 10, rel=0.05)
    (capped,) = run_json(spec, *FEW, "--rate", "40", "--max-concurrency", "8")["rates"]
    assert 36 < capped["rate"] < 41 < eight["rate"]
    shown = run(spec, *FEW, "--max-concurrency", "1,8").stdout
    assert "clients" in shown


def test_requests_that_the_model_has_no_positions_for(spec: str, tmp_path: Path) -> None:
    lengths = [4090] * 2 + [100] * 18
    rows = [json.dumps({"timestamp": 250 * i, "input_length": n, "output_length": 8}) for i, n in enumerate(lengths)]
    (tmp_path / "trace.jsonl").write_text("\n".join(rows))
    load = ("--model", "llama-2-7b", "--hardware", "h200-sxm", "--trace", str(tmp_path / "trace.jsonl"), "--rate", "2")
    found = run_json(spec, *load, "--num-requests", "50")
    assert any(note.startswith("10.00% of the requests are longer than the 4,096 positions") for note in found["notes"])
    refused = run(spec, *load, "--attainment", "0.95")
    assert refused.exit_code == 2
    assert "give prompts of 4,088 tokens at most" in refused.stderr
    assert run(spec, *load, "--num-requests", "50", "--max-input-len", "4088").exit_code == 0
    stretched = tmp_path / "stretched.yaml"
    stretched.write_text(f"max_model_len: 8192\n{Path(spec).read_text()}")
    assert run(str(stretched), *load, "--num-requests", "50", "--attainment", "0.95").exit_code == 0


def test_one_seed_gives_one_answer_and_another_seed_another(spec: str) -> None:
    first, again, other = (run_json(spec, *FEW, "--rate", "20", "--seed", seed)["rates"] for seed in ("1", "1", "2"))
    assert first == again
    assert first != other


def test_the_long_run_has_wider_intervals_than_chance_alone_for_the_times_may_be_wrong(spec: str) -> None:
    found = run_json(spec, "--hardware", "h100-sxm", *RANDOM, "--rate", "5", "--ttft", "1s")
    assert found["latency_error"] == 0.11
    tpot = found["rates"][0]["tpot_s"]["50"]
    assert tpot["low"] < 0.92 * tpot["value"] < 1.08 * tpot["value"] < tpot["high"]


def test_the_same_workers_colocated_for_comparison(spec: str) -> None:
    found = run_json(spec, *FEW, "--rate", "10", "--colocated")
    assert (found["workers"], found["colocated"]) == ({"mixed": 2}, True)


def test_a_trace_is_played_at_its_own_pace_where_no_rate_is_given(spec: str, tmp_path: Path) -> None:
    rows = [json.dumps({"timestamp": 250 * i, "input_length": 100, "output_length": 5}) for i in range(50)]
    (tmp_path / "trace.jsonl").write_text("\n".join(rows))
    trace = ("--trace", str(tmp_path / "trace.jsonl"), "--hardware", "h200-sxm", "--num-requests", "50")
    found = run_json(spec, *trace, "--trace-timestamps")
    assert found["rates"][0]["rate"] == pytest.approx(4)
    assert found["workload"] == "trace.jsonl"


def test_a_person_gets_a_table_that_names_what_it_shows(spec: str) -> None:
    result = run(spec, *FEW, "--rates", "2,4", "--attainment", "0.999")
    assert result.exit_code == 0
    assert "for 99.9% of requests" in result.stdout
    for text in ("1 x prefill", "meet both targets", "TTFT P90, ms", "decode, mean ms", "prefill busy"):
        assert text in result.stdout, result.stdout
    assert "within 7% nine times in ten" in result.stdout


def test_of_few_requests_no_interval_is_known(spec: str) -> None:
    shown = run(spec, *FEW, "--num-requests", "50", "--rate", "4").stdout
    assert "(not known)" in shown
    assert "never" not in shown


def test_a_profile_takes_the_place_of_hardware(spec: str, tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(profile(), path)
    found = run_json(spec, *RANDOM, "--profile", str(path), "--num-requests", "50", "--rate", "1")
    assert "measured by kvrelay calibrate on a CPU" in found["latency"][0]
    assert found["latency_error"] == 0.08
    both = run(spec, *FEW, "--profile", str(path), "--rate", "1")
    assert both.exit_code == 2
    assert "both --hardware and --profile are given; give one" in both.stderr


def test_what_the_simulation_leaves_out_is_noted(tmp_path: Path) -> None:
    (tmp_path / "two.yaml").write_text(f"{SPEC}\nmax_model_len: 512\nrouter: {{replicas: 2}}\n")
    result = run(str(tmp_path / "two.yaml"), *FEW, "--rate", "2")
    assert "note: max_model_len is 512; longer requests are served here" in result.stderr
    assert "router.replicas" not in result.stderr


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (("--rate", "0", *FEW), "--rate has '0.0'; give requests per second above 0"),
        (("--rates", "1,x", *FEW), "--rates has 'x'; give requests per second above 0"),
        (("--rate", "1", "--rates", "2", *FEW), "--rate and --rates do not go together"),
        (FEW, "no rate is given; give --rate"),
        (("--max-concurrency", "8,0", *FEW), "--max-concurrency has '0'; give clients, 1 or more"),
        (("--rate", "1", "--think-time", "1s", *FEW), "--think-time is of clients who wait for their answers"),
        (("--rate", "1", *RANDOM), "neither --hardware nor --profile is given; give one"),
        (("--rate", "1", *RANDOM, "--hardware", "h300"), "hardware is 'h300', which is no file"),
        (("--rate", "1", *RANDOM, "--profile", "none.json"), "none.json"),
        (("--rate", "1", "--hardware", "h200-sxm"), "no requests are given; give --trace, or --random-input-len"),
        (("--rate", "1", "--trace", AZURE, *FEW), "--trace and --random-input-len do not go together"),
        (("--rate", "1", "--trace", "no.csv", "--hardware", "h200-sxm"), "trace no.csv cannot be read"),
        (("--rate", "1", "--trace-timestamps", *FEW), "--trace-timestamps is of a trace and there is none"),
        (("--rate", "1", *FEW, "--ttft", "soon"), "--ttft is 'soon'; give a time above 0 such as 250ms"),
        (("--rate", "1", *FEW, "--attainment", "90"), "--attainment is 90; give a share above 0 and below 1"),
        (("--rate", "1", *FEW, "--seeds", "0"), "--seeds is 0; give 1 or more"),
        (("--rate", "1", *FEW, "--seeds", str(10**30)), f"--seeds is {10**30}; give 10000 or less"),
        (("--rate", "1", *FEW, "--num-requests", str(10**30)), "give 10000000 or less"),
        (
            ("--rate", "1", *FEW, *AHEAD, "--acceptance-rate", "7"),
            "--acceptance-rate is 7; give the chance of a",
        ),
        (
            ("--rate", "1", *FEW, "--acceptance-rate", "0.7"),
            "--acceptance-rate is 0.7, but no pool guesses",
        ),
        (("--rate", "1", *FEW, "--model", "opt-175b"), "pools[0] (prefill): opt-175b, 349 GB of weights, does not fit"),
        (("--rate", "1", *FEW, "--random-output-len", "0"), "random output length is 0; give 1 or more"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(spec: str, args: tuple[str, ...], sentence: str) -> None:
    result = run(spec, *args)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert result.stdout == ""


def test_a_spec_that_is_wrong_is_told_by_its_key(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("model: llama-3.1-8b\npools: [{role: prefill}, {role: decode, replicas: 0}]\n")
    result = run(str(tmp_path / "wrong.yaml"), *FEW, "--rate", "1", "--json")
    assert result.exit_code == 2
    assert "pools[1].replicas is 0" in json.loads(result.stdout)["error"]["message"]


def test_several_seeds_are_averaged_and_their_interval_holds_each() -> None:
    def point(value: float) -> RatePoint:
        share = Interval(value, value - 0.01, value + 0.01)
        late = Interval(value, 0.0, math.inf)
        return RatePoint(rate=1.0, attainment=share, ttft_s={"50": late}, tpot_s={"50": share}, num_requests=10)

    found = merged([point(0.8), point(0.9)])
    assert found.attainment.value == pytest.approx(0.85)
    assert (found.attainment.low, found.attainment.high) == pytest.approx((0.8, 0.9))
    assert found.ttft_s["50"].high == math.inf
    assert found.num_requests == 20

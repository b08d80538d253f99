"""What is written of a plan: its words, a JSON of everything, a spec that `kvrelay up` takes."""

from __future__ import annotations

import html
import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from cluster.spec.load import load_spec
from kvrelay.plan import amounts
from kvrelay.plan import words as plan_words
from kvrelay.plan.folder import save
from kvrelay.plan.reading import build_request
from kvrelay.plan.tables import tables
from placement.plan import Candidate, Interval, Objective, Plan, Slo, to_json
from tests.kvrelay.plan.plan_fixture import COLOCATED, PLAN, TRIED, apart, goodput, together

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
REQUEST = build_request(ROOT / "configs/plans/llama-8b-chat.yaml", {})
TP_1 = goodput(apart((1, 4), (1, 4)), 9.0)
SERVED = replace(PLAN, chosen=TP_1, tried=(TP_1, *TRIED[6:9]))


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes a second or two; test_plan_page.py looks at what is drawn."""
    monkeypatch.setattr("kvrelay.plan.plots.figures.figures", lambda plan, width: {})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(PLAN, REQUEST, tmp_path)
    return tmp_path


@pytest.fixture
def text(folder: Path) -> str:
    return (folder / "report.html").read_text()


def test_the_page_says_the_answer_the_advice_the_sources_and_what_was_refused(text: str) -> None:
    plain = html.unescape(text)
    for sentence in (*plan_words.answer(PLAN), *PLAN.advice, *PLAN.sources.values(), *PLAN.refused.values()):
        assert sentence in plain
    for found in PLAN.tried:
        assert found.candidate.label in plain


def test_what_nobody_knows_the_price_of_does_not_cost_nothing(tmp_path: Path) -> None:
    free = tuple(replace(each, usd_per_hour=0.0, watts=0.0) for each in PLAN.tried)
    plan = replace(PLAN, chosen=free[0], tried=free)
    save(plan, REQUEST, tmp_path)
    shown = io.StringIO()
    Console(file=shown, width=200).print(*tables(plan))
    rows = re.findall(r"<tr.*?</tr>", (tmp_path / "report.html").read_text(), re.DOTALL)
    for each in free[:3]:
        label = each.candidate.label
        assert next(line for line in shown.getvalue().splitlines() if label in line).split()[-1] == "-"
        row = next(row for row in rows if html.escape(label) in row)
        assert [re.sub(r"<[^>]*>", "", cell).strip() for cell in re.findall(r"<td.*?</td>", row)][-4:-1] == ["-"] * 3


def test_names_from_outside_are_written_as_text(tmp_path: Path) -> None:
    evil = replace(PLAN, advice=("<script>alert(1)</script>",), sources={"<b>x": "<img src=x onerror=1>"})
    save(evil, REQUEST, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert "<script" not in text
    assert "<img" not in text


def test_the_json_is_the_whole_plan(folder: Path) -> None:
    found = json.loads((folder / "plan.json").read_text())
    assert {key: found[key] for key in to_json(PLAN)} == json.loads(json.dumps(to_json(PLAN)))
    assert found["answer"]["placement"] == PLAN.chosen.candidate.label
    assert found["answer"]["goodput"] == {"value": 14.2, "low": pytest.approx(13.49), "high": pytest.approx(14.91)}


def test_a_plan_of_tp_1_is_a_spec_that_up_takes(tmp_path: Path) -> None:
    assert save(SERVED, REQUEST, tmp_path).notes == ()
    spec = load_spec(tmp_path / "cluster.yaml")
    assert [(pool.role, pool.replicas, pool.num_gpus) for pool in spec.pools] == [("prefill", 4, 1), ("decode", 4, 1)]
    pools: Any = spec.pools  # whose keys are made from the options classes
    prefill, decode = pools
    assert (prefill.max_batch_tokens, prefill.pack_tokens, decode.max_batch_size) == (2048, 2048, 256)
    assert prefill.kv_memory == 24_000 * 16 * 131_072  # llama-3.1-8b: 32 layers of 8 heads, 128 wide, K and V, 2 bytes
    assert spec.model == "meta-llama/Llama-3.1-8B"


def test_the_spec_says_how_it_came_about(folder: Path) -> None:
    text = (folder / "cluster.yaml").read_text()
    comment = " ".join(line.lstrip("# ") for line in text.splitlines() if line.startswith("#"))
    assert "two prefill workers of TP 2 and one decode worker of TP 4" in comment
    assert "kvrelay plan" in comment
    data = yaml.safe_load(text)
    assert [pool["tensor_parallel"] for pool in data["pools"]] == [2, 4]
    assert [pool["num_gpus"] for pool in data["pools"]] == [2, 4]


def test_workers_that_do_both_are_told_and_their_spec_is_written(tmp_path: Path) -> None:
    save(COLOCATED, REQUEST, tmp_path)
    (pool,) = yaml.safe_load((tmp_path / "cluster.yaml").read_text())["pools"]
    assert (pool["role"], pool["replicas"], pool["chunk_tokens"]) == ("mixed", 4, 512)
    page = (tmp_path / "report.html").read_text()
    assert "Do not disaggregate: run four mixed workers of TP 2, which read prompts in chunks of 512 tokens" in page


def test_its_commands_are_typed_where_the_plan_was_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    save(SERVED, REQUEST, Path("a plan"))
    page = html.unescape(Path("a plan/report.html").read_text())
    assert "kvrelay up 'a plan/cluster.yaml'" in page
    assert "kvrelay verify 'a plan/plan.json'" in page


def test_an_interval_of_nearly_everything_is_called_not_known(tmp_path: Path) -> None:
    vague = replace(PLAN, at_rate=replace(PLAN.at_rate, attainment=Interval(0.91, 0.002, 1.0)))
    save(vague, REQUEST, tmp_path)
    assert "interval not known, 90% asked" in (tmp_path / "report.html").read_text()


@pytest.mark.parametrize(("replicas", "reads"), [(1, "which reads prompts in"), (2, "which read prompts in")])
def test_one_mixed_worker_reads_and_two_read(replicas: int, reads: str) -> None:
    assert reads in plan_words.placement_words(together(1, replicas))


def published(plan: Plan) -> Plan:
    """The same, but that those who do both are a published system's machines."""
    theirs = [
        replace(each, candidate=together(2, 4, "colocated")) if each.candidate.is_colocated else each
        for each in plan.tried
    ]
    return replace(plan, chosen=next(each for each in theirs if each.candidate.is_colocated), tried=tuple(theirs))


def test_what_a_published_system_serves_is_told_and_the_best_two_pools_are_written(tmp_path: Path) -> None:
    save(published(COLOCATED), REQUEST, tmp_path)
    text = (tmp_path / "cluster.yaml").read_text()
    assert "which kvrelay does not serve" in " ".join(line.lstrip("# ") for line in text.splitlines())
    assert [pool["role"] for pool in yaml.safe_load(text)["pools"]] == ["prefill", "decode"]


def test_where_only_a_published_system_serves_there_is_no_spec(tmp_path: Path) -> None:
    plan = published(COLOCATED)
    only = replace(plan, tried=tuple(each for each in plan.tried if each.candidate.is_colocated))
    save(plan, REQUEST, tmp_path)
    assert (tmp_path / "cluster.yaml").exists()  # of another plan
    saved = save(only, REQUEST, tmp_path)
    assert not (tmp_path / "cluster.yaml").exists()
    assert saved.notes[0].startswith("no cluster.yaml is written: only a published system's machines meet")
    assert "machines meet the targets, and kvrelay does not serve them" in (tmp_path / "report.html").read_text()


def test_classes_have_targets_of_their_own() -> None:
    classes = [{"name": "people", "share": 0.7}, {"name": "jobs", "share": 0.3}]
    asked = replace(PLAN, asked={**PLAN.asked, "classes": classes}, slo=Slo())
    assert [target for _, target, _ in plan_words.percentile_rows(asked)] == ["by class", "by class"]
    assert [target for _, target, _ in plan_words.percentile_rows(PLAN)] == ["250 ms", "25 ms"]
    told = plan_words.answer(asked)[1]
    assert told.startswith("This meets the targets of people and jobs for as many of each as asked up to ")
    assert plan_words.answer(PLAN)[1].startswith(
        "This meets TTFT of 250 ms and TPOT of 25 ms for 90% of requests up to "
    )


@pytest.mark.parametrize("plan", [PLAN, COLOCATED, SERVED], ids=["two pools", "colocated", "tp 1"])
def test_the_terminal_shows_the_answer_and_the_alternatives(plan: Plan) -> None:
    console = Console(width=120, record=True, file=io.StringIO())
    for table in tables(plan):
        console.print(table)
    text = " ".join(console.export_text().split())
    assert plan_words.answer(plan)[0] in text
    for found in plan.tried[:3]:
        assert found.candidate.label in text
    assert plan.advice[0] in text


def test_a_narrow_terminal_wraps_the_figures_and_cuts_none() -> None:
    console = Console(width=50, record=True, file=io.StringIO())
    _, figures, *_ = tables(PLAN)
    console.print(figures)
    words = console.export_text().split()
    assert {"H100-SXM,", "384,000", "14.9)", "91.7%)"} <= set(words)


def test_infinite_ends_of_intervals_are_shown_and_written(tmp_path: Path) -> None:
    wild = Interval(float("inf"), 0.2, float("inf"))
    point = replace(PLAN.at_rate, ttft_s={"50": wild, "90": wild, "99": wild}, is_settled=False)
    save(replace(PLAN, at_rate=point), REQUEST, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text())["at_rate"]["ttft_s"]["50"]["value"] is None
    assert "limit before this interval was narrow" in (tmp_path / "report.html").read_text()


def test_a_rough_goodput_has_a_sign(tmp_path: Path) -> None:
    rough = replace(PLAN.tried[1], is_rough=True)
    assert plan_words.goodput_of(rough) == f"~ {plan_words.goodput_of(PLAN.tried[1])}"
    save(replace(PLAN, tried=(PLAN.tried[0], rough, *PLAN.tried[2:])), REQUEST, tmp_path)
    text = (tmp_path / "report.html").read_text()
    assert html.escape(plan_words.goodput_of(rough)) in text


def test_an_attainment_that_may_be_anything_says_what_is_known_instead() -> None:
    vague = replace(PLAN.at_rate, attainment=Interval(0.949, 0.0, 1.0))
    plan = replace(PLAN, at_rate=vague, chosen=replace(PLAN.chosen, goodput=Interval(78.8, 47.6, 135)))
    assert plan_words.attained(plan) == "94.9% if the latency model is right; sure up to 47.6 requests/s"
    nowhere = replace(plan, chosen=replace(plan.chosen, goodput=Interval(78.8, 0.0, 135)))
    assert plan_words.attained(nowhere).endswith("sure at no rate")
    assert plan_words.attained(PLAN) == amounts.percent_between(PLAN.at_rate.attainment)
    assert amounts.percent_between(vague.attainment) == "94.9% (not known)"


def test_a_rate_that_is_missed_is_told() -> None:
    late = replace(PLAN.at_rate, attainment=Interval(0.104, 0.0, 0.283))
    missed = replace(PLAN, asked={**PLAN.asked, "rate": PLAN.at_rate.rate}, at_rate=late)
    assert any("10.4% of requests meet the targets in the longest run" in said for said in plan_words.warnings(missed))
    kept = replace(missed, at_rate=replace(late, attainment=Interval(0.95, 0.94, 0.96)))
    assert not any("longest run" in said for said in plan_words.warnings(kept))


def test_verdicts() -> None:
    """Each kind of comparison has its own sentence."""
    apart_best, together_best = TRIED[0], TRIED[6]
    assert plan_words.verdict(PLAN).startswith("Two pools serve 1.6 times")
    assert plan_words.verdict(replace(PLAN, tried=(apart_best,))) == ""
    none = replace(together_best, goodput=Interval(0, 0, 0))
    assert "No colocated placement meets" in plan_words.verdict(replace(PLAN, tried=(apart_best, none)))
    close = replace(together_best, goodput=Interval(13.9, 13.0, 14.5))
    assert "come out alike" in plan_words.verdict(replace(PLAN, tried=(apart_best, close)))
    better = replace(together_best, goodput=Interval(28.4, 28.0, 29.0))
    assert plan_words.verdict(replace(PLAN, tried=(better, apart_best))).startswith("Colocated workers serve 2 times")
    pools = (*together(1, 2).pools, *together(2, 1, chunk_tokens=128).pools)
    hybrid = replace(apart_best, candidate=Candidate(pools=pools), goodput=Interval(28.4, 28.0, 29.0))
    told = "A hybrid, 2 x mixed TP 1 + 1 x mixed TP 2, chunks of 512 and 128, serves 4 times as much per GPU"
    assert told in plan_words.verdict(replace(PLAN, tried=(hybrid, apart_best, together_best)))
    rated = replace(PLAN, objective="cost", asked={**PLAN.asked, "rate": 10.0}, chosen=apart_best)
    dearer = replace(hybrid, usd_per_hour=2 * apart_best.usd_per_hour)
    assert "A hybrid of both takes" in plan_words.verdict(replace(rated, tried=(apart_best, dearer)))
    cheaper = replace(rated, chosen=dearer, tried=(replace(dearer, usd_per_hour=1.0), apart_best))
    assert "The best without a hybrid takes" in plan_words.verdict(cheaper)
    less = replace(hybrid, goodput=Interval(4.0, 3.5, 4.5))
    assert "A hybrid of both serves less" in plan_words.verdict(replace(PLAN, tried=(apart_best, less)))


@pytest.mark.parametrize(
    ("objective", "told"),
    [("cost", "The best colocated placement takes $40.00 an hour for it."), ("power", "takes 9 kW for it.")],
)
def test_what_is_to_be_cheap_is_compared_by_what_it_takes(objective: Objective, told: str) -> None:
    dear = replace(TRIED[6], usd_per_hour=40.0, watts=9000.0)
    plan = replace(PLAN, objective=objective, tried=(TRIED[0], dear))
    for_rate = {**PLAN.asked, "rate": 8.0}
    assert told in plan_words.verdict(replace(plan, asked=for_rate))
    assert plan_words.verdict(plan).startswith("Two pools serve"), "there is no rate that it takes so much for"
    same = replace(PLAN, objective=objective, tried=(TRIED[0], TRIED[6]), asked=for_rate)
    assert plan_words.verdict(same).startswith("Two pools serve")
    missed = replace(plan, asked={**PLAN.asked, "rate": 14.0})
    assert plan_words.verdict(missed).startswith(
        "No colocated placement meets the targets at 14 requests/s with as few"
    )


def test_kinds_of_gpus_are_compared_by_what_they_cost() -> None:
    pools = tuple(replace(pool, hardware="A100") for pool in TRIED[6].candidate.pools)
    cheap = replace(TRIED[6], candidate=replace(TRIED[6].candidate, pools=pools), usd_per_hour=10.0)
    told = plan_words.verdict(replace(PLAN, tried=(TRIED[0], cheap)))
    assert told.startswith(
        "Colocated workers serve 1.5 times what the best two pools do: 0.89 against 0.594 requests/s"
    )
    assert told.endswith("for each dollar an hour.")


def test_an_out_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"--out is .*file, where plan.json cannot be written"):
        save(PLAN, REQUEST, tmp_path / "file")

"""Two servers get the same requests in turns; rates are swept; what is saved becomes a page that stands alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from kvrelay.bench.pages.reading import read_result
from kvrelay.bench.series.comparing import SCHEMA
from kvrelay.cli.measuring import bench, report
from tests.kvrelay.client.scripted import ScriptedServer
from tests.kvrelay.plan.test_plan_page import Page

SMALL = ("--num-prompts", "4", "--random-input-len", "8", "--random-output-len", "3")
GOOD = ("--goodput", "ttft:60000", "tpot:60000")


def run(*args: str) -> Result:
    app = typer.Typer()
    app.callback()(lambda: None)
    bench.register(app)
    report.register(app)
    return CliRunner().invoke(app, [*args], env={"COLUMNS": "140"})


@pytest.fixture
def other() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        yield server


def series(*args: str) -> dict[str, Any]:
    result = run("bench", "--json", *SMALL, *args)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def sent(server: ScriptedServer) -> list[list[int]]:
    return sorted(list(request.token_ids.ids) for request in server.requests)


def test_both_get_the_same_requests_in_turns(server: ScriptedServer, other: ScriptedServer) -> None:
    a, b = server.endpoint, other.endpoint
    found = series("--compare", a, b, "--rounds", "3")
    assert [turn["side"] for turn in found["turns"]] == [a, b, b, a, a, b]
    assert sent(server) == sent(other)
    assert len({tuple(prompt) for prompt in sent(server)}) == 3 * 4  # no round finds another's prompts in a cache
    (at,) = found["compared"]
    ratio = at["figures"]["TTFT P50 ms"]
    assert ratio["least"] <= ratio["ratio"] <= ratio["most"]
    assert ratio["better"] == "lower"
    assert at["figures"]["output tokens/s"]["better"] == "higher"


def test_doors_of_one_cluster_get_prompts_of_their_own(server: ScriptedServer, other: ScriptedServer) -> None:
    series("--compare", server.endpoint, other.endpoint, "--rounds", "1", "--distinct-prompts")
    assert len(sent(server)) == len(sent(other)) == 4
    assert not {tuple(prompt) for prompt in sent(server)} & {tuple(prompt) for prompt in sent(other)}


def test_a_sweep_finds_attainment_by_rate_and_the_knee(server: ScriptedServer) -> None:
    found = series("--rates", "200,100", "--rounds", "2", "--endpoint", server.endpoint, *GOOD)
    assert [(turn["rate"], turn["attainment"]) for turn in found["turns"]] == [
        *[(100.0, 1.0)] * 2,
        *[(200.0, 1.0)] * 2,
    ]
    assert found["knees"] == {server.endpoint: {"rate": 200.0, "low": 200.0, "high": 200.0, "where": "above"}}
    assert "compared" not in found


def test_a_search_goes_down_where_nothing_is_kept(server: ScriptedServer) -> None:
    impossible = ("--goodput", "ttft:0.0001", "--request-rate", "6400000")
    found = series("--rates", "auto", "--rounds", "1", "--endpoint", server.endpoint, *impossible)
    rates = [turn["rate"] for turn in found["turns"]]
    assert rates == [6400000 / 2**i for i in range(16)]
    assert found["knees"][server.endpoint]["where"] == "below"


def test_a_person_gets_figures_ratios_and_knees(server: ScriptedServer, other: ScriptedServer) -> None:
    rates = ("--rates", "100,200", "--rounds", "1")
    result = run("bench", *SMALL, *GOOD, "--compare", server.endpoint, other.endpoint, *rates)
    assert result.exit_code == 0, result.stderr
    for text in ("Each server at each rate", "B over A, round by round", "least to most", "play higher rates"):
        assert text in result.stdout
    assert f"A is {server.endpoint}; B is {other.endpoint}" in " ".join(result.stdout.split())
    assert re.findall(r"^ ([AB]) +(\d+) ", result.stdout, re.MULTILINE) == [
        *(("A", "100"), ("B", "100")),
        *(("A", "200"), ("B", "200")),
    ]


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (("--compare", "a:1"), "--compare has 1 servers; give two: --compare A B"),
        (("--compare", "a:1", "a:1"), "--compare has a:1 twice; give two servers"),
        (("--rates", "1,2"), "--rates 1,2 looks for the knee of targets; give --goodput"),
        (("--rates", "1,zwei", *GOOD), "--rates is '1,zwei'; give requests/s above 0 joined by commas, or auto"),
        (("--rates", "0", *GOOD), "--rates is '0'; give requests/s above 0"),
    ],
)
def test_what_is_asked_wrongly_is_told(args: tuple[str, ...], told: str) -> None:
    result = run("bench", *SMALL, *args)
    assert result.exit_code == 2
    assert told in result.stderr.replace("\n", " ")


def test_failures_fail_the_command_unless_allowed(server: ScriptedServer) -> None:
    with ScriptedServer(answering="break UNAVAILABLE") as broken:
        args = ("bench", *SMALL, "--rounds", "1", "--compare", server.endpoint, broken.endpoint)
        assert run(*args).exit_code == 1
        assert run(*args, "--allow-failures").exit_code == 0


# Pages


@pytest.fixture
def saved(server: ScriptedServer, other: ScriptedServer, tmp_path: Path) -> Path:
    rates = ("--rates", "100,200,400", "--rounds", "2")
    kept = ("--save-result", "--result-dir", str(tmp_path))
    found = series("--compare", server.endpoint, other.endpoint, *rates, *GOOD, *kept)
    assert "samples" not in found["turns"][0]
    return Path(str(found["saved"]))


def page_of(tmp_path: Path, *results: Path) -> str:
    path = tmp_path / "report.html"
    made = run("report", *map(str, results), "-o", str(path))
    assert (made.exit_code, made.stdout.strip()) == (0, str(path)), made.stderr
    return path.read_text()


def test_a_saved_result_says_where_it_comes_from(saved: Path) -> None:
    found = read_result(saved)
    assert found["schema"] == SCHEMA
    assert {"date", "commit", "machine", "versions"} <= found.keys()
    assert found["versions"]["kvrelay"]
    assert len(found["turns"][0]["samples"]["ttft_ms"]) == 4


def test_the_page_stands_alone_and_shows_all(saved: Path, tmp_path: Path) -> None:
    text = page_of(tmp_path, saved)
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed"}
    for _, attributes in page.tags:
        for key in ("href", "xlink:href", "src"):
            assert (attributes.get(key) or "#").startswith("#"), attributes
    figures = [a["aria-label"] or "" for tag, a in page.tags if tag == "figure"]
    assert len(figures) == 2
    assert all(re.search(r"\d", figure) for figure in figures)
    for side in read_result(saved)["sides"]:
        assert side["endpoint"] in text
    assert "prefers-color-scheme: dark" in text
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert set(re.findall(r"(?:fill|stroke): (#\w+)", drawn)) <= {"#000000", "#ffffff"}
    assert "better is" in text


def test_a_single_run_and_several_make_a_page_too(server: ScriptedServer, saved: Path, tmp_path: Path) -> None:
    single = run(
        "bench", "--json", *SMALL, "--endpoint", server.endpoint, "--save-result", "--result-dir", str(tmp_path)
    )
    path = Path(json.loads(single.stdout)["saved"])
    assert page_of(tmp_path, path).count("<figure") == 1  # one rate: no curve
    both = page_of(tmp_path, path, saved)
    assert path.stem in both
    assert f"{saved.stem}: {server.endpoint}" in both


def test_what_is_no_result_is_told(tmp_path: Path) -> None:
    for name, text, told in (
        ("gone.json", None, "cannot be read: no such file or directory; give a file"),
        ("no.json", "{", "is no JSON; give what `kvrelay bench --save-result` wrote"),
        ("other.json", '{"a": 1}', "is no result of kvrelay-series/1 and no run"),
    ):
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        made = run("report", str(path))
        assert made.exit_code == 2
        assert told in made.stderr.replace("\n", " ")

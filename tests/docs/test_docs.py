"""The documentation names what there is: every spec key, command, flag, metric and field, and none besides."""

from __future__ import annotations

import asyncio
import importlib
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import typer
import yaml

from bench.plots import PLOTS
from cluster.front.server import RouterServer, server_options
from cluster.router.monitoring.families import PREFIX, families
from cluster.router.monitoring.metrics import COUNTERS, HISTOGRAMS
from cluster.spec.load import parse_spec
from cluster.spec.model import ClusterSpec, RouterSpec, TransferSpec
from cluster.spec.pool import PoolSpec
from kvrelay.chaos.bounds import BOUNDS, MEASURES, TERM, seconds
from kvrelay.cli import main as cli
from kvrelay.v1 import generate_pb2

pytestmark = pytest.mark.unit

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), ROOT / "README.md", ROOT / "CHANGELOG.md"]
SERVING = (ROOT / "docs" / "serving.md").read_text()


def section(heading: str) -> str:
    """The text under a heading of docs/serving.md, to the next heading of any level."""
    match = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", SERVING, re.MULTILINE | re.DOTALL)
    assert match, f"docs/serving.md has no section {heading}"
    return match[1]


def rows(text: str) -> list[list[str]]:
    """The cells of each table row, without the tables' heads."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    heads = {i - 1 for i, line in enumerate(lines) if re.fullmatch(r"[|\s:-]+", line)}
    return [row for i, row in enumerate(cells) if i not in heads and i - 1 not in heads]


def code(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)


def fill(name: str) -> Any:
    """A program of docs/ that writes a part of a page."""
    with mock.patch.object(sys, "path", [str(ROOT / "docs"), *sys.path]):  # as when it is run
        return importlib.import_module(name)


# The spec


def test_the_tables_of_keys_say_what_the_options_classes_say() -> None:
    assert fill("fill_serving").filled(SERVING) == SERVING, "run python docs/fill_serving.py"


def test_the_bounds_are_those_that_chaos_holds_a_cluster_against() -> None:
    page = (ROOT / "docs" / "reliability.md").read_text()
    assert fill("fill_reliability").filled(page) == page, "run python docs/fill_reliability.py"


def test_every_bound_is_made_of_settings_that_exist() -> None:
    settings = {name for part in (ClusterSpec, RouterSpec, TransferSpec, PoolSpec) for name in part.model_fields}
    for bound in BOUNDS:
        for time in (bound.noticed, bound.next_token, bound.pages):
            names = {match["name"] for match in TERM.finditer(time) if match["name"]}
            assert names <= settings | MEASURES.keys(), f"{bound.fault}: {time}"
            assert seconds(time, dict.fromkeys(names, 1.0)) >= len(names), "each term counts"


def test_the_page_on_failing_names_no_setting_that_is_not_there() -> None:
    settings = {name for part in (ClusterSpec, RouterSpec, TransferSpec, PoolSpec) for name in part.model_fields}
    named = re.findall(r"`([a-z]+(?:_[a-z]+)+)`", (ROOT / "docs" / "reliability.md").read_text())
    assert set(named) <= settings | MEASURES.keys() | {"max_tokens", "request_id"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_specs_in_the_text_can_be_used(page: Path) -> None:
    for block in blocks(page, "yaml"):
        parse_spec(yaml.safe_load(block))


# The command


def commands() -> dict[str, dict[str, bool]]:
    """Each command's flags: whether they are shown in its help."""
    cli._register()
    group: Any = typer.main.get_command(cli.app)
    known = {
        f"{name} {inner}".removesuffix(" "): each
        for name, command in group.commands.items()
        for inner, each in (command.commands if hasattr(command, "commands") else {"": command}).items()
    }
    return {
        name: {
            flag: not getattr(parameter, "hidden", False)
            for parameter in command.params
            if parameter.param_type_name == "option"
            for flag in (*parameter.opts, *parameter.secondary_opts)
        }
        for name, command in known.items()
    }


COMMANDS = commands()
SPEC_FLAGS = {  # described as keys of the spec
    f"--{no}{prefix}{key}".replace("_", "-")
    for part, prefix in ((ClusterSpec, ""), (PoolSpec, ""), (RouterSpec, "router_"), (TransferSpec, "transfer_"))
    for key in part.model_fields
    for no in ("", "no-")
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_flag_of_a_command_is_described_and_no_other(command: str) -> None:
    described = {flag for row in rows(section(f"`kvrelay {command}`")) for flag in code(row[0])}
    shown = {flag for flag, is_shown in COMMANDS[command].items() if is_shown}
    assert described - shown == set()
    assert shown - described <= (SPEC_FLAGS if command in ("up", "simulate", "apply", "config show") else set())


def typed(page: Path) -> Iterator[list[str]]:
    """The arguments of every `kvrelay ...` that a page asks the reader to type."""
    text = page.read_text()
    lines = [line for block in blocks(page, "sh") for line in block.replace("\\\n", " ").splitlines()]
    inline = re.findall(r"`(kvrelay [^`]+)`", text)
    for line in [*lines, *inline]:
        for call in re.split(r"&&|\||;|'", line):
            words = shlex.split(call, comments=True) if call.count('"') % 2 == 0 else []
            if words and words[0].rpartition("/")[2] == "kvrelay":
                yield words[1:]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_in_the_text_exist(page: Path) -> None:
    for words in typed(page):
        command = words[0] if words[0] in COMMANDS else " ".join(words[:2])
        assert command in COMMANDS, f"kvrelay {' '.join(words)}"
        flags = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[a-z]", word)]
        assert set(flags) <= set(COMMANDS[command]), f"kvrelay {' '.join(words)}"


def test_the_pages_do_show_commands() -> None:
    assert len([words for page in PAGES for words in typed(page)]) > 20


# The API and the metrics


def test_every_sampling_field_is_described_and_no_other() -> None:
    tables = rows(section("gRPC"))
    fields = [field.name for field in generate_pb2.SamplingParams.DESCRIPTOR.fields]
    described = [code(row[0])[0] for row in tables if len(row) == 3]
    assert described == fields


def test_every_method_is_described() -> None:
    methods = {method.name for method in generate_pb2.DESCRIPTOR.services_by_name["Generate"].methods}
    assert methods <= {name for row in rows(section("gRPC")) for name in code(row[0])}


def test_every_metric_is_described_and_no_other() -> None:
    described = {name for row in rows(section("Metrics")) for name in code(row[0]) if name.startswith(PREFIX)}
    [scrape] = asyncio.run(RouterServer(server_options()).scrape())
    scraped = families(scrape, COUNTERS)
    others = {f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in scraped}
    assert described == {PREFIX + name for name in HISTOGRAMS} | others


def test_every_counter_of_workers_is_described() -> None:
    folders = ("worker", "prefill_worker", "decode_worker", "kv_transfer")
    source = "".join(path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py"))
    counters = set(re.findall(r'counters\["(\w+)"\]', source))
    assert len(counters) > 15
    assert counters <= {name for row in rows(section("Metrics")) for cell in row for name in code(cell)}


# Links, and the tables of benchmarks


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def anchors(page: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_a_heading_lead_to_one(page: Path) -> None:
    for target, anchor in re.findall(r"\]\(((?!https)[^)#]*)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


def pictures(page: Path) -> list[str]:
    return re.findall(r'(?:src|srcset)="([^"]+)"', page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pictures_are_there_for_light_pages_and_dark_ones(page: Path) -> None:
    shown = pictures(page)
    for path in shown:
        assert (page.parent / path).exists(), path
        if "plots/" in path:
            plain = path.replace("-dark.svg", ".svg")
            assert {plain, plain.replace(".svg", "-dark.svg")} <= set(shown)


def test_every_result_has_a_table_and_every_plot_a_place() -> None:
    page = fill("fill_benchmarks")
    results = {path.stem for path in (ROOT / "bench" / "results").glob("*.json")}
    assert results <= page.TABLES.keys()
    assert page.PICTURES.keys() == PLOTS.keys() <= page.TABLES.keys()
    for name in results & PLOTS.keys():
        for ending in (".svg", "-dark.svg", ".png", "-dark.png"):
            assert (ROOT / "docs" / "plots" / f"{name}{ending}").exists(), "run python -m bench.plots"


def test_every_question_about_a_result_is_answered_in_the_same_form() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        question = section.partition("\n")[0]
        assert question.endswith("?")
        labels = re.findall(r"^- \*\*(\w[^*]*):\*\*", section, re.MULTILINE)
        assert labels == ["Run it", "It does not show", "Raw"], question


def test_the_benchmarks_page_begins_with_its_questions() -> None:
    page = (ROOT / "docs" / "benchmarks.md").read_text()
    listed = re.findall(r"^- \[(.+)\]\(#", page, re.MULTILINE)
    assert listed == re.findall(r"^## (.+)", page, re.MULTILINE)


def test_the_benchmarks_page_takes_every_result() -> None:
    filled = fill("fill_benchmarks").filled
    page = filled((ROOT / "docs" / "benchmarks.md").read_text())
    for path in (ROOT / "bench" / "results").glob("*.json"):
        assert f"<!-- {path.stem} -->" in page, path.name
        assert f"`{path.relative_to(ROOT)}` is not there" not in page
    assert filled(page) == page

"""A plan's page stands alone, and its figures follow the page's colours and say in words what they show."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from kvrelay.plan.folder import save
from kvrelay.plan.plots.attainment import crossing, falling
from kvrelay.plan.plots.figures import figures
from kvrelay.plan.reading import build_request
from placement.plan import Interval, RatePoint
from tests.kvrelay.plan.plan_fixture import PLAN, TRIED

ROOT = Path(__file__).parents[3]
REQUEST = build_request(ROOT / "configs/plans/llama-8b-chat.yaml", {})


class Page(HTMLParser):
    """What a test asks of a page: its tags, ids, links, and whether tags close in order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "path", "use", "rect", "circle"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        if tag in self.open:
            assert self.open.pop() == tag, tag


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("plan")
    save(PLAN, REQUEST, where)
    return where


@pytest.fixture(scope="module")
def text(folder: Path) -> str:
    return (folder / "report.html").read_text()


def test_the_folder_has_the_spec_the_plan_the_report_and_the_plots(folder: Path) -> None:
    plots = {f"{name}.png" for name in ("attainment", "goodput", "phases", "cost", "time", "tornado")}
    assert {path.name for path in folder.iterdir()} == {"cluster.yaml", "plan.json", "report.html", *plots}
    for name in plots:
        assert (folder / name).read_bytes().startswith(b"\x89PNG")


def test_the_page_asks_for_nothing_from_anywhere(text: str) -> None:
    page = Page(text)
    assert page.open == []
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "embed"}
    for _, attributes in page.tags:
        for key in ("href", "xlink:href", "src", "action", "data"):
            assert (attributes.get(key) or "#").startswith("#"), attributes
    assert "@import" not in text
    assert set(re.findall(r"url\((.)", text)) <= {"#"}


def test_ids_are_unique_and_links_lead_somewhere(text: str) -> None:
    page = Page(text)
    ids = Counter(attributes["id"] for _, attributes in page.tags if "id" in attributes)
    assert [name for name, count in ids.items() if count > 1] == []
    links = {a[k] for _, a in page.tags for k in ("href", "xlink:href") if a.get(k)}
    assert {str(link).removeprefix("#") for link in links} <= set(ids)
    assert set(re.findall(r"url\(#([^)]+)\)", text)) <= set(ids)


def test_figures_say_in_words_what_they_show_and_follow_the_page_s_colours(text: str) -> None:
    figures = [a for tag, a in Page(text).tags if tag == "figure"]
    assert len(figures) == 6
    assert all(len(figure["aria-label"] or "") > 60 for figure in figures)
    svgs = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(svgs) == 12
    for drawn in svgs:
        assert "var(--ink)" in drawn
        colours = set(re.findall(r"(?:fill|stroke): (#\w+)", drawn))
        assert colours <= {"#000000", "#ffffff"}, colours  # of shapes that are not drawn
        assert "<text" in drawn


def test_every_variable_of_a_figure_has_a_colour_in_light_and_in_dark(text: str) -> None:
    used = set(re.findall(r"var\(--([\w-]+)\)", text))
    light, dark = re.findall(r":root \{(.*?)\}", text, re.DOTALL)
    for part in (light, dark):
        assert used <= set(re.findall(r"--([\w-]+):", part))


def test_a_thin_plan_draws_what_it_has(tmp_path: Path) -> None:
    """One candidate without a curve, no cost, no refusals: a planner's least."""
    bare = replace(TRIED[0], curve=(), usd_per_hour=0.0, watts=0.0)
    thin = replace(PLAN, chosen=bare, tried=(bare,), refused={}, advice=(), phase_goodput={}, swings=())
    assert set(figures(thin)) == {"goodput"}
    save(thin, REQUEST, tmp_path)
    assert "NaN" not in (tmp_path / "plan.json").read_text()


def test_attainment_is_drawn_falling() -> None:
    """A short run past the knee may find more than one below it; its line does not rise again."""
    rows = ((2.0, 0.5), (1.0, 0.99), (3.0, 0.8), (4.0, 0.51))
    points = [RatePoint(rate=rate, attainment=Interval(share, share, share)) for rate, share in rows]
    assert [(rate, found.value) for rate, found in falling(points)] == [(1.0, 0.99), (2.0, 0.5), (4.0, 0.5)]
    assert crossing(falling(points), 0.9) == pytest.approx(1 + 0.09 / 0.49)
    assert crossing(falling(points), 0.4) is None

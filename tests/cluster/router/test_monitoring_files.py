"""The dashboard and the alerts in configs/monitoring ask for what a router does tell: by name, label and value."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cluster.front.server import server_options
from cluster.router.links.worker_link import LinkState
from cluster.router.monitoring.exposing import text_of
from cluster.router.monitoring.families import PREFIX, WORKER_FAILURES, WORKER_GAUGES
from tests.cluster.harness import request, serving
from tests.cluster.router.test_trouble import fail_to_reach
from worker.roles import ROLES

FOLDER = Path(__file__).parents[3] / "configs" / "monitoring"
ALERTS = [rule for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"] for rule in group["rules"]]
PANELS = json.loads((FOLDER / "grafana-dashboard.json").read_text())["panels"]
VARIABLES = {"$__rate_interval": "5m", "$model": ".*"}  # Grafana's own, and the dashboard's
PROMETHEUS = {"job", "instance"}  # labels that it gives itself
VALUES = {  # that no traffic of a test brings
    "worker_type": {*ROLES},
    "state": {*LinkState, "suspect", "draining", "drained"},
    "job": {"kvrelay"},
}
PARTS = ("lhs", "rhs", "expr", "param", "vector_selector")
OF_WORKERS = {*(PREFIX + name for name in WORKER_GAUGES), f"{PREFIX}worker_events_total", f"{PREFIX}workers_lost_total"}
Told = dict[str, dict[str, set[str]]]  # by metric: its labels, and the values that they have


def expressions() -> Iterator[str]:
    yield from (rule["expr"] for rule in ALERTS)
    for panel in PANELS:
        for target in panel.get("targets", ()):
            expression = str(target["expr"])
            for name, value in VARIABLES.items():
                expression = expression.replace(name, value)
            yield expression


def nodes(tree: Any) -> Iterator[Any]:
    yield tree
    for child in (*(getattr(tree, part, None) for part in PARTS), *getattr(tree, "args", ())):
        if child is not None:
            yield from nodes(child)


def selectors(expression: str) -> list[Any]:
    return [node for node in nodes(promql_parser.parse(expression)) if hasattr(node, "matchers")]


def grouped(expression: str) -> set[str]:
    modifiers = [getattr(node, "modifier", None) for node in nodes(promql_parser.parse(expression))]
    return {label for modifier in modifiers for label in getattr(modifier, "labels", ())}


def values(matcher: Any) -> list[str]:
    return [value for value in str(matcher.value).split("|") if value not in ("", ".*")]


async def scraped() -> Told:
    """Of a router that has had traffic, a worker that is lost, and a pair that fails."""
    options = server_options(port=0, metrics_port=0, dead_after_s=0.5)
    async with serving(1, 3, options=options) as h:
        await h.generate.GenerateOnce(request(max_tokens=4))
        h.prefill().compute = partial(fail_to_reach, h.prefill(), "decode-0")  # type: ignore[method-assign]
        await h.generate.GenerateOnce(request((5, 6, 8), max_tokens=4))
        await h.decode(2).kill()
        await h.until(lambda: h.count("workers_lost") == 1)
        page = await asyncio.to_thread(text_of, await h.server.scrape())
    told: Told = {"up": {label: set() for label in PROMETHEUS}}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            for label, value in sample.labels.items():
                told.setdefault(sample.name, {}).setdefault(label, set()).add(value)
    return told


async def test_each_name_label_and_value_is_one_that_a_router_tells() -> None:
    told = await scraped()
    assert len([*expressions()]) > 50
    for expression in expressions():
        found = selectors(expression)
        assert found, expression
        for selector in found:
            labels = told[selector.name]
            for matcher in selector.matchers.matchers:
                known = labels.get(matcher.name, set()) | VALUES.get(matcher.name, set())
                assert matcher.name in labels, expression
                assert {*values(matcher)} <= known, expression
        every = set[str]().union(*(told[selector.name] for selector in found))
        assert grouped(expression) <= every | PROMETHEUS, expression


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_it_knows(rule: dict[str, Any]) -> None:
    named = {*re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"])}
    assert named <= (grouped(rule["expr"]) or {"model_name", *PROMETHEUS})
    assert rule["labels"]["severity"] in ("page", "ticket")


def test_each_failure_that_workers_count_is_watched() -> None:
    asked = [each for expression in expressions() for each in selectors(expression)]
    watched = {value for each in asked for matcher in each.matchers.matchers for value in values(matcher)}
    assert {*WORKER_FAILURES} <= watched


def test_no_panel_sums_over_routers_what_each_of_them_tells_of_a_worker() -> None:
    """Two routers would show twice the requests, pages and failures that there are."""
    targets = [target["expr"] for panel in PANELS for target in panel.get("targets", ())]
    for expression in targets:
        names = {each.name for each in selectors(expression.replace("$__rate_interval", "5m"))}
        assert not (expression.startswith("sum") and names & OF_WORKERS), expression


def test_the_page_says_what_to_do_at_each_alert() -> None:
    page = (FOLDER.parents[1] / "docs" / "monitoring.md").read_text()
    told = re.findall(r"^\| `(Kvrelay\w+)` \|", page, re.MULTILINE)
    assert told == [rule["alert"] for rule in ALERTS]

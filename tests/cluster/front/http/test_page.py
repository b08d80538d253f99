"""The page at /, in a browser: its figures, its keyboard path, whom it asks, and that it fits a telephone."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.front.http.chromium import PROGRAM, Browser, chromium
from tests.cluster.front.http.harness import http, words

pytestmark = [pytest.mark.unit, pytest.mark.skipif(PROGRAM is None, reason="no Chromium is installed")]


async def figures(browser: Browser) -> dict[str, str]:
    told: dict[str, str] = await browser.value(
        "Object.fromEntries([...document.querySelectorAll('#tiles div')].map((tile) =>"
        " [tile.children[0].textContent, tile.children[1].firstChild.textContent]))"
    )
    return told


async def pair_rows(browser: Browser) -> dict[str, list[str]]:
    rows: list[list[str]] = await browser.value(
        "[...document.querySelectorAll('#pairs tbody tr')]"
        ".map((row) => [...row.children].map((cell) => cell.textContent))"
    )
    return {name: row for name, *row in rows}


def scraped(text: str) -> dict[tuple[str, ...], float]:
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {
        (
            each.name.removeprefix("kvrelay:"),
            *(each.labels[key] for key in ("worker", "peer") if key in each.labels),
        ): each.value
        for each in samples
    }


async def test_the_page_shows_what_metrics_say_and_asks_nobody_else() -> None:
    async with http(codec=words(), slo_ttft_ms=500, slo_tpot_ms=50) as h, chromium() as browser:
        await browser.go(h.base)
        for _ in range(5):
            await h.post("/v1/completions", prompt="w5 w6 w7", max_tokens=4)
        h.harness.prefill().is_holding = True
        asked = asyncio.create_task(h.post("/v1/completions", prompt="w5", max_tokens=4))
        await h.harness.until(lambda: h.harness.router.num_in_flight == 1)
        await browser.until("document.querySelector('#pairs tbody td:nth-child(2)')?.textContent === '5'")
        await browser.until("[...document.querySelectorAll('#tiles dd')][2].firstChild.textContent === '1'")
        metrics, shown, pairs = (
            scraped((await h.raw.get("/metrics")).text),
            await figures(browser),
            await pair_rows(browser),
        )
        assert float(shown["in flight"]) == metrics["num_requests_in_flight",] == 1
        assert float(shown["queued"]) == metrics["num_requests_queued",] == 0
        assert float(shown["failed"]) == metrics["failed_total",] == 0
        pair = ("prefill-0", "decode-0")
        good, bad, again, size, *_ = pairs["prefill-0 → decode-0"]
        assert float(good) == metrics[("pair_receipts_total", *pair)] == 5
        assert float(bad) == metrics[("pair_receipts_bad_total", *pair)] == 0
        assert float(again) == metrics[("pair_resends_total", *pair)] == 0
        told = metrics[("pair_bytes_total", *pair)]
        assert size == await browser.value(
            f"Intl.NumberFormat('en', {{notation: 'compact', maximumFractionDigits: 1}}).format({told}) + 'B'"
        )
        assert "decode-0 is ready" in await browser.value("document.querySelector('#deeds').textContent")
        h.harness.prefill().release()
        await asked
        assert {url.split("/")[2] for url in browser.urls if not url.startswith("data:")} == {h.base.split("/")[2]}
        assert browser.errors == []


async def test_the_page_is_used_by_keyboard_and_fits_a_telephone() -> None:
    async with http(codec=words(), slo_ttft_ms=0.001) as h, chromium() as browser:
        await browser.look_as(390, 844, "dark")
        await browser.go(h.base)
        await h.post("/v1/completions", prompt="w5 w6 w7", max_tokens=4, request_id="slow-1")
        told = (await h.raw.get("/v1/requests/slow-1")).json()
        spans = told["choices"][0]["spans"]
        assert [span["name"] for span in spans][-1] == "decode"
        await browser.until("!!document.querySelector('#slow button') && !!document.querySelector('#picture path')")
        assert await browser.value("document.documentElement.scrollWidth") <= 390
        reached: list[str] = []
        while "slow-1" not in reached and len(reached) < 9:
            await browser.press("Tab")
            reached.append(await browser.value("document.activeElement.textContent.slice(0, 6)"))
        assert reached[0] == "Pause"
        assert reached[-1] == "slow-1"
        assert await browser.value("getComputedStyle(document.activeElement).outlineStyle") == "solid", "focus is seen"
        await browser.press("Enter")
        await browser.until(f"document.querySelectorAll('#spans > li').length === {len(spans)}")
        shown = await browser.value("document.querySelector('#timeline').innerText")
        assert all(span["name"].replace("_", " ") in shown for span in spans)
        assert await browser.value("document.documentElement.scrollWidth") <= 390
        await browser.press("Escape")
        assert await browser.value("document.activeElement.textContent") == "slow-1", "focus is where it was"
        assert browser.errors == []

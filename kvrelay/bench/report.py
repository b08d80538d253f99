"""Tables of what kvrelay.bench.metrics.summarise found, for a person. It computes nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich import box
from rich.table import Table

from kvrelay.bench.metrics import METRICS


def tables(summary: Mapping[str, Any]) -> Iterator[Table]:
    """The run, its latencies, the handoffs, the phases, and what failed; those that have rows."""
    yield _totals(summary)
    if summary["completed"]:
        yield _latency(summary["latency_ms"])
        if summary["handoff"]["receipts_good"] or summary["handoff"]["receipts_unchecked"]:
            yield _handoff(summary["handoff"], summary["completed"])
    if summary["phases_ms"]:
        yield _phases(summary["phases_ms"])
    if summary["errors"]:
        yield _errors(summary["errors"])


def _pairs(title: str, rows: Mapping[str, str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def _totals(summary: Mapping[str, Any]) -> Table:
    rows = {
        "Successful requests": f"{summary['completed']}",
        "Failed requests": f"{summary['failed']}",
        "Benchmark duration (s)": f"{summary['duration_s']:.2f}",
        "Total input tokens": f"{summary['total_input_tokens']}",
        "of them cached": f"{summary['cached_input_tokens']}",
        "Total generated tokens": f"{summary['total_output_tokens']}",
        "Request throughput (req/s)": f"{summary['request_throughput']:.2f}",
        "Output token throughput (tok/s)": f"{summary['output_throughput']:.2f}",
        "Total token throughput (tok/s)": f"{summary['total_token_throughput']:.2f}",
    }
    if "slos_ms" in summary:
        targets = ", ".join(f"{name} {limit_ms:g} ms" for name, limit_ms in summary["slos_ms"].items())
        rows["Targets"] = targets
        rows["Request goodput (req/s)"] = f"{summary['request_goodput']:.2f}"
        rows["SLO attainment"] = f"{summary['attainment']:.1%}"
    return _pairs("Serving benchmark", rows)


def _latency(latency_ms: Mapping[str, Mapping[str, float | None]]) -> Table:
    table = Table(title="Latency as the client saw it (ms)", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    columns = list(next(iter(latency_ms.values()), {}))
    shown = [name for name in columns if name != "std" and not (name == "median" and "p50" in columns)]
    for name in shown:
        table.add_column(name.replace("p", "P"), justify="right")
    for metric, figures in latency_ms.items():
        table.add_row(f"{METRICS[metric]} ({metric.upper()})", *(_number(figures[name]) for name in shown))
    return table


def _handoff(handoff: Mapping[str, Any], completed: int) -> Table:
    exposed = handoff["exposed_ms"]
    peaks = ", ".join(f"{name.upper()} {_number(exposed[name])}" for name in exposed if name.startswith("p"))
    rows = {
        "Requests handed over": f"{completed - handoff['without_handoff']} of {completed}",
        "Receipts good / unchecked": f"{handoff['receipts_good']} / {handoff['receipts_unchecked']}",
        "Transport": ", ".join(f"{name} ({count})" for name, count in handoff["transports"].items()) or "-",
        "Pages moved": f"{handoff['pages']}",
        "Pages cached at decode": f"{handoff['cached_pages']}",
        "Bytes moved": f"{handoff['bytes']:,}",
        "GB/s while moving": _number(handoff["gb_per_s"]),
        "Exposed after prefill, mean (ms)": _number(exposed["mean"]),
        "Exposed after prefill (ms)": peaks,
        "Resends": f"{handoff['resends']}",
        "Tokens recomputed": f"{handoff['recomputed_tokens']}",
    }
    return _pairs("KV handoff", rows)


def _phases(phases_ms: Mapping[str, float]) -> Table:
    rows = {name.replace("_", " "): _number(value) for name, value in phases_ms.items()}
    rows["sum"] = _number(sum(phases_ms.values()))
    return _pairs("Where the time went, mean of each phase (ms)", rows)


def _errors(errors: Mapping[str, Mapping[str, Any]]) -> Table:
    rows = {f"{failures['count']} x {code}": f"{failures['first']}" for code, failures in errors.items()}
    return _pairs("Failed requests, with the first reason", rows)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

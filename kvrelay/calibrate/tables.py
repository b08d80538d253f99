"""Tables of a profile and of a verification, for a person. They compute no figure."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rich import box
from rich.table import Table

from placement.checks.verification import Row, Verification
from placement.latency.profile import Fault, Profile
from placement.latency.profile_latency import ProfileLatency
from placement.latency.under_load import UnderLoad
from placement.plan import Slo

METRICS = {"ttft": "Time to first token", "tpot": "Time per output token", "e2e": "End to end"}


def profile_tables(profile: Profile) -> list[Table]:
    """What a person wants to see of it: times of typical steps, and how far off the tables were."""
    latency = ProfileLatency(replace(profile, load=None))
    prefill = _table("Prefill", "tokens in a step", "cached before", "ms", "tokens/s", "table ms", "")
    for p in profile.prefill:
        start = p.chunks[0][1]
        table_s = latency.prefill_s(p.chunks) - profile.prefill_overhead_s
        what = f"{len(p.chunks)} x {p.chunks[0][0]}" if len(p.chunks) > 1 else f"{p.tokens}"
        prefill.add_row(what, f"{start}", _ms(p.seconds), f"{p.tokens / p.seconds:.0f}", _ms(table_s), _held(p))
    decode = _table("Decode", "requests", "context tokens", "ms a step", "tokens/s", "table ms", "")
    for d in profile.decode:
        table_s = latency.decode_line(d.batch_size, d.context_tokens).step_s
        sizes = (f"{d.batch_size}", f"{d.context_tokens}")
        decode.add_row(*sizes, _ms(d.seconds), f"{d.batch_size / d.seconds:.0f}", _ms(table_s), _held(d))
    mixed = _table("Both in one step", "tokens in a step", "requests", "ms a step", "table ms", "")
    for m in profile.mixed:
        table_s = latency.mixed_s(m.chunks, m.batch_size, m.context_tokens) - profile.prefill_overhead_s
        mixed.add_row(f"{m.tokens}", f"{m.batch_size}", _ms(m.seconds), _ms(table_s), _held(m))
    handoff = _table("Handoff", "tokens", "MB", "ms moving", "GB/s", "ms not hidden")
    for t in profile.transfer:
        speed = f"{t.bytes / t.seconds / 1e9:.2f}" if t.seconds else "-"
        handoff.add_row(f"{t.tokens}", f"{t.bytes / 1e6:.2f}", _ms(t.seconds), speed, _ms(t.exposed_s))
    rest = _table("Between", "", "")
    rest.add_row("two prefill steps (ms)", _ms(profile.prefill_overhead_s))
    rest.add_row("two processes, one way (ms)", _ms(profile.message_s))
    rest.add_row("a handoff, beside its bytes (ms)", _ms(profile.handoff_s))
    rest.add_row("client and router, both ways (ms)", _ms(profile.client_s))
    for s in profile.slowdown:
        both = f"prefill {s.prefill:.2f}, decode {s.decode:.2f} times as long"
        rest.add_row(f"both at once, {s.batch_size} requests decoding", both)
    rest.add_row("error, nine in ten of the points held out", _wrong(profile.error))
    load = [_load_table(profile.load)] if profile.load else []
    return [prefill, decode, *([mixed] if profile.mixed else []), *([handoff] if profile.transfer else []), rest, *load]


def _wrong(error: Fault) -> str:
    return f"prefill {error.prefill:.1%}, decode {error.decode:.1%}, handoff {error.transfer:.1%}"


def _load_table(load: UnderLoad) -> Table:
    title = f"All at work, {len(load.runs)} runs at {_rates(load)} requests/s: times as long as above"
    columns = ("alone", "beside the other phase", "and more (ms)", "bias", "swing between runs", "noise between steps")
    table = _table(title, "", *columns)
    for name, phase in (("prefill", load.prefill), ("decode", load.decode)):
        errors = (f"{share:.1%}" for share in (phase.bias, phase.swing, phase.noise))
        table.add_row(name, f"{phase.alone:.2f}", f"{phase.beside:.2f}", _ms(phase.more_s), *errors)
    return table


def _rates(load: UnderLoad) -> str:
    rates = [run.rate for run in load.runs]
    return f"{min(rates):.3g} to {max(rates):.3g}"


def verification_tables(verified: Verification) -> list[Table]:
    times = _table(f"{verified.num_requests} requests at {verified.rate:.2f}/s (ms)", "", *_COLUMNS)
    for row in verified.rows:
        times.add_row(f"{METRICS[row.metric]}, P{row.percentile:g}", *_cells(row))
    wanted = _targets(verified.slo)
    if wanted:
        share = verified.attainment
        times.add_section()
        times.add_row(
            f"Within {wanted} (%)",
            f"{100 * share.value:.1f}",
            f"{100 * share.low:.1f} to {100 * share.high:.1f}",
            f"{100 * verified.measured_attainment:.1f}",
            f"{100 * (verified.measured_attainment - share.value):+.1f} points",
        )
    phases = _table("Where the time went, mean of each phase (ms)", "", "predicted", "measured", "off by")
    for name, (predicted_s, measured_s) in verified.phases_s.items():
        off = f"{1000 * (measured_s - predicted_s):+.1f}"
        phases.add_row(name.replace("_", " "), f"{1000 * predicted_s:.1f}", f"{1000 * measured_s:.1f}", off)
    return [times, phases]


_COLUMNS = ("predicted", "it may be", "measured", "off by")


def _cells(row: Row) -> tuple[str, ...]:
    inside = "" if row.is_inside else " !"
    predicted = row.predicted
    return (
        f"{1000 * predicted.value:.1f}",
        f"{1000 * predicted.low:.1f} to {1000 * predicted.high:.1f}",
        f"{1000 * row.measured:.1f}",
        f"{row.error:+.1%}{inside}",
    )


def _targets(slo: Slo) -> str:
    named = {"TTFT": slo.ttft_s, "TPOT": slo.tpot_s}
    return ", ".join(f"{name} {1000 * at:g} ms" for name, at in named.items() if at != float("inf"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(column, justify="right" if column else "left")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _held(point: Any) -> str:
    return "held out" if point.held_out else ""

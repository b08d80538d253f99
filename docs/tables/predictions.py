"""What is foretold, held against what was measured: single steps, served loops, whole clusters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tables.shape import Tables, by_cpu, folded, table

PICTURES = {
    **by_cpu(
        verify_live="Attainment and the P90s of TTFT and TPOT over the rate: predicted, and measured twice",
    ),
    "closed_loops": "Measured against predicted TTFT, time between tokens and throughput of served closed loops",
    "static_batches": "Foretold over measured time of prefill and decode steps, by GPU",
    "roofline": "Planned over published time of single steps, by source",
}
CLOSED_LOOPS = {
    "ttft_mean": "TTFT mean",
    "itl_mean": "between tokens mean",
    "throughput": "throughput",
    "ttft_p95": "TTFT P95",
    "itl_p95": "between tokens P95",
}


def roofline(result: Mapping[str, Any]) -> str:
    """How wrong each source's steps are foretold."""
    rows = [
        [
            row["source"],
            row["rows"],
            *(f"{row[key][part]:{'+' if part == 'mean' else ''}.0%}" for key in ways for part in ("mean", "all")),
            *(f"{row['with_its_engine'][kind]:.0%}" for kind in ("prefill", "decode")),
        ]
        for ways in [("as_in_file", "with_its_engine")]
        for row in result["sources"]
    ]
    columns = ["steps published by", "steps", "as in the file: mean", "9 of 10 within", "with its engine: mean"]
    return table([*columns, "9 of 10 within", "prefill", "decode"], rows)


def static_batches(result: Mapping[str, Any]) -> str:
    """What each way of leaving batches out leaves of their times, then by setting, then what was fitted."""
    ways = result["ways"]
    gpus = list(result["figures"])
    rows = [
        [way, found["batches"], _step_errors(found), *(_step_errors(found["by_gpu"].get(gpu)) for gpu in gpus)]
        for way, found in ways.items()
    ]
    shown = ("fitted", "a model on a GPU", "a model", "another design")
    settings = [
        [" ".join((row["hardware"], row["model"], row["precision"])), row["tp"], row["batches"]]
        + [_step_errors(row.get(way)) for way in shown]
        for row in result["rows"]
    ]
    figures = [
        [path.split(".")[1], *(at.get(path, "") for at in result["figures"].values())]
        for path in result["figures"]["h100-sxm"]
    ]
    return "\n\n".join(
        [
            table(["left out of the fit", "batches", "all", *gpus], rows),
            folded("By GPU, model, precision and TP", table(["batches of", "TP", "batches", *shown], settings)),
            folded("What was fitted, as the hardware files have it", table(["", *gpus], figures)),
        ]
    )


def _step_errors(of: Mapping[str, Any] | None) -> str:
    if of is None:
        return ""
    return " / ".join(f"{of[phase]['median']:+.0%} ({of[phase]['nine_of_ten']:.0%})" for phase in ("prefill", "decode"))


def closed_loops(result: Mapping[str, Any]) -> str:
    """Each way's errors, fitted and left out, then what it goes by, then by setting, and what is left by clients."""
    ways = result["ways"]
    names = [f"{text}, within {result['wanted'][key]:.0%}" for key, text in CLOSED_LOOPS.items()]
    rows = [
        [f"{way}: {part}", of["runs"], *(_loop_error(of[key]) for key in CLOSED_LOOPS)]
        for way, found in ways.items()
        for part, of in found["parts"].items()
    ]
    by_setting = [
        [" ".join(str(row[key]) for key in ("model", "hardware", "precision")), row["tp"], row["clients"], row["runs"]]
        + [_loop_error(row[key]) for key in CLOSED_LOOPS]
        for row in ways["with both"]["by_setting"]
    ]
    columns = ["served", "TP", "clients", "runs", *CLOSED_LOOPS.values()]
    return "\n\n".join(
        [
            table(["", "runs", *names], rows),
            table(["nine of ten differ from runs like them by", "runs", *CLOSED_LOOPS.values()], _disagreement(result)),
            table(["what was fitted", "a step", "a token", "a request", "prompts", "reading KV"], _overheads(ways)),
            folded("By GPU, model, precision, TP and clients, with both", table(columns, by_setting)),
            folded("Measured less predicted by clients, prompts of 200 tokens, medians", _residuals(ways)),
        ]
    )


def _disagreement(result: Mapping[str, Any]) -> list[list[object]]:
    texts = {
        "repeated": "the same run twice, as measured",
        "fitted": "other lengths of answers only, with both: fitted",
        "left out": "other lengths of answers only, with both: left out",
    }
    return [
        [texts[part], of["runs"], *("" if of[key] is None else f"{of[key]:.1%}" for key in CLOSED_LOOPS)]
        for part, of in result["disagreement"].items()
    ]


def _loop_error(of: Mapping[str, float]) -> str:
    return f"{of['median']:+.0%} ({of['nine_of_ten']:.0%}), {of['within']:.0%} within"


def _overheads(ways: Mapping[str, Any]) -> list[list[object]]:
    return [
        [
            way,
            f"{of['step_s'] * 1e3:.2f} ms",
            f"{of['token_s'] * 1e6:.0f} us",
            f"{of['request_s'] * 1e3:.2f} ms",
            f"x {of['prefill']:.2f}",
            f"x {of['attention']:.2f}",
        ]
        for way, found in ways.items()
        for of in [found["overheads"]]
    ]


def _residuals(ways: Mapping[str, Any]) -> str:
    rows = [
        [row["clients"], row["runs"]]
        + [
            f"{found['residuals'][at][f'{key}_ms']:+.1f}"
            for key in ("ttft_mean", "itl_mean")
            for found in ways.values()
        ]
        for at, row in enumerate(ways["as in the file"]["residuals"])
    ]
    columns = [f"{text} ms, {way}" for text in ("TTFT", "between tokens") for way in ways]
    return table(["clients", "runs", *columns], rows)


def coverage(result: Mapping[str, Any]) -> str:
    """By quantity, and what the load had said of the machine."""
    covered, load = result["coverage"], result["profile"]["load"]
    rows = [
        [
            name,
            *(f"{100 * figures[key]:.0f}" for key in ("inside", "below", "above", "width")),
            f"{figures['off']:+.0%}",
        ]
        for name, figures in covered.items()
        if name != "all"
    ]
    times = "; ".join(
        f"{name} {load[name]['alone']:.2f} times the probes' alone, {load[name]['beside']:.2f} beside the other phase, "
        f"{load[name].get('more_s', 0.0) * 1e3:.2f} ms more, "
        f"bias {load[name]['bias']:.1%}, swing {load[name]['swing']:.1%}"
        for name in ("prefill", "decode")
    )
    cases = result["cases"]
    failed = sum(case["failed"] for case in cases)
    inside = f"{len(cases)} cases, {covered['all']['inside']:.0%} of all figures inside; {failed} requests failed."
    if again := result.get("predicted_again"):
        earlier = again["earlier"]["all"]["inside"]
        inside += f" Predicted again by commit {again['commit']}; before they were served, {earlier:.0%} was inside."
    return "\n\n".join(
        [
            f"{inside} Under load, in {len(load['runs'])} runs: {times}.",
            table(["", "inside %", "below %", "above %", "median width %", "median off by"], rows),
        ]
    )


def verify_live(result: Mapping[str, Any]) -> str:
    """Predicted and measured at each rate, then where the time went, then how the machine was."""
    columns = ["of the knee, requests/s", "within both %", "off", "TTFT P90 ms", "off", "TPOT P90 ms", "off", "noise"]
    rows: list[list[object]] = []
    for row in result["rows"]:
        shares, ttft, tpot = row["attainment"], row["ttft_p90"], row["tpot_p90"]
        noise = f"{shares['noise_points']:.1f}, {ttft['noise']:.0%}, {tpot['noise']:.0%}"
        rows.append(
            [
                f"{row['share_of_knee']:g}, {row['rate']:.2f}",
                _against(100 * shares["predicted"]["value"], [100 * value for value in shares["measured"]], 1),
                f"{shares['error_points']:+.1f}",
                *(_against(ttft["predicted_ms"]["value"], ttft["measured_ms"], 0), f"{ttft['error']:+.1%}"),
                *(_against(tpot["predicted_ms"]["value"], tpot["measured_ms"], 1), f"{tpot['error']:+.1%}"),
                noise,
            ]
        )
    names = list(result["rows"][0]["phases_ms"])
    phases = [
        [f"{row['share_of_knee']:g}"]
        + [_against(phase["predicted"], phase["measured"], 1) for phase in row["phases_ms"].values()]
        for row in result["rows"]
    ]
    broken = [
        f"{row['share_of_knee']:g} of the knee: {name}"
        for row in result["rows"]
        for name, is_kept in row["promises"].items()
        if not is_kept
    ]
    slo, error = result["slo"], result["profile"]["error"]
    return "\n\n".join(
        [
            f"Predicted against both live runs. Targets: TTFT {1e3 * slo['ttft_s']:.0f} ms, TPOT "
            f"{1e3 * slo['tpot_s']:.0f} ms. Error of the profile: prefill {error['prefill']:.1%}, decode "
            f"{error['decode']:.1%}. Noise: the live runs against each other (points, TTFT P90, TPOT P90).",
            table(columns, rows),
            f"Not as wanted: {'; '.join(broken)}." if broken else "All as wanted.",
            folded(
                "Where the time went, mean of each phase, ms",
                table(["of the knee", *(name.replace("_", " ") for name in names)], phases),
            ),
        ]
    )


def _against(predicted: float, measured: Sequence[float], digits: int) -> str:
    return f"{predicted:.{digits}f}: {'/'.join(f'{value:.{digits}f}' for value in measured)}"


TABLES: Tables = {
    **by_cpu(coverage=coverage, verify_live=verify_live),
    "closed_loops": closed_loops,
    "roofline": roofline,
    "static_batches": static_batches,
    "verify_live_again": verify_live,
}

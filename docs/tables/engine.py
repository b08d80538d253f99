"""What an engine can do, and what it costs: quantised weights, adapters, states, drafts, forms."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tables.shape import Tables, cell, folded, speed_rows, spread, table


def families(result: Mapping[str, Any]) -> str:
    by: dict[str, list[Mapping[str, str]]] = {verdict: [] for verdict in ("exact", "refused", "wrong", "not made")}
    for model in result["models"]:
        by[model["is"]].append(model)
    exact = ", ".join(f"`{model['model_type']}`" for model in by["exact"])
    reasons = [
        [f"`{model['model_type']}`", model["is"], model["why"]] for verdict in list(by)[1:] for model in by[verdict]
    ]
    return "\n\n".join(
        [
            f"By transformers {result['transformers']}. Exact, {len(by['exact'])}: {exact}.",
            folded(f"The {len(reasons)} others", table(["model type", "is", "why"], reasons)),
        ]
    )


def structured(result: Mapping[str, Any]) -> str:
    served, libraries = result["served"], result["libraries"]
    outcomes = ", ".join(f"{count:,} {how}" for how, count in served["outcomes"].items())
    told = (
        f"{outcomes}; workers killed {served['kills']} times, {served['computed_again']} answers computed again, "
        f"{served['with_the_same_tokens']} of them with the same tokens as without a loss."
    )
    steps = [[batch, row["without_ms"], row["with_ms"], spread(row["ratio"])] for batch, row in result["cost"].items()]
    beside = [
        [
            name,
            f"{of['kept']:,} of {of['schemas']:,}",
            f"{of['answers_taken']:,}",
            f"{of['grammar_ms']['p50']:.1f} / {of['grammar_ms']['p99']:.1f}",
            f"{1e3 * of['mask_ms']['p50']:.1f} / {1e3 * of['mask_ms']['p99']:.0f}",
        ]
        for name, of in libraries.items()
    ]
    columns = ["library", "schemas kept", "answers taken", "a grammar, ms", "what may follow a token, us"]
    return "\n\n".join(
        [
            told,
            table(["batch", "step, ms", "with a form", "speed of the latter"], steps),
            folded("Both libraries, the same schemas and answers, P50 / P99", table(columns, beside)),
        ]
    )


def speculation(result: Mapping[str, Any]) -> str:
    names = list(result["rows"][0]["ways"])
    rows = []
    for row in result["rows"]:
        cells = [f"{row['ways'][names[0]]['tokens_per_s']:.0f}"]
        for way in (row["ways"][name] for name in names[1:]):
            share = "" if way["accepted_share"] is None else f"; {way['drafted']}, {way['accepted_share']:.0%}"
            cells.append(f"{spread(way['ratio'])}{share}")
        rows.append([f"{row['temperature']:g}", row["batch"], *cells])
    columns = ["temperature", "batch", "tokens/s without", *(f"{name}; guesses, right" for name in names[1:])]
    return f"{table(columns, rows)}\n\nBatches with other tokens than without: {result['answers_that_differ']}."


def int8(result: Mapping[str, Any]) -> str:
    parts = []
    for name, of in result["models"].items():
        speeds = speed_rows(of["times"], "bfloat16", "int8")
        against = (of["int8_against_bfloat16"], of["bfloat16_against_float32"])
        errors = [
            ["relative error of logits, median", *(f"{100 * side['relative_error_median']:.1f}%" for side in against)],
            ["positions with the same likeliest token", *(f"{side['same_likeliest']:.0%}" for side in against)],
            ["KL divergence, mean, nats", *(cell(side["kl_mean_nats"]) for side in against)],
        ]
        ratio = (
            of["perplexity"]["int8"] / of["perplexity"]["bfloat16"],
            of["perplexity"]["bfloat16"] / of["perplexity"]["float32"],
        )
        errors.append(["perplexity, a multiple of", *(f"{value:.4f}" for value in ratio)])
        weights = of["weight_mb"]
        parts += [
            f"{name}, {weights['int8']:.0f} MB of weights instead of {weights['bfloat16']:.0f}:",
            table(["step", "bfloat16, ms", "int8, ms", "speed"], speeds),
            folded("Accuracy", table(["", "int8 beside bfloat16", "bfloat16 beside float32"], errors)),
        ]
    return "\n\n".join(parts)


def adapters(result: Mapping[str, Any]) -> str:
    parts = []
    for kind, of in result["kinds"].items():
        rows = [
            [
                step,
                f"{t['alone_ms']:.1f}",
                f"{t['each its own_ms']:.1f}",
                spread(t["each its own_speed"]),
                f"{t['all the same_ms']:.1f}",
                spread(t["all the same_speed"]),
            ]
            for step, t in of["times"].items()
        ]
        heads = ["step", "alone, ms", "each row its own, ms", "speed", "all rows one, ms", "speed"]
        parts += [f"{kind}, {of['adapter_mb']:g} MB each:", table(heads, rows)]
    return "\n\n".join(parts)


def states(result: Mapping[str, Any]) -> str:
    parts = []
    for kind, of in result["kinds"].items():
        rows = speed_rows(of["times"], "generate", "kvrelay")
        page = f"{of['page_kv_mb']:g} MB of KV and {of['page_state_mb']:g} MB of states"
        parts += [
            f"{kind}, {of['params_m']:g}M parameters, pages of {of['page_tokens']:,} tokens, {page}:",
            table(["step", "transformers, ms", "kvrelay, ms", "speed"], rows),
        ]
    return "\n\n".join(parts)


TABLES: Tables = {
    "structured": structured,
    "speculation": speculation,
    "speculation_heads": speculation,
    "int8": int8,
    "adapters": adapters,
    "states": states,
    "families": families,
}

"""Ours beside other servers, in the same minutes: one table of ratios with their spread over rounds.

    python -m bench.peers [--quick] [--peers openvino,vllm,llamacpp] [--rates 2,4,6]

First each is asked for the same greedy tokens. Then bench.engine's prompts and batches, then bench.arrangements'
requests, which arrive by chance, all in turns. Rates, where none are given, are shares of what our engine would just do
by the figures before. Each other server is started once, and stopped while others have their turn; bench.peers.install
makes what is not installed. Ratios are their times over ours: above 1 ours is the shorter. The table is kept as
bench/results/peers.json (or peers_amx.json: by the kind of CPU), and without --quick what engine and arrangements keep.
--quick takes ten minutes at most where all are installed. Exit code 1 when one of ours failed a request, or another
server's tokens are not the model's.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

from bench import arrangements, engine
from bench.common import about, demo_model, on_this_cpu, save
from bench.e2e import QUICK_SECONDS, SECONDS, console
from bench.peers.install import PEERS, peer_names
from bench.peers.serve import Server, servers
from bench.peers.tokens import checked
from bench.plots import SHORT, draw
from bench.rounds import told
from engine.process import set_environment

THREADS = 2
QUICK_PLAN = (("prefill", 512), ("decode", 1), ("decode", 8))
QUICK_OURS = ("1P1D, a core each", "one mixed, whole steps of 512")
OURS = (*QUICK_OURS, "two mixed, a core each, as predicted", "a prefill and a mixed worker, as predicted")
QUICK_LOADS, LOADS = (0.5,), (0.4, 0.7, 1.0)  # shares of what the engine would just do
QUICK_REPEATS, REPEATS = 3, 3
MEAN_TOKENS = (256, 64)  # prompt and answer, of bench.e2e's load

Result = dict[str, Any]


def rates_for(rows: Sequence[Mapping[str, Any]], loads: Sequence[float]) -> list[float]:
    """Requests a second: shares of what prompts at the speed of 512 tokens and decode steps of 8 leave room for."""
    speeds = {row["what"]: row["tokens_per_s"]["kvrelay"] for row in rows}
    prompt_tokens, new_tokens = MEAN_TOKENS
    request_s = prompt_tokens / speeds["prefill 512"] + new_tokens / speeds["decode 8"]
    return [round(load / request_s, 1) for load in loads]


def play(peers: Mapping[str, Server], quick: bool, rates: Sequence[float] | None) -> tuple[Result, Result]:
    """bench.engine's result and bench.arrangements'."""
    names, plan = (engine.NAMES[:1], QUICK_PLAN) if quick else (engine.NAMES, engine.PLAN)
    alone = engine.run(names, peers, plan, quick, THREADS)
    rates = rates or rates_for(alone["rows"], QUICK_LOADS if quick else LOADS)
    ours, repeats, seconds = (QUICK_OURS, QUICK_REPEATS, QUICK_SECONDS) if quick else (OURS, REPEATS, SECONDS)
    specs = {name: asked for name, asked in arrangements.arrangements().items() if name in ours}
    return alone, arrangements.run(specs, peers, rates, repeats, seconds)


def rows_of(alone: Result, arriving: Result) -> list[dict[str, Any]]:
    """Of each thing measured: our milliseconds, and the other servers' over them."""
    rows = [
        {
            "what": row["what"],
            "ms": row["ms"]["kvrelay"],
            "ratio_to": {name: ratio for name, ratio in row["ratio_to"].items() if name in PEERS},
        }
        for row in alone["rows"]
    ]
    return rows + [row for of_rate in arriving["ratios"] for row in _arriving_rows(of_rate, arriving["rows"])]


def _arriving_rows(of_rate: Mapping[str, Any], medians: Mapping[str, Any]) -> list[dict[str, Any]]:
    name, rate = of_rate["ours"], of_rate["asked_per_s"]
    [ours] = [one for one in medians[name] if one["asked_per_s"] == rate]
    return [
        {
            "what": f"{SHORT[name]}, {rate:g}/s, {metric.upper()} {key.upper()}",
            "ms": ours["latency_ms"][metric][key],
            "ratio_to": {peer: ratios[f"{metric} {key}"] for peer, ratios in of_rate["ratio_to"].items()},
        }
        for metric, key in arrangements.COMPARED
    ]


def shown(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = "Other servers' times over ours: median (least, most) of the rounds; above 1 ours is the shorter"
    table = Table(title=title, title_justify="left")
    names = list(rows[0]["ratio_to"])
    for column in ("", "ours, ms", *(PEERS[name].title for name in names)):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for row in rows:
        table.add_row(row["what"], f"{row['ms']:.1f}", *(told(row["ratio_to"][name]) for name in names))
    return table


def problems_of(result: Result, arriving: Result) -> list[str]:
    strange = [
        f"{PEERS[name].title} does not compute the same model: {found['wrong'][0]}"
        for name, found in result["tokens"].items()
        if found["wrong"]
    ]
    return strange + arrangements.failures(arriving)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="less of each, in ten minutes at most")
    parser.add_argument("--peers", type=peer_names, default=list(PEERS), help="default: all")
    parser.add_argument("--rates", type=lambda text: tuple(map(float, text.split(","))), help="requests per second")
    args = parser.parse_args()
    head, model = about(), demo_model("125m")
    set_environment(THREADS)  # for the processes that start from here
    with servers(args.peers, model, sorted(os.sched_getaffinity(0))[:THREADS], console.print) as peers:
        tokens = checked(peers, model)
        alone, arriving = play(peers, args.quick, args.rates)
    if not args.quick:
        engine.show(alone, console)
        save(on_this_cpu("engine"), alone)
        draw(on_this_cpu("engine"), alone)
        arrangements.keep(arriving)
    noise = {key: alone[key] + arriving[key] for key in ("played_again", "not_clean")}
    result = {**head, "quick": args.quick, "tokens": tokens, **noise, "rows": rows_of(alone, arriving)}
    console.print(shown(result["rows"]))
    console.print(
        f"played again: {len(noise['played_again'])} rounds; not clean: {'; '.join(noise['not_clean']) or 'none'}"
    )
    console.print(f"written to {os.path.relpath(save(on_this_cpu('peers'), result))}")
    draw(on_this_cpu("peers"), result)
    problems = problems_of(result, arriving)
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

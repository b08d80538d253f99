"""Which arrangement of workers serves most on this machine: one pool for each phase, workers of both, or a hybrid.

    python -m bench.arrangements [--quick] [--plan] [--rates 1,2,3,4,6] [--repeats 3] [--peers openvino,vllm,llamacpp]
                                 [NAMES...]

The clusters and the load of bench.e2e (two cores, a Llama-shaped model of 124.7M parameters in bf16, prompts of 128 to
384 and outputs of 32 to 96 tokens, Poisson arrivals). In each repeat each arrangement is started, played at every rate
with the same requests, and stopped; the next repeat begins with another one. With --peers other servers take their
turns among them, on both cores (bench.peers installs them, once); they are started once, and stopped while others have
their turn. With --plan the machine is calibrated first, a worker of one thread for each phase and a mixed one of two;
what `kvrelay plan` picks for this load is played, too, from the cluster.yaml that it writes. A noisy run is played
again (bench/rounds.py). The table shows medians over repeats: the share of requests within TTFT 500 ms and TPOT 50 ms,
and from the rates that were played how many requests a second are served within them; a second one each other server's
latencies over ours, in the same repeats. Kept in bench/results/arrangements.json (or arrangements_amx.json: by the kind
of CPU) and drawn in docs/. Exit code 1 when a request failed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from rich.table import Table

from bench.common import MODELS, about, demo_model, on_this_cpu, save
from bench.e2e import (
    QUICK_SECONDS,
    SECONDS,
    SLOS_S,
    Run,
    cluster,
    console,
    load_of,
    median_of,
    play,
    problems_of,
    spec,
)
from bench.peers import rates as peer_rates
from bench.peers.install import PEERS, peer_names
from bench.peers.serve import Server, servers
from bench.plots import PICK, SHORT, draw
from bench.rounds import Replays, counted, noise_report, spread, told
from bench.verify_live import measure_profile
from engine.process import set_environment
from kvrelay.calibrate.effort import QUICK, USUAL, Effort
from kvrelay.plan import words
from kvrelay.plan.folder import save as save_plan
from kvrelay.plan.planning import make_plan
from kvrelay.plan.reading import build_request
from kvrelay.plan.request import RANDOM
from placement.latency.profile_file import write_profile
from placement.plan import to_json

RATES = (1.0, 2.0, 3.0, 4.0, 6.0)
CALIBRATED = ("1P1D, a core each", "one mixed, whole steps of 512")
COMPARED = (("ttft", "p50"), ("ttft", "p90"), ("tpot", "p50"), ("tpot", "p90"))
BOTH = {"role": "mixed", "kv_memory": "512MiB"}


def arrangements() -> dict[str, dict[str, Any]]:
    """What each has in its spec, by name. Those of several workers of both phases know the targets."""
    first, second = sorted(os.sched_getaffinity(0))[:2]
    halves = [BOTH | {"name": f"mixed-{i}", "threads": 1, "cpus": [core]} for i, core in enumerate((first, second))]
    whole = BOTH | {"threads": 2, "cpus": [first, second]}
    pair = spec(demo_model("125m"))
    router = pair.get("router", {})
    told = {"router": router | {"slo_ttft_ms": 500.0, "slo_tpot_ms": 50.0}}
    return {
        "1P1D, a core each": {"pools": pair["pools"]},
        "one mixed, whole steps of 512": {"pools": [whole | {"chunk_tokens": 512}]},
        "one mixed, chunks of 128": {"pools": [whole]},
        "two mixed, a core each, by load": {"pools": halves},
        "two mixed, a core each, as predicted": {"pools": halves} | told,
        "a prefill and a mixed worker, as predicted": {"pools": [pair["pools"][0], halves[1]]} | told,
    }


def planned(effort: Effort) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what the planner's pick has in its spec, what to keep of the plan), from measurements of this machine."""
    model, folder = demo_model("125m"), MODELS / "arrangements-plan"
    profiles = [MODELS / f"arrangements-profile-{number}.json" for number in range(len(CALIBRATED))]
    for name, path in zip(CALIBRATED, profiles, strict=True):
        console.print(f"[bold]{name}, calibrated")
        with cluster(spec(model) | arrangements()[name]) as served:
            write_profile(measure_profile(served, effort), path)
    lengths = {key: getattr(load_of(1.0, 1.0, 0), key) for key in RANDOM}
    targets = {key: f"{seconds}s" for key, seconds in SLOS_S.items()}
    asked = {"model": str(model), "profile": profiles, "num_gpus": len(os.sched_getaffinity(0)), **lengths, **targets}
    request = build_request(None, asked)
    plan = make_plan(request)
    save_plan(plan, request, folder)
    console.print(*words.answer(plan))
    written = yaml.safe_load((folder / "cluster.yaml").read_text())
    own = {key: value for key, value in written.items() if key not in ("name", "model")}
    kept = {"cluster": own, "goodput": {each.candidate.label: to_json(each.goodput) for each in plan.tried}}
    return own | {"router": spec(model)["router"] | written.get("router", {})}, kept


def measure(
    specs: Mapping[str, dict[str, Any]],
    peers: Mapping[str, Server],
    rates: Sequence[float],
    repeats: int,
    seconds: float,
) -> dict[str, list[Run]]:
    everyone = [*specs, *peers]
    runs: dict[str, list[Run]] = {name: [] for name in everyone}
    replays = Replays(repeats * len(rates) * len(everyone) // 3)
    for repeat in range(repeats):
        for name in [*everyone[repeat % len(everyone) :], *everyone[: repeat % len(everyone)]]:
            console.print(f"[bold]{name}")
            seed = 100 * repeat
            if name in peers:
                runs[name] += peer_rates.play(peers[name], rates, seconds, seed, replays)
                continue
            with cluster(spec(demo_model("125m")) | specs[name]) as served:
                runs[name] += [play(served, rate, seconds, seed + i, replays) for i, rate in enumerate(rates)]
    return runs


def ratios(runs: Mapping[str, Sequence[Run]], rates: Sequence[float]) -> list[dict[str, Any]]:
    """Of each other server's latencies to ours: for each arrangement and rate, over the repeats."""
    return [
        {
            "ours": name,
            "asked_per_s": rate,
            "ratio_to": {
                peer: {
                    f"{metric} {key}": _ratio(_at(runs[name], rate), _at(runs[peer], rate), metric, key)
                    for metric, key in COMPARED
                }
                for peer in PEERS
                if peer in runs
            },
        }
        for name in runs
        if name not in PEERS
        for rate in rates
    ]


def _at(runs: Sequence[Run], rate: float) -> list[Run]:
    return [one for one in runs if one["asked_per_s"] == rate]


def _ratio(ours: Sequence[Run], theirs: Sequence[Run], metric: str, key: str) -> dict[str, float]:
    """Over the repeats in which both were clean."""
    pairs = [
        {"noise": mine["noise"] or other["noise"], "pair": [one["latency_ms"][metric][key] for one in (mine, other)]}
        for mine, other in zip(ours, theirs, strict=True)
    ]
    return spread([(mine, other) for mine, other in (each["pair"] for each in counted(pairs))])


def goodput(rows: Sequence[dict[str, Any]], wanted: float = 0.9) -> float:
    """The rate at which so many are still within both targets: straight between the rates that were played."""
    best = 0.0
    for below, above in zip(rows, [*rows[1:], None], strict=True):
        if below["attainment"] < wanted:
            break
        best = below["asked_per_s"]
        if above is not None and above["attainment"] < wanted:
            share = (below["attainment"] - wanted) / (below["attainment"] - above["attainment"])
            best += share * (above["asked_per_s"] - best)
    return round(best, 2)


def shown(rows: dict[str, list[dict[str, Any]]], rates: Sequence[float]) -> Table:
    table = Table(title="Within TTFT 500 ms and TPOT 50 ms (TTFT P90 / TPOT P90 in ms)", title_justify="left")
    table.add_column("arrangement", no_wrap=True)
    for rate in rates:
        table.add_column(f"{rate:g}/s", justify="right")
    table.add_column("90% to", justify="right")
    for name, of_rates in rows.items():
        latency = [(row["latency_ms"]["ttft"]["p90"], row["latency_ms"]["tpot"]["p90"]) for row in of_rates]
        cells = [
            f"{row['attainment']:.0%} ({ttft:.0f}/{tpot:.0f})"
            for row, (ttft, tpot) in zip(of_rates, latency, strict=True)
        ]
        table.add_row(name, *cells, f"{goodput(of_rates):g}/s")
    return table


def shown_ratios(rows: Sequence[Mapping[str, Any]]) -> Table:
    title = "Each other server's latency over ours: median (least, most) of the repeats; above 1 ours is the shorter"
    table = Table(title=title, title_justify="left")
    peers = list(rows[0]["ratio_to"])
    for column in ("arrangement", "rate", "of", *(PEERS[name].title for name in peers)):
        table.add_column(column, justify="left" if column == "arrangement" else "right", no_wrap=True)
    for row in rows:
        for of in next(iter(row["ratio_to"].values())):
            cells = [told(row["ratio_to"][name][of]) for name in peers]
            table.add_row(SHORT.get(row["ours"], row["ours"]), f"{row['asked_per_s']:g}/s", of.upper(), *cells)
    return table


def run(
    specs: Mapping[str, dict[str, Any]],
    peers: Mapping[str, Server],
    rates: Sequence[float],
    repeats: int,
    seconds: float,
) -> dict[str, Any]:
    """What is written: of clusters of these specs and of other servers, at each rate."""
    head = about()
    runs = measure(specs, peers, rates, repeats, seconds)
    rows = {name: [median_of(_at(of_name, rate)) for rate in rates] for name, of_name in runs.items()}
    by_rate = {f"{name}, {rate:g}/s": _at(of_name, rate) for name, of_name in runs.items() for rate in rates}
    return {
        **head,
        "goodput": {name: goodput(of_name) for name, of_name in rows.items()},
        "rows": rows,
        "ratios": ratios(runs, rates) if peers else [],
        **noise_report(by_rate),
        "runs": runs,
    }


def keep(result: Mapping[str, Any]) -> None:
    name = on_this_cpu("arrangements")
    console.print(f"written to {os.path.relpath(save(name, result))}")
    draw(name, result)


def failures(result: Mapping[str, Any]) -> list[str]:
    return [
        f"{name}, {text}"
        for name, of_name in result["runs"].items()
        if name not in PEERS
        for one in of_name
        for text in problems_of(one)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.arrangements", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two rates, once, ten seconds each; writes no file")
    parser.add_argument(
        "--plan", action="store_true", help="calibrate and plan first, and play the planner's pick, too"
    )
    parser.add_argument("--rates", type=lambda text: tuple(map(float, text.split(","))), help="requests per second")
    parser.add_argument("--repeats", type=int, help="of each; default 3")
    parser.add_argument("--peers", type=peer_names, default=[], help=f"of {', '.join(PEERS)}")
    parser.add_argument("names", nargs="*", help="of the arrangements; all when none is given")
    args = parser.parse_args()
    rates = args.rates or ((1.0, 3.0) if args.quick else RATES)
    repeats = args.repeats or (1 if args.quick else 3)
    if unknown := set(args.names) - arrangements().keys():
        parser.error(f"{min(unknown)!r} is no arrangement; give some of {', '.join(map(repr, arrangements()))}")
    set_environment(2)  # other servers' threads wait as ours do; read when they start
    cores, seconds = sorted(os.sched_getaffinity(0))[:2], QUICK_SECONDS if args.quick else SECONDS
    specs = {name: asked for name, asked in arrangements().items() if name in args.names or not args.names}
    plan: dict[str, Any] = {}
    if args.plan:
        specs[PICK], plan["plan"] = planned(QUICK if args.quick else USUAL)
    with servers(args.peers, demo_model("125m"), cores, console.print) as peers:
        result = plan | run(specs, peers, rates, repeats, seconds)
    console.print(shown(result["rows"], rates))
    if peers:
        console.print(shown_ratios(result["ratios"]))
    if not args.quick:
        keep(result)
    problems = failures(result)
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

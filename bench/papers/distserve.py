"""DistServe beside us: its simulator's runs and searches, and what its paper published (tests/placement/papers/data).

    python -m bench.papers.distserve [--quick]

    runs        its simulator's attainment and P90 beside its rules here (the named variant), and beside the live
    policies
                on the same profile: they prefill at most 2,048 tokens in a step, hold KV in pages, and count TPOT
                between tokens
    searches    its placement searches: by its rules and its measure (300 requests, P90s apart), and the best pair in
    the
                long run, both targets together
    placements  Table 5 beside Algorithm 1's best degrees and the best pair within nodes, in the long run
    figures     goodput per GPU of Fig. 8 and 9: published, its rules over a burst of as many requests as its
    experiment,
                its rules in the long run, the live policies in the long run; the gain over colocation for each
    bursts      how goodput falls with the number of requests
Writes bench/results/paper_distserve.json.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from bench.common import REPO, RESULTS, about, save
from placement.build.from_offers import assemble, offers_of, pair_of
from placement.catalogs.base import Degrees
from placement.goodput.estimate import Effort
from placement.goodput.runner import Runner, open_runner
from placement.goodput.search import GoodputProblem, find_goodput
from placement.goodput.targets import Targets
from placement.papers.distserve.coefficients import DistServeCatalog, distserve_latency
from placement.papers.distserve.latency import Engine
from placement.papers.distserve.rules import DistServeCluster
from placement.plan import Slo
from placement.search.placements import find_pairs
from placement.search.problem import PlacementProblem, SearchLog
from placement.search.screening import screen_colocated, screen_phase, usable_offers
from placement.simulator.outcome import Outcome, percentiles
from placement.simulator.systems import System
from placement.workload.requests import Workload, read_request_list
from placement.workload.traffic import Traffic

DATA = REPO / "tests" / "placement" / "papers" / "data"
CASES = {case["id"]: case for case in json.loads((DATA / "distserve-cases.json").read_text())["cases"]}
DATASETS = {"sharegpt": "sharegpt_synth", "humaneval": "humaneval_synth", "longbench": "longbench_synth"}
SLOS = {  # of the paper's evaluation, s
    ("opt-13b", "sharegpt"): (0.25, 0.1),
    ("opt-66b", "sharegpt"): (2.5, 0.15),
    ("opt-66b", "humaneval"): (0.125, 0.2),
    ("opt-66b", "longbench"): (15.0, 0.15),
}
LONG = Effort(first_requests=4000, max_requests=24_000, half_width=0.01, decides=True)


def requests(dataset: str, count: int = 1000) -> Workload:
    return read_request_list(DATA / f"{DATASETS.get(dataset, dataset)}_N{count}.json")


def its_cluster(model: str, degrees: Sequence[int], engine: Engine = "distserve") -> DistServeCluster:
    tp, pp, decode_tp, decode_pp = degrees
    decode = distserve_latency(model, decode_tp, decode_pp, engine) if decode_tp else None
    return DistServeCluster(prefill=distserve_latency(model, tp, pp, engine), decode=decode)


def our_cluster(model: str, degrees: Sequence[int]) -> System:
    """The live policies on the same profile; KV passes in no time, as in its simulator."""
    catalog = DistServeCatalog(name=model, has_link=False)
    offer_of = offers_of(catalog)
    tp, pp, decode_tp, decode_pp = degrees
    prefill, decode = offer_of(Degrees(tp, pp), True), offer_of(Degrees(decode_tp, decode_pp), True)
    return assemble(pair_of((prefill, 1), (decode, 1), catalog.hardware), offer_of, within_node=True)


def gpus_of(degrees: Sequence[int]) -> int:
    return int(degrees[0] * degrees[1] + degrees[2] * degrees[3])


# runs


def shown(outcome: Outcome, slo_ms: Sequence[float]) -> dict[str, Any]:
    ttft_s, tpot_s = (slo / 1e3 for slo in slo_ms)
    return {
        "attainment_pct": round(100 * outcome.attainment(ttft_s, tpot_s), 1),
        "ttft_p90_ms": round(1e3 * percentiles(outcome.ttft_s, (90,))[0], 2),
        "tpot_p90_ms": round(1e3 * percentiles(outcome.tpot_s, (90,))[0], 2),
    }


def runs(runner: Runner) -> list[dict[str, Any]]:
    rows = []
    for case in CASES.values():
        if case["kind"] != "simdistserve run":
            continue
        workload = requests(case["dataset"], case["N"]).faster(case["rate_req_s"])
        degrees = case["tp_pp_prefill_tp_pp_decode"]
        its = its_cluster(case["model"], degrees, case["backend"]).play(workload)
        row = {
            "case": case["id"],
            "its_simulator": {
                "attainment_pct": case["attainment_pct"]["both"],
                "ttft_p90_ms": case["p50_p90_p99_ttft_ms"][1],
                "tpot_p90_ms": case["p50_p90_p99_tpot_ms"][1],
            },
            "its_rules_here": shown(its, case["slo_ms"]),
        }
        if case["backend"] == "distserve":
            row["live_policies"] = shown(our_cluster(case["model"], degrees).play(workload), case["slo_ms"])
        rows.append(row)
    return rows


# bursts, as its search measures


def burst_rate(system: System, workload: Workload, slo_s: Sequence[float], most: float, eps: float, gpus: int) -> float:
    """Its search: halve [0, most] per GPU while it is wider than eps; P90 of TTFT and of TPOT below their targets."""
    low, high = 0.0, most
    while high - low > eps:
        rate = (low + high) / 2
        outcome = system.play(workload.faster(rate * gpus))
        p90s = (percentiles(outcome.ttft_s, (90,))[0], percentiles(outcome.tpot_s, (90,))[0])
        if all(value < limit for value, limit in zip(p90s, slo_s, strict=True)):
            low = rate
        else:
            high = rate
    return low


def in_the_long_run(
    runner: Runner, systems: Mapping[str, tuple[System, int]], traffic: Traffic, slo: Slo
) -> dict[str, Any]:
    """Goodput per GPU of each system, with its interval."""
    problems = [
        GoodputProblem(system=system, traffic=traffic, targets=Targets(slo=slo), top=3.0 * gpus, effort=LONG)
        for system, gpus in systems.values()
    ]
    knees = runner.map(find_goodput, problems, "long runs")
    return {
        name: [round(value / gpus, 3) for value in (knee.goodput.value, knee.goodput.low, knee.goodput.high)]
        for (name, (_, gpus)), knee in zip(systems.items(), knees, strict=True)
    }


def searches(runner: Runner) -> list[dict[str, Any]]:
    rows = []
    for case in CASES.values():
        if case["kind"] != "simdistserve placement search":
            continue
        workload = requests("sharegpt", case["N"])
        slo_s = [limit / 1e3 for limit in case["attainment"][:2]]
        ours: dict[str, float] = {}
        for name in case["all"]:
            cross, tp, pp, decode_tp, decode_pp = json.loads(name.replace("(", "[").replace(")", "]"))
            degrees = (tp, pp * cross, decode_tp, decode_pp * cross)
            system = its_cluster(case["model"], degrees)
            most, eps = case["max_per_gpu_rate"], case["esp"]
            ours[name] = burst_rate(system, workload, slo_s, most, eps, gpus_of(degrees))
        best = max(ours, key=lambda name: ours[name])
        pairs = best_pairs(runner, case["model"], slo_s, "sharegpt", case["num_node"] * case["gpu_per_node"])
        rows.append(
            {
                "case": case["id"],
                "its_best": f"{tuple(case['best_config'])}",
                "its_best_per_gpu": case["best_per_gpu_rate"],
                "its_rules_here": best,
                "its_rules_here_per_gpu": ours[best],
                "configurations_alike": sum(ours[name] == rate for name, rate in case["all"].items()),
                "configurations": len(ours),
                "long_run_best_pair": pairs[0][0] if pairs else "none",
                "long_run_per_gpu": pairs[0][1] if pairs else 0.0,
            }
        )
    return rows


def problem_of(model: str, slo_s: Sequence[float], dataset: str) -> PlacementProblem:
    catalog = DistServeCatalog(name=model, has_link=False)
    return PlacementProblem(
        catalog=catalog,
        offer_of=offers_of(catalog),
        traffic=Traffic(source=requests(dataset)),
        targets=Targets(slo=Slo(ttft_s=slo_s[0], tpot_s=slo_s[1])),
        max_pp=2,
    )


def best_pairs(
    runner: Runner, model: str, slo_s: Sequence[float], dataset: str, max_gpus: int
) -> list[tuple[str, float]]:
    problem, log = problem_of(model, slo_s, dataset), SearchLog()
    offers = usable_offers(problem, max_gpus, log)
    prefills = screen_phase(problem, runner, "prefill", offers, log)
    decodes = screen_phase(problem, runner, "decode", offers, log)
    pairs = find_pairs(problem, runner, prefills, decodes, max_gpus, log)
    return [
        (placement.candidate.label, round(placement.promised / placement.candidate.gpus, 3)) for placement, _ in pairs
    ]


# the paper


def placements(runner: Runner) -> list[dict[str, Any]]:
    rows = []
    for model, dataset, prefill, decode in CASES["paper_table5"]["rows"]:
        row = {"model": model, "dataset": dataset, "published_prefill": prefill, "published_decode": decode}
        if model == "opt-175b":
            rows.append(row | {"ours": "DistServe published no coefficients of this model"})
            continue
        problem, log = problem_of(model, SLOS[model, dataset], dataset), SearchLog()
        offers = usable_offers(problem, 8, log)
        tables = {role: screen_phase(problem, runner, role, offers, log) for role in ("prefill", "decode")}
        pairs = find_pairs(problem, runner, tables["prefill"], tables["decode"], 8, log)
        colocated = screen_colocated(problem, runner, offers, log)
        for role, found in tables.items():
            row[f"algorithm_1_{role}"] = [[str(one.offer.degrees), round(one.per_gpu, 3)] for one in found[:4]]
        row["best_pairs"] = [
            [placement.candidate.label, round(placement.promised / placement.candidate.gpus, 3)]
            for placement, _ in pairs[:4]
        ]
        row["best_colocated_same_profile"] = [
            [one.unit.label, round(one.per_gpu, 3)] for one in colocated[:2] if one.unit is not None
        ]
        row["refused"] = dict(list(log.refused.items())[:4])
        rows.append(row)
    return rows


def figures(runner: Runner) -> list[dict[str, Any]]:
    rows = []
    for name in ("paper_13b", "paper_66b"):
        case = CASES[name]
        slo_s, model = (case["ttft_slo_s"], case["tpot_slo_s"]), case["model"].split("/")[1]
        degrees = case["placement_tp_pp_prefill_tp_pp_decode"]
        vllm = (*case["vllm_tp_pp"], 0, 0)
        its, colocated = its_cluster(model, degrees), its_cluster(model, vllm, "vllm")
        count = case["num_requests_per_gpu"]
        bursts = {
            "DistServe": burst_curve(its, gpus_of(degrees), count * gpus_of(degrees), case, slo_s),
            "vLLM": burst_curve(colocated, case["vllm_gpus"], count * case["vllm_gpus"], case, slo_s),
        }
        systems: dict[str, tuple[System, int]] = {
            "DistServe": (its, gpus_of(degrees)),
            "vLLM": (colocated, case["vllm_gpus"]),
            "live policies": (our_cluster(model, degrees), gpus_of(degrees)),
        }
        slo = Slo(ttft_s=slo_s[0], tpot_s=slo_s[1], attainment=case["attainment_goal_pct"] / 100)
        long = in_the_long_run(runner, systems, Traffic(source=requests("sharegpt")), slo)
        published = case["goodput_per_gpu_at_90pct"]
        rows.append(
            {
                "case": name,
                "published_per_gpu": {key: published[key] for key in ("DistServe", "vLLM")},
                "published_gain": round(published["DistServe"] / published["vLLM"], 2),
                "burst_attainment_pct": bursts,
                "published_attainment_pct": {key: case["attainment_pct"][key] for key in bursts},
                "per_gpu_rate": case["per_gpu_rate"],
                "burst_per_gpu": {key: read_off(case["per_gpu_rate"], curve) for key, curve in bursts.items()},
                "long_run_per_gpu": long,
                "long_run_gain": {
                    key: round(long[key][0] / long["vLLM"][0], 2) if long["vLLM"][0] else None
                    for key in ("DistServe", "live policies")
                },
            }
        )
    return rows


def burst_curve(system: System, gpus: int, count: int, case: Mapping[str, Any], slo_s: Sequence[float]) -> list[float]:
    """Attainment of both targets, over as many requests as the experiment had, at each of its rates."""
    workload = requests("sharegpt").first(count)
    return [
        round(100 * system.play(workload.faster(rate * gpus)).attainment(*slo_s), 1) for rate in case["per_gpu_rate"]
    ]


def read_off(rates: Sequence[float], attainment_pct: Sequence[float], wanted: float = 90.0) -> float:
    """Where the curve crosses 90%, by lines between its points, as the paper's plots are read."""
    last = 0.0
    for i, value in enumerate(attainment_pct):
        if value < wanted:
            if i == 0:
                return 0.0
            before = attainment_pct[i - 1]
            return round(rates[i - 1] + (rates[i] - rates[i - 1]) * (before - wanted) / (before - value), 3)
        last = rates[i]
    return last


def bursts(runner: Runner) -> list[dict[str, Any]]:
    case = CASES["n_sensitivity"]
    rows = []
    for name, known in case["rows"].items():
        model, degrees = json.loads(name.replace("(", "[").replace(")", "]").replace("'", '"'))
        model = model.split("/")[1]
        slo_s = [limit / 1e3 for limit in case["slo_ms"][model]]
        its, gpus = its_cluster(model, degrees), gpus_of(degrees)
        ours = {
            str(count): burst_rate(its, requests("sharegpt", count), slo_s, 6.0, 0.05, gpus) for count in (300, 1000)
        }
        systems: dict[str, tuple[System, int]] = {
            "its rules": (its, gpus),
            "live policies": (our_cluster(model, degrees), gpus),
        }
        slo = Slo(ttft_s=slo_s[0], tpot_s=slo_s[1])
        rows.append(
            {
                "placement": f"{model} {tuple(degrees)}",
                "known_per_gpu": {str(count): rate for count, rate in known},
                "its_rules_here_per_gpu": ours,
                "long_run_per_gpu": in_the_long_run(runner, systems, Traffic(source=requests("sharegpt")), slo),
            }
        )
    return rows


PARTS: dict[str, Callable[[Runner], list[dict[str, Any]]]] = {
    "runs": runs,
    "figures": figures,
    "bursts": bursts,
    "searches": searches,
    "placements": placements,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.papers.distserve", description="DistServe beside us.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; the others are kept")
    parser.add_argument("--quick", action="store_true", help="without the placements of Table 5")
    args = parser.parse_args()
    if unknown := [name for name in args.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]!r}; give some of {', '.join(PARTS)}")
    path = RESULTS / "paper_distserve.json"
    result = (json.loads(path.read_text()) if args.parts and path.exists() else {}) | about()
    with open_runner(None) as runner:
        for name in args.parts or [name for name in PARTS if not (args.quick and name == "placements")]:
            result[name] = PARTS[name](runner)
            print(name, json.dumps(result[name], indent=1), flush=True)
    print(f"saved to {save('paper_distserve', result).relative_to(REPO)}")


if __name__ == "__main__":
    main()

"""What a whole placement search costs: OPT-66B on 4 nodes of 8 GPUs, Llama-3.1-70B on 64 H100.

    python -m bench.placement_search [--quick]

OPT-66B by DistServe's coefficients and its ShareGPT-like lengths, pipelines of up to two stages, 25 Gbit/s between
nodes: both of its algorithms and colocation. Llama-3.1-70B by the roofline and the Azure conversation trace's lengths,
where the trace is at hand, else the same ShareGPT-like ones. CPU seconds of all processes together, without the
compiler's, which runs once for each change of the simulator. Wanted: under 60 and under 120.
Writes bench/results/placement_search.json.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

from bench.common import REPO, about, save
from placement.catalogs.base import Catalog
from placement.catalogs.roofline import open_catalog
from placement.compiled.build import compiled_folder
from placement.papers.distserve.coefficients import DistServeCatalog
from placement.plan import Kind, Plan, Slo
from placement.search.planner import plan
from placement.search.question import PlanQuestion
from placement.workload.requests import Workload, from_trace, read_request_list

SHAREGPT = REPO / "tests" / "placement" / "papers" / "data" / "sharegpt_synth_N1000.json"
TRACES = (REPO / "configs" / "workloads", REPO.parent / "shared" / "data" / "azure")


def azure(kind: str) -> Workload | None:
    """The trace of this kind, `conv` or `code`, where it is at hand."""
    for folder in TRACES:
        for path in sorted(folder.glob(f"*{kind}*.csv")) if folder.is_dir() else ():
            return from_trace(path)
    return None


def trace(kind: str) -> Workload:
    """The same, or the end of the benchmark."""
    if found := azure(kind):
        return found
    raise SystemExit(f"no trace of Azure's {kind} is here; looked in {', '.join(map(str, TRACES))}")


def searched(name: str, catalog: Catalog, workload: Workload, ask: PlanQuestion, wanted_s: float) -> dict[str, Any]:
    print(f"{name}:", flush=True)
    began_s = time.monotonic()
    found = plan(ask, catalog, workload, on_progress=_told())
    row = {
        "search": name,
        "workload": workload.name,
        "latency": found.sources["latency"],
        "ttft_s": ask.slo.ttft_s,
        "tpot_s": ask.slo.tpot_s,
        "cpu_s": round(found.cpu_s, 1),
        "wanted_cpu_s": wanted_s,
        "wall_s": round(time.monotonic() - began_s, 1),
        "simulated_requests": found.num_simulated,
        "candidates": len(found.tried),
        "chosen": found.chosen.candidate.label,
        "goodput": [
            round(v, 3) for v in (found.chosen.goodput.value, found.chosen.goodput.low, found.chosen.goodput.high)
        ],
        "per_gpu": round(found.chosen.per_gpu, 4),
        "best_two_pools": _best(found, "two pools"),
        "best_colocated": _best(found, "one pool"),
        "advice": list(found.advice),
    }
    print(
        f"  {row['cpu_s']} CPU-s (wanted {wanted_s:g}), {row['wall_s']} s: {row['chosen']}, {row['goodput']}",
        flush=True,
    )
    return row


def _best(found: Plan, kind: Kind) -> str:
    for one in found.tried:
        if one.candidate.kind == kind:
            return f"{one.candidate.label}: {one.goodput} requests/s, {one.per_gpu:.3f} per GPU"
    return "none keeps the targets"


def _told() -> Callable[[str, int, int], None]:
    last = [""]

    def say(what: str, done: int, total: int) -> None:
        if what != last[0]:
            print(f"  {what}: {total}", flush=True)
            last[0] = what

    return say


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.placement_search", description="What a search costs.")
    parser.add_argument("--quick", action="store_true", help="a fifth of the requests")
    thoroughness = 0.2 if parser.parse_args().quick else 1.0
    compiled_folder()
    opt = PlanQuestion(slo=Slo(ttft_s=2.5, tpot_s=0.15), num_gpus=32, max_pp=2, thoroughness=thoroughness)
    llama = PlanQuestion(slo=Slo(ttft_s=1.0, tpot_s=0.05), num_gpus=64, thoroughness=thoroughness)
    conversation = azure("conv") or read_request_list(SHAREGPT)
    result = about()
    result["rows"] = [
        searched("OPT-66B on 4 x 8 A100", DistServeCatalog(name="opt_66b"), read_request_list(SHAREGPT), opt, 60),
        searched("Llama-3.1-70B on 64 H100", open_catalog("llama-3.1-70b", "h100-sxm"), conversation, llama, 120),
    ]
    print(f"saved to {save('placement_search', result).relative_to(REPO)}")


if __name__ == "__main__":
    main()

"""What a client sees: `kvrelay up` with one prefill and one decode worker on a core each, played at rising rates.

    python -m bench.e2e [--quick] [--rates 1,2,3,4,6,8] [--repeats 3]

A real cluster (Ray, processes, gRPC) serves a 124.7M Llama-shaped model in bf16; what `kvrelay bench` runs is run
against it: prompts of 128 to 384 and outputs of 32 to 96 tokens, Poisson arrivals. Router and load generator share the
workers' cores where there are no others. Each rate is repeated with other prompts; the table shows the medians. Beside
latencies each run keeps the CPU seconds of each process and how many cores other work took meanwhile, on this machine
and on others of its host. A noisy run is played again with other prompts (bench/rounds.py); a rate's row is made of its
clean runs if it has any (`clean_runs`). Runs are kept in bench/results/e2e.json. Exit code 1 when a request failed, KV
was damaged, or a token was computed twice.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import yaml
from rich.console import Console
from rich.table import Table

from bench.common import REPO, CpuWatch, about, demo_model, other_cores, save
from bench.rounds import Replays, counted, noise_report
from kvrelay.bench.metrics import METRICS, Outcome, summarise
from kvrelay.bench.options import PlayOptions, WorkloadOptions
from kvrelay.bench.run import run

RATES = (1.0, 2.0, 3.0, 4.0, 6.0, 8.0)
SECONDS, QUICK_SECONDS = 30.0, 10.0  # of arrivals at each rate
LEAST_REQUESTS = 40
WARMUPS = 6
SLOS_S = {"ttft": 0.5, "tpot": 0.05}
AGAIN_SEED = 10**6  # apart: the same lengths and times with other prompts, which no prefix cache holds
PERCENTILES = (50.0, 90.0, 99.0)
QUANTILES = tuple(f"p{p:g}" for p in PERCENTILES)
READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
WIDTH = 136  # of the tables, where the terminal is narrower or none

Run = dict[str, Any]
console = Console(width=max(WIDTH, Console().width))


def spec(model: Path) -> dict[str, Any]:
    """One worker of each kind, a core each, one thread each."""
    cores = sorted(os.sched_getaffinity(0))
    pools: list[dict[str, Any]] = [
        {"role": role, "threads": 1, "kv_memory": "512MiB"} for role in ("prefill", "decode")
    ]
    if len(cores) > 1:
        pools = [pool | {"cpus": [core]} for pool, core in zip(pools, cores, strict=False)]
    return {
        "name": f"bench-{os.getpid()}",
        "model": str(model),
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "router": {"port": 0},
        "pools": pools,
    }


class Cluster:
    """A running `kvrelay up`: its endpoint, seconds to ready, and the processes of each part."""

    def __init__(self, process: subprocess.Popen[str], ready: Mapping[str, Any]) -> None:
        self.endpoint: str = ready["endpoints"][0]
        self.ready_s: float = ready["ready_s"]
        self._process = process
        self._members = {member["name"]: int(member["pid"]) for member in ready["members"]}

    def parts(self) -> dict[str, list[int]]:
        members = set(self._members.values())
        tree = [self._process.pid, *(child.pid for child in psutil.Process(self._process.pid).children(recursive=True))]
        parts = {name: [pid] for name, pid in self._members.items()}
        return parts | {"ray and up": [pid for pid in tree if pid not in members], "client": [os.getpid()]}


@contextlib.contextmanager
def cluster(wanted: Mapping[str, Any], checkout: Path = REPO) -> Iterator[Cluster]:
    """By the version in that folder."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "cluster.yaml"
        path.write_text(yaml.safe_dump(dict(wanted)))
        command = [sys.executable, "-m", "kvrelay.cli.main", "up", str(path), "--json"]
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": str(checkout)},
        )
        try:
            yield Cluster(process, _wait_ready(process))
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(STOP_TIMEOUT_S)


def _wait_ready(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The last line that `kvrelay up --json` prints before it serves."""
    assert process.stdout is not None
    watchdog = _kill_after(process, READY_TIMEOUT_S)
    for line in process.stdout:
        said = json.loads(line)
        if "endpoints" in said:
            watchdog.cancel()
            return dict(said)
        if "error" in said:
            raise SystemExit(f"kvrelay up failed: {said['error']['message']}")
    raise SystemExit("kvrelay up ended before it was ready")


def _kill_after(process: subprocess.Popen[str], timeout_s: float) -> threading.Timer:
    timer = threading.Timer(timeout_s, process.terminate)
    timer.daemon = True
    timer.start()
    return timer


def load_of(rate: float, seconds: float, seed: int) -> WorkloadOptions:
    return WorkloadOptions(
        num_prompts=max(LEAST_REQUESTS, round(rate * seconds)),
        request_rate=rate,
        random_input_len=256,
        random_output_len=64,
        random_range_ratio=0.5,
        seed=seed,
    )


def playing(seed: int, attempt: int) -> PlayOptions:
    return PlayOptions(num_warmups=WARMUPS, prompt_seed=seed + AGAIN_SEED * attempt)


async def play_rate(served: Cluster, rate: float, seconds: float, seed: int, attempt: int = 0) -> Run:
    """One run at one rate; the CPU is watched from the first request, after the warm-ups, to the last end."""
    options = load_of(rate, seconds, seed)
    cpu = CpuWatch(served.parts)
    used: dict[str, Any] = {}

    @contextlib.contextmanager
    def watch(total: int) -> Iterator[Callable[[Outcome], None]]:
        cpu.begin()
        yield lambda outcome: None
        used.update(cpu.end())

    _, outcomes, duration_s = await run(served.endpoint, options, playing(seed, attempt), watch=watch)
    return {"asked_per_s": rate, "seed": seed, **summary_of(outcomes, duration_s), **used}


def summary_of(outcomes: Sequence[Outcome], duration_s: float) -> dict[str, Any]:
    return summarise(outcomes, duration_s, SLOS_S, tuple(METRICS), PERCENTILES)


def problems_of(result: Run) -> list[str]:
    handoff = result["handoff"]
    found = {
        f"{result['failed']} requests failed: {result['errors']}": result["failed"],
        f"{handoff['receipts_unchecked']} receipts are unchecked": handoff["receipts_unchecked"],
        f"{handoff['recomputed_tokens']} tokens were computed twice": handoff["recomputed_tokens"],
        f"{result['cached_input_tokens']} prompt tokens came from a cache": result["cached_input_tokens"],
        f"{handoff['without_handoff']} requests came without a handoff": handoff["without_handoff"],
    }
    return [f"at {result['asked_per_s']:g}/s: {text}" for text, count in found.items() if count]


def median_of(runs: Sequence[Run]) -> dict[str, Any]:
    """One row: the median of each figure over the clean runs of one rate, over all if none was clean."""
    runs = counted(runs)
    latency = {metric: _medians([one["latency_ms"][metric] for one in runs], QUANTILES) for metric in METRICS}
    figures = ("request_throughput", "output_throughput", "attainment", "other_cores", "stolen_cores")
    per_request = [{part: 1e3 * used / one["requests"] for part, used in one["cpu_s"].items()} for one in runs]
    return {
        "asked_per_s": runs[0]["asked_per_s"],
        "runs": len(runs),
        "clean_runs": sum(not one["noise"] for one in runs),
        "requests_per_run": runs[0]["requests"],
        **_medians(runs, figures),
        "holds": all(latency[metric]["p90"] <= 1e3 * limit_s for metric, limit_s in SLOS_S.items()),
        "latency_ms": latency,
        "handoff": _medians([one["handoff"] for one in runs], ("gb_per_s",)),
        "handoff_exposed_ms": _medians([one["handoff"]["exposed_ms"] for one in runs], QUANTILES),
        "phases_ms": _medians([one["phases_ms"] for one in runs]),
        "cpu_ms_per_request": _medians(per_request),
    }


def _medians(figures: Sequence[Mapping[str, Any]], names: Iterable[str] = ()) -> dict[str, float]:
    """Of each name; of all that the first has when none is given. What was not measured counts as 0."""
    return {name: round(statistics.median(one.get(name) or 0.0 for one in figures), 4) for name in names or figures[0]}


def held_rate(rows: Sequence[Mapping[str, Any]]) -> float:
    """The highest rate that was held with every lower one; 0 if none."""
    held = 0.0
    for row in sorted(rows, key=lambda row: row["asked_per_s"]):
        if not row["holds"]:
            break
        held = row["asked_per_s"]
    return held


def latency_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(title="End to end: prompts 128-384, outputs 32-96, Poisson; P50/P90/P99 in ms", title_justify="left")
    for name in ("server", "asked, served /s", "TTFT", "TPOT", "within 500/50", "other cores"):
        table.add_column(name, justify="left" if name == "server" else "right", no_wrap=True)
    for row in rows:
        ttft, tpot = (tuple(row["latency_ms"][name].values()) for name in ("ttft", "tpot"))
        table.add_row(
            "kvrelay 1P1D, a core each",
            f"{row['asked_per_s']:g}, {row['request_throughput']:.2f}",
            _slashed(ttft),
            _slashed(tpot),
            f"{row['attainment']:.0%}",
            f"{row['other_cores']:.2f}",
        )
    return table


def cost_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    parts = list(rows[0]["cpu_ms_per_request"])
    table = Table(title="CPU for each request (ms), and the handoff", title_justify="left")
    for name in ("asked /s", *parts, "GB/s", "exposed P50/P90/P99 (ms)"):
        table.add_column(name, justify="right")
    for row in rows:
        cpu = [f"{row['cpu_ms_per_request'][part]:.1f}" for part in parts]
        exposed = _slashed(tuple(row["handoff_exposed_ms"].values()), digits=1)
        table.add_row(f"{row['asked_per_s']:g}", *cpu, f"{row['handoff']['gb_per_s']:.2f}", exposed)
    return table


def _slashed(values: Sequence[float], digits: int = 0) -> str:
    return "/".join(f"{value:.{digits}f}" for value in values)


def measure(rates: Sequence[float], repeats: int, seconds: float) -> tuple[list[Run], float]:
    replays = Replays(repeats * len(rates))
    with cluster(spec(demo_model("125m"))) as served:
        runs = [play(served, rate, seconds, index, replays) for index, rate in enumerate([*rates] * repeats)]
        return runs, served.ready_s


def play(served: Cluster, rate: float, seconds: float, seed: int, replays: Replays) -> Run:
    """`seed`: another one each time, so that no prompt is in a prefix cache."""
    return replays.clean(lambda attempt: noted(lambda: asyncio.run(play_rate(served, rate, seconds, seed, attempt))))


def noted(run_once: Callable[[], Run]) -> Run:
    """How busy the machine was before, too; printed."""
    before = {"busy_cores_before": round(other_cores(1.0), 3), "load_average_before": os.getloadavg()[0]}
    result = {**before, **run_once()}
    _say(result)
    return result


def _say(one: Run) -> None:
    ttft, tpot = one["latency_ms"]["ttft"], one["latency_ms"]["tpot"]
    console.print(
        f"{one['asked_per_s']:g}/s: served {one['request_throughput']:.2f}, TTFT P90 {ttft['p90']:.0f} ms, "
        f"TPOT P90 {tpot['p90']:.1f} ms, other work {one['other_cores']:.2f} cores, stolen {one['stolen_cores']:.2f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.e2e", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="two rates, once, ten seconds each; writes no file")
    parser.add_argument("--rates", type=lambda text: tuple(map(float, text.split(","))), help="requests per second")
    parser.add_argument("--repeats", type=int, help="runs of each rate; default 3")
    args = parser.parse_args()
    rates = args.rates or ((1.0, 3.0) if args.quick else RATES)
    repeats = args.repeats or (1 if args.quick else 3)

    head = about()
    runs, ready_s = measure(rates, repeats, QUICK_SECONDS if args.quick else SECONDS)
    rows = [median_of([one for one in runs if one["asked_per_s"] == rate]) for rate in rates]
    held = held_rate(rows)
    console.print(latency_table(rows), cost_table(rows))
    console.print(f"TTFT P90 under 500 ms and TPOT P90 under 50 ms held to {held:g} requests/s")
    noise = noise_report({f"{rate:g}/s": [one for one in runs if one["asked_per_s"] == rate] for rate in rates})
    result = {**head, "ready_s": ready_s, "held_per_s": held, **noise, "rows": rows, "runs": runs}
    if not args.quick:
        console.print(f"written to {os.path.relpath(save('e2e', result))}")
    problems = [problem for one in runs for problem in problems_of(one)]
    for problem in problems:
        console.print(f"[red]{problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())

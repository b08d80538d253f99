"""`python -m bench [NAMES...] [--quick]`: run benchmarks one after another, each in a process of its own.

A benchmark is a module under this folder that runs by itself (`python -m bench.NAME`), takes --quick and writes a file
of bench/results. One that fails does not stop the others; the exit code says how many failed. At the end the pictures
of docs/plots are drawn again (bench/plots.py).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

from bench.common import REPO, RESULTS
from bench.plots import PLOTS, redraw

NAMES = (
    "engine",
    "handoff",
    "router",
    "http",
    "page",
    "flood",
    "guards",
    "e2e",
    "arrangements",
    "startup",
    "newcomer",
    "simulator",
    "roofline",
    "closed_loops",
    "static_batches",
    "papers.splitwise",
    "placement_search",
    "hybrids",
    "placements",
    "models",
    "structured",
    "speculation",
    "int8",
    "adapters",
    "states",
    "kv_int8",
    "kept_kv",
    "degrees",
    "families",
    "fairness",
    "accounts",
    "accounts.cost",
    "papers.distserve",
    "verify_live",
    "coverage",
    "protocol",
    "fuzz",
    "chaos",
)


def run(name: str, quick: bool) -> bool:
    print(f"\n{name}: python -m bench.{name}{' --quick' if quick else ''}", flush=True)
    began_s = time.monotonic()
    done = subprocess.run([sys.executable, "-m", f"bench.{name}", *(["--quick"] if quick else [])], cwd=REPO)
    print(f"{name}: {'done' if done.returncode == 0 else 'FAILED'} in {time.monotonic() - began_s:.0f} s", flush=True)
    return done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description="Run kvrelay's benchmarks.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all when none is given")
    parser.add_argument("--quick", action="store_true", help="a look that takes minutes; figures are rough")
    args = parser.parse_args()
    if unknown := [name for name in args.names if name not in NAMES]:
        parser.error(f"there is no benchmark {unknown[0]!r}; give some of {', '.join(NAMES)}")
    failed = [name for name in args.names or NAMES if not run(name, args.quick)]
    if not args.quick:
        redraw(PLOTS)
    print(f"\nresults are in {RESULTS.relative_to(REPO)}" + (f"; failed: {', '.join(failed)}" if failed else ""))
    return len(failed)


if __name__ == "__main__":
    raise SystemExit(main())

"""Messes at every door for as long as one likes: gRPC services, spec, trace and model files.

    python -m bench.fuzz [--minutes M] [--seed N] [--quick]

tests/fuzz says what is tried and what counts as clear. Each door gets an equal share of the time; what is unclear is
told by its seed, belongs into tests/fuzz/corpus.json and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from bench.common import about, save
from cluster.deploy.local import LocalCluster
from tests.fuzz.doors import FILES, SERVICES, Doors, Unclear, play
from tests.fuzz.models import model_dir
from tests.serving.harness import ENGINE, ROUTER, WORKER
from tests.zoo import make_tiny_model

ROUND = 50  # seeds of a service between two checks of the cluster
Findings = list[tuple[int, str]]


def files(read: Callable[[int], str], seed: int, until_s: float, outcomes: Counter[str]) -> Findings:
    unclear: Findings = []
    while time.monotonic() < until_s:
        try:
            outcomes[read(seed)] += 1
        except Unclear as error:
            unclear.append((seed, str(error)))
        seed += 1
    return unclear


async def services(model: Path, seed: int, each_s: float, tell: Callable[[str, Counter[str], Findings], None]) -> None:
    async with LocalCluster(str(model), engine=ENGINE, worker=WORKER, router=ROUTER) as cluster:
        doors = Doors(cluster)
        for name in SERVICES:
            outcomes: Counter[str] = Counter()
            unclear: Findings = []
            until_s, first = time.monotonic() + each_s, seed
            while time.monotonic() < until_s:
                unclear += await play(doors, name, range(first, first + ROUND), outcomes)
                await doors.check()
                first += ROUND
            tell(name, outcomes, unclear)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="in all (default: 60)")
    parser.add_argument("--seed", type=int, default=10_000, help="of each door's first case (default: 10000)")
    parser.add_argument("--quick", action="store_true", help="a minute and a half")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # what is refused is logged
    minutes = 1.5 if args.quick else args.minutes
    each_s = 60 * minutes / (len(FILES) + len(SERVICES) + 1)
    rows: dict[str, object] = {}
    num_unclear = 0

    def tell(name: str, outcomes: Counter[str], unclear: Findings) -> None:
        nonlocal num_unclear
        num_unclear += len(unclear)
        rows[name] = {"cases": outcomes.total() + len(unclear), "outcomes": dict(outcomes), "unclear": unclear[:20]}
        print(f"{name:9}{outcomes.total():9}  {dict(outcomes.most_common())}  unclear: {len(unclear)}", flush=True)
        for seed, why in unclear[:5]:
            print(f"          seed {seed}: {why}")

    with TemporaryDirectory() as folder:
        model = make_tiny_model("llama", Path(folder) / "model")
        for name, read in (*FILES.items(), ("model", lambda seed: model_dir(model, seed))):
            outcomes: Counter[str] = Counter()
            tell(name, outcomes, files(read, args.seed, time.monotonic() + each_s, outcomes))
        asyncio.run(services(model, args.seed, each_s, tell))
    save("fuzz-quick" if args.quick else "fuzz", {**about(), "minutes": minutes, "doors": rows})
    return 1 if num_unclear else 0


if __name__ == "__main__":
    sys.exit(main())

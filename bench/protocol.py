"""The protocol of requests, handoffs and leases by its real objects, in every order, with every fault.

    python -m bench.protocol [--quick] [--minutes M] [--most M] [--walks N] [--jobs J] [NAMES...]

tests/protocol says what is real there and what must hold. SMALL settings are explored to the end: `left` is 0 then. Of
one that does not end in its time, all is explored that turns from the first choice fewer than `turns` times (with
every fault at every place), and a part of what turns so often; `left` histories are known and not followed. Then come
`walks` by chance, each from the beginning to the end, with every kind of fault and one more of them. The result is kept
after each setting, beside what was kept of settings that are not run, with the commit of those.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from functools import partial
from multiprocessing import get_context
from typing import Any

from bench.common import RESULTS, about, save
from tests.protocol.explore import Broken, Explored, Explorer, walk
from tests.protocol.faults import KINDS
from tests.protocol.setting import Setting

PAIR = ("expire", "fail", "cancel", "deadline", "cut", "kill", "sever")
CROWD = Setting(prompts=(4, 4, 8), decode_pages=4, arrivals=True, reports=True, options={"overcommit": 2.0})
MOVES = Setting(prompts=(3,), decode=2, max_tokens=6, reports=True, faults=("drain",))
ONE_PAIR = Setting(prompts=(3,), max_tokens=2, options={"max_attempts": 2})
SMALL = {
    "one pair": ONE_PAIR,
    **{f"one pair, {fault}": replace(ONE_PAIR, faults=(fault,)) for fault in PAIR},
    "one pair, two of fail": replace(ONE_PAIR, faults=("fail",), num_faults=2),
    "one pair, router": replace(ONE_PAIR, faults=("router",), sends_again=False),
    "one pair, two of cut and fail": replace(ONE_PAIR, faults=("cut", "fail"), num_faults=2),
}
LARGE = {
    "one pair, router, and sent again": replace(ONE_PAIR, faults=("router",)),
    "a move": MOVES,
    "a move, and cut, fail, cancel or kill": replace(
        MOVES, faults=("drain", "cut", "fail", "cancel", "kill"), num_faults=2
    ),
    "two move": replace(MOVES, prompts=(3, 5), num_faults=2),
    "one pair, a longer answer, cut": Setting(faults=("cut",)),
    "two and two, two of all": Setting(prefill=2, decode=2, faults=PAIR, num_faults=2),
    "two requests, pages for one": Setting(prompts=(4, 4), decode_pages=2, options={"overcommit": 2.0}),
    "two requests, one is preempted": Setting(prompts=(4, 4), decode_pages=3),
    "two requests, one prefix": Setting(prompts=(5, 9), prefix_cache=True, arrivals=True, faults=("cancel", "kill")),
    "three requests in few pages": CROWD,
    "a poison at prefill": Setting(prompts=(4, 5), poison=(0, "prefill")),
    "a poison at decode": Setting(prompts=(4, 5), poison=(0, "decode")),
    "a poison in a crowd": replace(CROWD, prefill=2, decode=2, poison=(1, "decode"), prefix_cache=True),
}
SETTINGS = SMALL | LARGE
QUICK = ("one pair", "one pair, cancel", "a poison at decode")


def explored_in(setting: Setting, minutes: float, num_walks: int) -> dict[str, Any]:
    logging.disable(logging.CRITICAL)  # faults are told at every one of them
    gc.freeze()
    gc.set_threshold(100_000)  # worlds are what there is to collect, many of them
    began_s = time.perf_counter()

    def is_enough(_: Explored) -> bool:
        return time.perf_counter() > began_s + 60 * minutes

    try:
        explored = Explorer(setting).explore(is_enough)
        num_walks *= explored.left > 0
        _walk(setting, num_walks)
    except Broken as error:
        return {"broken": str(error), "seconds": round(time.perf_counter() - began_s, 1)}
    return {**asdict(explored), "walks": num_walks, "seconds": round(time.perf_counter() - began_s, 1)}


def _walk(setting: Setting, num_walks: int) -> None:
    options = {key: value for key, value in setting.options.items() if key != "max_attempts"}
    wild = replace(setting, faults=tuple(KINDS), num_faults=setting.num_faults + 1, options=options)
    for seed in range(num_walks):
        walk(wild, seed)


def rows(minutes: dict[str, float], num_walks: int, jobs: int) -> Iterator[tuple[str, dict[str, Any]]]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        work = partial(explored_in, num_walks=num_walks)
        yield from zip(minutes, pool.map(work, map(SETTINGS.__getitem__, minutes), minutes.values()), strict=True)


def _kept(result: str) -> dict[str, dict[str, Any]]:
    """Rows of the last result, each with its commit."""
    try:
        last = json.loads((RESULTS / f"{result}.json").read_text())
    except OSError:
        return {}
    return {name: {"commit": last["commit"], **row} for name, row in last["settings"].items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.protocol", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small settings only")
    parser.add_argument("--minutes", type=float, default=1.0, help="for each large setting (default: 1)")
    parser.add_argument("--most", type=float, default=30.0, help="minutes for each small setting (default: 30)")
    parser.add_argument("--walks", type=int, default=500, help="of each that has not ended (default: 500)")
    parser.add_argument("--jobs", type=int, default=2, help="settings at a time (default: 2)")
    parser.add_argument("names", nargs="*", choices=[[], *SETTINGS], help="of settings; all when none is given")
    args = parser.parse_args()
    names = args.names or (QUICK if args.quick else SETTINGS)
    minutes = {name: args.most if name in SMALL else args.minutes for name in names}
    columns = ("states", "histories", "longest", "turns", "left", "walks", "seconds")
    print(f"{'setting':34}" + "".join(f"{column:>10}" for column in columns))
    head, result = about(), "protocol-quick" if args.quick else "protocol"
    kept, settings = _kept(result), {}
    for name, row in rows(minutes, args.walks, args.jobs):
        settings[name] = row
        known = {**kept, **settings}
        save(result, {**head, "settings": {each: known[each] for each in SETTINGS if each in known}})
        print(f"{name:34}" + "".join(f"{row.get(column, 'broken'):>10}" for column in columns), flush=True)
    if broken := [f"{name}: {row['broken']}" for name, row in settings.items() if "broken" in row]:
        raise SystemExit("\n".join(broken))


if __name__ == "__main__":
    main()

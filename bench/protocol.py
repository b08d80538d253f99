"""Every state of the protocol: requests, handoffs and leases by their real objects, in every order, with every fault.

    python -m bench.protocol [--quick] [--minutes M]

tests/protocol says what is real there and what must hold. A setting that does not end in its time says how far it came.
"""

from __future__ import annotations

import argparse
import logging
import time
from dataclasses import asdict

from bench.common import about, save
from tests.protocol.explore import Explored, explore
from tests.protocol.world import Setting

SETTINGS = {
    "one pair": Setting(),
    **{f"one pair, {fault}": Setting(faults=(fault,)) for fault in ("cancel", "cut", "expire", "sever", "kill")},
    "one pair, prefix cache, kill": Setting(faults=("kill",), prefix_cache=True),
    "two decode workers, kill": Setting(decode=2, faults=("kill",)),
    "two prefill workers, kill": Setting(prefill=2, faults=("kill",)),
    "two decode workers, cut or expire": Setting(decode=2, faults=("cut", "expire")),
    "one pair, two of all": Setting(faults=("kill", "cut", "sever", "cancel", "expire"), num_faults=2),
}
QUICK = ("one pair", "one pair, cancel", "one pair, expire")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.protocol", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="small settings only")
    parser.add_argument("--minutes", type=float, default=10.0, help="for each setting (default: 10)")
    args = parser.parse_args()
    logging.disable(logging.CRITICAL)  # faults are told at every one of them
    rows = {}
    print(f"{'setting':36}{'states':>9}{'histories':>11}{'longest':>9}{'left':>8}{'s':>7}")
    for name, setting in SETTINGS.items():
        if args.quick and name not in QUICK:
            continue
        began_s = time.perf_counter()
        until_s = began_s + 60 * args.minutes

        def is_enough(_: Explored, until_s: float = until_s) -> bool:
            return time.perf_counter() > until_s

        explored = explore(setting, is_enough)
        took_s = time.perf_counter() - began_s
        rows[name] = {**asdict(explored), "seconds": round(took_s, 1)}
        print(f"{name:36}{explored.states:9}{explored.histories:11}{explored.longest:9}{explored.left:8}{took_s:7.0f}")
    save("protocol-quick" if args.quick else "protocol", {**about(), "settings": rows})


if __name__ == "__main__":
    main()

"""What a handoff costs more where workers' pages are divided among ranks: the copy between every pair of degrees.

    python -m bench.degrees [--tokens N]

As shared_memory does it, in this process: the pages of a prompt go from a sender's shares into a receiver's, in turns
with the plain copy between two workers of one process each, to which the ratio is. With checksums (of whole pages, so
that tokens are put together on the way) and without. Writes bench/results/degrees.json.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import about, save
from bench.handoff import MODELS, layout_of, segments_of
from engine.pages.memory import KvMemory, ShareBytes
from engine.pages.share import Share
from kv_transfer.checksum import RunningDigest

DEGREES = ((1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2))  # sender's and receiver's
ROUNDS = 9


def memory_of(model: str, num_tokens: int, size: int) -> KvMemory:
    """As the leader of `size` ranks has it."""
    layout = layout_of(model, num_tokens)
    first, *others = (KvMemory(layout, share=Share(rank, size)) for rank in range(size))
    opened = [ShareBytes(share=each.share, num_bytes=len(each.bytes), fd=os.dup(each.fd or -1)) for each in others]
    memory = KvMemory(layout, fd=os.dup(first.fd or -1), share=first.share, others=opened)
    nbytes = layout.page_bytes() * layout.num_pages
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    memory.rows.scatter(range(layout.num_layers), range(layout.num_pages), data)
    return memory


def seconds_of(source: KvMemory, target: KvMemory, order: Sequence[int], is_checked: bool) -> float:
    segments = segments_of(source.layout, order)
    began_s = time.perf_counter()
    for segment in segments:
        digest = RunningDigest()
        seen = digest.see if is_checked else None
        target.rows.copy_from(source.rows, segment.layers, segment.src_pages, segment.dst_pages, seen)
    return time.perf_counter() - began_s


def bench(model: str, num_tokens: int) -> list[dict[str, Any]]:
    memories = {size: [memory_of(model, num_tokens, size) for _ in range(2)] for size in (1, 2, 4)}
    layout = memories[1][0].layout
    orders = {"consecutive": list(range(layout.num_pages)), "scattered": list(range(layout.num_pages))}
    random.Random(0).shuffle(orders["scattered"])
    nbytes, rows = layout.page_bytes() * layout.num_pages, []
    for order, is_checked in ((order, checked) for order in orders for checked in (True, False)):
        taken: dict[tuple[int, int], list[float]] = {pair: [] for pair in DEGREES}
        for _ in range(ROUNDS):
            for ours, theirs in DEGREES:
                pair = memories[ours][0], memories[theirs][1]
                taken[ours, theirs].append(seconds_of(*pair, orders[order], is_checked))
        plain_s = statistics.median(taken[1, 1])
        for (ours, theirs), each in taken.items():
            median_s = statistics.median(each)
            rows.append(
                {
                    "degrees": f"{ours}-{theirs}",
                    "pages": order,
                    "checksums": is_checked,
                    "gbytes_per_s": nbytes / 1e9 / median_s,
                    "gbytes_per_s_and_rank": nbytes / 1e9 / median_s / max(ours, theirs),
                    "of_1_1": plain_s / median_s,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="it takes 15 seconds as it is")
    arguments = parser.parse_args()
    rows = bench(arguments.model, arguments.tokens)
    table = Table("degrees", "pages", "checksums", "GB/s", "GB/s and rank", "of 1-1")
    for row in rows:
        figures = (f"{row[key]:.2f}" for key in ("gbytes_per_s", "gbytes_per_s_and_rank", "of_1_1"))
        table.add_row(row["degrees"], row["pages"], "on" if row["checksums"] else "off", *figures)
    Console().print(table)
    result = about() | {"model": arguments.model, "tokens": arguments.tokens, "rows": rows}
    print(f"written to {save('degrees', result)}")


if __name__ == "__main__":
    main()

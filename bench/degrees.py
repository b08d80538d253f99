"""What a handoff costs more where workers' pages are divided among ranks: between every pair of degrees.

    python -m bench.degrees [--tokens N]

*Handoffs*: a prompt's KV through the control stream to another process, from its last layer to the receipt, by which
each sending rank's bytes are known. *Copies*: as shared_memory makes them, in this process: the pages of a prompt go
from a sender's shares into a receiver's, in turns with the plain copy between two workers of one process each, to which
the ratio is; with checksums (of whole pages, so that tokens are put together on the way) and without. Writes
bench/results/degrees.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.common import about, save
from bench.handoff import (
    MODELS,
    TIMEOUT_S,
    connect_peer,
    decode_process,
    hand_off,
    layout_of,
    other_process,
    segments_of,
)
from engine.pages.layout import KvLayout
from engine.pages.memory import KvMemory, ShareBytes
from engine.pages.share import Share
from kv_transfer.checksum import RunningDigest
from kv_transfer.options import TransferOptions

DEGREES = ((1, 1), (2, 1), (1, 2), (2, 2), (2, 4), (4, 2))  # sender's and receiver's
TRANSPORTS = ("shared_memory", "tcp", "process_group")
ROUNDS = 9


def memory_of(layout: KvLayout, size: int) -> KvMemory:
    """As the leader of `size` ranks has it."""
    first, *others = (KvMemory(layout, share=Share(rank, size)) for rank in range(size))
    opened = [ShareBytes(share=each.share, num_bytes=len(each.bytes), fd=os.dup(each.fd or -1)) for each in others]
    memory = KvMemory(layout, fd=os.dup(first.fd or -1), share=first.share, others=opened)
    nbytes = layout.page_bytes() * layout.num_pages
    data = np.random.default_rng(0).integers(0, 256, nbytes, dtype=np.uint8)
    memory.rows.scatter(range(layout.num_layers), range(layout.num_pages), data)
    return memory


async def handed_over(model: str, num_tokens: int, transport: str) -> list[dict[str, Any]]:
    """By `transport`, with checksums. Of each sending rank as much as the receipt says that it had."""
    layout, options = layout_of(model, num_tokens), TransferOptions(transports=(transport,), timeout_s=TIMEOUT_S)
    rows = []
    for ours, theirs in DEGREES:
        with other_process(decode_process, layout, options, partial(memory_of, size=theirs)) as pipe:
            peer = await connect_peer(pipe, memory_of(layout, ours), options)
            runs = [await hand_off(peer, str(turn), num_tokens) for turn in range(ROUNDS + 1)][1:]
            await peer.close()
        seconds = statistics.median(run["exposed_s"] for run in runs)
        nbytes = runs[0]["bytes"]
        rows.append(
            {
                "degrees": f"{ours}-{theirs}",
                "transport": transport,
                "gbytes_per_s": nbytes / 1e9 / seconds,
                "by_sending_rank": [each / 1e9 / seconds for each in runs[0]["rank_bytes"] or [nbytes]],
                "by_receiving_rank": nbytes / 1e9 / seconds / theirs,
            }
        )
    return rows


def seconds_of(source: KvMemory, target: KvMemory, order: Sequence[int], is_checked: bool) -> float:
    segments = segments_of(source.layout, order)
    began_s = time.perf_counter()
    for segment in segments:
        digest = RunningDigest()
        seen = digest.see if is_checked else None
        target.rows.copy_from(source.rows, segment.layers, segment.src_pages, segment.dst_pages, seen)
    return time.perf_counter() - began_s


def bench(model: str, num_tokens: int) -> list[dict[str, Any]]:
    layout = layout_of(model, num_tokens)
    memories = {size: [memory_of(layout, size) for _ in range(2)] for size in (1, 2, 4)}
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
                    "of_1_1": plain_s / median_s,
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="llama-8b")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--quick", action="store_true", help="it takes a minute and a half as it is")
    arguments = parser.parse_args()
    asked = arguments.model, arguments.tokens
    handoffs = [row for name in TRANSPORTS for row in asyncio.run(handed_over(*asked, name))]
    rows = bench(*asked)
    table = Table("degrees", "transport", "GB/s", "of each sending rank", "of each receiving rank")
    for row in handoffs:
        sent = ", ".join(f"{each:.2f}" for each in row["by_sending_rank"])
        received = f"{row['by_receiving_rank']:.2f}"
        table.add_row(row["degrees"], row["transport"], f"{row['gbytes_per_s']:.2f}", sent, received)
    Console().print(table)
    table = Table("degrees", "pages", "checksums", "GB/s", "of 1-1")
    for row in rows:
        figures = f"{row['gbytes_per_s']:.2f}", f"{row['of_1_1']:.2f}"
        table.add_row(row["degrees"], row["pages"], "on" if row["checksums"] else "off", *figures)
    Console().print(table)
    result = about() | {"model": arguments.model, "tokens": arguments.tokens, "handoffs": handoffs, "rows": rows}
    print(f"written to {save('degrees', result)}")


if __name__ == "__main__":
    main()

"""What tcp hands to a socket: all bytes, in order, in few calls, however few of them it takes at once."""

from __future__ import annotations

import random
import socket
import threading

import numpy as np
import pytest

from engine.pages.layout import KvLayout, LayerKv
from engine.pages.rows import CHUNK_BYTES, PageRows
from engine.pages.share import WHOLE
from kv_transfer.transports.tcp import MOST_VIEWS, _send_all

NARROW, WIDE = LayerKv(1, 4, 4), LayerKv(16, 80, 64)  # pages are gathered, and sent from where they stand


def test_a_socket_that_takes_little_gets_all_of_many_views() -> None:
    rng = random.Random(1)
    data = rng.randbytes(400_000)
    cuts = sorted(rng.sample(range(len(data)), 2 * MOST_VIEWS + 7))
    views = [memoryview(data)[a:b] for a, b in zip([0, *cuts], [*cuts, len(data)], strict=True)]
    ours, theirs = socket.socketpair()
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    got = bytearray()

    def read() -> None:
        while piece := theirs.recv(rng.randrange(1, 5000)):
            got.extend(piece)

    reader = threading.Thread(target=read)
    reader.start()
    _send_all(ours, [*views, memoryview(b"")])
    ours.close()
    reader.join(30)
    theirs.close()
    assert bytes(got) == data


@pytest.mark.parametrize("is_scattered", [False, True])
def test_batches_hold_the_bytes_of_blocks_in_pieces_for_one_call(is_scattered: bool) -> None:
    layout = KvLayout(16, "bfloat16", (NARROW, WIDE, WIDE, NARROW, WIDE), 60)
    data = np.random.default_rng(1).integers(0, 256, layout.total_bytes, dtype=np.uint8)
    rows, pages = PageRows(layout, [(WHOLE, data)]), list(range(3, 57))
    if is_scattered:
        random.Random(2).shuffle(pages)
    wanted = b"".join(block.tobytes() for block in rows.blocks(range(5), pages))
    got, calls, most = [], 0, 0
    for batch in rows.batches(range(5), pages):
        got += [block.tobytes() for block in batch]
        calls, most = calls + 1, max(most, sum(block.nbytes for block in batch))
    assert b"".join(got) == wanted
    assert most < 2 * CHUNK_BYTES
    assert calls <= len(wanted) // CHUNK_BYTES + 2 * 5

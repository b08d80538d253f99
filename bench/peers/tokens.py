"""Do other servers compute the same model? Their greedy tokens beside those of our engine alone.

Kernels sum in other orders and round at other places. With random weights the likeliest of 32,000 tokens are a quarter
of a nat apart, which that often bridges; a token that another model chose is some four nats behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.gpu.cluster import PAGE_SIZE, Reference, asks, compare
from bench.peers.serve import Server
from engine.pages.pool import pages_for

REQUESTS, LONGEST, VOCAB = 8, 300, 30000
TIE_NATS = 0.5


def checked(peers: Mapping[str, Server], model: Path) -> dict[str, dict[str, Any]]:
    """Of each server: how many answers are our engine's likeliest tokens throughout, and whether the others tie."""
    wanted = asks(REQUESTS, VOCAB, LONGEST, rehearse=True)
    pages = max(pages_for(len(ask.prompt) + ask.new_tokens, PAGE_SIZE) for ask in wanted)
    reference = Reference.load(str(model), rehearse=True, pages=pages)
    found = {}
    for name, peer in peers.items():
        with peer.awake():
            theirs = peer.tokens((0.0, ask.prompt, ask.new_tokens) for ask in wanted)
        found[name] = compare(wanted, theirs, reference, TIE_NATS)
    return found

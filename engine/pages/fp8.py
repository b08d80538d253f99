"""KV pages in fp8: half the bytes to hold and to relay, at e4m3's three bits of mantissa.

Each layer has one scale for K and one for V, a power of two, so that scaling itself loses nothing. They are measured
once, at load, on fixed prompts through pages in the model's own dtype, with room for values that those prompts do not
reach; what lies beyond is saturated, never NaN. Two workers must agree on them, or they would misread each other's
pages: the scales are part of the model's fingerprint, which the handshake compares.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine.pages.prompts import prompts_in_pages
from engine.types import Chunk

DTYPE = torch.float8_e4m3fn
LARGEST = 448.0  # finite value of e4m3
ROOM = 4.0  # times the largest value seen: e4m3 is a floating format and keeps its precision below
PROMPT_TOKENS = (48, 33)
SEED = 8


@dataclass(frozen=True, slots=True)
class KvScale:
    k: float = 1.0
    v: float = 1.0


def quantise(x: torch.Tensor, scale: float) -> torch.Tensor:
    """x / scale in e4m3, saturated at its largest value. `scale` is a power of two."""
    return (x * (1.0 / scale)).clamp(-LARGEST, LARGEST).to(DTYPE)


def scale_for(largest: float) -> float:
    """The power of two at which `largest`, times ROOM, just fits. 1 where nothing was seen."""
    if not math.isfinite(largest) or largest <= 0.0:
        return 1.0
    return float(2.0 ** math.ceil(math.log2(largest * ROOM / LARGEST)))


def prompts(vocab_size: int, max_len: int, page_size: int) -> tuple[list[Chunk], int]:
    """The chunks to run, in pages counted from 0, and how many pages they take."""
    generator = torch.Generator().manual_seed(SEED)
    lengths = [min(length, max_len) for length in PROMPT_TOKENS]
    ids = [torch.randint(0, vocab_size, (length,), generator=generator).tolist() for length in lengths]
    return prompts_in_pages(ids, page_size)


def scales_of(pages: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[KvScale, ...]:
    """For each layer's (K, V) pages, which hold the prompts' KV and zeros."""
    return tuple(KvScale(*(scale_for(float(x.abs().amax().float())) for x in pair)) for pair in pages)


def with_scales(fingerprint: str, scales: Sequence[KvScale]) -> str:
    """A fingerprint of the model that holds its scales, too."""
    digest = hashlib.blake2b(fingerprint.encode(), digest_size=16)
    for scale in scales:
        digest.update(f"{scale.k!r},{scale.v!r};".encode())
    return digest.hexdigest()

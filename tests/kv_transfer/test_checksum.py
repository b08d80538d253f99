"""The digest follows the bytes, not where they stand; any flipped bit changes it."""

from __future__ import annotations

import random

import pytest
import torch
import xxhash

from engine.pages.layout import LayerKv
from kv_transfer.checksum import Checksummer
from tests.kv_transfer.sides import LAYERS, random_memory

WIDE = (LayerKv(16, 80, 64), LayerKv(16, 64, 80))


@pytest.mark.parametrize("layers", [LAYERS, WIDE, (LayerKv(1, 3, 1),)], ids=["small", "wide", "odd"])
@pytest.mark.parametrize("pages", [[4], [3, 4, 5, 6], [9, 2, 3, 4, 17, 0]])
def test_the_digest_is_of_each_layers_keys_in_order_of_pages_then_its_values(
    layers: tuple[LayerKv, ...], pages: list[int]
) -> None:
    memory = random_memory(20, layers=layers)
    planes = [plane[pages] for layer in range(len(layers)) for plane in (memory.k(layer), memory.v(layer))]
    wanted = xxhash.xxh3_64_intdigest(b"".join(plane.view(torch.uint8).numpy().tobytes() for plane in planes))
    assert Checksummer(memory).digest(range(len(layers)), pages) == wanted


def test_both_sides_agree_though_their_pages_stand_elsewhere() -> None:
    source, target, rng = random_memory(20, seed=1), random_memory(33, seed=2), random.Random(0)
    src, dst = rng.sample(range(20), 7), list(range(9, 16))
    for layer in range(3):
        target.k(layer)[dst] = source.k(layer)[src]
        target.v(layer)[dst] = source.v(layer)[src]
    digest = Checksummer(source).digest(range(3), src)
    assert Checksummer(target).digest(range(3), dst) == digest
    assert Checksummer(target).digest(range(3), dst[::-1]) != digest
    target.v(2).view(-1)[9 * 16] += 1
    assert Checksummer(target).digest(range(3), dst) != digest

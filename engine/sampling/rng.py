"""One uniform number for each (seed, position): Philox-4x32-10, a counter-based generator, in plain integers.

Nothing here keeps state. A draw depends on the request's seed and on where the token will stand in its sequence,
so the same request gives the same tokens in any batch, on any worker, and after it was moved or recomputed.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011); constants and test
vectors from its reference library Random123.
"""

from __future__ import annotations

_MASK_32 = 0xFFFFFFFF
_MULTIPLIER_0 = 0xD2511F53
_MULTIPLIER_1 = 0xCD9E8D57
_WEYL_0 = 0x9E3779B9  # golden ratio
_WEYL_1 = 0xBB67AE85  # sqrt(3) - 1
_ROUNDS = 10

Words4 = tuple[int, int, int, int]


def philox_4x32(counter: Words4, key: tuple[int, int]) -> Words4:
    """Ten rounds of Philox-4x32: four 32-bit words of counter and two of key to four random 32-bit words."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0 = c0 * _MULTIPLIER_0
        product_1 = c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (
            (product_1 >> 32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0 = (k0 + _WEYL_0) & _MASK_32
        k1 = (k1 + _WEYL_1) & _MASK_32
    return c0, c1, c2, c3


def uniform(seed: int, position: int) -> float:
    """A uniform float64 in [0, 1) with 53 random bits. Seed and position are whole numbers from 0 to 2**64 - 1."""
    counter = (position & _MASK_32, position >> 32 & _MASK_32, 0, 0)
    high, low, _, _ = philox_4x32(counter, (seed & _MASK_32, seed >> 32 & _MASK_32))
    return ((high >> 5) * 2.0**26 + (low >> 6)) / 2.0**53

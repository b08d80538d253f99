"""SamplingPlan says, before the logits are there, what sampling on a device needs: small arrays, and which parts of the
work there are. Made on the host, while the step before still runs.

Uniform numbers are bit-equal to engine/sampling/rng.py.

Shapes: R rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.types import SampleSpec

_MASK_32 = 0xFFFFFFFF
Arrays = dict[str, npt.NDArray[np.generic]]


def uniforms(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Philox-4x32-10 in int64: float64 in [0, 1) for each (seed, position), bit for bit what rng.uniform gives.

    A product of two 32-bit words overflows int64, but two's complement keeps all 64 bits of it.
    """
    c0, c1 = positions & _MASK_32, positions >> 32 & _MASK_32
    c2, c3 = torch.zeros_like(c0), torch.zeros_like(c0)
    k0, k1 = seeds & _MASK_32, seeds >> 32 & _MASK_32
    for _ in range(10):
        product_0, product_1 = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            (product_1 >> 32 & _MASK_32) ^ c1 ^ k0,
            product_1 & _MASK_32,
            (product_0 >> 32 & _MASK_32) ^ c3 ^ k1,
            product_0 & _MASK_32,
        )
        k0, k1 = k0 + 0x9E3779B9 & _MASK_32, k1 + 0xBB67AE85 & _MASK_32
    return ((c0 >> 5).double() * 2.0**26 + (c1 >> 6).double()) / 2.0**53


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """Of R rows: what the device needs (`arrays`, to be uploaded), and which parts of the work there are."""

    arrays: Arrays
    request_ids: Sequence[str]
    has_random: bool
    has_edits: bool
    logprobs: tuple[int | None, ...]
    scored: list[int]  # rows that want log-probabilities
    searched: list[int]  # rows of beam searches
    specs: Sequence[SampleSpec]

    @classmethod
    def of(cls, request_ids: Sequence[str], specs: Sequence[SampleSpec]) -> SamplingPlan:
        params = [spec.params for spec in specs]
        random = [row for row, p in enumerate(params) if not p.is_greedy]
        ordered = [at for at, row in enumerate(random) if params[row].top_k > 0 or params[row].top_p < 1.0]
        arrays: Arrays = {}
        if random:
            chosen = [params[row] for row in random]
            seeds = torch.tensor([p.seed for p in chosen], dtype=torch.int64)
            positions = torch.tensor([specs[row].position for row in random], dtype=torch.int64)
            arrays |= {
                "random_rows": np.array(random, np.int64),
                "temperature": np.array([p.temperature for p in chosen], np.float64),
                "min_p": np.array([p.min_p for p in chosen], np.float64),
                "uniform": uniforms(seeds, positions).numpy(),
            }
            if any(p.top_n_sigma > 0.0 for p in chosen):
                arrays["top_n_sigma"] = np.array([p.top_n_sigma or np.inf for p in chosen], np.float64)
            if typical := [at for at, p in enumerate(chosen) if p.typical_p < 1.0]:
                arrays["typical"] = np.array(typical, np.int64)  # among the random rows
                arrays["typical_p"] = np.array([chosen[at].typical_p for at in typical], np.float64)
        if ordered:
            chosen = [params[random[at]] for at in ordered]
            arrays |= {
                "ordered": np.array(ordered, np.int64),  # among the random rows
                "top_k": np.array([p.top_k or np.iinfo(np.int64).max for p in chosen], np.int64),
                "top_p": np.array([p.top_p if p.top_p < 1.0 else np.inf for p in chosen], np.float64),
            }
        edits = _penalties(specs) | _choices(specs)
        given = [(row, spec.given_id) for row, spec in enumerate(specs) if spec.given_id is not None]
        if given:
            arrays["given"] = np.array(given, np.int64)
        searched = [row for row, spec in enumerate(specs) if spec.num_candidates]
        scored = [row for row, spec in enumerate(specs) if spec.params.logprobs is not None and row not in searched]
        for name, rows in (("searched", searched), ("scored", scored)):
            if rows:
                arrays[name] = np.array(rows, np.int64)
        return cls(
            arrays=arrays | edits,
            request_ids=request_ids,
            has_random=bool(random),
            has_edits=bool(edits),
            logprobs=tuple(p.logprobs for p in params),
            scored=scored,
            searched=searched,
            specs=specs,
        )


def _penalties(specs: Sequence[SampleSpec]) -> Arrays:
    """(row, id) pairs, each once: those whose logits are divided or multiplied, and what is subtracted from which."""
    pairs: list[npt.NDArray[np.int64]] = []
    factors: list[npt.NDArray[np.float32]] = []
    out_pairs: list[npt.NDArray[np.int64]] = []
    subtract: list[npt.NDArray[np.float32]] = []
    for row, spec in enumerate(specs):
        params = spec.params
        if params.repetition_penalty != 1.0:
            seen = np.unique(np.array([*spec.prompt_ids, *spec.output_ids], np.int64))
            pairs.append(np.stack([np.full_like(seen, row), seen], axis=1))
            factors.append(np.full(seen.size, params.repetition_penalty, np.float32))
        if spec.output_ids and (params.frequency_penalty != 0.0 or params.presence_penalty != 0.0):
            seen, counts = np.unique(np.array(spec.output_ids, np.int64), return_counts=True)
            out_pairs.append(np.stack([np.full_like(seen, row), seen], axis=1))
            subtract.append((counts * params.frequency_penalty + params.presence_penalty).astype(np.float32))
    arrays: Arrays = {}
    if pairs:
        arrays |= {"repeated": np.concatenate(pairs), "factor": np.concatenate(factors)}
    if out_pairs:
        arrays |= {"produced": np.concatenate(out_pairs), "subtract": np.concatenate(subtract)}
    return arrays


def _choices(specs: Sequence[SampleSpec]) -> Arrays:
    """(row, id) pairs of what is likelier or less so, of what alone may be drawn, and of what may not."""
    biases = [(row, token, bias) for row, spec in enumerate(specs) for token, bias in spec.params.logit_bias]
    allowed = [(row, token) for row, spec in enumerate(specs) for token in spec.params.allowed_token_ids]
    formed = [(row, spec.form.bits()) for row, spec in enumerate(specs) if spec.form is not None]
    bans = [(row, token) for row, spec in enumerate(specs) for token in spec.banned_ids]
    arrays: Arrays = {}
    if biases:
        arrays["biased"] = np.array([(row, token) for row, token, _ in biases], np.int64)
        arrays["bias"] = np.array([bias for _, _, bias in biases], np.float32)
    if allowed:
        arrays["allowed"] = np.array(allowed, np.int64)
        arrays["narrowed_rows"] = np.unique(arrays["allowed"][:, 0])
    if formed:
        arrays["formed_rows"] = np.array([row for row, _ in formed], np.int64)
        arrays["form_bits"] = np.stack([np.frombuffer(bits, np.uint8) for _, bits in formed])
    if bans:
        arrays["bans"] = np.array(bans, np.int64)
    return arrays

"""What tests of a DecodePolicy share."""

from __future__ import annotations

from decode_worker.batches import DecodeBatch
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from engine.pages.pool import PagePool

PAGE = 4  # tokens


def policy_of(num_pages: int, **limits: object) -> DecodePolicy:
    return DecodePolicy(PagePool(num_pages, PAGE), DecodeOptions(**limits), name="decode-0")  # type: ignore[arg-type]


def step(policy: DecodePolicy) -> DecodeBatch:
    batch = policy.next_batch()
    policy.on_batch_done(batch)
    policy.check_invariants()
    return batch

"""What tests of a DecodePolicy share."""

from __future__ import annotations

from typing import Any

from decode_worker.batches import DecodeBatch
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from engine.pages.pool import PagePool

PAGE = 4  # tokens


def policy_of(num_pages: int, num_stages: Any = 1, **limits: object) -> DecodePolicy:
    options = DecodeOptions(**limits)  # type: ignore[arg-type]
    return DecodePolicy(PagePool(num_pages, PAGE), options, name="decode-0", num_stages=num_stages)


def step(policy: DecodePolicy) -> DecodeBatch:
    batch = policy.next_batch()
    policy.on_batch_done(batch)
    policy.check_invariants()
    return batch

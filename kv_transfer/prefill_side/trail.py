"""Trail is when what happened to one handoff, for who wants to know where its time went: plain values, bounded."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from kv_transfer.prefill_side.segments import SentSegment

MOST_SEGMENTS = 32  # what is sent after so many counts with the last of them


@dataclass(slots=True)
class Gone:
    """Some layers that went. `merged`: so many segments more."""

    begin_ns: int
    end_ns: int
    layers: range
    nbytes: int
    merged: int = 0


@dataclass(slots=True)
class Trail:
    """By time.monotonic_ns(); 0: it did not come to that."""

    asked_ns: int = field(default_factory=time.monotonic_ns)
    granted_ns: int = 0
    committed_ns: int = 0
    answered_ns: int = 0
    sent: list[Gone] = field(default_factory=list)

    def on_sent(self, sent: SentSegment) -> None:
        now_ns = time.monotonic_ns()
        if len(self.sent) < MOST_SEGMENTS:
            begin_ns = now_ns - int(sent.transfer_s * 1e9)
            self.sent.append(Gone(begin_ns, now_ns, sent.segment.layers, sent.nbytes))
            return
        last = self.sent[-1]
        layers = sent.segment.layers
        last.layers = range(min(last.layers.start, layers.start), max(last.layers.stop, layers.stop))
        last.end_ns, last.nbytes, last.merged = now_ns, last.nbytes + sent.nbytes, last.merged + 1

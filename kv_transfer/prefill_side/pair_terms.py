"""What a handoff asks of its pair, and what holds for every handoff of a pair."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Protocol

from engine.pages.layout import KvLayout
from kv_transfer.options import TransferOptions
from kv_transfer.prefill_side.segments import Flow, SegmentToSend

ANSWER_TIMEOUTS = 3  # an answer may wait behind this many transfers


@dataclass(frozen=True, slots=True, kw_only=True)
class PairTerms:
    """What holds for every handoff of a pair."""

    peer: str  # name of the decode worker
    transport: str
    layout: KvLayout
    rank_page_bytes: tuple[int, ...]  # of a page, what each process of this worker sends; none, if it is one
    segment_bytes: int  # what is larger is cut
    options: TransferOptions

    @property
    def answer_timeout_s(self) -> float:
        return ANSWER_TIMEOUTS * self.options.timeout_s


class Pair(Protocol):
    """What a handoff asks of its pair, in the event loop; `send` in any thread."""

    def write(self, **kind: Any) -> None:
        """Queue one message to the peer."""

    def send(self, segment: SegmentToSend) -> None: ...

    def all_sent(self) -> asyncio.Future[None]:
        """Done when all segments given so far are sent; never, if the transport fails before."""

    async def stop_flow(self, flow: Flow) -> None:
        """Returns when nothing of the flow is being written, nor will be."""

    def lose(self, reason: str) -> None:
        """The pair is of no more use."""

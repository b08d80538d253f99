"""ControlStream carries what a pair says: one call of the decode worker's Handoff service, on a channel of its own.

How to open one that the decode worker lets in (the cluster's secret) is the worker's, which brings a Dial.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio


@dataclass(frozen=True, slots=True)
class ControlStream:
    channel: grpc.aio.Channel
    call: Any  # of Handoff.Connect; grpc generates no types

    async def close(self) -> None:
        self.call.cancel()
        await self.channel.close()


class Dial(Protocol):
    def __call__(self, address: str) -> ControlStream:
        """A stream to that address. Returns at once: the first read or write says whether anybody is there."""

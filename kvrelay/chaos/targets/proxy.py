"""Proxy is the network between the processes of a ProcessCluster: a TCP listener on loopback before each service, and
for each link, named `router-0>decode-1`, what is to happen to its bytes. It needs no root and no kernel module.

Bytes are never reordered or lost within a connection, as TCP does not: a lost packet is a wait for its repetition, and
a hole swallows nothing that it does not hold. Where one listener serves many, `source_of` says whose a connection is.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
from collections.abc import Callable
from dataclasses import dataclass, field

LOOPBACK = "127.0.0.1"
CHUNK_BYTES = 1 << 16
REPEAT_S = 0.2  # TCP's least wait before it sends a lost packet again
CONNECT_S = 2.0


@dataclass(slots=True)
class Link:
    """What happens to the bytes of one link. `up` goes to the service, `down` comes from it."""

    name: str
    up: asyncio.Event = field(default_factory=asyncio.Event)  # set: bytes pass
    down: asyncio.Event = field(default_factory=asyncio.Event)
    delay_s: float = 0.0
    loss: float = 0.0  # share of packets that come after REPEAT_S
    connections: set[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = field(default_factory=set)

    def heal(self) -> None:
        self.delay_s, self.loss = 0.0, 0.0
        self.up.set()
        self.down.set()

    def cut(self, *directions: str) -> None:
        for direction in directions or ("up", "down"):
            getattr(self, direction).clear()

    def reset(self) -> None:
        for pair in list(self.connections):
            for writer in pair:
                _abort(writer)


class Proxy:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._links: dict[str, Link] = {}
        self._servers: list[asyncio.Server] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def link(self, name: str) -> Link:
        """The link of this name; there is none that is not."""
        if name not in self._links:
            self._links[name] = Link(name)
            self._links[name].heal()
        return self._links[name]

    def heal(self) -> None:
        for link in self._links.values():
            link.heal()

    async def listen(self, upstream: Callable[[], int], source_of: Callable[[int], str], service: str) -> int:
        """A listener before a service; returns its port. `upstream` says where the service listens now (0: nowhere),
        `source_of` whose a connection from this port is."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            source = source_of(writer.get_extra_info("peername")[1])
            await self._join(self.link(f"{source}>{service}"), reader, writer, upstream())

        server = await asyncio.start_server(serve, LOOPBACK, 0)
        self._servers.append(server)
        return int(server.sockets[0].getsockname()[1])

    async def close(self) -> None:
        for server in self._servers:
            server.close()
        for link in self._links.values():
            link.reset()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self, link: Link, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
        try:
            async with asyncio.timeout(CONNECT_S):
                there_reader, there_writer = await asyncio.open_connection(LOOPBACK, port)
        except (OSError, TimeoutError):
            _abort(writer)
            return
        pair = (writer, there_writer)
        link.connections.add(pair)
        pumps = (self._pump(link, "up", reader, there_writer), self._pump(link, "down", there_reader, writer))
        tasks = [asyncio.get_running_loop().create_task(pump) for pump in pumps]
        self._tasks.update(tasks)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
            self._tasks.discard(task)
        link.connections.discard(pair)
        for end in pair:
            end.close()

    async def _pump(
        self, link: Link, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        passes: asyncio.Event = getattr(link, direction)
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK_BYTES):
                await passes.wait()
                if link.delay_s or link.loss:
                    await asyncio.sleep(link.delay_s + (REPEAT_S if self._rng.random() < link.loss else 0.0))
                writer.write(data)
                await writer.drain()
            await passes.wait()  # a cut cable carries no end, either


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset."""
    with contextlib.suppress(OSError):
        raw: socket.socket = writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()

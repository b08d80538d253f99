"""Peers are a worker's pairs with the decode workers that it sends KV to: each is opened at first use, and again after
it was lost.

One that cannot be opened is tried again by itself, ever more seldom (pair_health.py), for as long as requests have
named it lately; those that name it meanwhile wait a moment for it and no longer.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from functools import partial

from kv_transfer.prefill_side.connect import connect
from kv_transfer.prefill_side.errors import HandoffError, HandoffFailed, HandoffUntried
from kv_transfer.prefill_side.pair import PrefillPair
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1.generate_pb2 import HandoffReceipt
from worker.peers.pair_health import PairHealth, PeerKey
from worker.role import RoleHost
from worker.wire.credentials import FollowedTls
from worker.wire.rpc import handoff_dial
from worker.wire.tls import TlsError

log = logging.getLogger(__name__)

Connection = asyncio.Task[PrefillPair]

UNREACHABLE_WAIT_S = 0.5  # that a request waits for a pair which could not be opened the last time
WANTED_S = 30.0  # after the last request that named it, a pair is not tried any more


@dataclass(frozen=True, slots=True)
class Undelivered:
    """Why a handoff to `peer` came to nothing, and whose fault it is."""

    reason: str
    cause: pb.FailureCause
    peer: str


class Peers:
    def __init__(self, host: RoleHost) -> None:
        self._host = host
        self._connections: dict[PeerKey, Connection] = {}
        self._wanted_s: dict[PeerKey, float] = {}  # when a request last named it; of those that are tried
        self.health = PairHealth()
        self._tls = FollowedTls(host.options.tls) if host.options.tls else None
        self._is_closed = False

    def open_pair(self, decode: pb.WorkerAddress) -> PrefillPair | None:
        """The one that stands, if one does."""
        key = _key(decode)
        connection = self._connections.get(key)
        if connection is None or not is_open(connection):
            return None
        self._wanted_s[key] = _now()
        return connection.result()

    async def pair(self, decode: pb.WorkerAddress) -> PrefillPair:
        """The one that stands, or a new one. Raises HandoffLost, HandoffRefused; soon HandoffUntried, if it is known to
        be bad."""
        key = _key(decode)
        self._wanted_s[key] = _now()
        connection = self._connections.get(key) or self._connect_soon(decode)
        why = self.health.why_not_now(key)
        done, _ = await asyncio.wait({connection}, timeout=UNREACHABLE_WAIT_S if why else None)
        if not done:
            raise HandoffUntried(f"{decode.name} could not be reached lately: {why}")
        return connection.result()

    def report(self) -> list[pb.PeerHealth]:
        now = _now()
        return [
            pb.PeerHealth(
                name=name,
                incarnation=incarnation,
                failures=trouble.failures,
                reason=trouble.reason,
                age_ms=int(1000 * (now - trouble.failed_s)),
            )
            for (name, incarnation), trouble in self.health.troubles(now)
        ]

    def on_receipt(self, decode: pb.WorkerAddress, receipt: HandoffReceipt) -> None:
        self.health.on_receipt(_key(decode))
        counters = self._host.counters
        counters["pages_sent"] += receipt.pages
        counters["bytes_sent"] += receipt.bytes
        counters["resends"] += receipt.resends

    def undelivered(self, request_id: str, decode: pb.WorkerAddress, error: BaseException) -> Undelivered:
        """A handoff to it came to nothing by this."""
        if not isinstance(error, HandoffError):  # a bug must fail one request, not leave it waiting
            log.error("the handoff of %s to %s broke", request_id, decode.name, exc_info=error)
            reason = f"{type(error).__name__}: {error}"
            return Undelivered(reason, pb.FAILURE_CAUSE_PEER, decode.name)
        if isinstance(error, HandoffFailed):  # though its pair stands
            self.health.on_broken(_key(decode), str(error), _now())
        return Undelivered(str(error), error.cause, decode.name)

    async def close(self) -> None:
        self._is_closed = True
        connections = list(self._connections.values())
        for connection in connections:
            connection.cancel()
        await asyncio.gather(*(c.result().close() for c in connections if is_open(c)))

    def _connect_soon(self, decode: pb.WorkerAddress) -> Connection:
        key = _key(decode)
        connection = asyncio.get_running_loop().create_task(self._connect(decode))
        connection.add_done_callback(partial(self._on_tried, decode))
        self._connections[key] = connection
        return connection

    async def _connect(self, decode: pb.WorkerAddress) -> PrefillPair:
        host = self._host
        await asyncio.sleep(self.health.backoff_s(_key(decode), _now()))
        return await connect(
            decode,
            me=host.address,
            model_fingerprint=host.engine.info.fingerprint,
            memory=host.engine.memory,
            dial=handoff_dial(host.options.secret, host.options.tls, silent_s=host.options.transfer.peer_silent_s),
            options=host.options.transfer,
            host=host.options.host,
            tls=self._tls,
            faults=host.faults,
        )

    def _on_tried(self, decode: pb.WorkerAddress, connection: Connection) -> None:
        if connection.cancelled():
            return
        error = connection.exception()
        if error is None:
            self._on_open(decode, connection.result())
            return
        if not isinstance(error, HandoffError | TlsError):
            log.error("cannot connect to %s", decode.name, exc_info=error)
        self.health.on_unreachable(_key(decode), str(error) or repr(error), _now())
        self._again_if_wanted(decode)

    def _on_open(self, decode: pb.WorkerAddress, pair: PrefillPair) -> None:
        self.health.on_open(_key(decode))
        pair.on_lost = partial(self._on_lost, decode)
        if pair.is_lost:  # in the meantime
            self._on_lost(decode, pair.lost_reason)

    def _on_lost(self, decode: pb.WorkerAddress, reason: str) -> None:
        self.health.on_broken(_key(decode), reason, _now())
        self._again_if_wanted(decode)

    def _again_if_wanted(self, decode: pb.WorkerAddress) -> None:
        """Before the next request asks, so that none has to find out. A restarted decode worker has another key."""
        key = _key(decode)
        self._connections.pop(key, None)
        if _now() - self._wanted_s[key] < WANTED_S and not self._is_closed:
            self._connect_soon(decode)
        else:
            del self._wanted_s[key]


def is_open(connection: Connection) -> bool:
    """Whether the pair is connected and stands."""
    is_connected = connection.done() and not connection.cancelled() and connection.exception() is None
    return is_connected and not connection.result().is_lost


def _key(decode: pb.WorkerAddress) -> PeerKey:
    return decode.name, decode.incarnation


def _now() -> float:
    return asyncio.get_running_loop().time()

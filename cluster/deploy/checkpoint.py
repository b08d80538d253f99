"""Checkpoint keeps what a controller knows where its death does not reach: in the key-value store of Ray's GCS, under
the actor's id, which stays the same over its restarts and is never given to another actor.

No secret goes there. A store that does not answer costs the next controller some knowledge, never this one its work.
Where Ray has put another controller in the place of one that lives on, cut off, the store is the later one's.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import ray
from ray.experimental import internal_kv

log = logging.getLogger(__name__)

NAMESPACE = b"kvrelay"
TIMEOUT_S = 5.0


class Checkpoint:
    def __init__(self) -> None:
        self._key = f"roster:{ray.get_runtime_context().get_actor_id()}".encode()
        self._lock = asyncio.Lock()  # one is written after another, and the newest last
        self._writing: set[asyncio.Task[None]] = set()

    def load(self) -> dict[str, Any] | None:
        """None at the actor's first start. Raises what Ray's client raises."""
        text = internal_kv._internal_kv_get(self._key, namespace=NAMESPACE)
        return dict(json.loads(text)) if text else None

    async def epoch(self) -> int | None:
        """Of the last controller that saved; None: the store does not answer."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                saved = await asyncio.to_thread(self.load)
        except Exception:  # whatever Ray's client raises
            return None
        return 0 if saved is None else int(saved["epoch"])

    async def save(self, newest: Callable[[], dict[str, Any]]) -> None:
        """Returns when it is kept, or TIMEOUT_S after: then it is kept as soon as the store answers."""
        writing = asyncio.get_running_loop().create_task(self._write(newest))
        self._writing.add(writing)
        writing.add_done_callback(self._writing.discard)
        if not (await asyncio.wait({writing}, timeout=TIMEOUT_S))[0]:
            log.warning("what is known of the cluster is not kept yet: the store does not answer")

    async def _write(self, newest: Callable[[], dict[str, Any]]) -> None:
        """A thread that waits for the store cannot be ended, and nothing newer may be written before it ends."""
        try:
            async with self._lock:
                await asyncio.to_thread(self._put, newest())
        except Exception as error:  # whatever Ray's client raises: the cluster serves on
            log.warning("what is known of the cluster was not kept: %s", " ".join(str(error).split()))

    def forget(self) -> None:
        internal_kv._internal_kv_del(self._key, namespace=NAMESPACE)

    def _put(self, newest: dict[str, Any]) -> None:
        saved = self.load()
        if saved is None or saved["epoch"] <= newest["epoch"]:
            internal_kv._internal_kv_put(self._key, json.dumps(newest).encode(), namespace=NAMESPACE)

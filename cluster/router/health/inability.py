"""Inability is which workers have said lately that they cannot serve requests of some kind, so that not each of these
finds out anew. It reads no clock: whoever asks passes `now`, in seconds.

It is believed for a time and no longer: files that a worker lacked may be there by then.
"""

from __future__ import annotations

BELIEVED_S = 60.0


class Inability:
    def __init__(self) -> None:
        self._until_s: dict[str, dict[str, float]] = {}  # by kind of request: workers

    def note(self, kind: str, worker: str, now: float) -> None:
        if not kind:
            return
        believed = {known: workers for known, workers in self._until_s.items() if max(workers.values()) > now}
        self._until_s = {**believed, kind: {**believed.get(kind, {}), worker: now + BELIEVED_S}}

    def forget(self, worker: str) -> None:
        for kind, workers in [*self._until_s.items()]:
            workers.pop(worker, None)
            if not workers:
                del self._until_s[kind]

    def by_kind(self, now: float) -> dict[str, frozenset[str]]:
        """Workers, of each kind that any cannot serve."""
        return {kind: unable for kind in self._until_s if (unable := self.of(kind, now))}

    def of(self, kind: str, now: float) -> frozenset[str]:
        """Workers."""
        return frozenset(name for name, until_s in self._until_s.get(kind, {}).items() if now < until_s)

"""commuting says which choices lead to one state in both orders, and what is no choice because it changes nothing.

A choice that touches one process reads and changes that process alone, takes from queues that only it reads and puts
at the end of queues that only it writes; what does not know whom it touches touches everybody.
"""

from __future__ import annotations

from collections.abc import Iterable

from tests.protocol.cluster import BROKEN, UP, Cluster
from tests.protocol.streams import Call

EVERYBODY: frozenset[str] = frozenset()


def lesser(cluster: Cluster, choice: str, others: Iterable[str]) -> set[str]:
    """Which of the other choices commute with it and are less."""
    touched = touches(cluster, choice)
    if touched == EVERYBODY:
        return set()
    less = {other: touches(cluster, other) for other in others if _rank(other) < _rank(choice)}
    return {other for other, whom in less.items() if whom != EVERYBODY and whom.isdisjoint(touched)}


def _rank(choice: str) -> tuple[str, str]:
    """Choices of one process side by side."""
    verb, _, what = choice.partition(" ")
    return (what or verb.partition(">")[2]).partition("/")[0], choice


def touches(cluster: Cluster, choice: str) -> frozenset[str]:
    """Whose state it reads or changes."""
    verb, _, what = choice.partition(" ")
    if ">" in verb:
        return _hearers(cluster, verb)
    if verb == "write":
        sender = cluster.senders[what]
        return frozenset((sender.owner.name, sender.target.name))
    if verb in ("begin", "report") or (verb == "end" and cluster.setting.poison is None):
        return frozenset((what,))
    return frozenset(("router",)) if verb == "arrive" else EVERYBODY


def _hearers(cluster: Cluster, way: str) -> frozenset[str]:
    """Whom the next message on a way concerns."""
    source, _, target = way.partition(">")
    if (call := cluster.calls.get(way)) is not None:
        is_heard = way == call.down and call.target is not None and call.target.is_alive
        return frozenset((call.target_name if is_heard else call.source.name,))
    if not target.startswith("router-"):
        return frozenset((target,))
    return frozenset(("router", source) if cluster.queues[way][0] == UP else ("router",))


def skip(cluster: Cluster) -> None:
    """Take what would change nothing: a step of nothing, a message that nobody hears."""
    for process in cluster.processes.values():
        if process.is_alive and process.is_awake and process.batch is None and process.is_idle:
            process.is_awake = False
    for way in [way for way in cluster.queues if _is_unheard(cluster, way)]:
        del cluster.queues[way]


def _is_unheard(cluster: Cluster, way: str) -> bool:
    """Neither now nor later."""
    if (call := cluster.calls.get(way)) is not None:
        return _has_left(call, way)
    router, _, target = way.partition(">")
    if target.startswith("router-"):
        return False
    process = cluster.processes[target]
    link = process.streams.link(cluster.router_ids[router])
    is_open = link is not None and not link.is_closed
    return not process.is_alive or not (is_open or BROKEN in cluster.queues[way])


def _has_left(call: Call, way: str) -> bool:
    """Who would hear it is not on the call any more."""
    if way == call.up:
        return call.is_cancelled or not call.source.is_alive
    if call.task is None or call.target is None:
        return False  # on its way there
    return call.task.done() or not call.target.is_alive

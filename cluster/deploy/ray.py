"""Ray as every command meets it: joining one that runs, its named actors, and its driver's chatter kept out of ours.

It starts no actor and knows no cluster but by name; importing it imports no ray, which takes a second.
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import ipaddress
import logging
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from engine.limits.process_room import process_room
from worker.wire.knock import knock

CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 5.0
LOOK_S = 0.1
SHUTDOWN_S = 10.0
LEAST_FREE_BYTES = 4 << 20  # of the disk of Ray's folder: processes begin logs and sockets there
THREADS_OF_AN_ACTOR = 32  # at least, once it serves; an idle one of Ray's has 24
RESET_S = 0.01  # Ray's own shutdown gives signals their defaults back: how long that may stand


class DeployError(Exception):
    """The cluster could not be started or found: one sentence. `is_a_crash`: the logs may say more."""

    def __init__(self, message: str, *, is_a_crash: bool = False) -> None:
        super().__init__(message)
        self.is_a_crash = is_a_crash


def namespace_of(name: str) -> str:
    return f"kvrelay-{name}"


def join_ray(address: str, name: str) -> None:
    """Raises DeployError when there is no Ray there."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    import ray

    logging.getLogger("ray").setLevel(logging.CRITICAL)
    _knock(address)
    try:
        ray.init(
            address=address,
            namespace=namespace_of(name),
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.CRITICAL,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise DeployError(
            f"no Ray answers at --address {address}: {reason}; start one with `ray start --head`"
        ) from None


def _knock(address: str) -> None:
    """Ray itself tries for minutes, and talks meanwhile, where nobody answers. Raises DeployError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in host:
        return  # auto, and whatever else Ray may know
    try:
        knock(host, int(port), CONNECT_TIMEOUT_S)
    except (OSError, OverflowError) as error:
        why = (getattr(error, "strerror", None) or str(error)).lower()
        raise DeployError(f"no Ray answers at --address {address}: {why}; start one with `ray start --head`") from None


@contextlib.contextmanager
def quiet_stdout() -> Iterator[None]:
    """Ray's driver prints what its raylet has to say on sys.stdout, from a thread: keep it out of our output."""
    real = sys.stdout
    sys.stdout = io.StringIO()
    try:
        yield
    finally:
        sys.stdout = real


def node_host() -> str:
    import ray

    return str(ray.util.get_node_ip_address())


def why_apart(nodes: Iterable[Mapping[str, Any]]) -> str:
    """Of a Ray's nodes, as it tells them: which one the others cannot reach, in one sentence. Ray takes the address of
    a host's name where it has no default route, which many hosts file under loopback."""
    here = {str(node["NodeManagerAddress"]): str(node["NodeManagerHostname"]) for node in nodes if node["Alive"]}
    unreached = [address for address in here if _is_loopback(address)]
    if not unreached or len(unreached) == len(here):
        return ""
    return (
        f"Ray knows its node {here[unreached[0]]} as {unreached[0]}, where its other nodes cannot reach it; start it "
        "with `ray start --node-ip-address=ADDRESS`"
    )


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:  # a name
        return False


def ends_within(
    work: Callable[[], object],
    timeout_s: float,
    is_hopeless: Callable[[], object] = bool,
    *,
    look_s: float = LOOK_S,
) -> bool:
    """Whether what is asked of Ray ends well in time, and before it `is_hopeless`: where Ray's GCS is stopped or gone,
    calls wait for it for a minute, or without end. A thread that hangs in one is left behind."""
    ended = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            work()
            ended.set()

    thread = threading.Thread(target=run, name="asks Ray", daemon=True)
    thread.start()
    deadline = time.monotonic() + timeout_s
    while thread.is_alive() and not is_hopeless() and (left_s := deadline - time.monotonic()) > 0:
        thread.join(min(look_s, left_s))
    return ended.is_set()


def initialized_ray() -> Any | None:
    """None where Ray was not begun; nor does anything run in one whose import was interrupted, which raises when it is
    imported again."""
    ray: Any = sys.modules.get("ray")
    return ray if hasattr(ray, "is_initialized") and ray.is_initialized() else None


def shut_down(ray: Any, keep_signals: Callable[[], object]) -> bool:
    """Whether Ray has let this process go: it waits for its raylet without end. `keep_signals` is called all the while,
    as somebody may ask a second time."""
    try:
        return ends_within(ray.shutdown, SHUTDOWN_S, lambda: keep_signals() and False, look_s=RESET_S)
    finally:
        keep_signals()


def named_actors() -> list[str]:
    """Of the cluster whose namespace this is."""
    import ray

    return list(ray.util.list_named_actors())


def why_full() -> str:
    """Why no process starts here, in one sentence: its user may have no more, or the disk of the folder in which this
    process' Ray keeps its files is full. Empty where neither is so, or nobody knows."""
    room = process_room()
    if room is not None and room.left < THREADS_OF_AN_ACTOR:
        return f"only {room}; raise that limit"
    return _why_disk_full()


def _why_disk_full() -> str:
    from ray._private import worker

    try:
        folder = str(worker._global_node.get_session_dir_path())
        free_bytes = shutil.disk_usage(folder).free
    except (AttributeError, OSError):
        return ""
    if free_bytes >= LEAST_FREE_BYTES:
        return ""
    return f"the disk of Ray's folder {folder} is full ({free_bytes >> 10} KiB free); make room there"


def find_actor(name: str) -> Any | None:
    import ray

    try:
        return ray.get_actor(name)
    except ValueError:
        return None


async def within(ref: Any, timeout_s: float) -> Any:
    """What a call of an actor comes to. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        return await ref

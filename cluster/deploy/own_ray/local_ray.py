"""LocalRay is a Ray that kvrelay started for itself on this machine, and all that must be gone when it ends.

Ray's processes are children of this one. They are remembered while they run, so that what survives Ray's own
shutdown (a worker whose raylet was killed, say) can be ended by its process id. No other process is ever touched.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import psutil

from cluster.deploy.forks.preload import Preload
from cluster.deploy.forks.started import ForkServer, take
from cluster.deploy.own_ray.lean import RUNTIME_ENVIRONMENTS, lean_ray
from cluster.deploy.ray import initialized_ray, shut_down
from worker.wire.private_files import write_private

OBJECT_STORE_BYTES = 80 << 20  # Ray's least, nearly: no object of any size ever goes through it
REAP_TIMEOUT_S = 5.0
REAP_POLL_S = 0.02
LOOPBACK = "127.0.0.1"
PREFIX = "kvrelay-ray-"
KEEPERS = ("gcs_server", "raylet")  # who start what ends; without them nobody does
MAX_FOLDER_BYTES = 42  # of a path: Ray makes Unix sockets 65 bytes below, and the kernel takes 107
MAX_KEPT_LOG_BYTES = 8 << 20  # of each of Ray's own logs, after a crash

# A Ray of our own listens on loopback only (Ray turns 127.0.0.1 into the machine's address unless it believes that it
# cannot be a cluster), takes a token that only its own processes know, and reports to nobody, nor does it gather what
# it would report, which is a fifth of what an idle one costs. Ray makes actors yield to every other process (niceness
# 15), its own helpers among them; here the actors are what must answer in time.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_prestart_worker_first_driver": "0",  # `ray.init` would wait until the fork server has imported all
    "RAY_task_events_report_interval_ms": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",  # what is run here by `uv run` has its packages here
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_kill_worker_timeout_milliseconds": "500",  # until a process that is told to end is sent a SIGKILL
}


class LocalRay:
    """`start` before anything else imports ray, for some of its settings are read then."""

    def __init__(self) -> None:
        self._folder: Path | None = None  # until `start` has made it
        self._lock: int | None = None
        self._seen: dict[int, psutil.Process] = {}
        self._keepers: dict[str, psutil.Process] = {}
        self._forks: ForkServer | None = None

    def start(self, namespace: str, needs: Mapping[str, float], preload: Preload | None = None) -> None:
        """`needs`: what all actors together ask for, by Ray's names. `preload`: they are forked of a process that has
        it; None: Ray starts them. Raises RuntimeError or OSError."""
        base = _base()
        _sweep(base)
        folder, self._lock = _make_folder(base)
        self._folder = folder
        for name in ("RAY_AUTH_TOKEN", *RUNTIME_ENVIRONMENTS):
            os.environ.pop(name, None)  # Ray would take them before ours: the file's token, and no environment
        token_path = folder / "token"
        write_private(token_path, secrets.token_hex(32))
        os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN_PATH=str(token_path))
        if preload is not None:
            self._forks = take()
            self._forks.tell(folder, preload)
        import ray

        logging.getLogger("ray").setLevel(logging.CRITICAL)
        whole = {name: math.ceil(amount) for name, amount in needs.items()}  # Ray has no parts of them
        with lean_ray(is_forking=self._forks is not None):
            ray.init(
                address="local",
                namespace=namespace,
                num_cpus=max(1, whole.pop("CPU", 0)),
                num_gpus=whole.pop("GPU", 0),
                resources=whole,
                object_store_memory=OBJECT_STORE_BYTES,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                logging_level=logging.CRITICAL,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder / "r"),  # which Ray opens to everybody, but not the folder that it is in
            )
        self.remember()
        for process in self._seen.values():
            with contextlib.suppress(psutil.Error):
                if (name := process.name()) in KEEPERS:
                    self._keepers[name] = process

    def change(self, preload: Preload | None) -> None:
        """The cluster has another spec now."""
        if self._forks is not None and preload is not None:
            self._forks.change(preload)

    def remember(self) -> None:
        """Note the processes that run now; call again when actors have been started."""
        for process in psutil.Process().children(recursive=True):
            self._seen[process.pid] = process

    def why_lost(self) -> str:
        """One sentence if Ray cannot keep the cluster any more, else nothing. Without its GCS all of Ray's processes,
        this one among them, would end in the middle of what they do after a minute."""
        ended = [name for name, process in self._keepers.items() if not is_there(process)]
        return f"Ray's {' and '.join(ended)} ended, and nobody is left who restarts what fails" if ended else ""

    def stop(
        self, *, is_answering: bool = True, keep_logs_in: str = "", keep_signals: Callable[[], object] = bool
    ) -> bool:
        """End Ray and everything under it; returns when all of it is gone. One that does not answer is killed at once.
        `keep_logs_in`: a folder for Ray's logs. `keep_signals`: see `shut_down`. Returns whether this process is rid of
        Ray, too."""
        if self._folder is None:
            return True
        self.remember()
        if self._forks is not None:
            self._forks.end()
        ray = initialized_ray()  # None: its start was interrupted, and nothing runs in it
        is_ended = ray is not None and is_answering and shut_down(ray, keep_signals)
        if not is_ended and ray is not None:
            atexit.unregister(ray.shutdown)  # it would ask a GCS that is gone, and wait
        alive = _alive_after(self._seen.values(), REAP_TIMEOUT_S if is_ended else 0)
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):  # one that has just died takes others with it
                process.send_signal(signal.SIGKILL)  # psutil checks that the pid is still the same process
        _alive_after(alive, REAP_TIMEOUT_S)
        if keep_logs_in:
            _keep_logs(self._folder / "r" / "session_latest" / "logs", Path(keep_logs_in, "ray"))
        shutil.rmtree(self._folder, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
        return is_ended or ray is None


def _alive_after(processes: Iterable[psutil.Process], timeout_s: float) -> list[psutil.Process]:
    """Those that have not ended by then. One that nobody reaps has, as in a container without an init."""
    deadline, alive = time.monotonic() + timeout_s, list(processes)
    while (alive := [process for process in alive if is_there(process)]) and time.monotonic() < deadline:
        time.sleep(REAP_POLL_S)
    return alive


def is_there(process: psutil.Process) -> bool:
    """One that has ended and was not reaped is not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def _base() -> str:
    """Where temporary files go, unless sockets cannot have so long a path there, or Ray cannot read it. Raises OSError
    where there is no such place."""
    try:
        wanted = tempfile.gettempdir()
    except FileNotFoundError as error:
        raise OSError(f"{error.strerror}; set TMPDIR to a short path that can be written to") from None
    needed = len(f"/{PREFIX}") + 8
    return wanted if wanted.isascii() and len(os.fsencode(wanted)) + needed <= MAX_FOLDER_BYTES else "/tmp"


def _keep_logs(logs: Path, target: Path) -> None:
    """The ends of Ray's logs."""
    with contextlib.suppress(OSError):
        target.mkdir(parents=True, exist_ok=True)  # whatever else is there may be somebody's own
        for path in (path for path in logs.iterdir() if path.is_file() and path.stat().st_size):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - MAX_KEPT_LOG_BYTES))
                (target / path.name).write_bytes(file.read())


def _make_folder(base: str) -> tuple[Path, int]:
    """With what locks it until it is closed, or this process ends: another container, where its id says nothing, sees
    by that that somebody lives in it."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=base))
        descriptor = _locked(folder)
        if descriptor is not None and folder.exists():  # else it was swept before it was locked
            return folder, descriptor


def _locked(folder: Path) -> int | None:
    """What holds it until it is closed; None where another process does."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)  # closed on exec: no child keeps the lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _sweep(base: str) -> None:
    """Remove what runs left whose process was killed before it could clean up."""
    for folder in Path(base).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or gone already
            if (descriptor := _locked(folder)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(descriptor)

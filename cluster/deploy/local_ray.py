"""LocalRay is a Ray that kvrelay started for itself on this machine, and all that must be gone when it ends.

Ray's processes are children of this one. They are remembered while they run, so that what survives Ray's own
shutdown (a worker whose raylet was killed, say) can be ended by its process id. No other process is ever touched.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path

import psutil

OBJECT_STORE_BYTES = 80 << 20  # Ray's least, nearly: no object of any size ever goes through it
REAP_TIMEOUT_S = 5.0
LOOPBACK = "127.0.0.1"
PREFIX = "kvrelay-ray-"  # then the process that made it

# A Ray of our own listens on loopback only (Ray turns 127.0.0.1 into the machine's address unless it believes that it
# cannot be a cluster), takes a token that only its own processes know, and reports to nobody. Ray makes actors yield to
# every other process (niceness 15), its own helpers among them; here the actors are what must answer in time.
ENVIRONMENT = {
    "RAY_worker_niceness": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_kill_worker_timeout_milliseconds": "500",  # until a process that is told to end is sent a SIGKILL
}


class LocalRay:
    """`start` before anything else imports ray, for some of its settings are read then."""

    def __init__(self) -> None:
        self.temp_dir = ""
        self._seen: dict[int, psutil.Process] = {}

    def start(self, namespace: str, needs: Mapping[str, float]) -> None:
        """`needs`: what all actors together ask for, by Ray's names. Raises RuntimeError or OSError."""
        os.environ.update(ENVIRONMENT, RAY_AUTH_TOKEN=secrets.token_hex(32))
        import ray

        logging.getLogger("ray").setLevel(logging.CRITICAL)
        _sweep()
        self.temp_dir = tempfile.mkdtemp(prefix=f"{PREFIX}{os.getpid()}-")
        custom = {name: amount for name, amount in needs.items() if name not in ("CPU", "GPU")}
        ray.init(
            address="local",
            namespace=namespace,
            num_cpus=max(1, math.ceil(needs.get("CPU", 0))),
            num_gpus=math.ceil(needs.get("GPU", 0)),
            resources=custom or None,
            object_store_memory=OBJECT_STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            configure_logging=False,
            logging_level=logging.CRITICAL,
            _node_ip_address=LOOPBACK,
            _temp_dir=self.temp_dir,
        )
        self.remember()

    def remember(self) -> None:
        """Note the processes that run now; call again when actors have been started."""
        for process in psutil.Process().children(recursive=True):
            self._seen[process.pid] = process

    def stop(self, *, keep_logs: bool = False) -> None:
        """End Ray and everything under it; returns when all of it is gone."""
        import ray

        self.remember()
        ray.shutdown()
        _, alive = psutil.wait_procs(self._seen.values(), timeout=REAP_TIMEOUT_S)
        for process in alive:
            process.send_signal(signal.SIGKILL)  # psutil checks that the pid is still the same process
        psutil.wait_procs(alive, timeout=REAP_TIMEOUT_S)
        if not keep_logs:
            shutil.rmtree(self.temp_dir, ignore_errors=True)


def _sweep() -> None:
    """Remove what runs left whose process was killed before it could clean up."""
    for path in Path(tempfile.gettempdir()).glob(f"{PREFIX}*-*"):
        pid = path.name.removeprefix(PREFIX).partition("-")[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)

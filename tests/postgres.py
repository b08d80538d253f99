"""A PostgreSQL server of one's own, in a folder that goes with it, for tests and benchmarks; where none is installed,
`why_not` says so. PostgreSQL refuses to run as root: then it runs as the user `postgres`, or `nobody`."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PASSWORD = "hush-0123"
USER = "usage"
WAIT_S = 60.0
ENVIRONMENT = {"PATH": os.defpath, "LC_ALL": "C"}


def _programs() -> Path | None:
    folders = [*sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)]
    if found := shutil.which("initdb"):
        folders.append(Path(found).resolve().parent)
    return next((each for each in folders if (each / "initdb").exists() and (each / "postgres").exists()), None)


def _user() -> pwd.struct_passwd | None:
    """That it runs as, if that is not ours."""
    known = {each.pw_name: each for each in pwd.getpwall()}
    return None if os.geteuid() else known.get("postgres") or known["nobody"]


PROGRAMS = _programs()
AS_USER = _user()
is_there = PROGRAMS is not None and shutil.which("setpriv") is not None
why_not = "" if is_there else "PostgreSQL's initdb and postgres are not installed, or setpriv is not"


class Postgres:
    def __init__(self, folder: Path) -> None:
        """`folder`: empty, and of the user that it runs as."""
        assert PROGRAMS is not None, why_not
        self._data, self._programs = folder / "data", PROGRAMS
        self._process: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        secret = folder / "password"
        secret.write_text(PASSWORD)
        secret.chmod(0o644)
        how = ["--auth=scram-sha-256", f"--username={USER}", f"--pwfile={secret}", "--encoding=UTF8", "--no-sync"]
        self._run("initdb", f"--pgdata={self._data}", *how)

    @property
    def url(self) -> str:
        return self.url_of("postgres")

    def url_of(self, database: str, password: str = PASSWORD) -> str:
        return f"postgresql://{USER}:{password}@127.0.0.1:{self.port}/{database}"

    def start(self) -> None:
        """Until it takes connections; nothing if it runs."""
        if self._process is not None:
            return
        settings = {"listen_addresses": "127.0.0.1", "port": self.port, "unix_socket_directories": "", "fsync": "off"}
        command = [*self._command("postgres"), "-D", str(self._data)]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        log = (self._data.parent / "log").open("ab")
        self._process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        log.close()
        began_s = time.monotonic()
        ready = [str(self._programs / "pg_isready"), "-q", "-h", "127.0.0.1", "-p", str(self.port)]
        while subprocess.run(ready, check=False).returncode:
            if time.monotonic() > began_s + WAIT_S or self._process.poll() is not None:
                raise RuntimeError(f"{self._process.poll()}: {(self._data.parent / 'log').read_text()}")
            time.sleep(0.02)

    def stop(self) -> None:
        """At once, as in a crash: connections break, and it recovers at its next start."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait(WAIT_S)
            self._process = None

    def _run(self, name: str, *arguments: str) -> None:
        done = subprocess.run([*self._command(name), *arguments], capture_output=True, check=False, env=ENVIRONMENT)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())

    def _command(self, name: str) -> list[str]:
        """It ends with us."""
        user = [f"--reuid={AS_USER.pw_uid}", f"--regid={AS_USER.pw_gid}", "--clear-groups"] if AS_USER else []
        return ["setpriv", *user, "--pdeathsig=QUIT", str(self._programs / name)]


@contextmanager
def postgres() -> Iterator[Postgres]:
    """It runs."""
    with tempfile.TemporaryDirectory(prefix="kvrelay-postgres-") as name:
        folder = Path(name)
        if AS_USER is not None:
            os.chown(folder, AS_USER.pw_uid, AS_USER.pw_gid)
        server = Postgres(folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()

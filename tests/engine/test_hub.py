"""A name on the hub at the commit at which a cluster has it, whatever its main branch comes to be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from engine.hub import at_commit, name_and_commit, why_not_had

pytestmark = pytest.mark.unit

OLD, NEW = "1" * 40, "2" * 40


class Hub(BaseHTTPRequestHandler):
    """Of one model, whose config.json holds the commit. Its main branch moves on each time that it is asked for."""

    commits: Iterator[str]

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self.wfile.write(self._answer())

    def _answer(self) -> bytes:
        revision, _, name = self.path.removeprefix("/org/model/resolve/").partition("/")
        commit = next(self.commits) if revision == "main" else revision
        is_there = name == "config.json"
        self.send_response(200 if is_there else 404)
        for key, value in {"X-Repo-Commit": commit, "ETag": f'"{commit}"'}.items():
            self.send_header(key, value)
        self.send_header("Content-Length", str(len(commit)))
        self.end_headers()
        return commit.encode()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def hub() -> Iterator[str]:
    Hub.commits = iter([OLD, NEW])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def told(code: str, endpoint: str, cache: Path, **more: str) -> str:
    """In a process of its own: the hub's address and cache are read when its client is imported."""
    known = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", **more}
    code = f"from engine.hub import *; from engine.weights.files import file_of; {code}"
    done = subprocess.run([sys.executable, "-c", code], env=known, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_process_that_starts_later_has_the_commit_of_the_others_though_main_has_moved_on(
    hub: str, tmp_path: Path
) -> None:
    model = told("print(at_commit('org/model'))", hub, tmp_path)
    assert model == f"org/model@{OLD}"
    assert told("print(at_commit('org/model'))", hub, tmp_path) == f"org/model@{NEW}"
    read = f"print(file_of({model!r}, 'config.json', fetch=True).read_text()); keep_as_main({model!r})"
    assert told(read, hub, tmp_path) == OLD
    offline = "print(at_commit('org/model'), file_of('org/model', 'config.json').read_text())"
    assert told(offline, hub, tmp_path, HF_HUB_OFFLINE="1") == f"org/model {OLD}"


def test_a_directory_has_no_commit(tmp_path: Path) -> None:
    folder = tmp_path / f"model@{OLD}"
    folder.mkdir()
    assert at_commit(str(folder)) == str(folder)
    assert name_and_commit(str(folder)) == (str(folder), None)
    assert name_and_commit("org/model") == ("org/model", None)


@pytest.mark.parametrize(
    ("kind", "word", "why"),
    [
        (
            "httpx2.RemoteProtocolError",
            "peer closed connection",
            "the hub does not give its files (peer closed connection); start again, or fetch it by `hf download org/m`",
        ),
        (
            "huggingface_hub.errors.GatedRepoError",
            "403 for url 'https://hub/x?Signature=secret' For more information check: https://mdn",
            "the hub does not give its files (403 for url 'https://hub/x'); look at its name and its terms there, and "
            "give each host HF_TOKEN or log in on it by `hf auth login`",
        ),
        ("huggingface_hub.errors.RemoteEntryNotFoundError", "no such file", ""),
        ("builtins.ValueError", "no such layer", ""),
    ],
)
def test_a_download_that_fails_tells_its_cause_and_what_to_do(kind: str, word: str, why: str) -> None:
    """transformers tells that it cannot load the model, and what a model's directory is."""
    module, _, name = kind.rpartition(".")
    cause = type(name, (Exception,), {"__module__": module})(word)
    error = OSError("Can't load the model for 'org/m'. If you were trying to load it from")
    error.__cause__ = cause
    assert why_not_had(f"org/m@{OLD}", error) == why

"""A model that cannot be had is told in one sentence with what to do, before anything is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from engine.weights.files import why_incomplete
from kvrelay.model_found import why_not_found
from tests.hub import snapshot_of

pytestmark = pytest.mark.unit

ANSWERS = {  # of the hub, for the names that a test asks for
    "org/open": (200, ""),
    "org/gated": (403, "GatedRepo"),
    "org/unknown": (404, "RepoNotFound"),
    "org/gguf": (404, "EntryNotFound"),
    "org/ill": (503, ""),
}
FILES = ("config.json", "model.safetensors", "tokenizer.json")


class Hub(BaseHTTPRequestHandler):
    def do_HEAD(self) -> None:
        model = self.path.strip("/").removesuffix("/resolve/main/config.json")
        status, code = ANSWERS[model]
        self.send_response(status)
        for name, value in {"X-Error-Code": code, "X-Repo-Commit": "1" * 40, "ETag": '"1"'}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "2")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    Thread(target=server.serve_forever).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def make_model(directory: Path, *names: str) -> Path:
    directory.mkdir(parents=True)
    for name in names or FILES:
        (directory / name).write_text("{}")
    return directory


def of_hub(model: str, endpoint: str, cache: Path, **more: str) -> str:
    """In a process of its own: the hub's address and cache are read when its client is imported."""
    code = "import sys; from kvrelay.model_found import why_not_found; print(why_not_found(sys.argv[1]))"
    known = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HUB_CACHE": str(cache), "HF_HUB_OFFLINE": "0", **more}
    done = subprocess.run([sys.executable, "-c", code, model], env=known, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_a_whole_directory_is_found(tmp_path: Path) -> None:
    assert why_not_found(str(make_model(tmp_path / "model"))) == ""


@pytest.mark.parametrize(
    ("names", "why"),
    [
        (FILES[1:], "has no config.json"),
        (("config.json", "tokenizer.json"), "has no weights"),
        (("config.json", "model.safetensors"), "has no tokenizer"),
    ],
)
def test_a_directory_that_lacks_something_is_told_what(tmp_path: Path, names: tuple[str, ...], why: str) -> None:
    model = str(make_model(tmp_path / "model", *names))
    told = why_not_found(model)
    assert told.startswith(f"model is {model!r}, a directory that {why}")
    assert "did you mean" not in told
    assert ("; copy the model's tokenizer files there, or give a whole" in told) == (why == "has no tokenizer")
    assert "hf download" in told
    assert "kvrelay make-model" in told


def test_a_shard_that_was_not_downloaded_is_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "config.json", "tokenizer.json", "a.safetensors")
    index = {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    assert why_incomplete(model) == "lacks 1 of the files that its index names, first b.safetensors"
    (model / "b.safetensors").write_text("{}")
    assert why_incomplete(model) == ""


def test_weights_in_a_format_that_is_not_read_are_named(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "config.json", "tokenizer.json", "model-Q4_K_M.gguf")
    told = "has no weights (*.safetensors, *.bin), but model-Q4_K_M.gguf, in a format that is not read"
    assert why_incomplete(model) == told
    assert f"a directory that {told}; give a whole Hugging Face model directory" in why_not_found(str(model))
    told = "in GGUF, which is not read; give the directory of a checkpoint in safetensors"
    assert why_not_found(str(model / "model-Q4_K_M.gguf")).endswith(told)
    (model / "config.json").unlink()
    assert why_incomplete(model) == "has no config.json, but model-Q4_K_M.gguf, in a format that is not read"


def test_a_pointer_of_git_lfs_is_no_weight(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model")
    (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    assert "git lfs pull" in why_incomplete(model)


def test_weights_of_another_user_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(tmp_path / "model")
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "model.safetensors")  # root may read all
    assert why_incomplete(model) == "has model.safetensors, which this user may not read"


def test_a_misspelt_directory_finds_the_one_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "modles").mkdir()  # of something else
    monkeypatch.chdir(tmp_path)
    assert "there is no such directory, did you mean ./model? give another" in why_not_found("./modle")
    assert f"did you mean {tmp_path}/model?" in why_not_found(f"{tmp_path}/Modell")
    assert "did you mean" not in why_not_found("./other")


def test_the_folder_above_a_model_names_it(tmp_path: Path) -> None:
    make_model(tmp_path / "llama" / "llama-v2")
    assert f"did you mean {tmp_path}/llama/llama-v2?" in why_not_found(str(tmp_path / "llama"))


def test_a_file_and_what_can_be_no_name(tmp_path: Path) -> None:
    path = make_model(tmp_path / "model") / "config.json"
    assert "which is a file; give the directory" in why_not_found(str(path))
    assert "which is no directory and no hub id" in why_not_found("two words")


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ("org/open", ""),
        ("org/gated", "which is gated; accept its terms at {hub}/org/gated, then log in with `hf auth login`"),
        ("org/unknown", "on the hub none of that name that you may see: log in with `hf auth login` if it is private"),
        ("org/gguf", "which has no config.json on the hub; give one in transformers' format"),
    ],
)
def test_what_the_hub_says_of_a_name(hub: str, tmp_path: Path, model: str, told: str) -> None:
    found = of_hub(model, hub, tmp_path)
    assert told.format(hub=hub) in found
    assert bool(found) == bool(told)


def test_a_hub_that_is_out_of_reach(tmp_path: Path) -> None:
    told = of_hub("org/open", "http://127.0.0.1:1", tmp_path)
    assert "a hub id that is not among those downloaded, and the hub cannot be asked" in told
    assert "`hf download org/open` where there is a network" in told
    assert "HF_HUB_OFFLINE keeps us from asking" in of_hub(
        "org/open", "http://127.0.0.1:1", tmp_path, HF_HUB_OFFLINE="1"
    )


def test_what_was_downloaded_whole_needs_no_hub(tmp_path: Path) -> None:
    model = make_model(snapshot_of("org/open", tmp_path))
    assert of_hub("org/open", "http://127.0.0.1:1", tmp_path) == ""
    assert "did you mean org/open?" in of_hub("org/opne", "http://127.0.0.1:1", tmp_path)
    (model / "model.safetensors").unlink()
    assert "a hub id that has no weights" in of_hub("org/open", "http://127.0.0.1:1", tmp_path)

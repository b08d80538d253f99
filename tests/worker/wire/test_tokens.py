"""Tokens of clients: what is read as one, who is let in, and what a changed file changes."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

import pytest

from worker.wire.private_files import MAX_BYTES
from worker.wire.tokens import MAX_TOKENS, RELOAD_S, Keyring, TokenError, parse_tokens, read_tokens

pytestmark = pytest.mark.unit

CHAT, BATCH = "chat-token-0123456789", "batch-token-0123456789"


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def tokens_file(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_each_line_names_a_client_in_any_of_the_three_ways(tmp_path: Path) -> None:
    path = tokens_file(tmp_path, f"# of ours\n\nchat:{CHAT}\r\nbatch   {BATCH}\nchat: second-{CHAT}\nlone-{CHAT}\n")
    keyring = Keyring(path=str(path))
    named = [keyring.name_of(token.encode()) for token in (CHAT, BATCH, f"second-{CHAT}", f"lone-{CHAT}")]
    assert named == ["chat", "batch", "chat", "default"]


@pytest.mark.parametrize(
    "token",
    [b"", b"chat", CHAT[:-1].encode(), CHAT.encode() + b"0", f"chat:{CHAT}".encode(), b"\xff\xfe", b"0" * 10_000],
)
def test_everybody_else_is_nobody(token: bytes) -> None:
    assert Keyring(text=f"chat:{CHAT}").name_of(token) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "has no token, so nobody could come in"),
        ("# none yet\n", "has no token, so nobody could come in"),
        (f"chat:{CHAT}\nbatch:short", "line 2 of here is no `name:token`"),
        ("chat:schlüssel-mit-umlaut", "line 1 of here is no `name:token`"),
        (f"a name:{CHAT}", "line 1 of here"),
        (f"chat:{CHAT}\nbatch:{CHAT}", "line 2 of here gives batch the token of another name"),
        ("\n".join(f"{CHAT}{i}" for i in range(MAX_TOKENS + 1)), f"give at most {MAX_TOKENS}"),
    ],
)
def test_what_is_no_list_of_tokens_is_told_without_showing_one(text: str, sentence: str) -> None:
    with pytest.raises(TokenError, match=sentence) as refused:
        parse_tokens(text, "here")
    assert CHAT not in str(refused.value)


@pytest.mark.parametrize("mode", [0o604, 0o644, 0o660])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(TokenError, match=f"is open to others .mode {mode:04o}.; chmod 600 it"):
        read_tokens(tokens_file(tmp_path, f"chat:{CHAT}", mode))


def test_what_is_no_file_of_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tokens_file(tmp_path, f"chat:{CHAT}")
    (tmp_path / "link").symlink_to(path)
    assert read_tokens(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    for other in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises(TokenError, match=r"is no plain file|is a directory"):
            read_tokens(other)
    with pytest.raises(TokenError, match="no such file"):
        read_tokens(tmp_path / "nowhere")
    with pytest.raises(TokenError, match=f"more than {MAX_BYTES} bytes"):
        read_tokens(tokens_file(tmp_path, "#" * (MAX_BYTES + 1)))
    monkeypatch.setattr(os, "geteuid", lambda: path.stat().st_uid + 1 or 1)
    if path.stat().st_uid:  # root's files are anybody's who may read them
        with pytest.raises(TokenError, match="belongs to another user"):
            read_tokens(path)


def test_a_token_is_revoked_and_another_given_without_a_restart(tmp_path: Path) -> None:
    clock = Clock()
    path = tokens_file(tmp_path, f"chat:{CHAT}")
    keyring = Keyring(path=str(path), clock=clock)
    path.write_text(f"batch:{BATCH}")
    clock.now += RELOAD_S
    assert (keyring.name_of(CHAT.encode()), keyring.name_of(BATCH.encode())) == (None, "batch")


def test_a_token_is_revoked_though_the_file_could_not_be_read_at_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As when a flood of connections has taken the last descriptor."""
    clock = Clock()
    path = tokens_file(tmp_path, f"chat:{CHAT}")
    keyring = Keyring(path=str(path), clock=clock)
    path.write_text(f"batch:{BATCH}")
    with monkeypatch.context() as full:

        def no_more(*_: object) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        full.setattr(os, "open", no_more)
        clock.now += RELOAD_S
        assert keyring.name_of(CHAT.encode()) == "chat"
    clock.now += RELOAD_S
    assert keyring.name_of(CHAT.encode()) is None


@pytest.mark.parametrize("spoil", ["empty", "gone", "open", "torn"])
def test_a_file_that_is_spoilt_neither_opens_nor_closes_the_door(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, spoil: str
) -> None:
    clock = Clock()
    path = tokens_file(tmp_path, f"chat:{CHAT}")
    keyring = Keyring(path=str(path), clock=clock)
    match spoil:
        case "empty":
            path.write_text("")
        case "gone":
            path.unlink()
        case "open":
            path.chmod(0o644)
        case "torn":
            path.write_text(f"chat:{CHAT}\nbatch:{BATCH[:5]}")
    caplog.set_level(logging.INFO)
    for _ in range(10):
        clock.now += RELOAD_S
        assert (keyring.name_of(CHAT.encode()), keyring.name_of(b"")) == ("chat", None)
    assert len(caplog.records) == 1
    assert "the tokens stay as they were" in caplog.text
    assert BATCH[:5] not in caplog.text


def test_no_token_shows_in_a_repr() -> None:
    assert CHAT not in repr(parse_tokens(f"chat:{CHAT}", "here"))
    with pytest.raises(TokenError, match="has no token"):
        Keyring()

"""Tokens are what clients show a cluster: named, so that one is revoked and accounted for without the others.

    # tokens.txt, 0600
    chat:cjF0gk8...       client "chat" sends `authorization: Bearer cjF0gk8...`
    batch 9pHn2xV...      a name may have two tokens, while the new one replaces the old

Keyring follows such a file (followed.py): what is added is let in, and what is gone is refused, within RELOAD_S. No
token is ever part of a sentence, a log line or a repr.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from worker.wire.followed import Followed
from worker.wire.private_files import PrivateFileError, read_private

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]{16,512}")  # the characters of a bearer token (RFC 6750)
TOKEN_RULE = "16 to 512 characters of A-Z, a-z, 0-9 and ._~+/=-, such as from `openssl rand -hex 32`"
MAX_TOKENS = 1000
RELOAD_S = 1.0
DEFAULT_NAME = "default"
OPERATORS = ("", DEFAULT_NAME, "operator")  # who may do what others may not; no name: there are no tokens


class TokenError(ValueError):
    """Tokens that cannot be used: one sentence that names the place and the mend, and no token."""


@dataclass(frozen=True, slots=True)
class Token:
    name: str
    value: bytes = field(repr=False)


def checked_token(value: str, where: str) -> str:
    """Raises TokenError for what gRPC's metadata cannot carry, or is too short to be a secret."""
    if not TOKEN.fullmatch(value):
        raise TokenError(f"{where} is no token; give {TOKEN_RULE}")
    return value


def parse_tokens(text: str, where: str) -> tuple[Token, ...]:
    """A line is name:token, `name token`, or a token alone, whose name is `default`. Raises TokenError."""
    tokens: dict[bytes, Token] = {}
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        name, value = _split(line.strip())
        if not NAME.fullmatch(name) or not TOKEN.fullmatch(value):
            raise TokenError(f"line {number} of {where} is no `name:token`; give a token of {TOKEN_RULE}")
        token = Token(name, value.encode("ascii"))
        if tokens.setdefault(token.value, token) != token:
            raise TokenError(f"line {number} of {where} gives {name} the token of another name; give each its own")
    if not tokens:
        raise TokenError(f"{where} has no token, so nobody could come in; add a line `name:token`")
    if len(tokens) > MAX_TOKENS:
        raise TokenError(f"{where} has {len(tokens)} tokens; give at most {MAX_TOKENS}")
    return tuple(tokens.values())


def _split(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":") if ":" in line else line.partition(" ")
    return (name.strip(), value.strip()) if value else (DEFAULT_NAME, name)


def read_tokens(path: str | Path) -> tuple[Token, ...]:
    """Raises TokenError."""
    try:
        text = read_private(path, "the tokens file").decode("ascii")
    except PrivateFileError as error:
        raise TokenError(str(error)) from None
    except UnicodeDecodeError:
        raise TokenError(f"the tokens file {str(path)!r} is not plain ASCII; give {TOKEN_RULE}") from None
    return parse_tokens(text, f"the tokens file {str(path)!r}")


class Keyring:
    """Who a token belongs to. `text` has fixed tokens, `path` is a file that is followed; one of them is given."""

    def __init__(self, *, text: str = "", path: str = "", clock: Callable[[], float] = time.monotonic) -> None:
        """Raises TokenError for tokens that cannot be used, or none at all."""
        self._clock = clock
        self._looked_s = clock()
        self._key = secrets.token_bytes(32)
        self._fixed = self._owners(parse_tokens(text, "the cluster's tokens")) if text or not path else {}
        self._file: Followed[dict[bytes, str]] | None = None
        if path:
            self.follow(path)

    def follow(self, path: str) -> None:
        """This file, and the last one no more. Raises TokenError; nothing has changed then."""
        self._file = Followed([path], lambda: self._owners(read_tokens(path)), "the tokens")

    def name_of(self, token: bytes) -> str | None:
        """None for a token of nobody. Looked up by a hash with a key of this process's own: the time it takes tells
        nothing of any token, and does not grow with their number."""
        self._follow()
        digest = self._digest(token)
        return self._fixed.get(digest) or (self._file.value.get(digest) if self._file else None)

    def _owners(self, tokens: Sequence[Token]) -> dict[bytes, str]:
        return {self._digest(token.value): token.name for token in tokens}

    def _digest(self, token: bytes) -> bytes:
        return hashlib.blake2b(token, digest_size=32, key=self._key).digest()

    def _follow(self) -> None:
        now = self._clock()
        if self._file is not None and now - self._looked_s >= RELOAD_S:
            self._looked_s = now
            self._file.renew()

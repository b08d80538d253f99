"""A router that takes options while it serves is in every value like one that was made with them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from cluster.front.allowance.options import Account
from cluster.front.generation import Generation
from cluster.front.options import FrontOptions
from cluster.front.server import RouterServer, ServerOptions
from cluster.router.options import RouterOptions
from cluster.spec.knobs import change_of
from cluster.spec.model import RouterSpec
from engine.knobs import Knob, knobs_of
from worker.wire.tokens import Keyring, TokenError

pytestmark = pytest.mark.unit

KNOBS = {**knobs_of(RouterOptions), **knobs_of(FrontOptions)}
UNLIKE = ("router_id", "_router_id", "_started_s")  # of two routers
LIVE = [name for name in KNOBS if change_of(RouterSpec, name).how == "now"]


def other_value(knob: Knob) -> Any:
    """In its range, and not its default."""
    if isinstance(knob.default, dict):
        return {"somebody": Account(weight=2)}
    if knob.choices:
        return next(choice for choice in knob.choices if choice != knob.default)
    if isinstance(knob.default, bool):
        return not knob.default
    other = knob.default * 2 or 7
    return other if not knob.why_not(other) else knob.default / 2


@dataclasses.dataclass
class Codec:
    max_waiting_bytes: int


def server_of(**changed: Any) -> RouterServer:
    own = {kind: {k: v for k, v in changed.items() if k in knobs_of(kind)} for kind in (RouterOptions, FrontOptions)}
    options = ServerOptions(router=RouterOptions(**own[RouterOptions]), front=FrontOptions(**own[FrontOptions]))
    server = RouterServer(options, codec=cast(Any, Codec(options.front.max_tokenizing_bytes)))
    server._generation = Generation(server.catalog, options=options.front, calls=server._calls)
    return server


def values_of(thing: Any) -> dict[str, Any]:
    """Every plain value that an object of ours reaches, by the way to it."""
    return dict(_values_of(thing, "", set()))


def _values_of(thing: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    if isinstance(thing, bool | int | float | str | None):
        yield path, thing
    elif isinstance(thing, dict) and all(isinstance(value, Account) for value in thing.values()):
        for key, account in thing.items():
            yield from ((f"{path}[{key}].{name}", value) for name, value in account)
    elif type(thing).__module__.startswith(("cluster.", "worker.", __name__)) and id(thing) not in seen:
        seen.add(id(thing))
        slots = (name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ()))
        names = {*getattr(thing, "__dict__", ()), *slots}
        for name in sorted(names):
            if hasattr(thing, name) and name not in UNLIKE:
                yield from _values_of(getattr(thing, name), f"{path}.{name}", seen)


@pytest.mark.parametrize("name", LIVE)
async def test_each_knob_that_changes_now_is_taken_by_whoever_reads_it(name: str) -> None:
    changed = server_of(**{name: other_value(KNOBS[name])})
    server = server_of()
    assert values_of(server) != values_of(changed), "the value is another one"
    server.take_options(changed.options.router, changed.options.front, "")
    assert values_of(server) == values_of(changed)


def test_a_knob_that_cannot_change_says_why() -> None:
    assert set(KNOBS) - set(LIVE) == {name for name, knob in KNOBS.items() if knob.fixed}


def test_tokens_of_another_file_are_taken_and_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first", "second")]
    for file in files:
        file.write_text(f"{file.name}:token-of-the-{file.name}")
        file.chmod(0o600)
    keyring = Keyring(path=str(files[0]))
    with pytest.raises(TokenError, match="nowhere"):
        keyring.follow(str(tmp_path / "nowhere"))
    assert keyring.name_of(b"token-of-the-first") == "first"
    keyring.follow(str(files[1]))
    assert keyring.name_of(b"token-of-the-second") == "second"
    assert keyring.name_of(b"token-of-the-first") is None


def test_a_server_goes_by_another_tokens_file(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("first", "second")]
    for file in files:
        file.write_text(f"{file.name}:token-of-the-{file.name}")
        file.chmod(0o600)
    server = RouterServer(ServerOptions(auth=True, tokens_file=str(files[0])))
    server.take_options(server.options.router, server.options.front, str(files[1]))
    assert server._keyring is not None
    assert server._keyring.name_of(b"token-of-the-second") == "second"
    assert dataclasses.replace(server.options).tokens_file == str(files[1])

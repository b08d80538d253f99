"""What `kvrelay up` draws, reads and checks before it starts anything."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import trustme

from cluster.spec.errors import SpecError
from kvrelay.cli.cluster.secrets import draw, keep_from_children, noted, why_overheard
from kvrelay.cli.cluster.state import this_process
from kvrelay.cli.console import CliError
from kvrelay.cli.spec.wanted import build
from kvrelay.cli.spec_flags import SpecChanges
from tests.certificates import write_tls
from worker.wire.tls import MEMBER_NAME
from worker.wire.tokens import Keyring

pytestmark = pytest.mark.unit

TOKEN = "a-token-of-ours-0123"


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in [name for name in os.environ if name.startswith(("KVRELAY_T", "KVRELAY_S", "OTEL_"))]:
        monkeypatch.delenv(variable)


def spec_of(cluster: dict[str, Any] | None = None, **router: Any) -> Any:
    return build(None, SpecChanges(cluster={"model": "m", **(cluster or {})}, router=router), {}).spec


def test_tokens_are_asked_for_unless_one_says_otherwise() -> None:
    first = draw(spec_of(), must_be_here=True)
    second = draw(spec_of(), must_be_here=True)
    state = noted(spec_of(), first, this_process("chat", "foreground"))
    assert Keyring(text=first.clients).name_of(state.token.encode()) == "default"
    assert len({first.cluster, second.cluster, first.clients, second.clients}) == 4
    assert first.cluster not in repr(first) + repr(state)
    assert state.token not in repr(first) + repr(state)
    assert draw(spec_of(auth=False), must_be_here=True).clients == ""


def test_what_opentelemetry_reads_goes_with_the_secrets_and_its_headers_to_nobody_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4317", "OTEL_EXPORTER_OTLP_HEADERS": "api-key=of-ours"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    drawn = draw(spec_of(), must_be_here=True)
    keep_from_children()
    assert given.items() <= drawn.telemetry.items()
    assert "of-ours" not in repr(drawn)
    assert [name for name in given if name in os.environ] == ["OTEL_EXPORTER_OTLP_ENDPOINT"]


def test_traces_that_nothing_here_can_send_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "zipkin")
    with pytest.raises(CliError, match="OTEL_TRACES_EXPORTER is 'zipkin', which no installed package has"):
        draw(spec_of(), must_be_here=True)
    assert draw(spec_of(), must_be_here=False).telemetry["OTEL_TRACES_EXPORTER"] == "zipkin"


def test_a_token_or_a_file_that_is_given_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokens"
    path.write_text(TOKEN)
    path.chmod(0o600)
    monkeypatch.setenv("KVRELAY_TOKEN", TOKEN)
    assert draw(spec_of(), must_be_here=True).clients == f"default:{TOKEN}"
    monkeypatch.setenv("KVRELAY_TOKENS_FILE", str(path))
    spec = build(None, SpecChanges(cluster={"model": "m"}), {}).with_tokens_file().spec
    drawn = draw(spec, must_be_here=True)
    assert (spec.router.tokens_file, drawn.clients) == (str(path), "")  # what is taken out of it is out
    assert noted(spec, drawn, this_process("chat", "foreground")).tokens_file == str(path)


@pytest.mark.parametrize("variable", ["KVRELAY_TOKEN", "KVRELAY_SECRET"])
@pytest.mark.parametrize("value", ["schlüssel-mit-umlaut", "short", "with blanks in it, long enough"])
def test_a_secret_that_metadata_cannot_carry_is_refused_at_reading_it(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(CliError, match=f"{variable} is no token; give 16 to 512 characters") as refused:
        draw(spec_of(), must_be_here=True)
    assert value not in str(refused.value)


def test_one_who_is_no_operator_cannot_replan(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch(mode=0o600)
    path.write_text(f"chat:{TOKEN}\noperator:{TOKEN}-2")
    spec = spec_of({"replan": "advise"}, tokens_file=str(path), slo_ttft_ms=500.0)
    with pytest.raises(CliError, match=r"replan is advise, which takes an operator, and .* of 'chat'; put one"):
        draw(spec, must_be_here=True)
    draw(spec, must_be_here=False)
    draw(spec_of(tokens_file=str(path)), must_be_here=True)
    for first in ("operator:", ""):
        path.write_text(f"{first}{TOKEN}\nchat:{TOKEN}-2")
        draw(spec, must_be_here=True)


def test_files_are_read_before_anything_is_started(tmp_path: Path) -> None:
    with pytest.raises(CliError, match=r"the tokens file '/nowhere' cannot be read: no such file"):
        draw(spec_of(tokens_file="/nowhere"), must_be_here=True)
    draw(spec_of(tokens_file="/nowhere"), must_be_here=False)
    files = write_tls(tmp_path, trustme.CA())
    with pytest.raises(CliError, match="the key '/nowhere' cannot be read"):
        draw(spec_of(tls=f"{{cert: {files.cert}, key: /nowhere}}"), must_be_here=True)
    Path(files.ca).write_text("no certificate")
    member = {"cert": files.cert, "key": files.key, "ca": files.ca}
    with pytest.raises(CliError, match=r"the authorities '.*' cannot be used"):
        draw(spec_of({"tls": str(member)}), must_be_here=True)


def test_certificates_are_named_in_the_spec_by_full_paths(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    spec = spec_of({"tls": "{cert: m.pem, key: m.key, ca: ca.pem}"}, tls="{cert: ~/r.pem, key: r.key}")
    assert spec.tls.files.cert == str(tmp_path / "m.pem")
    assert spec.tls.files.server_name == MEMBER_NAME
    assert spec.router.tls.files.cert == str(Path("~/r.pem").expanduser())
    assert spec.router.tls.files.ca == ""


@pytest.mark.parametrize(
    ("router", "sentence"),
    [
        ({"auth": False, "host": "0.0.0.0"}, "^router.auth is false and host is 0.0.0.0, where anybody"),
        ({"auth": False, "host": "10.0.0.5", "tls": "{cert: a, key: b}"}, "where anybody on the network could call"),
        ({"auth": False, "tokens_file": "t"}, "^router.auth is false, and a tokens_file is given; give one of them"),
        ({"tls": "{cert: a}"}, "router.tls.key is missing; give it a value"),
        ({"tls": "{cert: a, key: b, kee: c}"}, "router.tls.kee is not a known key; did you mean router.tls.key?"),
        ({"tls": "yes"}, "router.tls is True; give keys and values, indented under it"),
    ],
)
def test_a_router_that_lets_strangers_in_is_no_spec(router: dict[str, Any], sentence: str) -> None:
    with pytest.raises(SpecError, match=sentence):
        spec_of(**router)


def test_a_router_that_asks_for_certificates_may_do_without_tokens() -> None:
    assert not spec_of(auth=False, host="0.0.0.0", tls="{cert: a, key: b, client_ca: c}").router.auth


@pytest.mark.parametrize(
    ("router", "is_joined", "sentence"),
    [
        ({}, False, ""),
        ({"host": "127.0.0.1"}, True, "the cluster's secret and KV cross between nodes in plain text"),
        ({"host": "0.0.0.0"}, False, "clients' tokens, prompts and answers cross the network in plain text"),
        ({}, True, "clients' tokens, prompts and answers"),
        ({"host": "0.0.0.0", "tls": "{cert: a, key: b}"}, False, ""),
    ],
)
def test_what_could_be_overheard_is_told(router: dict[str, Any], is_joined: bool, sentence: str) -> None:
    told = why_overheard(spec_of(**router), is_joined=is_joined)
    assert told.startswith(sentence)
    assert bool(told) == bool(sentence)

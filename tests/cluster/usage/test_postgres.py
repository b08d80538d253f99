"""A router serves whether its PostgreSQL server is there or not, and all that it counted is there once it is."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import grpc
import psycopg
import pytest

from cluster.front.server import server_options
from cluster.usage import postgres as engine
from cluster.usage.accounting import Accounting
from cluster.usage.database import DatabaseError
from cluster.usage.layout import Counts, Row
from cluster.usage.options import UsageUrl
from cluster.usage.postgres import PostgresDatabase
from kvrelay.v1 import cluster_pb2, cluster_pb2_grpc
from tests.cluster.harness import Harness, collect, request, serving
from tests.cluster.usage.harness import totals
from tests.postgres import PASSWORD, Postgres

ROW = Row(bytes(16), 7, "anna", 1, Counts(requests=1))


async def usage_of(h: Harness) -> cluster_pb2.GetUsageResponse:
    stub = cluster_pb2_grpc.ClusterStub(h.channel)
    told: cluster_pb2.GetUsageResponse = await stub.GetUsage(cluster_pb2.GetUsageRequest())
    return told


def generated(told: cluster_pb2.GetUsageResponse) -> int:
    return sum(each.generated_tokens for each in told.usage)


async def test_a_router_starts_without_its_database_and_loses_nothing(
    server: Postgres, url: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    options = server_options(port=0, usage_db=UsageUrl(url, tmp_path / "postgresql"))
    server.stop()
    try:
        async with serving(options=options) as h:
            await collect(h.generate.Generate(request((5, 6), max_tokens=4)))
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError, match=r"cannot be read now: .*refused") as away:
                    await usage_of(h)
                assert away.value.code() == grpc.StatusCode.UNAVAILABLE
                assert PASSWORD not in str(away.value)
            server.start()
            assert generated(await usage_of(h)) == 4
            server.stop()
            await collect(h.generate.Generate(request((5, 6), max_tokens=4)))
        server.start()
        async with serving(options=options) as h:
            assert generated(await usage_of(h)) == 8
    finally:
        server.start()
    said = [line.message for line in caplog.records if "the ledger keeps" in line.message]
    assert 1 <= len(said) <= 2, "once each time that it goes away"
    assert url.replace(PASSWORD, "***") in said[0]
    assert PASSWORD not in caplog.text


async def test_routers_of_two_clusters_tell_the_same_of_one_database(url: str, tmp_path: Path) -> None:
    places = [UsageUrl(url, tmp_path / name / "postgresql") for name in ("blue", "green")]
    async with (
        serving(options=server_options(port=0, usage_db=places[0])) as blue,
        serving(options=server_options(port=0, usage_db=places[1])) as green,
    ):
        for h in (blue, green):
            await collect(h.generate.Generate(request((5, 6), max_tokens=4)))
        told = [await usage_of(h) for h in (blue, green, blue)][1:]
        assert len({each.database for each in told}) == 1
        assert [generated(each) for each in told] == [8, 8]


def test_a_connection_that_broke_is_made_again(server: Postgres, url: str) -> None:
    database = PostgresDatabase(url)
    database.store([ROW])
    identity = database.identity
    server.stop()
    with pytest.raises(DatabaseError):
        database.store([ROW])
    server.start()
    database.store([ROW._replace(version=2, counts=Counts(requests=5))])
    assert totals(database) == {(7, "anna"): Counts(requests=5)}
    assert database.identity == identity


def test_a_server_that_says_nothing_is_given_up(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    database = PostgresDatabase(url)
    database.store([ROW])
    monkeypatch.setattr(engine, "ANSWER_S", 0.2)
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE usage")
        began_s = time.monotonic()
        with pytest.raises(DatabaseError):
            database.store([ROW])
        assert time.monotonic() - began_s < 60
    monkeypatch.undo()
    database.store([ROW])
    assert totals(database) == {(7, "anna"): ROW.counts}


def test_one_that_may_write_but_make_no_tables_can_be_given(server: Postgres, url: str) -> None:
    PostgresDatabase(url).store(())
    name = url.rpartition("/")[2]
    with psycopg.connect(url, autocommit=True) as db:
        db.execute(f"CREATE ROLE counter{name} LOGIN PASSWORD '{PASSWORD}'")
        db.execute(f"GRANT SELECT, INSERT, UPDATE ON usage, identity TO counter{name}")
    database = PostgresDatabase(f"postgresql://counter{name}@127.0.0.1:{server.port}/{name}?password={PASSWORD}")
    database.store([ROW])
    assert totals(database) == {(7, "anna"): ROW.counts}
    assert PASSWORD not in database.name


def test_what_a_wrong_url_fails_by_is_said_without_the_password(server: Postgres) -> None:
    wrong = {
        server.url_of("postgres", password="other-hush"): "password authentication failed",
        server.url_of("nowhere"): 'database "nowhere" does not exist',
        server.url.replace(f":{server.port}", ":1"): "Connection refused",
    }
    for url, why in wrong.items():
        with pytest.raises(DatabaseError, match=why) as error:
            PostgresDatabase(url).store(())
        assert "hush" not in str(error.value)
        assert "\n" not in str(error.value)


@pytest.mark.unit
def test_a_url_that_cannot_be_read_keeps_a_router_from_starting_and_is_not_shown(tmp_path: Path) -> None:
    for url in ("postgresql://me:hu%sh@host/usage", "postgresql://me:hu sh@host:x/usage?what=hush"):
        with pytest.raises(OSError, match=r"usage_db 'postgresql://me:\*\*\*@host.*percent-encoded") as error:
            Accounting.open(UsageUrl(url, tmp_path / "postgresql"), "router-0")
        assert "sh@" not in str(error.value)


@pytest.mark.unit
def test_without_psycopg_it_is_said_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "cluster.usage.postgres", raising=False)
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(OSError, match=r"psycopg is not installed; pip install 'kvrelay\[postgres\]'"):
        Accounting.open(UsageUrl("postgresql://host/usage", tmp_path / "postgresql"), "router-0")

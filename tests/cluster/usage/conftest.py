"""A PostgreSQL server for all tests here, and a database of its own for each; skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import psycopg
import pytest

from tests import postgres as programs
from tests.postgres import Postgres, postgres

NUMBERS = count()


@pytest.fixture(scope="session")
def server() -> Iterator[Postgres]:
    if programs.why_not:
        pytest.skip(programs.why_not)
    with postgres() as started:
        yield started


@pytest.fixture
def url(server: Postgres) -> str:
    """Of an empty database."""
    name = f"test{next(NUMBERS)}"
    with psycopg.connect(server.url, autocommit=True) as db:
        db.execute(f"CREATE DATABASE {name}")
    return server.url_of(name)

"""No password is shown, however its URL is written."""

from __future__ import annotations

import pytest

from worker.wire.secrets import without_passwords

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://me:hush@host:5432/usage", "postgresql://me:***@host:5432/usage"),
        ("postgresql://me:hu@sh/hu sh@host/usage", "postgresql://me:***@host/usage"),
        ("postgresql://host/usage?user=me&password=hu sh&sslmode=require", "postgresql://host/usage?user=me&password=***&sslmode=require"),
        ("postgresql:///usage?sslmode=verify-full&sslpassword=hush", "postgresql:///usage?sslmode=verify-full&sslpassword=***"),
        ("postgresql://me@host/usage", "postgresql://me@host/usage"),
        ("http://localhost:4317", "http://localhost:4317"),
        ("./model", "./model"),
    ],
)  # fmt: skip
def test_a_password_in_a_url_is_not_shown(url: str, shown: str) -> None:
    assert without_passwords(url) == shown

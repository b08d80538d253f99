"""What is asked of a Ray that does not answer ends."""

from __future__ import annotations

import threading
import time

import pytest

from cluster.deploy.ray import ends_within

pytestmark = pytest.mark.unit


def test_who_hangs_is_left_behind() -> None:
    began_s = time.monotonic()
    assert not ends_within(threading.Event().wait, 0.05)
    assert time.monotonic() - began_s < 5.0


def test_who_can_never_end_is_not_waited_for() -> None:
    began_s = time.monotonic()
    assert not ends_within(threading.Event().wait, 60.0, lambda: "the GCS is gone")
    assert time.monotonic() - began_s < 5.0


def test_what_fails_did_not_end_well() -> None:
    def fail() -> None:
        raise ConnectionError("the GCS is gone")

    assert not ends_within(fail, 5.0)
    assert ends_within(lambda: None, 5.0)

"""What an engine says no with. UnsupportedModel comes at load; EngineBroken from any step after it, and stays."""

from __future__ import annotations


class UnsupportedModel(Exception):
    """A model that cannot be served exactly: one sentence naming the architecture or feature, and why."""


class EngineBroken(Exception):
    """No step can be run any more, whatever it holds: one sentence that says why."""

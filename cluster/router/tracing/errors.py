"""What goes wrong where traces are asked for."""

from __future__ import annotations


class TracingError(ValueError):
    """What is asked for cannot be had: one sentence."""

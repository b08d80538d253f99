"""What an engine says no with. UnsupportedModel comes at load; EngineBroken from any step after it, and stays."""

from __future__ import annotations

import re

# CUDA says of these that the process must end before the device can be used again; their text is all that every library
# passes on. What is not among them (no memory, an argument that a kernel refuses) may be one step's trouble.
CANNOT_HEAL = re.compile(
    r"illegal memory access|illegal address|illegal instruction|misaligned address|invalid program counter"
    r"|device-side assert|launch failure|launch timed out|hardware stack error|uncorrectable|unknown error"
    r"|GPU is lost|fallen off the bus|busy or unavailable|NCCL communicator was aborted|ncclUnhandledCudaError",
    re.IGNORECASE,
)


class UnsupportedModel(Exception):
    """A model that cannot be served exactly: one sentence naming the architecture or feature, and why."""


class EngineBroken(Exception):
    """No step can be run any more, whatever it holds: one sentence that says why."""


def raise_if_broken(error: Exception) -> None:
    """Raise EngineBroken for what no later step can be free of."""
    if isinstance(error, EngineBroken):
        raise error
    if CANNOT_HEAL.search(str(error)):
        raise EngineBroken(f"the device is lost to this process: {in_short(error)}") from error


def in_short(error: Exception) -> str:
    """What of an error may stand in a sentence: libraries put pages of advice below their first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

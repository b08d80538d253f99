"""What an engine says no with. UnsupportedModel comes at load; EngineBroken from any step after it, and stays.

Torch-free: torch's errors are known by what they carry.
"""

from __future__ import annotations

import re

# CUDA refuses such calls before anything of them runs, and later ones may go well. By their codes: no memory, a bad
# argument or launch's shape, no kernel, no peer access, too much asked of a launch, what no graph may hold. After any
# other error the process must end before the device can be used again.
MAY_HEAL = {1, 2, 9, 13, 98, 209, 217, 701, 704, 705, 720, 801, *range(900, 911)}
# The same of other libraries' errors, of which there is only a text.
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
    if _cannot_heal(error):
        raise EngineBroken(f"the device is lost to this process: {in_short(error)}") from error


def _cannot_heal(error: Exception) -> bool:
    if type(error).__name__ == "OutOfMemoryError":
        return False
    code = getattr(error, "error_code", None)  # torch.AcceleratorError: CUDA's own
    if isinstance(code, int):
        return code not in MAY_HEAL
    return CANNOT_HEAL.search(str(error)) is not None


def in_short(error: Exception) -> str:
    """What of an error may stand in a sentence: libraries put pages of advice below their first line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__

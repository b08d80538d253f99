"""What is free in glibc's heap after a load or a flood; by itself it gives back only its end."""

from __future__ import annotations

import ctypes


def give_memory_back() -> None:
    """To the system."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)

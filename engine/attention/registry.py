"""Which attention backends there are, and which one `auto` means here."""

from __future__ import annotations

import logging

from engine.attention.base import AttentionBackend

logger = logging.getLogger(__name__)

NAMES = ("auto", "torch", "native")


def make_backend(name: str, page_size: int) -> AttentionBackend:
    """The backend called `name`; `auto` is `native` where it can be built. Raises ValueError for an unknown name."""
    if name not in NAMES:
        raise ValueError(f"attention is {name!r}; give one of {', '.join(NAMES)}")
    from engine.attention.torch_backend import TorchBackend

    return TorchBackend()

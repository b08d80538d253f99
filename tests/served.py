"""A model as a router tells of it."""

from __future__ import annotations

from typing import Any

from kvrelay.client.types import ServedModel


def served_model(**changes: Any) -> ServedModel:
    told: dict[str, Any] = {"name": "m", "architecture": "", "dtype": "", "eos_token_ids": (), "fingerprint": ""}
    return ServedModel(**told | {"vocab_size": 100, "max_model_len": 100, "num_params": 1} | changes)

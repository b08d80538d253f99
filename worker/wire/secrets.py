"""Secrets are what the processes of one cluster share and nobody else may read.

They are made by `kvrelay up`, and handed from process to process in calls of which Ray keeps nothing: never in a
command line, an environment, an actor's constructor (which Ray's GCS keeps) or a log. Their text shows none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    cluster: str = field(repr=False)  # every call between processes of the cluster carries it
    clients: str = field(default="", repr=False)  # tokens (worker/wire/tokens.py); empty: a file has them, or none

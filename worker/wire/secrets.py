"""Secrets are what the processes of one cluster share and nobody else may read.

They are made or found by `kvrelay up`, and handed from process to process in calls of which Ray keeps nothing: never in
a command line, an actor's constructor (which Ray's GCS keeps), a log or an environment, but that of the router which
sends traces. Their text shows none of them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

SECRET_VARIABLE = "KVRELAY_SECRET"
TOKEN_VARIABLE = "KVRELAY_TOKEN"
TELEMETRY_HEADERS = ("OTEL_EXPORTER_OTLP_HEADERS", "OTEL_EXPORTER_OTLP_TRACES_HEADERS")  # in which a key may be
VARIABLES = (SECRET_VARIABLE, TOKEN_VARIABLE, *TELEMETRY_HEADERS)  # of the environment of `up`, and of no other's
IN_URLS = (
    (re.compile(r"(://[^/@:\s]*):.*@", re.DOTALL), r"\1:***@"),  # to the last @: it may be one of the password's
    (re.compile(r"([?&](?:ssl)?password=)[^&]*", re.IGNORECASE), r"\1***"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Secrets:
    cluster: str = field(repr=False)  # every call between processes of the cluster carries it
    clients: str = field(default="", repr=False)  # tokens (worker/wire/tokens.py); empty: a file has them, or none
    telemetry: Mapping[str, str] = field(default_factory=dict, repr=False)  # OTEL_* for routers: headers hold keys


def without_passwords(text: str) -> str:
    """A value as it may be shown, which may be a URL; rather too little of it than too much."""
    for pattern, shown in IN_URLS:
        text = pattern.sub(shown, text)
    return text

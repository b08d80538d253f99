"""Whether traces are asked for, and whose exporter sends them: OpenTelemetry's variables say it, or the router's
endpoint. Nothing of OpenTelemetry is imported before they do; what else they say its SDK reads itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import TYPE_CHECKING

from cluster.router.tracing.errors import TracingError

if TYPE_CHECKING:
    from cluster.router.tracing.tracing import Tracing

ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
BY_PROTOCOL = {"grpc": "otlp_proto_grpc", "http/protobuf": "otlp_proto_http"}
GROUP = "opentelemetry_traces_exporter"  # in which packages name their exporters


def make_tracing(endpoint: str, *, instance: str, clock: Callable[[], float]) -> Tracing | None:
    """None: nobody asks. `endpoint`: in place of the variables' one; empty: theirs. Raises TracingError."""
    if not (exporters := asked_exporters(endpoint)):
        return None
    from cluster.router.tracing.tracing import Tracing, make_provider

    return Tracing(make_provider(exporters, endpoint, instance), clock=clock)


def asked_exporters(endpoint: str, environ: Mapping[str, str] = os.environ) -> list[EntryPoint]:
    """None: it is off. Raises TracingError for one that is not installed."""
    given = environ.get("OTEL_TRACES_EXPORTER", "").strip()
    if given.lower() == "none" or environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return []
    usual = "otlp" if endpoint or any(environ.get(name) for name in ENDPOINTS) else ""
    names = [name.strip() for name in (given or usual).split(",") if name.strip()]
    return [_installed(_full(name, environ)) for name in names]


def _full(name: str, environ: Mapping[str, str]) -> str:
    if name != "otlp":
        return name
    variable = next((each for each in PROTOCOLS if environ.get(each)), "")
    protocol = environ.get(variable, "grpc").strip()
    if protocol not in BY_PROTOCOL:
        raise TracingError(f"{variable} is {protocol!r}; give one of {', '.join(BY_PROTOCOL)}")
    return BY_PROTOCOL[protocol]


def _installed(name: str) -> EntryPoint:
    if exporter := next(iter(entry_points(group=GROUP, name=name)), None):
        return exporter
    if name in BY_PROTOCOL.values():
        package = f"opentelemetry-exporter-{name.replace('_', '-')}"
        raise TracingError(f"traces are asked for, and {package} is not installed; pip install 'kvrelay[otel]'")
    known = ", ".join(sorted({"otlp", "none", *entry_points(group=GROUP).names}))
    raise TracingError(f"OTEL_TRACES_EXPORTER is {name!r}, which no installed package has; give one of {known}")

"""A call belongs to the trace that its caller is in, where its process uses OpenTelemetry: then it carries traceparent.
Where nobody has imported that, it is not imported for this either.
"""

from __future__ import annotations

import sys


def trace_metadata() -> tuple[tuple[str, str], ...]:
    if "opentelemetry.trace" not in sys.modules:
        return ()
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return tuple(carrier.items())

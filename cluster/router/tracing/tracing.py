"""Tracing sends requests that have ended to OpenTelemetry, each as a span of spans (spans.py). All of it is done in a
thread of its own, a moment later, when workers have told the last: the event loop puts a record into a line, no more.

Which exporter, where to, how much is sampled and batched is the SDK's to read from its variables.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from importlib.metadata import EntryPoint, version
from queue import SimpleQueue

from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor

from cluster.router.explaining.kept import Record
from cluster.router.tracing.errors import TracingError
from cluster.router.tracing.spans import send

log = logging.getLogger(__name__)

LATE_S = 1.0  # that workers may take to tell of a request that has ended
FLUSH_S = 2.0  # that a router which stops waits for what is on its way
MOST = 4096  # records in line; those beyond have no trace


def make_provider(exporters: Sequence[EntryPoint], endpoint: str, instance: str) -> TracerProvider:
    """Raises TracingError."""
    provider = TracerProvider(resource=_resource(instance), shutdown_on_exit=False)
    for each in exporters:
        given = {"endpoint": endpoint} if endpoint and each.name.startswith("otlp") else {}
        try:
            provider.add_span_processor(BatchSpanProcessor(each.load()(**given)))
        except (ValueError, TypeError, OSError, ImportError) as error:
            raise TracingError(f"the exporter {each.name} cannot be made: {error}") from error
    return provider


def _resource(instance: str) -> Resource:
    """As the variables say, and by our own names where they say nothing."""
    own = {SERVICE_NAME: "kvrelay", SERVICE_INSTANCE_ID: instance}
    return Resource.create(own | dict(OTELResourceDetector().detect().attributes))


class Tracing:
    def __init__(self, provider: TracerProvider, *, clock: Callable[[], float]) -> None:
        """`clock`: by which records are."""
        self._provider = provider
        self._tracer = provider.get_tracer("kvrelay", version("kvrelay"))
        self._clock = clock
        self._ended: SimpleQueue[tuple[Record, str] | None] = SimpleQueue()
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tracing", daemon=True)
        self._thread.start()

    def on_end(self, record: Record, model: str) -> None:
        """`model`: as requests name it."""
        if self._ended.qsize() < MOST:
            self._ended.put((record, model))

    def close(self) -> None:
        """Send what is left, as far as that can be done soon. A second call does nothing."""
        if self._is_closing.is_set():
            return
        self._is_closing.set()
        self._ended.put(None)
        self._thread.join(FLUSH_S)

    def _run(self) -> None:
        calls: dict[tuple[str, float], list[Record]] = {}  # of several choices, until all have ended
        while (ended := self._ended.get()) is not None:
            record, model = ended
            self._is_closing.wait(max(0.0, record.end_s + LATE_S - self._clock()))
            key = record.request_id, record.timeline.arrived_s
            choices = [*calls.pop(key, ()), record]
            if len(choices) == record.num_choices:
                self._send(choices, model)
            elif len(calls) < MOST:
                calls[key] = choices
        self._provider.shutdown()

    def _send(self, choices: list[Record], model: str) -> None:
        unix_s = time.time() - self._clock()  # of the clock's zero, as it is now: wall clocks are set
        try:
            send(self._tracer, choices, unix_s, model)
        except Exception:  # one that is odd costs no other its trace
            log.exception("the trace of a request cannot be made")

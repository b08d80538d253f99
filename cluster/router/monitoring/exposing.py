"""/metrics: what is read of the routers of one process, one for each model, in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cluster.router.monitoring.families import PREFIX, Scrape, families
from cluster.router.monitoring.metrics import COUNTERS
from cluster.router.monitoring.scraping import Application, ScrapeServer
from worker.wire.tls import TlsFiles

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.metrics_core import Metric

Scrapes = Callable[[], Sequence[Scrape]]


def text_of(scrapes: Sequence[Scrape]) -> bytes:
    from prometheus_client import generate_latest

    return generate_latest(_registry(lambda: scrapes))


def expose(
    host: str,
    port: int,
    scrapes: Scrapes,
    *,
    may_enter: Callable[[bytes, str], bool] = lambda authorization, peer: True,
    tls: TlsFiles | None = None,
) -> ScrapeServer:
    """Serve /metrics on host:port (0: any free one). Raises OSError when it is taken.

    `scrapes` is called in the server's thread, at each scrape.
    """
    from prometheus_client import make_wsgi_app

    app = _in_text(make_wsgi_app(_registry(scrapes)))
    return ScrapeServer(host, port, app, may_enter=may_enter, tls=tls)


def _in_text(app: Application) -> Application:
    """Whatever a scraper would rather have: prometheus_client's OpenMetrics has `_` in a name for its `:`."""

    def answer(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        return app(environ | {"HTTP_ACCEPT": "text/plain"}, start_response)

    return answer


def _registry(scrapes: Scrapes) -> CollectorRegistry:
    from prometheus_client import CollectorRegistry

    registry = CollectorRegistry()
    registry.register(_Exposed(scrapes))
    return registry


class _Exposed:
    """In a registry of its own: two servers in one process do not meet."""

    def __init__(self, scrapes: Scrapes) -> None:
        self._scrapes = scrapes

    def collect(self) -> Iterator[Metric]:
        """Called at a scrape, in the server's thread."""
        return _joined(metric for scrape in self._scrapes() for metric in _of(scrape))

    def describe(self) -> Iterator[Metric]:
        return iter(())


def _of(scrape: Scrape) -> Iterator[Metric]:
    yield from families(scrape, COUNTERS)
    for name, histogram in scrape.histograms.items():
        yield histogram.family(PREFIX + name, scrape.model)


def _joined(metrics: Iterable[Metric]) -> Iterator[Metric]:
    """Those of one name are one family, which the format has once."""
    found: dict[str, Metric] = {}
    for metric in metrics:
        if (known := found.setdefault(metric.name, metric)) is not metric:
            known.samples.extend(metric.samples)
    return iter(found.values())

"""Endings notes how each call of Generate's ended: counted by code, and where asked for in one line of the log.

A line has what whoever is on call asks first: who, for which model, which code and why, how many tokens, where the time
went, over which workers, in how many attempts. No text and no token of the request is in it.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from cluster.front.models.catalog import Served
from cluster.router.live.requests import RequestFailed, Submission
from cluster.router.monitoring.metrics import RouterMetrics
from engine.types import InvalidRequest
from worker.wire.door import CALLER

log = logging.getLogger("kvrelay.requests")


class Ending:
    """Of one call, while it runs."""

    def __init__(self) -> None:
        self.submission: Submission | None = None  # None: refused before there was one
        self.num_tokens = 0  # that were made into messages
        self.model = ""  # that it asks for by name, or the cluster's own; empty: not known yet, as is
        self.served: Served | None = None  # who serves that
        self.release: Callable[[], None] = _nothing  # of what it has of its caller's allowance
        self.code = "OK"
        self.reason = ""

    def ask(self, served: Served, name: str) -> None:
        """It is one of that model's calls until it ends. `name`: the model's or an adapter's, or empty."""
        self.served, self.model = served, name or served.name
        served.calls.add(self)

    def end(self) -> None:
        if self.served is not None:
            self.served.calls.discard(self)
        self.release()


def _nothing() -> None:
    pass


class Endings:
    def __init__(self, metrics: RouterMetrics, log_requests: Literal["off", "text", "json"]) -> None:
        """`metrics`: of calls that end before it is known which model they ask for."""
        self._metrics = metrics
        self.log_requests = log_requests

    @contextmanager
    def noted(self) -> Iterator[Ending]:
        ending = Ending()
        try:
            yield ending
        except RequestFailed as error:
            ending.code, ending.reason = error.code.name, error.message
            raise
        except InvalidRequest as error:
            ending.code, ending.reason = "INVALID_ARGUMENT", str(error)
            raise
        except (asyncio.CancelledError, GeneratorExit):
            ending.code, ending.reason = "CANCELLED", "the client went away"
            raise
        except BaseException as error:
            ending.code, ending.reason = "UNKNOWN", repr(error)
            raise
        finally:
            ending.end()
            metrics = self._metrics if ending.served is None else ending.served.router.metrics
            metrics.on_ended(ending.code)
            if self.log_requests != "off":
                self._log(described(ending, CALLER.get()))

    def _log(self, line: dict[str, Any]) -> None:
        if self.log_requests == "json":
            log.info("%s", json.dumps(line))
        else:
            log.info("%s", " ".join(f"{key}={value}" for key, value in line.items() if value not in ("", 0, {})))


def described(ending: Ending, caller: str) -> dict[str, Any]:
    """Plain values. With several choices, time and workers are the first one's."""
    line: dict[str, Any] = {
        "request_id": "",
        "client": caller,
        "model": ending.model,
        "code": ending.code,
        "reason": ending.reason,
    }
    if ending.submission is None:
        return line
    first = ending.submission.choices[0]
    return line | {
        "request_id": ending.submission.id,
        "choices": len(ending.submission.choices),
        "prompt_tokens": len(first.prompt_ids),
        "cached_tokens": first.cached_tokens,
        "completion_tokens": ending.num_tokens,
        "ttft_s": round(first.timeline.ttft_s, 6),
        "e2e_s": round(first.timeline.e2e_s, 6),
        "phases_s": {name: round(seconds, 6) for name, seconds in first.timeline.phases().items()},
        "prefill_worker": first.prefill,
        "decode_worker": first.decode,
        "attempts": first.attempt,
    }

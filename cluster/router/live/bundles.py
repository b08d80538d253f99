"""Bundles says for how long a stream's tokens are kept after a message, to go to the client together.

Most of what a token costs the router is its message, so a busy router sends fewer: the busier the event loop's thread,
the longer tokens are kept, up to a share of the TPOT target. It is busy while it runs, and while it stands in line for
a core. At rest nothing is kept. The first of an answer never waits, nor what came with the end, so that neither TTFT
nor E2EL is longer; vLLM's `stream_interval` counts tokens instead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

LOOK_S = 0.1  # between two looks at how busy the thread is
IDLE, BUSY = 0.3, 0.6  # shares of a core: nothing is kept up to the one, all of the share from the other on
SCHEDSTAT = Path("/proc/thread-self/schedstat")
UNTARGETED_S = 0.05  # what counts as a target where there is none


def thread_wanted_s() -> float:
    """Seconds that this thread has run or stood in line for a core; where the kernel does not say, that it has run."""
    try:
        ran_ns, waited_ns, _ = SCHEDSTAT.read_text().split()
    except OSError:
        return time.thread_time()
    return (int(ran_ns) + int(waited_ns)) / 1e9


class Bundles:
    def __init__(
        self,
        share: float = 0.0,
        tpot_s: float = 0.0,
        *,
        clock: Callable[[], float] = time.monotonic,
        wanted_s: Callable[[], float] = thread_wanted_s,
    ) -> None:
        """`share` of a request's TPOT target, or of `tpot_s` where it has none; `wanted_s`: of a core, by
        the thread that asks."""
        self.set_targets(share, tpot_s)
        self._clock = clock
        self._wanted_s = wanted_s
        self._looked: tuple[float, float] | None = None
        self._fullness = 0.0  # of the share, by how busy the thread was

    def set_targets(self, share: float, tpot_s: float) -> None:
        self._share = share
        self._tpot_s = tpot_s or UNTARGETED_S

    def keep_s(self, tpot_s: float) -> float:
        """Seconds; 0: what comes goes at once. `tpot_s`: the request's own target; 0: it has none."""
        if not self._share:
            return 0.0
        now = self._clock()
        if self._looked is None or now - self._looked[0] >= LOOK_S:
            self._look(now)
        return self._fullness * self._share * (tpot_s or self._tpot_s)

    def _look(self, now: float) -> None:
        wanted_s = self._wanted_s()
        if self._looked is not None:
            busy = (wanted_s - self._looked[1]) / (now - self._looked[0])
            self._fullness = min(1.0, max(0.0, (busy - IDLE) / (BUSY - IDLE)))
        self._looked = now, wanted_s

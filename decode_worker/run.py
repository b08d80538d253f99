"""DecodeRun takes a DecodePolicy many steps ahead at once, for a driver that knows the time of steps beforehand: the
simulator. It decides nothing; the policy does, as it does live.

While nobody joins, ends or is preempted, one step is like the next but for the pages. So of all that next_batch and
on_batch_done would do, step by step, only this is left to do when a run advances: whoever has filled a page gets the
next one, in the order of the steps. The lengths of the requests lag behind until the run ends.

    begin      next_batch
    advance    on_batch_done and next_batch, so many times
    end        on_batch_done
"""

from __future__ import annotations

from decode_worker.policy import DecodePolicy, DecodeRequest, DecodeSchedule


class DecodeRun:
    """One run after another of one policy. No batch may be in flight meanwhile."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = policy
        self._pool = policy.pool
        self._requests: list[DecodeRequest] = []
        self._advanced = 0  # steps
        self._needs_page: dict[int, list[DecodeRequest]] = {}  # by the step, modulo the page size, that needs one more

    def begin(self) -> DecodeSchedule:
        assert not self._requests, "a run is under way"
        schedule = self._policy.schedule()
        self._requests, self._advanced = schedule.requests, 0
        return schedule

    @property
    def context_tokens(self) -> int:
        """Attended to in the first step, the new tokens counted."""
        tokens = 0
        for request in self._requests:
            tokens += request.scheduled_len
        return tokens

    @property
    def steps_ahead(self) -> int:
        """How many steps `advance` can surely take from here before pages run out; 0: begin a new run for each."""
        count = len(self._requests)
        spare = self._pool.available - count  # everyone takes at most one page more than a full page's steps ask for
        return spare * self._pool.page_size // count if count and spare > 0 else 0

    def advance(self, steps: int) -> None:
        """The caller sees to it that steps <= steps_ahead, that nobody needs its last token before the run's last step,
        and that nobody is cancelled but in the last step."""
        if not steps:
            return
        if not self._advanced:
            self._note_needs()
        begin, end = self._advanced, self._advanced + steps
        self._advanced = end
        page_size = self._pool.page_size
        for at in range(begin - begin % page_size, end, page_size) if self._needs_page else ():
            for offset in sorted(self._needs_page):
                if begin <= at + offset < end:
                    for request in self._needs_page[offset]:
                        request.pages.extend(self._pool.allocate(1))

    def _note_needs(self) -> None:
        self._needs_page = {}
        for request in self._requests:
            self._needs_page.setdefault(-request.scheduled_len % self._pool.page_size, []).append(request)

    def end(self) -> None:
        requests, self._requests = self._requests, []
        self._policy.on_steps_done(requests, self._advanced + 1)

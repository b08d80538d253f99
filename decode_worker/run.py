"""DecodeRun takes a DecodePolicy many steps ahead at once, for a driver that knows the time of steps beforehand: the
simulator. It decides nothing; the policy does, as it does live.

While nobody is preempted or moves, one step is like the next but for the pages. So of all that next_batch and
on_batch_done would do, step by step, only this is left to do: whoever has filled a page gets the next one, in the order
of the steps. The lengths of the requests lag behind, from run to run, until they leave or something else than a step
may change them: then all are settled, and the policy schedules anew.

    begin      next_batch
    advance    on_batch_done and next_batch, so many times
    end        on_batch_done
"""

from __future__ import annotations

from bisect import bisect_left, insort
from operator import attrgetter

from decode_worker.batches import DecodeRequest, DecodeSchedule
from decode_worker.policy import DecodePolicy

_order = attrgetter("order")


class DecodeRun:
    """One run after another of one policy. No batch may be in flight meanwhile, and who has its last token is told to
    `leave` before the next run begins."""

    def __init__(self, policy: DecodePolicy) -> None:
        self._policy = policy
        self._pool = policy.pool
        self._requests: dict[str, DecodeRequest] = {}  # whose lengths lag behind
        self._is_whole = True  # all that run are in the step that was begun last
        self._steps = 0  # of all runs, that have begun
        self._needs_page: dict[int, list[DecodeRequest]] = {}  # by the step, modulo the page size, that needs one more
        self.context_tokens = 0  # attended to in the step that begins, the new tokens counted

    def begin(self) -> DecodeSchedule:
        policy = self._policy
        joined = policy.join()
        if not self._goes_on(joined):
            return self._begin_anew()
        for request in joined:
            self._note(request, request.scheduled_len)
            request.scheduled_len += 1
            self.context_tokens += request.scheduled_len - 1
        self.context_tokens += len(self._requests)
        self._give_pages(self._steps)
        self._steps += 1
        names = tuple([request.request_id for request in joined])
        return DecodeSchedule(requests=policy.running, joined=names, preempted=())

    def _goes_on(self, joined: list[DecodeRequest]) -> bool:
        """Whether all that ran are in the next step, too, with those who join them, and all have their pages."""
        policy, count = self._policy, len(self._requests)
        if not count or policy.num_moving or count + len(joined) != policy.num_running:
            return False
        needs = self._needs_page.get(self._steps % self._pool.page_size)
        return self._pool.available >= len(joined) + (len(needs) if needs else 0)

    def _begin_anew(self) -> DecodeSchedule:
        self.settle()
        schedule = self._policy.schedule()
        for request in schedule.requests:
            self._note(request, request.scheduled_len - 1)
            self.context_tokens += request.scheduled_len
        self._is_whole = len(self._requests) == self._policy.num_running
        self._steps += 1
        return schedule

    def _note(self, request: DecodeRequest, length: int) -> None:
        """It is in the step that begins, and had this length."""
        request.joined_step = self._steps
        self._requests[request.request_id] = request
        key = (self._steps - length) % self._pool.page_size
        needs = self._needs_page.get(key)
        if needs is None:
            self._needs_page[key] = [request]
        else:
            insort(needs, request, key=_order)

    @property
    def steps_ahead(self) -> int:
        """How many steps `advance` can surely take from here before pages run out; 0: begin a new run for each."""
        count = len(self._requests)
        spare = self._pool.available - count  # everyone takes at most one page more than a full page's steps ask for
        return spare * self._pool.page_size // count if count and spare > 0 else 0

    def advance(self, steps: int) -> None:
        """The caller sees to it that steps <= steps_ahead, that nobody needs its last token before the run's last step,
        and that nobody is cancelled but in the last step."""
        begin, end = self._steps, self._steps + steps
        self._steps = end
        self.context_tokens += steps * len(self._requests)
        if steps < len(self._needs_page):
            for step in range(begin, end):
                self._give_pages(step)
            return
        page_size = self._pool.page_size
        for at in range(begin - begin % page_size, end, page_size) if self._needs_page else ():
            for offset in sorted(self._needs_page):
                if begin <= at + offset < end:
                    self._give_pages(at + offset)

    def _give_pages(self, step: int) -> None:
        for request in self._needs_page.get(step % self._pool.page_size, ()):
            request.pages.extend(self._pool.allocate(1))

    def end(self) -> None:
        """Somebody may have been cancelled meanwhile: it goes now."""
        if self._policy.num_moving or not self._is_whole or len(self._requests) != self._policy.num_running:
            self.settle()

    def leave(self, request_id: str) -> None:
        """Between two runs: this one is about to leave, and its lengths are wanted."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return
        key = (request.joined_step - request.scheduled_len + 1) % self._pool.page_size
        needs = self._needs_page[key]
        needs.pop(bisect_left(needs, request.order, key=_order))
        if not needs:
            del self._needs_page[key]
        self._settle(request)
        self.context_tokens -= request.scheduled_len

    def settle(self) -> None:
        """Between two runs: the lengths of all are wanted."""
        for request in self._requests.values():
            self._settle(request)
        self._requests.clear()
        self._needs_page.clear()
        self.context_tokens = 0

    def _settle(self, request: DecodeRequest) -> None:
        self._policy.on_steps_done(request, self._steps - request.joined_step)

"""RunningBatch is who decodes at a colocated worker, how far each is, and the worker's pages.

It chooses nobody to join and knows no time: its worker tells it who joins and how many steps have passed. Steps are
counted, so that whoever ends next is known beforehand, and many of them may pass at once.
"""

from __future__ import annotations

from heapq import heappop, heappush

from engine.pages.pool import pages_for


class Request:
    __slots__ = ("computed", "end_step", "index", "joined_step", "left", "num_tokens", "order", "pages", "size")

    def __init__(self, index: int, prompt_len: int, output_len: int) -> None:
        self.index = index
        self.size = prompt_len + output_len
        self.num_tokens = prompt_len  # to prefill: the prompt, and what it made before it was preempted
        self.left = output_len  # tokens still to make
        self.computed = 0
        self.order = 0
        self.pages = 0  # held, but for those that growth has added in the run under way
        self.joined_step = 0
        self.end_step = -1  # while it decodes


class RunningBatch:
    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        self.free_pages = num_pages
        self.requests: dict[Request, None] = {}
        self.context_tokens = 0  # of all, those of the next step counted
        self.steps = 0  # that have ended
        self._ends: list[tuple[int, int, int, Request]] = []

    def take_prompt_pages(self, request: Request) -> None:
        request.pages = pages_for(request.num_tokens, self.page_size)
        self.free_pages -= request.pages

    def release(self, request: Request) -> None:
        self.free_pages += request.pages

    def join(self, request: Request) -> None:
        """Its prompt is computed; its pages are taken."""
        request.joined_step = self.steps
        request.end_step = self.steps + request.left
        self.requests[request] = None
        self.context_tokens += request.num_tokens + 1
        heappush(self._ends, (request.end_step, request.index, request.order, request))

    def make_room(self) -> list[Request]:
        """Pages for everybody's next token. Those who had to leave for it, the youngest first: they begin again, with
        the tokens that they have made as part of their prompt."""
        preempted: list[Request] = []
        while self.requests:
            growing = sum(self._grows(request) for request in self.requests)
            if growing <= self.free_pages:
                for request in self.requests:
                    if self._grows(request):
                        request.pages += 1
                self.free_pages -= growing
                break
            youngest = max(self.requests, key=lambda request: request.order)
            self._preempt(youngest)
            preempted.append(youngest)
        return preempted

    @property
    def steps_ahead(self) -> int:
        """How many steps may pass at once: until somebody ends, or until pages could run out."""
        count = len(self.requests)
        spare = self.free_pages - count
        return min(self._next_end() - self.steps, 1 + (spare * self.page_size // count if spare > 0 else 0))

    def advance(self, steps: int) -> list[Request]:
        """So many steps have ended, for whose first make_room has taken the pages. Those who are done, without their
        pages."""
        count = len(self.requests)
        if steps > 1:
            self.steps += steps - 1
            for request in self.requests:
                more = pages_for(self._length(request) + 1, self.page_size) - request.pages
                request.pages += more
                self.free_pages -= more
            self.steps -= steps - 1
        self.steps += steps
        self.context_tokens += count * steps
        done: list[Request] = []
        while self._ends and self._ends[0][0] <= self.steps:
            end_step, _, _, request = heappop(self._ends)
            if request.end_step == end_step and request in self.requests:
                del self.requests[request]
                self.context_tokens -= self._length(request) + 1
                self.release(request)
                done.append(request)
        return done

    def _preempt(self, request: Request) -> None:
        length = self._length(request)
        del self.requests[request]
        self.context_tokens -= length + 1
        self.release(request)
        request.left -= self.steps - request.joined_step
        request.num_tokens = length + 1  # the token that it had not computed yet is known too
        request.computed = request.pages = 0
        request.end_step = -1

    def _length(self, request: Request) -> int:
        """Tokens whose KV stands in its pages."""
        return request.num_tokens + self.steps - request.joined_step

    def _grows(self, request: Request) -> bool:
        return self._length(request) >= request.pages * self.page_size

    def _next_end(self) -> int:
        while self._ends[0][3].end_step != self._ends[0][0]:
            heappop(self._ends)  # it was preempted
        return self._ends[0][0]

"""DecodePolicy decides who may have pages, who joins the running batch, and who must leave when pages run out.

It never reads a clock, moves a byte or talks to anyone: its driver (driver.py live, the simulator in placement)
calls it, carries out what it returns and reports what happened. `next_batch` is legal while batches are in flight.

     expect --pages--> [reading] --adopt------------\
    reserve --> [queued] --pages--> [reserved] --commit--> [ready] --> [running] --> gone
                    \\                  \\----> [held] --begin--/ |         |
                     \\__________________\\_______\\_______________\\________\\--- on_cancelled, or preempted --> gone

Pages. A reservation takes pages for every token that will be handed over. With `watermark` admission a share of the
pool is left free for running requests to grow into, and when it runs out the last request that holds committed KV, by
priority and then by age, is preempted: its pages go, and the router has it computed again (prompt and tokens so far) by
the prefill pool. With `worst_case` admission the sum of prompt + max_tokens over all admitted requests stays within the
pool, so that nobody is ever preempted. Queued reservations are granted by priority, lower ones first, then first come,
first served.

Held requests. One that may be what a decode worker died of is reserved and committed as any other, and joins no batch
before its router says so, who lets them begin one by one: it knows of which this worker dies. Until then it holds its
pages, and ends as all others do.

Requests that move to another worker are computed on meanwhile, and hold their pages until the handoff is closed: they
are not preempted. `on_move_stops` ends their steps, so that the last page can follow; without a receipt they go on.

A prompt that another worker has read in part comes like any other; what is unread is read here (`on_unread`), in the
pages that were reserved for all of it.

Prompts beside. Where prompts are computed in the same pages, each counts from its first chunk on as a request that was
admitted, and whoever asked for pages first, prompt or reservation of one priority, has them first. One that stays is
*adopted* when it is computed, pages and all; one that leaves is gone then.

Dropped pages. One that keeps less than all of its KV counts the tokens that it holds, in all lengths and positions:
`drop_page` takes a page from among them.

The batch. Ready requests join by priority, then in order of their commit, up to max_batch_size. Each step computes one
token for every running request that has no token in flight beyond what its pages can hold. Where an engine has pipeline
stages, each has a batch of its own: a request is in one of them, and each holds an even share of all.

Guesses. Behind a request's next token a step may run guesses at those that follow (drafts.py), in rows and pages that
nobody else needs now: nobody leaves, or waits, for a guess. It is in no other step meanwhile; those that were wrong are
forgotten with it (`kept`), and their places in the pages are written again.

Beam searches. Each beam is a row of every step, in pages of its own behind those that all share (beam_tables.py). After
a step the driver says from which beams the next ones go on (`on_fork`). All have the same length, and come and go
together.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from operator import attrgetter

from decode_worker.batches import NEVER, DecodeBatch, DecodeEntry, DecodeRequest, DecodeSchedule, Stage
from decode_worker.beam_tables import BeamTables
from decode_worker.options import DecodeOptions
from engine.pages.pool import OutOfPages, PageHash, PagePool, pages_for
from kv_transfer.lease import Denied, Granted, Queued
from worker.priority import in_turn

ORDER_BITS = 32  # of the number of a reservation

_order = attrgetter("order")


class DecodePolicy:
    def __init__(self, pool: PagePool, options: DecodeOptions, *, name: str = "decode", num_stages: int = 1) -> None:
        self.pool = pool
        self.options = options
        self.name = name
        self.num_stages = num_stages  # of the engine
        self._requests: dict[str, DecodeRequest] = {}
        self._queued: dict[str, DecodeRequest] = {}
        self._held: dict[str, DecodeRequest] = {}
        self._ready: dict[str, DecodeRequest] = {}
        self._running: dict[str, DecodeRequest] = {}
        self._by_age: list[DecodeRequest] = []  # the running, by order: priority, and then age
        self._num_rows = 0  # of the running
        self._next_order = 0
        self._queued_pages = 0  # that the queued reservations ask for
        self._expected: dict[str, DecodeRequest] = {}  # prompts that will stay, and have not begun
        self._refused: dict[str, int] = {}  # of those, who has last asked for pages in vain: their orders
        self.preemptions = 0
        self.num_changes = 0  # of request_ids
        self.num_moving = 0  # to another worker

    def reserve(
        self,
        request_id: str,
        *,
        num_tokens: int,
        max_new_tokens: int,
        hashes: Sequence[PageHash],
        room: int = 0,
        is_held: bool = False,
        priority: int = 0,
        most_pages: int = NEVER,
        num_beams: int = 0,
    ) -> Granted | Queued | Denied:
        """Pages for a request of which `num_tokens` will be handed over, and that may grow by `max_new_tokens`.
        `room`: it runs elsewhere, and may have grown by so many when it comes; it waits for nothing. `is_held`: it is
        not computed before on_begin. `priority`: lower goes first. `most_pages`: more it will never hold. `num_beams`:
        of its search, if it has one."""
        if max_new_tokens < 2:  # the first of them was drawn at prefill
            return Denied(reason=f"{self.name}: {request_id} has no token left to decode", retryable=False)
        max_len = num_tokens + max_new_tokens - 1
        request = self._made(request_id, num_tokens, max_len, hashes, is_held, priority, most_pages, num_beams)
        if isinstance(request, Denied):
            return request
        request.room = min(room, max_new_tokens - 2)
        is_next = self._is_before_queued(request) and self._may_admit(request)
        why = f"{self.name}: {self.pool.available} of {self.pool.num_pages} pages free"
        if room and not is_next:
            return Denied(reason=why, retryable=True)
        self._requests[request_id] = request
        self.num_changes += 1
        if is_next:
            return self._admit(request)
        self._queued = in_turn(self._queued, request)
        self._queued_pages += self._pages_for(request.prompt_len)
        return Queued(reason=why)

    def _made(
        self,
        request_id: str,
        num_tokens: int,
        max_len: int,
        hashes: Sequence[PageHash],
        is_held: bool,
        priority: int,
        most_pages: int,
        num_beams: int,
    ) -> DecodeRequest | Denied:
        if request_id in self._requests or request_id in self._expected:
            return Denied(reason=f"{self.name}: {request_id} is here already", retryable=True)
        request = DecodeRequest(
            request_id=request_id,
            order=(priority << ORDER_BITS) + self._next_order,
            priority=priority,
            prompt_len=num_tokens,
            max_len=max_len,
            most_pages=self._most_pages(num_tokens, max_len, most_pages, num_beams),
            hashes=list(hashes[: num_tokens // self.pool.page_size]),
            is_held=is_held,
            num_beams=num_beams,
        )
        if (need := request.most_pages) > self.pool.num_pages:
            return Denied(reason=f"{self.name}: {need} pages needed, {self.pool.num_pages} exist", retryable=False)
        if num_beams > (most := self.options.max_batch_size):
            return Denied(reason=f"{self.name}: num_beams is {num_beams}; its batch holds {most}", retryable=False)
        self._next_order += 1
        return request

    def next_grants(self) -> list[tuple[str, Granted]]:
        """Queued reservations whose turn has come, in order."""
        grants: list[tuple[str, Granted]] = []
        while self._queued and self._may_admit(request := next(iter(self._queued.values()))):
            self._unqueue(request)
            grants.append((request.request_id, self._admit(request)))
        return grants

    # prompts that are computed in these pages

    def expect(
        self,
        request_id: str,
        *,
        num_tokens: int,
        max_len: int,
        is_held: bool = False,
        priority: int = 0,
        most_pages: int = NEVER,
        num_beams: int = 0,
    ) -> Denied | None:
        """A prompt has come that will be computed here, and grow to `max_len` if it stays. Or why it may not.
        `most_pages`: as of `reserve`, behind the prompt."""
        request = self._made(request_id, num_tokens, max_len, [], is_held, priority, most_pages, num_beams)
        if isinstance(request, Denied):
            return request
        self._expected[request_id] = request
        return None

    def on_asked_again(self) -> None:
        """Who was refused, and is not asked for again now, waits for a step and not for pages."""
        self._refused.clear()

    def may_begin(self, request_id: str, needed_pages: int) -> bool:
        """Whether a prompt that is expected may begin, for which so many pages must be available; it does, if so."""
        request = self._expected[request_id]
        if not self._is_before_queued(request) or not self._leaves_room(request, needed_pages):
            self._refused[request_id] = request.order
            return False
        del self._expected[request_id]
        self._refused.pop(request_id, None)
        request.stage = Stage.READING
        self._requests[request_id] = request
        self.num_changes += 1
        return True

    def on_stays(self, request_id: str, *, max_len: int, most_pages: int = NEVER) -> Denied | None:
        """A prompt that was to leave will be adopted and grow to `max_len`. Or why it may not."""
        request = self._expected.get(request_id) or self._requests[request_id]
        most = self._most_pages(request.prompt_len, max_len, most_pages, 0)
        is_promised = self.options.admission == "worst_case" and request_id in self._requests
        others = self._promised_pages - request.most_pages if is_promised else 0
        if others + most > self.pool.num_pages:
            beside = f" beside {others} that are promised to others" if others else ""
            why = f"{self.name}: {most} pages needed{beside}, {self.pool.num_pages} exist"
            return Denied(reason=why, retryable=True)
        request.max_len, request.most_pages = max_len, most
        return None

    def adopt(
        self,
        request_id: str,
        pages: Sequence[int],
        hashes: Sequence[PageHash],
        *,
        more: int = 0,
        num_dropped: int = 0,
    ) -> None:
        """The prompt is computed, in these pages, which are this request's from now on, too. Its full pages have been,
        or will be, published by whoever computed them. `more`: see on_committed. `num_dropped`: it has so many pages
        more, which it does not keep."""
        request = self._requests[request_id]
        assert request.stage is Stage.READING, f"{request_id} is {request.stage.value}, not reading"
        dropped = num_dropped * self.pool.page_size
        request.prompt_len += more - dropped
        request.max_len -= dropped
        request.pages = list(pages[: self._pages_for(request.prompt_len)])
        self.pool.hold(request.pages)
        request.hashes = list(hashes[: request.prompt_len // self.pool.page_size])
        request.published_pages = len(request.hashes)
        self._on_complete(request)

    def on_unread(self, request_id: str, num_read: int) -> tuple[list[int], list[PageHash], int]:
        """Of a reserved request the KV of `num_read` tokens stands in its pages; the rest is computed here, as of a
        prompt that has begun. Returns its pages, which are whose who computes it, their hashes, and how many tokens
        have KV: those that were cached, too, but for the last, whose logits are wanted."""
        request = self._requests[request_id]
        assert request.stage is Stage.RESERVED, f"{request_id} is {request.stage.value}, not reserved"
        page_size, pages = self.pool.page_size, request.pages
        cached_len = request.published_pages * page_size
        if cached_len == request.prompt_len:  # the last page is shared, and computed again
            cached_len = num_read = cached_len - page_size
            if self.pool.available:
                self.pool.release(pages[-1:])
                pages[-1:] = self.pool.allocate(1)
        request.stage, request.pages, request.published_pages = Stage.READING, [], 0
        return pages, request.hashes, max(num_read, cached_len)

    def on_gone(self, request_id: str) -> None:
        """The prompt is not here any more; it was adopted before, or is not wanted."""
        self._expected.pop(request_id, None)
        self._refused.pop(request_id, None)
        request = self._requests.get(request_id)
        if request is not None and request.stage is Stage.READING:
            self.on_finished(request_id)

    # requests whose KV is here

    def on_committed(self, request_id: str, more: int = 0) -> None:
        """All KV of a reserved request stands in its pages, of `more` tokens than it was reserved for; of one less
        where a search begins with the only token of a prompt, which is computed again."""
        request = self._requests[request_id]
        assert request.stage is Stage.RESERVED, f"{request_id} is {request.stage.value}, not reserved"
        assert more <= request.room, f"{request_id} has {more} tokens more, and room for {request.room}"
        request.prompt_len += more
        needed = self._pages_for(request.prompt_len)
        self.pool.release(request.pages[needed:])
        del request.pages[needed:]
        self._on_complete(request)

    def _on_complete(self, request: DecodeRequest) -> None:
        request.computed_len = request.scheduled_len = request.prompt_len
        if request.num_beams:
            request.beams = BeamTables(request.pages, request.prompt_len, self.pool)
        self._publish(request)
        if request.is_held:
            request.stage = Stage.HELD
            self._held[request.request_id] = request
        else:
            self._on_ready(request)

    def _on_ready(self, request: DecodeRequest) -> None:
        request.stage = Stage.READY
        self._ready = in_turn(self._ready, request)

    def drop_page(self, request_id: str, index: int) -> bool:
        """What stands in this one of its pages is not wanted any more: the page goes, and what is behind moves up in
        the request's lengths and positions. False while a batch or a move reads its pages."""
        request = self._requests[request_id]
        if request.is_in_use or request.is_over:
            return False
        self.pool.release([request.pages.pop(index)])
        tokens = self.pool.page_size
        request.prompt_len -= tokens  # below 0, in time: only what it has beyond is asked for
        request.max_len -= tokens
        request.computed_len -= tokens
        request.scheduled_len -= tokens
        return True

    def on_begin(self, request_id: str) -> None:
        """A held request may join the batch. One that is not held, or not here any more: ignored."""
        request = self._requests.get(request_id)
        if request is None or not request.is_held:
            return
        request.is_held = False
        if self._held.pop(request_id, None) is not None:
            self._on_ready(request)

    # requests that leave

    def may_move(self, request_id: str) -> bool:
        """It is computed here, and does not leave yet."""
        request = self._requests.get(request_id)
        stages = (Stage.READY, Stage.RUNNING)
        stays = request is None or request.is_over or request.is_moving or request.num_beams
        return request is not None and request.stage in stages and not stays

    def on_move(self, request_id: str, room: int) -> int:
        """The request is handed to another worker from now on, until on_move_closed; meanwhile it may grow by `room`
        tokens. Returns how many have KV now."""
        request = self._requests[request_id]
        request.is_moving = True
        self.num_moving += 1
        request.stops_at = request.computed_len + room
        return request.computed_len

    def on_move_stops(self, request_id: str) -> None:
        """No more of it is computed here."""
        request = self._requests[request_id]
        request.stops_at = min(request.stops_at, request.scheduled_len - request.drafted)

    def on_move_failed(self, request_id: str) -> None:
        """It is computed on, while its pages may still be read."""
        self._requests[request_id].stops_at = NEVER

    def stands_still(self, request_id: str) -> bool:
        """Whether nothing of it is computed, nor will be."""
        request = self._requests[request_id]
        return request.computed_len == request.scheduled_len >= request.stops_at

    def on_move_closed(self, request_id: str, *, has_left: bool) -> None:
        """Nothing reads its pages any more: it has left, or goes on here."""
        request = self._requests[request_id]
        request.is_moving, request.stops_at = False, NEVER
        self.num_moving -= 1
        if has_left and not request.is_over:
            self.on_finished(request_id)
        else:
            self._drop_if_unused(request)

    def next_batch(self, drafts: Sequence[tuple[str, int]] = ()) -> DecodeBatch:
        """Who computes a token next; preempts the last, by priority and age, while pages are short. May be empty.
        `drafts`: for whom there are so many guesses."""
        schedule, wanted = self.schedule(), dict(drafts)
        rows = self.options.max_batch_size - sum(request.num_rows for request in schedule.requests)
        entries: list[DecodeEntry] = []
        copies: list[tuple[int, int]] = []
        for request in schedule.requests:
            position = request.scheduled_len - 1
            if request.beams is not None:
                copies += request.beams.take_copies()
                for beam, pages in enumerate(request.beams.tables):
                    entries.append(
                        DecodeEntry(request_id=request.request_id, position=position, pages=pages, beam=beam)
                    )
                continue
            if wanted:
                self._add_guesses(request, min(rows, wanted.get(request.request_id, 0)))
                rows -= request.drafted
            entries.append(
                DecodeEntry(
                    request_id=request.request_id, position=position, pages=request.pages, drafted=request.drafted
                )
            )
        return DecodeBatch(
            entries=tuple(entries), joined=schedule.joined, preempted=schedule.preempted, copies=tuple(copies)
        )

    def _add_guesses(self, request: DecodeRequest, most: int) -> None:
        """To its step, which is scheduled, if no other is in flight and none is its last here."""
        if request.stops_at != NEVER or request.scheduled_len != request.computed_len + 1:
            return
        most = min(most, request.max_len - request.scheduled_len)
        free = len(request.pages) * self.pool.page_size - request.scheduled_len
        if free < most and self.spare_pages > len(self._running) + int(self.options.watermark * self.pool.num_pages):
            request.pages.extend(self.pool.allocate(1))
            free += self.pool.page_size
        request.drafted = max(0, min(most, free))
        request.scheduled_len += request.drafted

    def schedule(self) -> DecodeSchedule:
        """next_batch for a driver that needs no entries. Their step's end is told by on_steps_done."""
        self.join()
        preempted: list[str] = []
        scheduled: list[DecodeRequest] = []
        page_size = self.pool.page_size
        left = -(-self._num_rows // self.num_stages)  # rows
        for request in list(self._by_age):  # who is preempted leaves it meanwhile
            if left <= 0:
                break
            if request.is_over or request.drafted or request.scheduled_len >= min(request.max_len, request.stops_at):
                continue
            if request.is_in_flight and (request.num_beams or self.num_stages > 1):
                continue  # which beams live, or what its last token is, is not known yet
            has_room = request.beams is None and request.scheduled_len < len(request.pages) * page_size
            if has_room or self._grow(request, preempted):
                scheduled.append(request)
                request.scheduled_len += 1
                left -= request.num_rows
        if preempted and not scheduled and self._ready:  # who left made room in the batch, too
            again = self.schedule()
            return DecodeSchedule(
                requests=again.requests, joined=again.joined, preempted=(*preempted, *again.preempted)
            )
        joined = tuple([r.request_id for r in scheduled if r.scheduled_len == r.prompt_len + 1])
        return DecodeSchedule(requests=scheduled, joined=joined, preempted=tuple(preempted))

    def on_batch_done(self, batch: DecodeBatch, kept: Sequence[tuple[str, int]] = ()) -> None:
        """The engine has computed the batch; batches end in the order they were made. `kept`: of the tokens of each
        entry with guesses those that stand, the first counted."""
        counts = dict(kept)
        for entry in batch.entries:
            if entry.beam:
                continue  # the first of a search stands for all
            request = self._requests[entry.request_id]
            assert request.computed_len == entry.position, f"{entry.request_id}: batches ended out of order"
            request.computed_len += 1
            if entry.drafted:
                request.computed_len += counts[entry.request_id] - 1
                request.scheduled_len, request.drafted = request.computed_len, 0
                if not request.is_moving:  # pages for guesses that were wrong
                    needed = self._pages_for(request.computed_len)
                    self.pool.release(request.pages[needed:])
                    del request.pages[needed:]
            self._drop_if_unused(request)

    def on_fork(self, request_id: str, parents: Sequence[int]) -> None:
        """The beams of a search are these from now on: each goes on from that one of those of the last step, which is
        done. The pages of the others are free."""
        request = self._requests[request_id]
        assert request.beams is not None, f"{request_id} has no beams"
        assert not request.is_in_use, f"{request_id} is computed"
        assert len(parents) <= request.num_beams, f"{request_id} has {len(parents)} beams, not {request.num_beams}"
        request.beams.fork(parents)
        request.pages = request.beams.held

    def on_steps_done(self, request: DecodeRequest, steps: int) -> None:
        """What was scheduled for the request is computed, and `steps` - 1 more tokens of it, in pages it has."""
        request.scheduled_len += steps - 1
        request.computed_len += steps
        self._drop_if_unused(request)

    def on_page_filled(self, request_id: str, page_hash: PageHash) -> None:
        """The tokens of the next full page are known: its hash, chained to the pages before it."""
        request = self._requests.get(request_id)
        if request is not None and not request.is_over:
            request.hashes.append(page_hash)
            self._publish(request)

    def on_finished(self, request_id: str) -> None:
        """The request needs no more tokens. Its pages go as soon as no batch uses them."""
        request = self._requests[request_id]
        request.is_over = True
        if request_id in self._queued:
            self._unqueue(request)
        self._held.pop(request_id, None)
        self._ready.pop(request_id, None)
        if self._running.pop(request_id, None) is not None:
            del self._by_age[bisect_left(self._by_age, request.order, key=_order)]
            self._num_rows -= request.num_rows
        self._drop_if_unused(request)

    def on_cancelled(self, request_id: str) -> None:
        """Like on_finished, whatever the request is at; a lease's pages only after its fence. Unknown: ignored."""
        if request_id in self._requests:
            self.on_finished(request_id)

    def on_failed(self, request_id: str) -> None:
        """The engine could not compute its token: the request ends, and what its pages hold is not to be trusted."""
        self.pool.withdraw(self._requests[request_id].pages)
        self.on_finished(request_id)

    def holds(self, request_id: str) -> bool:
        return request_id in self._requests

    def is_reserved(self, request_id: str) -> bool:
        request = self._requests.get(request_id)
        return request is not None and request.stage in (Stage.QUEUED, Stage.RESERVED)

    def has_pages(self, request_id: str) -> bool:
        return bool(self._requests[request_id].pages)

    def pages_of(self, request_id: str) -> Sequence[int]:
        return self._requests[request_id].pages

    def computed_len_of(self, request_id: str) -> int:
        return self._requests[request_id].computed_len

    @property
    def request_ids(self) -> list[str]:
        return list(self._requests)

    @property
    def spare_pages(self) -> int:
        """Pages for those who have not asked yet: what is available, less what the queue asks for. A worker that told
        of all that is available would draw stalled handoffs from others, which would stall in its queue again."""
        return max(0, self.pool.available - self._queued_pages)

    @property
    def running(self) -> list[DecodeRequest]:
        """By priority and age."""
        return list(self._by_age)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - len(self._running)

    def _is_before_queued(self, request: DecodeRequest) -> bool:
        """Before all reservations that wait."""
        return not self._queued or request.order < next(iter(self._queued.values())).order

    def _unqueue(self, request: DecodeRequest) -> None:
        del self._queued[request.request_id]
        self._queued_pages -= self._pages_for(request.prompt_len)

    def _may_admit(self, request: DecodeRequest) -> bool:
        if self._refused and min(self._refused.values()) < request.order:
            return False
        fresh = self._pages_for(request.prompt_len + request.room) - self.pool.count_matching(request.hashes)
        return self._leaves_room(request, fresh + self.pool.count_matching_unheld(request.hashes))

    def _leaves_room(self, request: DecodeRequest, taken: int) -> bool:
        left = self.pool.available - taken
        if self.options.admission == "worst_case":
            return left >= 0 and self._promised_pages + request.most_pages <= self.pool.num_pages
        is_alone = len(self._queued) == len(self._requests)
        return left >= (0 if is_alone else max(1, int(self.options.watermark * self.pool.num_pages)))

    @property
    def _promised_pages(self) -> int:
        """That those who are admitted may ever hold."""
        return sum(r.most_pages for r in self._requests.values() if r.stage is not Stage.QUEUED)

    def _pages_for(self, num_tokens: int) -> int:
        return pages_for(num_tokens, self.pool.page_size)

    def _most_pages(self, num_tokens: int, max_len: int, most_pages: int, num_beams: int) -> int:
        """That it may ever hold; beams share those of the prompt that are full."""
        most = self._pages_for(max_len)
        more = max(0, num_beams - 1) * (most - num_tokens // self.pool.page_size)
        return min(most, max(most_pages, self._pages_for(num_tokens))) + more

    def _admit(self, request: DecodeRequest) -> Granted:
        cached = self.pool.match(request.hashes)
        fresh = self.pool.allocate(self._pages_for(request.prompt_len + request.room) - len(cached))
        request.pages = cached + fresh
        request.published_pages = len(cached)
        request.stage = Stage.RESERVED
        return Granted(pages=tuple(request.pages), cached_pages=len(cached))

    def join(self) -> list[DecodeRequest]:
        """Let those who are ready into the batch, as many as it holds. Who is told of them schedules them next."""
        joined: list[DecodeRequest] = []
        while self._ready:
            request = next(iter(self._ready.values()))
            if self._num_rows + request.num_rows > self.options.max_batch_size:
                break
            del self._ready[request.request_id]
            self._num_rows += request.num_rows
            request.stage = Stage.RUNNING
            self._running[request.request_id] = request
            insort(self._by_age, request, key=_order)
            joined.append(request)
        return joined

    def _grow(self, request: DecodeRequest, preempted: list[str]) -> bool:
        """Make room for the token at scheduled_len; False when the request itself had to leave."""
        beams = request.beams
        while missing := self._missing(request):
            try:
                fresh = self.pool.allocate(missing)
                if beams is None:
                    request.pages.extend(fresh)
                else:
                    beams.grow(request.scheduled_len, fresh)
                    request.pages = beams.held
            except OutOfPages:
                victim = self._last_committed(request)
                if victim is None:
                    return False  # all that go later are in flight: wait for its pages
                self.preemptions += 1
                self.on_finished(victim.request_id)
                preempted.append(victim.request_id)
                if victim is request:
                    return False
        return True

    def _missing(self, request: DecodeRequest) -> int:
        """Pages for the token at scheduled_len, of each beam."""
        if request.beams is not None:
            return request.beams.missing(request.scheduled_len)
        return max(0, self._pages_for(request.scheduled_len + 1) - len(request.pages))

    def _last_committed(self, request: DecodeRequest) -> DecodeRequest | None:
        """Whose pages this request may have: itself, or one that goes after it. With stages it does not leave itself
        while another stage computes such a one, which leaves next."""
        committed = (*self._held.values(), *self._ready.values(), *self._running.values())
        candidates = [r for r in committed if not r.is_in_use and r.order >= request.order]
        victim = max(candidates, key=_order, default=None)
        if victim is request and self.num_stages > 1:
            elsewhere = [r for r in self._by_age if r.is_in_flight and r.order > request.order]
            return None if elsewhere else victim
        return victim

    def _publish(self, request: DecodeRequest) -> None:
        full = min(request.computed_len // self.pool.page_size, len(request.hashes))
        for i in range(request.published_pages, full):
            self.pool.publish(request.pages[i], request.hashes[i])
        request.published_pages = max(request.published_pages, full)

    def _drop_if_unused(self, request: DecodeRequest) -> None:
        if request.is_over and not request.is_in_use:
            self.pool.release(request.pages)
            del self._requests[request.request_id]
            self.num_changes += 1

    def check_invariants(self) -> None:
        self.pool.check_invariants()
        held: dict[int, int] = {}
        for request in self._requests.values():
            assert request.computed_len <= request.scheduled_len <= max(request.max_len, request.prompt_len)
            assert request.drafted <= max(0, request.scheduled_len - request.computed_len - 1), "a guess stands first"
            has_pages = request.stage not in (Stage.QUEUED, Stage.READING)
            assert bool(request.pages) == has_pages or not request.prompt_len, f"{request.request_id} has no pages"
            assert request.beams is None or request.pages == request.beams.held, "a beam's pages are not its request's"
            assert request.scheduled_len <= len(request.pages) * self.pool.page_size
            assert not request.is_over or request.is_in_use
            for page in request.pages:
                held[page] = held.get(page, 0) + 1
        groups = {Stage.QUEUED: self._queued, Stage.HELD: self._held}
        groups |= {Stage.READY: self._ready, Stage.RUNNING: self._running}
        for stage, group in groups.items():
            assert all(r.stage is stage and not r.is_over for r in group.values())
        assert self._refused.keys() <= self._expected.keys(), "one that is not here waits for pages"
        assert all(r.is_held for r in self._held.values()), "one that may begin waits"
        assert not any(r.is_held for r in (*self._ready.values(), *self._running.values())), "a held one is computed"
        assert self.num_moving == sum(r.is_moving for r in self._requests.values()), "others move"
        assert self._queued_pages == sum(self._pages_for(r.prompt_len) for r in self._queued.values())
        assert self._num_rows == sum(r.num_rows for r in self._running.values()) <= self.options.max_batch_size
        assert self._by_age == sorted(self._running.values(), key=_order), "the running are not in order"
        for going in (self._queued, self._ready):
            numbers = [request.priority for request in going.values()]
            assert numbers == sorted(numbers), f"not in the order in which they go: {numbers}"
        self.pool.check_holders(held)

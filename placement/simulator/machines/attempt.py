"""Attempt is one try at serving one request, handed from the router to a prefill worker to a decode worker.

Three parties pass it on, and each is known to the others by what it may be told here: Dispatcher is its router,
Prefiller and Decoder are workers, and a Mover is that of a decode worker which hands requests to another (a Move). What
they are told arrives as late as a message takes; the teller sees to that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from cluster.router.accounts import Past, WorkerView
from engine.pages.pool import PageHash
from placement.simulator.clock import VirtualClock
from placement.simulator.cluster import SimCluster
from placement.simulator.ledger import Ledger
from placement.simulator.reporting import Reporting, Teller


class Attempt:
    """After `is_gone` nothing that happens to it counts any more."""

    __slots__ = (
        "computed",
        "decode",
        "granted",
        "hashes",
        "id",
        "index",
        "is_gone",
        "is_held",
        "joined_step",
        "left",
        "max_new",
        "moving_to",
        "num_tokens",
        "number",
        "past",
        "prefill",
        "priority",
        "segments",
        "sent_tokens",
        "seq",
        "skip_tokens",
        "tail_s",
        "wire_end_s",
        "wire_s",
    )

    def __init__(
        self,
        index: int,
        number: int,
        num_tokens: int,
        left: int,
        hashes: list[PageHash],
        past: Past,
        priority: int = 0,
    ) -> None:
        self.index = index  # of the request
        self.number = number  # of the attempt, from 1
        self.id = f"{index}" if number == 1 else f"{index}/{number}"
        self.num_tokens = num_tokens  # prompt, and tokens made by attempts before
        self.max_new = left
        self.left = left  # tokens still to make
        self.hashes = hashes
        self.past = past  # what the attempts before have met
        self.priority = priority  # lower goes first
        self.prefill: Prefiller | None = None
        self.decode: Decoder | None = None
        self.moving_to: Decoder | None = None  # which takes its KV while it is computed
        self.seq = 0
        self.is_gone = False
        self.is_held = False  # by its decode worker, until its router lets it begin
        # the handoff
        self.granted = False
        self.computed = False
        self.skip_tokens = 0  # that the decode worker has cached
        self.segments: list[tuple[int, float, float]] = []  # tokens, begun, computed: waiting for the grant
        self.wire_end_s = 0.0  # when the link has passed it all
        self.wire_s = 0.0  # that it took
        self.sent_tokens = 0
        self.tail_s = 0.0  # of the last segment: what leaves after its step
        self.joined_step = -1  # of the decode machine


class Dispatcher(ABC):
    """The router, or all of them, and what all parties of a simulation share."""

    def __init__(self, cluster: SimCluster, clock: VirtualClock, ledger: Ledger) -> None:
        self.cluster = cluster
        self.message_s = cluster.message_s
        self.clock = clock
        self.ledger = ledger

    @abstractmethod
    def reporter_of(self, name: str, worker: Reporting) -> Teller:
        """By which this worker reports."""

    # what comes from outside

    @abstractmethod
    def arrive(self, index: int, next_arrival_s: float) -> None:
        """A request, and when the next one will; inf: none."""

    @abstractmethod
    def on_worker_up(self, view: WorkerView, prefill: Prefiller | None, decode: Decoder | None) -> None:
        """It is ready. What it is for each phase that it computes."""

    @abstractmethod
    def on_worker_back(self) -> None:
        """One has come up again."""

    @abstractmethod
    def on_worker_lost(self, lost: str) -> None:
        """The router has noticed."""

    @abstractmethod
    def on_drain(self) -> None:
        """A worker will say so with its next report."""

    @abstractmethod
    def has_left(self, name: str) -> bool:
        """Whether nothing is at this worker, which drains, or on its way there, as far as the router knows."""

    @abstractmethod
    def on_role_changed(self, view: WorkerView, prefill: Prefiller | None, decode: Decoder | None) -> None:
        """A worker that was drained has said hello again, as this one."""

    # what workers say

    @abstractmethod
    def on_first_token(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def on_stalled(self, attempt: Attempt) -> None:
        """No pages for it now; it is queued at its decode worker."""

    @abstractmethod
    def on_handoff_failed(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def on_no_room(self, attempt: Attempt) -> None:
        """It has waited for pages for too long."""

    @abstractmethod
    def on_handed_off(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def on_decoded(self, num_tokens: int, attempt: Attempt) -> None:
        """So many tokens of one that a decode worker may have died of before."""

    @abstractmethod
    def on_preempted(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def on_finished(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def on_moved(self, attempt: Attempt) -> None:
        """The one that it was moving to has it."""

    @abstractmethod
    def on_move_failed(self, attempt: Attempt) -> None:
        """It goes on where it was."""


class Prefiller(Reporting):
    def __init__(self, name: str) -> None:
        self.name = name
        self.next_seq = 0  # of Submits sent to it

    @abstractmethod
    def submit(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def on_granted(self, grant: tuple[Attempt, Decoder, int]) -> None:
        """The decode worker has pages for it, and so many of its tokens already."""

    @abstractmethod
    def move(self, order: tuple[Attempt, Decoder]) -> None:
        """The router names another decode worker for a handoff that waits for pages."""

    @abstractmethod
    def end(self, attempt: Attempt) -> None:
        """It needs nothing here any more: handed off, cancelled or failed."""

    @abstractmethod
    def report_anew(self, now: float) -> None:
        """Though nothing has changed: the router waits for it."""


class Mover(ABC):
    @abstractmethod
    def on_granted(self, grant: tuple[Move, int]) -> None:
        """The other has pages for it, and so many of its tokens already."""

    @abstractmethod
    def on_receipt(self, move: Move) -> None:
        """It runs there now."""

    @abstractmethod
    def on_failed(self, move: Move) -> None:
        """No pages there, or nobody."""


class Move:
    """`reserved`: tokens that it asked pages for; `more`: what has come since, when it stands still. After `is_over`
    nothing that happens to it counts any more."""

    __slots__ = ("attempt", "is_copied", "is_over", "is_still", "more", "reserved", "source", "target")

    def __init__(self, source: Mover, attempt: Attempt, target: Decoder) -> None:
        self.source = source
        self.attempt = attempt
        self.target = target
        self.reserved = 0
        self.more = 0
        self.is_copied = False
        self.is_still = False
        self.is_over = False


class Link:
    """One worker's, one way."""

    __slots__ = ("free_s",)

    def __init__(self) -> None:
        self.free_s = 0.0  # when it has passed all that is booked

    def book(self, ready_s: float, wire_s: float) -> float:
        """When it has passed what is ready then and takes so long."""
        self.free_s = max(ready_s, self.free_s) + wire_s
        return self.free_s


class Decoder(Reporting):
    def __init__(self, name: str) -> None:
        self.name = name
        self.ingress = Link()

    @abstractmethod
    def reserve(self, attempt: Attempt) -> None: ...

    @abstractmethod
    def commit(self, attempt: Attempt) -> None:
        """All its KV stands there."""

    @abstractmethod
    def begin(self, attempt: Attempt) -> None:
        """It was held, and may be computed."""

    @abstractmethod
    def cancel(self, attempt: Attempt) -> None:
        """It is served elsewhere, or not at all."""

    # requests that move while they are computed

    @abstractmethod
    def made_now(self, attempt: Attempt) -> int:
        """Tokens that it has made for the request, in all, when somebody asks."""

    @abstractmethod
    def move(self, order: tuple[Attempt, Decoder]) -> None:
        """The router wants it computed by the other."""

    @abstractmethod
    def make_room(self, move: Move) -> None: ...

    @abstractmethod
    def take(self, move: Move) -> None:
        """All its KV stands here."""

    @abstractmethod
    def forget_target(self, name: str) -> None:
        """That worker is lost, and takes none."""

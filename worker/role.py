"""Role is what a worker asks of the role that it carries, and RoleHost what a role has of its worker.

The worker has the life, the engine, its pages, the streams with routers and the step loop; a role decides, by its
policy, what the next step computes, and carries out what follows for its requests:

    on_submit --> requests --> next_batch --> step_of --> [the engine] --> on_step
                      \\-- on_cancel, a router that is lost, a worker that stops

All methods are called in the event loop and return at once, but those that are coroutines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar

from engine.engine import Engine
from engine.pages.pool import PageHash, PagePool
from engine.types import SampledToken, Step
from kv_transfer.transports.faulty import Faults
from kvrelay.v1 import worker_pb2 as pb
from kvrelay.v1 import worker_pb2_grpc
from worker.options import WorkerOptions
from worker.requests import HeldRequest
from worker.steps.costs import StepCosts
from worker.streams.router_link import RouterLink
from worker.streams.router_streams import RouterStreams

BatchT = TypeVar("BatchT")


class RoleHost(Protocol):
    """The worker, as its role sees it. A role is made last, and may use all of this at once."""

    options: WorkerOptions
    engine: Engine
    pool: PagePool  # of the engine's pages: the worker's, whatever roles it carries
    address: pb.WorkerAddress
    counters: Counter[str]  # reported to routers
    streams: RouterStreams
    faults: Faults | None
    is_draining: bool  # nothing new may be taken, but what was sent here before it was known
    is_stopping: bool  # nothing at all

    def wake(self) -> None:
        """There may be something to compute."""

    def step_costs(self) -> StepCosts | None:
        """What its steps have taken of late; None while too few have been run."""

    def page_hashes(self, tokens: Sequence[int], parent: PageHash = b"") -> list[PageHash]:
        """Of the full pages of `tokens`, by which the pool finds them again; none without a prefix cache."""


class Role(Protocol[BatchT]):
    @property
    def policy(self) -> object:
        """What decides; its calls are recorded if the options say so."""

    @property
    def max_batch(self) -> int:
        """What a step computes at most, in the unit of the phase: told to routers in the hello."""

    @property
    def receiver(self) -> worker_pb2_grpc.HandoffServicer | None:
        """What it serves to workers that hand KV over to it; None: it takes none."""

    @property
    def requests(self) -> Mapping[str, HeldRequest]:
        """Those it was given and has not ended, by id."""

    def on_submit(self, link: RouterLink, submit: pb.Submit) -> None:
        """Raises InvalidRequest for one that no worker could serve; the router is told."""

    def on_begin(self, request_id: str) -> None:
        """The request was held, and may be computed. It may be over."""

    def on_cancel(self, cancel: pb.Cancel) -> None:
        """The request is not wanted any more, or not here. It may be over, or not have come yet."""

    def on_reassign(self, reassign: pb.Reassign) -> None: ...

    def on_move(self, move: pb.Move) -> None: ...

    @property
    def waits_for_tokens(self) -> bool:
        """Whether the next batch may only be made when the tokens of the step that runs are known."""

    def next_batch(self) -> BatchT | None:
        """What to compute next; None when nothing can run. Called while the step before may still run."""

    def step_of(self, batch: BatchT) -> Step:
        """Asked again when the step has to be run again, with what is known by then."""

    def on_step(self, batch: BatchT, tokens: Sequence[SampledToken]) -> None:
        """The batch is computed; batches end in the order they were made."""

    def report(self) -> pb.WorkerReport:
        """What it holds, and its own counters. The worker adds its pages, its counters and whether it drains."""

    def check_invariants(self) -> None: ...

    async def stop_serving(self) -> None:
        """End what it serves: it is about to go. Steps still run."""

    async def close(self) -> None:
        """No step runs any more: let go of what other workers hold for it."""

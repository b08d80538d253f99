"""sim_worker makes a simulated worker, whatever says what it is: a spec, an offer, a profile, a recording."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from decode_worker.options import DecodeOptions
from placement.latency.base import LatencyModel
from placement.latency.speculation import Speculation
from placement.simulator.cluster import SimWorker
from prefill_worker.options import PrefillOptions

RolePolicy = PrefillOptions | DecodeOptions


class Machine(Protocol):
    """How fast a worker computes, and what it holds; whether it prefills or decodes makes no difference."""

    @property
    def latency(self) -> LatencyModel: ...

    @property
    def num_pages(self) -> int: ...

    @property
    def page_size(self) -> int: ...

    @property
    def step_overhead_s(self) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerModel:
    """A Machine as plain values. `error`: by how much the latency model may be wrong, as a share of a time.
    `speculation`: of its guesses, where they are simulated."""

    latency: LatencyModel
    num_pages: int
    page_size: int
    step_overhead_s: float = 0.0
    error: float = 0.0
    speculation: Speculation | None = None


def sim_worker(
    name: str,
    role: str,
    machine: Machine,
    policy: RolePolicy,
    *,
    prefix_cache: bool = True,
    speculation: Speculation | None = None,
) -> SimWorker:
    return SimWorker(
        name=name,
        role=role,
        latency=machine.latency,
        num_pages=machine.num_pages,
        policy=policy,
        page_size=machine.page_size,
        step_overhead_s=machine.step_overhead_s,
        prefix_cache=prefix_cache,
        speculation=speculation,
    )

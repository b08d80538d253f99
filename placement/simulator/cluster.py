"""SimCluster says what is simulated: the workers, what they know of each other how late, and what goes wrong when.

Values only. Times are seconds. `simulate` in placement/simulator/simulate.py runs it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from cluster.router.options import RouterOptions
from decode_worker.options import DecodeOptions
from placement.latency.base import LatencyModel
from placement.latency.speculation import Speculation
from prefill_worker.options import PrefillOptions
from worker.roles import PHASES, kind_of

SIMULATED = ("prefill", "decode", "mixed")  # roles that have a machine on the virtual clock


class SetupError(ValueError):
    """A cluster that cannot be simulated: one sentence naming the key, the value and the mend."""


def check_simulated(name: str, role: str) -> None:
    """Raises SetupError for a worker of a role that has no machine on the virtual clock."""
    if role not in SIMULATED:
        raise SetupError(
            f"{name} has the role {role}, which is not simulated; give {', '.join(SIMULATED[:-1])} or {SIMULATED[-1]}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SimWorker:
    """`step_overhead_s`: what the worker does between two steps. With pipeline stages batches follow each other through
    them, as in the live worker: there is one in each."""

    name: str
    role: str  # one of worker.roles.ROLES
    latency: LatencyModel
    num_pages: int
    policy: PrefillOptions | DecodeOptions  # of its role
    page_size: int = 16
    step_overhead_s: float = 0.0
    prefix_cache: bool = True
    speculation: Speculation | None = None  # of its guesses, where its policy has some; None: a step for each token
    device: str = ""  # that it has together with workers of other models (simulate_together); empty: its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """`worker` dies at at_s; another one of its name is ready at back_s, if ever."""

    worker: str
    at_s: float
    back_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """`worker` takes nothing new from at_s on, and what is decoded there goes elsewhere."""

    worker: str
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleChange:
    """`worker` is drained from at_s on, and of another role when nothing is left there: what its pages hold stays."""

    worker: str
    at_s: float
    role: str
    policy: PrefillOptions | DecodeOptions  # of that


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedHost:
    """Workers that share memory bandwidth and cores: while prefill and decode both compute, each is slower than alone.

    `by_batch`: rows of (requests that decode, factor of a prefill step beside them, factor of their decode step beside
    prefill), by rising batch; as measured, see placement/latency/profile.py."""

    workers: tuple[str, ...]
    by_batch: tuple[tuple[int, float, float], ...]

    def __post_init__(self) -> None:
        sizes = [size for size, _, _ in self.by_batch]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise SetupError(f"by_batch of a shared host has the batch sizes {sizes}; give 1 or more, rising")
        for size, *factors in self.by_batch:
            if not all(0 < factor < float("inf") for factor in factors):
                raise SetupError(f"by_batch of a shared host has {factors} at {size}; give factors above 0, 1 for none")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimCluster:
    workers: tuple[SimWorker, ...]
    router: RouterOptions = field(default_factory=RouterOptions)
    message_s: float = 0.0005  # one way, between any two processes
    report_gap_s: float = 0.02  # a worker reports what changed, but not more often than this
    layer_groups: int = 8  # in which KV leaves while a step is computed
    handoff_s: float = 0.0  # what a handoff takes beside the bytes and a message: announcing, checking, committing
    queued_reservation_s: float = 30.0  # that KV waits for pages of a decode worker; then it is sent again
    noticed_s: float = 0.15  # from a worker's death until the router knows
    max_len: int = 0  # tokens of a request: a router refuses longer ones; 0: none
    num_routers: int = 1  # each with as much in its queue as `router` lets one have; requests go to them by turns
    losses: tuple[Loss, ...] = ()
    drains: tuple[Drain, ...] = ()
    role_changes: tuple[RoleChange, ...] = ()
    hosts: tuple[SharedHost, ...] = ()  # a worker in none of them has its machine to itself

    def __post_init__(self) -> None:
        names = [worker.name for worker in self.workers]
        for name in names:
            if names.count(name) > 1:
                raise SetupError(f"two workers are named {name}; give each its own name")
        for worker in self.workers:
            check_simulated(worker.name, worker.role)
        for phase in PHASES:
            if not any(phase in kind_of(worker.role).phases for worker in self.workers):
                raise SetupError(f"no worker has the role {phase}, or mixed; give at least one")
        for key in ("message_s", "report_gap_s", "noticed_s", "handoff_s"):
            if not getattr(self, key) >= 0:
                raise SetupError(f"{key} is {getattr(self, key):g}; give seconds, 0 or more")
        if self.noticed_s < self.message_s:
            raise SetupError(
                f"noticed_s is {self.noticed_s:g}, and a message takes {self.message_s:g}; give as much or more"
            )
        for key in ("report_gap_s", "queued_reservation_s"):
            if not getattr(self, key) > 0:
                raise SetupError(f"{key} is {getattr(self, key):g}; give seconds above 0")
        for key in ("layer_groups", "num_routers"):
            if getattr(self, key) < 1:
                raise SetupError(f"{key} is {getattr(self, key)}; give 1 or more")
        struck = [("loss", loss.worker) for loss in self.losses] + [("drain", drain.worker) for drain in self.drains]
        for kind, name in [*struck, *(("role change", change.worker) for change in self.role_changes)]:
            if name not in names:
                raise SetupError(f"a {kind} names {name}; the workers are {', '.join(names)}")
        self._check_role_changes()
        self._check_hosts()

    def _check_role_changes(self) -> None:
        """As a live router does, but for workers that are lost: each phase has another one meanwhile."""
        roles = {worker.name: worker.role for worker in self.workers}
        on_hosts = {name for host in self.hosts for name in host.workers}
        for change in sorted(self.role_changes, key=lambda change: change.at_s):
            name = change.worker
            check_simulated(name, change.role)
            wanted = kind_of(change.role).load_options()
            if type(change.policy) is not wanted:
                raise SetupError(
                    f"a role change gives {name} {type(change.policy).__name__}; a {change.role} worker has "
                    f"{wanted.__name__}"
                )
            if name in on_hosts:
                raise SetupError(f"a role change names {name}, which is on a shared host; give one that is on none")
            gone = {drain.worker for drain in self.drains if drain.at_s <= change.at_s} | {name}
            for phase in kind_of(roles[name]).phases:
                if not any(phase in kind_of(role).phases for other, role in roles.items() if other not in gone):
                    raise SetupError(f"a role change takes {name} away, the only worker for {phase}; add another one")
            roles[name] = change.role

    def _check_hosts(self) -> None:
        seen: set[str] = set()
        stages = {worker.name: worker.latency.stages for worker in self.workers}
        for host in self.hosts:
            for name in host.workers:
                if name not in stages:
                    raise SetupError(f"a shared host names {name}; the workers are {', '.join(stages)}")
                if name in seen:
                    raise SetupError(f"{name} is on two shared hosts; give it one")
                if stages[name] > 1:
                    raise SetupError(f"{name} has {stages[name]} pipeline stages; on a shared host give it 1")
                seen.add(name)

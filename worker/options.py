"""WorkerOptions says what one worker is: its name, its role with the options of that role's policy, where it listens.

The cluster's spec (cluster/spec/model.py) is what a person writes; it is turned into these, one for each worker.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any

from engine.knobs import as_text, knob, knobs_of, read
from kv_transfer.options import TransferOptions
from worker.roles import ROLES, kind_of
from worker.wire.tls import TlsFiles

REPORT_GAP_S = 0.05  # a worker that changes reports no more often: worker and router spend half a millisecond on each
REPORT_COST_S = 0.0003  # of that, the router's part
REPORTS_SHARE = 0.25  # of a router's core, for the reports of all workers


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    name: str
    role: str  # one of worker.roles.ROLES
    policy: Any  # what the role's policy goes by: an object of the role's options class
    transfer: TransferOptions = field(default_factory=TransferOptions)
    host: str = "127.0.0.1"  # the address that others reach it at, and that it binds
    port: int = 0  # 0: any free one
    secret: str = field(default="", repr=False)
    tls: TlsFiles | None = None  # between the processes of the cluster; None: plain text
    incarnation: str = ""  # empty: drawn at start
    prefix_cache: bool = knob(True, "keep full pages of ended requests, for prompts that begin alike")
    max_failed_steps: int = knob(
        3,
        "in a row that compute nothing, those of one token that the engine then tries by itself counted, before the "
        "worker's process is replaced",
        unit="steps",
        ge=1,
    )
    step_timeout_s: float = knob(
        60.0, "that one step may take before the worker's process is replaced; 0: any time", unit="seconds", ge=0
    )
    drop_router_after_s: float = knob(
        10.0, "of a router's silence, after which a worker drops its requests", unit="seconds", gt=0
    )
    elsewhere: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # knobs that were given for other roles
    tensor_parallel: int = 1  # as its engine has it: for those who look at the worker or predict it
    pipeline_parallel: int = 1  # likewise
    threads: int = 0  # likewise, of each of its processes; 0: on a GPU, or not known
    quantization: str = ""  # likewise; empty: none
    kv_dtype: str = ""  # likewise; empty: the model's own
    report_interval_s: float = 0.2
    faults: str = ""  # a folder that says what is to go wrong, for worker/faults/box.py; empty: nothing is
    record: str = ""  # a folder to write every call of the policy into, for placement/checks/replay.py; empty: none is

    @property
    def limits(self) -> dict[str, str]:
        """What whoever predicts the worker must know, as text."""
        names = ("tensor_parallel", "pipeline_parallel", "threads", "quantization", "kv_dtype")
        engine = {name: str(value) for name in names if (value := getattr(self, name))}
        return as_text(self.policy) | as_text(self) | engine

    @property
    def num_processes(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel


def report_gap_s(num_workers: int) -> float:
    """Between two reports of a worker that changes, one of so many of a router's."""
    return max(REPORT_GAP_S, num_workers * REPORT_COST_S / REPORTS_SHARE)


def owner_of(name: str, num_routers: int) -> int:
    """Which of so many routers takes the worker of this name first: those of a pool are dealt out to them."""
    number = name.rpartition("-")[2]
    return (int(number) if number.isdecimal() else zlib.crc32(name.encode())) % num_routers


def pool_of(name: str) -> str:
    """The pool of a worker of this name: decode of decode-0."""
    return name.rpartition("-")[0]


def given_knobs(policy: Any) -> dict[str, Any]:
    """Those of an options object that are not at their defaults."""
    knobs = knobs_of(type(policy))
    return {name: getattr(policy, name) for name, knob in knobs.items() if getattr(policy, name) != knob.default}


def with_role(options: WorkerOptions, role: str, knobs: Mapping[str, Any] = MappingProxyType({})) -> WorkerOptions:
    """The same worker in another role, or in its own. Its knobs have these values, else what they are given in that
    role, else what they were given in this one. Raises ValueError for a role that is not known, and for values that do
    not go together there."""
    mine = given_knobs(options.policy)
    given = {} if role == options.role else options.elsewhere.get(role, {})
    policy = read(kind_of(role).load_options(), {**mine, **given, **knobs})
    return replace(options, role=role, policy=policy, elsewhere={**options.elsewhere, options.role: mine})


def with_knobs_elsewhere(options: WorkerOptions, knobs: Mapping[str, Any]) -> WorkerOptions:
    """The same worker, which has these values in other roles that have such knobs."""
    given = {
        role: {**options.elsewhere.get(role, {}), **{name: knobs[name] for name in knobs.keys() & its}}
        for role, its in _knobs_of_roles().items()
        if role != options.role
    }
    return replace(options, elsewhere={**options.elsewhere, **given})


def _knobs_of_roles() -> Mapping[str, Collection[str]]:
    return {role: knobs_of(kind.load_options()).keys() for role, kind in ROLES.items()}


def worker_options(name: str, role: str, **settings: Any) -> WorkerOptions:
    """A worker's options from settings by name: knobs of its role's policy and of the transfer, and what else
    WorkerOptions has. Knobs of other roles are passed over, so that alike settings do for all workers of a cluster.
    Raises ValueError for a value out of range and for a name that is no setting."""
    of_roles = _knobs_of_roles()
    knobs = knobs_of(TransferOptions).keys() | {knob for knobs in of_roles.values() for knob in knobs}
    own = {field.name for field in fields(WorkerOptions)} - {"name", "role", "policy", "transfer", "elsewhere"}
    if unknown := settings.keys() - knobs - own:
        raise ValueError(f"{min(unknown)} is no setting of a worker; give some of {', '.join(sorted(knobs | own))}")
    return WorkerOptions(
        name=name,
        role=role,
        policy=read(kind_of(role).load_options(), settings),
        transfer=read(TransferOptions, settings),
        elsewhere={kind: {key: settings[key] for key in settings.keys() & of} for kind, of in of_roles.items()},
        **{key: value for key, value in settings.items() if key in own},
    )

"""The one registry of roles: which kinds of worker there are, and where what each is made of stands.

Whoever needs to know reads it here: a worker what drives its role, the cluster's spec and the simulator which options
its policy has. A role is named by text and imported when it is asked for, so that reading the registry costs nothing
and this module knows no torch, gRPC or Ray.

Where another role goes. It is a folder beside `prefill_worker/` and `decode_worker/` with a policy, its options and a
driver that is a Role, and one entry here; the worker that carries it (life, step loop, run-ahead, streams, reports,
actor) is the same for all. `mixed_worker/` computes both phases, of prefill's and decode's parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal, get_args

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)  # in the order in which a request passes them


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleKind:
    """A kind of worker. What it names is `module:name`."""

    name: str
    phases: tuple[Phase, ...]  # of a request's life that it computes
    options: str  # the options class of its policy
    driver: str  # its Role (worker/role.py): called with the RoleHost, it carries the policy's decisions out

    def load_options(self) -> type[Any]:
        options: type[Any] = _load(self.options)
        return options

    def load_driver(self) -> type[Any]:
        driver: type[Any] = _load(self.driver)
        return driver


ROLES: Mapping[str, RoleKind] = {
    kind.name: kind
    for kind in (
        RoleKind(
            name="prefill",
            phases=("prefill",),
            options="prefill_worker.options:PrefillOptions",
            driver="prefill_worker.driver:PrefillRole",
        ),
        RoleKind(
            name="decode",
            phases=("decode",),
            options="decode_worker.options:DecodeOptions",
            driver="decode_worker.driver:DecodeRole",
        ),
        RoleKind(
            name="mixed",
            phases=("prefill", "decode"),
            options="mixed_worker.options:MixedOptions",
            driver="mixed_worker.driver:MixedRole",
        ),
    )
}


def kind_of(role: str) -> RoleKind:
    """Raises ValueError for a role that is not known here."""
    if role not in ROLES:
        raise ValueError(f"role is {role!r}; give one of {', '.join(ROLES)}")
    return ROLES[role]


def _load(where: str) -> Any:
    module, _, name = where.partition(":")
    return getattr(import_module(module), name)

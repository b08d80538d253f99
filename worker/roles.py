"""The one registry of roles: which kinds of worker there are, and where what each is made of stands.

Whoever needs to know reads it here: a worker what drives its role, the cluster's spec and the simulator which options
its policy has. A role is named by text and imported when it is asked for, so that reading the registry costs nothing
and this module knows no torch, gRPC or Ray.
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
    driver: str  # what carries its policy's decisions out

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
            options="prefill_worker.policy:PrefillOptions",
            driver="prefill_worker.driver:PrefillWorker",
        ),
        RoleKind(
            name="decode",
            phases=("decode",),
            options="decode_worker.policy:DecodeOptions",
            driver="decode_worker.driver:DecodeWorker",
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

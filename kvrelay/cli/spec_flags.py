"""Flags that say or change a cluster's spec: one for each key, named, explained and checked by the spec itself.

A key of pools is a flag of its own name and goes to the pools whose role has it; keys of the router and of the transfer
have `--router-` and `--transfer-` before them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any

import yaml
from pydantic import BaseModel

from cluster.router.options import RouterOptions
from cluster.spec.documents import document
from cluster.spec.model import ClusterSpec, RouterSpec, TransferSpec
from cluster.spec.pool import PoolSpec, roles_of
from engine.knobs import knobs_of
from kvrelay.cli.groups import Flags
from worker.roles import ROLES

PARTS = ("router", "pools", "transfer", "models")  # of the spec, which have keys of their own
POOL_KEYS = tuple(
    name for name in PoolSpec.model_fields if name not in ("name", "role", "model", "replicas", "assumed")
)
ROUTER_FLAGS = {
    "host": "--host",
    "port": "--port",
    "http_port": "--http-port",
    "auth": "--auth/--no-auth",
    "tokens_file": "--tokens-file",
    "otlp_traces_endpoint": "--otlp-traces-endpoint",
    "adapters": "--adapters",
}


def _panel(key: str) -> str:
    roles = roles_of(key)
    return "Pools" if len(roles) == len(ROLES) else f"{' and '.join(roles).capitalize()} pools"


ClusterFlags = Annotated[
    dict[str, Any], Flags(*(key for key in ClusterSpec.model_fields if key not in PARTS), of=ClusterSpec)
]
# Beside the flags by which a client is let in, of which --tls is one.
ChangeFlags = Annotated[
    dict[str, Any], Flags(*(key for key in ClusterSpec.model_fields if key not in (*PARTS, "tls")), of=ClusterSpec)
]
PoolFlags = Annotated[dict[str, Any], Flags(*POOL_KEYS, of=PoolSpec, panels={key: _panel(key) for key in POOL_KEYS})]
RouterFlags = Annotated[
    dict[str, Any],
    Flags(
        of=RouterSpec,
        prefix="router_",
        flags=ROUTER_FLAGS,
        panels=dict.fromkeys(RouterSpec.model_fields, "Router"),
    ),
]
TransferFlags = Annotated[
    dict[str, Any],
    Flags(of=TransferSpec, prefix="transfer_", panels=dict.fromkeys(TransferSpec.model_fields, "Transfer")),
]
# What policies go by, and so makes a difference to a simulation.
POLICY_KEYS = tuple(dict.fromkeys(knob for kind in ROLES.values() for knob in knobs_of(kind.load_options())))
PolicyFlags = Annotated[
    dict[str, Any], Flags(*POLICY_KEYS, of=PoolSpec, panels={key: _panel(key) for key in POLICY_KEYS})
]
RouterPolicyFlags = Annotated[
    dict[str, Any],
    Flags(
        *knobs_of(RouterOptions),
        of=RouterSpec,
        prefix="router_",
        panels=dict.fromkeys(RouterSpec.model_fields, "Router"),
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecChanges:
    """What flags say of a spec, by key."""

    cluster: dict[str, Any] = field(default_factory=dict)
    router: dict[str, Any] = field(default_factory=dict)
    pools: dict[str, Any] = field(default_factory=dict)
    transfer: dict[str, Any] = field(default_factory=dict)

    def applied(self, data: dict[str, Any]) -> dict[str, Any]:
        """A spec's plain data with the flags' values in it: they win."""
        pools = _read(PoolSpec, self.pools)
        return {
            **data,
            **_read(ClusterSpec, self.cluster),
            "router": data.get("router", {}) | _read(RouterSpec, self.router),
            "transfer": data.get("transfer", {}) | _read(TransferSpec, self.transfer),
            "pools": [
                pool | {key: value for key, value in pools.items() if pool["role"] in roles_of(key)}
                for pool in data["pools"]
            ],
        }

    def sources(self, data: dict[str, Any]) -> dict[str, str]:
        """The flag that each key comes from, of a spec's plain data."""
        router = {key: ROUTER_FLAGS.get(key, _flag(f"router_{key}")) for key in self.router}
        return {
            **{key: _flag(key) for key in self.cluster},
            **{f"router.{key}": flag for key, flag in router.items()},
            **{f"transfer.{key}": _flag(f"transfer_{key}") for key in self.transfer},
            **{
                f"pools[{index}].{key}": _flag(key)
                for index, pool in enumerate(data["pools"])
                for key in self.pools
                if pool["role"] in roles_of(key)
            },
        }


def _flag(name: str) -> str:
    return f"--{name}".replace("_", "-")


def _read(part: type[BaseModel], given: dict[str, Any]) -> dict[str, Any]:
    """What was typed as text for a key that is more than text, as the file would have it: 2, [0, 1], {a: b}."""
    return {
        key: _parsed(value) if isinstance(value, str) and not _is_text(part, key) else value
        for key, value in given.items()
    }


def _parsed(text: str) -> Any:
    """Text that is no YAML stays text: the spec refuses it in a sentence."""
    try:
        return document(text)
    except yaml.YAMLError:
        return text


def _is_text(part: type[BaseModel], key: str) -> bool:
    annotation = part.model_fields[key].annotation
    return annotation is str or annotation == str | None

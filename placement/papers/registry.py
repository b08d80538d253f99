"""The registry of published systems: what there is of them, by name. Nothing of a paper is imported until it is wanted.

This is all that product code knows of them. A published system is kept to compare with, and to plan by its figures:

    CATALOGS   workers by its published latencies: a class of Catalog's methods, made from a model's name and limits
    RULES      its simulator's rules for mixes of machines: a class of placement.mixes.rules.MixRules' methods
    COMPILED   what of its simulator is compiled with ours, and the values that are sent to processes
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

CATALOGS: Mapping[str, str] = {"distserve": "placement.papers.distserve.coefficients:DistServeCatalog"}
RULES: Mapping[str, str] = {"splitwise": "placement.papers.splitwise.mixes:SplitwiseRules"}
COMPILED = (
    "placement/papers/distserve/groups.py",
    "placement/papers/distserve/latency.py",
    "placement/papers/distserve/rules.py",
    "placement/papers/splitwise/batch.py",
    "placement/papers/splitwise/latency.py",
    "placement/papers/splitwise/machine.py",
    "placement/papers/splitwise/rules.py",
)
PASSED_TO_PROCESSES = (
    ("placement.papers.distserve.latency", "DistServeLatency"),
    ("placement.papers.distserve.rules", "DistServeCluster"),
    ("placement.papers.splitwise.rules", "SplitwiseCluster"),
    ("placement.papers.splitwise.latency", "SplitwiseLatency"),
)


def published(reference: str) -> Any:
    """What one of the above refers to, as `module:name`."""
    module, _, name = reference.partition(":")
    return getattr(import_module(module), name)

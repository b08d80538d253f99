"""Account is what the callers of one name may take of a cluster (`router.accounts`). Values."""

from __future__ import annotations

from pydantic import Field

from cluster.spec.knobs import Spec

OTHERS = "default"  # the account of each name that has none of its own


class Account(Spec):
    requests_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="that begin; as many at once, then as they flow in",
        json_schema_extra={"unit": "requests"},
    )
    tokens_per_minute: int | None = Field(
        default=None,
        ge=1,
        description="of prompts, charged when a request is taken, and of answers, charged when they end: requests are "
        "taken while there are as many left as their prompt has, or all",
        json_schema_extra={"unit": "tokens"},
    )
    max_concurrent: int | None = Field(
        default=None,
        ge=1,
        description="that run, a request counting for each of its `n`",
        json_schema_extra={"unit": "calls"},
    )
    least_priority: int | None = Field(
        default=None, description="the lowest `priority` that a request may give; null: 0, and of operators any"
    )
    weight: float = Field(
        default=1.0,
        ge=0.01,
        le=100,
        description="of its turns in the router's queue: with 2 it gets twice what others do",
    )


NO_LIMITS = Account()

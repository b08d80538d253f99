"""RouterOptions are the knobs of a router: how much may wait in it, and when it gives a worker or a request up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.kept import POLICY_KEYS
from engine.knobs import check, knob


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    max_queued_requests: int = knob(
        1024,
        "that wait in one router; more are refused with RESOURCE_EXHAUSTED. The clients of one token's name may hold "
        "seven times what is free: 7/8 when alone",
        unit="requests",
        ge=1,
    )
    max_queued_tokens: int = knob(1_048_576, "of their prompts, likewise", unit="tokens", ge=1)
    max_backlog_tokens: int = knob(
        32_768, "of prompts sent to one prefill worker and not computed; more wait in the router", unit="tokens", ge=1
    )
    overcommit: float = knob(
        0.25,
        "of a decode worker that may be promised beyond those free; their KV waits at prefill",
        unit="share of pages",
        ge=0,
    )
    max_passes: int = knob(
        16, "that one for which no pages are free lets smaller requests go before it", unit="requests", ge=0
    )
    dead_after_s: float = knob(
        2.0,
        "a worker that says nothing for so long is suspect; it is lost, if another can take its requests",
        unit="s",
        gt=0,
        le=86_400,
    )
    lost_after_s: float = knob(10.0, "one that says nothing for so long is lost in any case", unit="s", gt=0, le=86_400)
    slow_step_s: float = knob(
        5.0, "a worker whose step takes longer gets new requests only where there is no other", unit="s", gt=0
    )
    max_attempts: int = knob(
        4, "that may fail before the request does; a preemption or a lost worker is no failure", unit="attempts", ge=1
    )
    unavailable_grace_s: float = knob(
        60.0, "how long a request waits while a role has no worker at all; 0: it fails at once", unit="s", ge=0
    )

    slo_ttft_ms: float = knob(
        0.0,
        "that a request's first token should take, unless it says otherwise; by it, and by `slo_tpot_ms`, requests are "
        "placed where there are mixed workers; 0: no target",
        unit="ms",
        ge=0,
    )
    slo_tpot_ms: float = knob(0.0, "likewise for each token after the first", unit="ms", ge=0)
    kv_window_tokens: int = knob(
        0,
        "of a request, the last ones, whose KV is kept behind its prompt, unless its `kv_policy` says otherwise: see "
        "*Keeping less KV*; 0: all of it",
        unit="tokens",
        ge=0,
    )
    kv_sink_tokens: int = knob(0, "likewise, the first ones", unit="tokens", ge=0)
    kv_heavy_tokens: int = knob(0, "likewise, those of the prompt that were attended to most", unit="tokens", ge=0)
    placement: Literal["predicted", "splitwise"] = knob("predicted", "who serves a request: see *Which workers*")
    refuse_late: bool = knob(
        False,
        "whether a request that the queue would keep beyond its deadline, at the rate of late, is refused at once with "
        "RESOURCE_EXHAUSTED",
    )

    def __post_init__(self) -> None:
        check(self)

    @property
    def targets_s(self) -> tuple[float, float]:
        """TTFT and TPOT; 0: none."""
        return self.slo_ttft_ms / 1e3, self.slo_tpot_ms / 1e3

    @property
    def kept_tokens(self) -> dict[str, int]:
        """Fields of a KvPolicy; none: all KV is kept."""
        return {key: getattr(self, f"kv_{key}") for key in POLICY_KEYS} if self.kv_window_tokens else {}

"""Seen is a running cluster as a planner sees it: its workers and what their steps take, what came lately and how it
fared. Values, and what is simulated of them: the same cluster, with the same or with other roles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from cluster.router.options import RouterOptions
from engine.knobs import read
from mixed_worker.options import MixedOptions
from placement.latency.base import DecodeLine
from placement.latency.scaled import ScaledLatency
from placement.replan.arrangements import Arrangement
from placement.simulator.cluster import SimCluster, SimWorker
from placement.workload.requests import NO_FLOATS, Floats, Workload, own_or
from worker.options import pool_of, report_gap_s
from worker.roles import kind_of
from worker.steps.costs import StepCosts

MIN_STEP_S = 1e-6  # a fit may find nothing where nothing was seen
NO_COSTS = StepCosts(fixed_s=0.0, prompt_token_s=0.0, request_s=0.0, context_token_s=0.0)  # of what does not come
MOST_PLAYED = 4096  # requests, so that an arrangement is played within a few seconds
COMPUTED = ("max_batch_tokens", "pack_tokens", "short_prompt_tokens", "chunk_tokens")  # knobs that count such tokens
SPANS = 4  # of a longer time: each as it came, and long enough to fill a cluster
GAP_S = 60.0  # between two spans: each begins anew


class Row(NamedTuple):
    """A request that came. Its own targets in seconds; 0: none."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    slo_ttft_s: float = 0.0
    slo_tpot_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenWorker:
    """`limits`: knobs of its policy, as text. `costs`: None until enough steps of it were measured."""

    name: str
    role: str
    num_pages: int
    page_size: int
    limits: Mapping[str, str]
    costs: StepCosts | None

    @property
    def num_stages(self) -> int:
        return int(self.limits.get("pipeline_parallel", 1))

    @property
    def devices(self) -> int:
        return int(self.limits.get("tensor_parallel", 1)) * self.num_stages


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Seen:
    """`workload`: what came, or spans of it (workload_of); `rate`, `seen_s`: how many a second, and for how long.
    `ttft_s`, `tpot_s`: of each that came since roles changed, inf where it failed; `slo_ttft_s`, `slo_tpot_s`: its own
    targets, 0: none; empty: none has any. `cached_share`: of all prompts."""

    workers: Sequence[SeenWorker]
    router: RouterOptions
    workload: Workload
    ttft_s: Floats
    tpot_s: Floats
    handoff_s: float
    cached_share: float
    rate: float
    seen_s: float
    slo_ttft_s: Floats = field(default_factory=lambda: NO_FLOATS)
    slo_tpot_s: Floats = field(default_factory=lambda: NO_FLOATS)
    num_routers: int = 1
    slower: float = 1.0  # how much longer a step that only decodes takes than was measured

    @property
    def roles(self) -> dict[str, str]:
        return {worker.name: worker.role for worker in self.workers}

    @property
    def devices(self) -> dict[str, int]:
        return {worker.name: worker.devices for worker in self.workers}

    @property
    def middle_tpot_s(self) -> float:
        """Of those that did not fail; 0: all did."""
        finished = self.tpot_s[np.isfinite(self.tpot_s)]
        return float(np.median(finished)) if len(finished) else 0.0

    def chunks_and_steps(self, arrangement: Arrangement) -> tuple[dict[str, int], dict[str, int]]:
        """By mixed worker: its chunk_tokens, and its max_batch_tokens."""
        policies = self._policies(arrangement)
        mixed = {name: policy for name, policy in policies.items() if isinstance(policy, MixedOptions)}
        steps = {name: policy.max_batch_tokens for name, policy in mixed.items()}
        return {name: policy.chunk_tokens for name, policy in mixed.items()}, steps

    def named(self, arrangement: Arrangement) -> Arrangement:
        """With the chunks of those that become mixed, as they are played: by themselves they would have the spec's."""
        chunks, _ = self.chunks_and_steps(arrangement)
        new = {name: tokens for name, tokens in chunks.items() if self.roles.get(name) != "mixed"}
        return replace(arrangement, chunks={**new, **arrangement.chunks})

    def model_of(self, name: str) -> SeenWorker:
        """It, or for one that is not there yet one of its pool."""
        known = {worker.name: worker for worker in self.workers}
        return known.get(name) or next(each for each in self.workers if pool_of(each.name) == pool_of(name))

    def attainment(self, ttft_s: float, tpot_s: float) -> float:
        """As it was measured: the share of the requests that met both, its own targets where it has them."""
        count = len(self.ttft_s)
        is_read = self.ttft_s <= own_or(self.slo_ttft_s, ttft_s, count)
        is_written = self.tpot_s <= own_or(self.slo_tpot_s, tpot_s, count)
        return float((is_read & is_written).mean())

    @property
    def missing_costs(self) -> str:
        """A phase of which no worker's steps were measured yet, and that what came has; empty: all are known."""
        phases = ("prefill", "decode") if self.workload.has_decode else ("prefill",)
        return next((phase for phase in phases if not self._measured(phase)), "")

    def _measured(self, phase: str) -> list[StepCosts]:
        """A mixed worker without chunks may have read nothing."""
        return [
            each.costs
            for each in self.workers
            if each.costs is not None and phase in kind_of(each.role).phases
            if phase != "prefill" or each.costs.prompt_token_s or each.limits.get("chunk_tokens") != "0"
        ]

    def latency(self) -> CostsLatency:
        """What steps take at any of them, passes of all stages where there are: each part as those measured it that do
        it. What is found in prefix caches, as much of each prompt as there was of all, is not computed."""
        prompts, answers = self._measured("prefill"), self._measured("decode") or [NO_COSTS]
        both = [costs.both_s for costs in prompts if costs in answers]
        return CostsLatency(
            prompt_fixed_s=median(costs.fixed_s for costs in prompts),
            prompt_token_s=median(costs.prompt_token_s for costs in prompts) * (1 - self.cached_share),
            answers=StepCosts(
                fixed_s=median(costs.fixed_s for costs in answers),
                prompt_token_s=0.0,
                request_s=median(costs.request_s for costs in answers),
                context_token_s=median(costs.context_token_s for costs in answers),
                both_s=median(both) if both else 0.0,
            ),
        )

    def cluster(self, arrangement: Arrangement) -> SimCluster:
        """It, if its workers were these. One whose role is not its own has the knobs of those that have it; where none
        has, its own, and defaults. One that is not there yet is as others of its pool. Prompts are played whole, so
        that what bounds the tokens which are computed of them bounds so many more."""
        whole = self.latency()
        latencies = {
            stages: ScaledLatency(
                model=replace(whole, stages=stages),
                prefill=1.0,
                decode=self.slower,
                transfer=1.0,
                how="as answers came",
            )
            for stages in {worker.num_stages for worker in self.workers}
        }
        policies = self._policies(arrangement)
        return SimCluster(
            workers=tuple(
                SimWorker(
                    name=name,
                    role=role,
                    latency=latencies[worker.num_stages],
                    num_pages=worker.num_pages,
                    page_size=worker.page_size,
                    policy=self._for_whole_prompts(policies[name], COMPUTED),
                )
                for name, role in arrangement.roles.items()
                for worker in (self.model_of(name),)
            ),
            router=self._for_whole_prompts(self.router, ("max_backlog_tokens",)),
            report_gap_s=report_gap_s(len(arrangement.roles)),
            handoff_s=self.handoff_s,
            num_routers=self.num_routers,
        )

    def _policies(self, arrangement: Arrangement) -> dict[str, Any]:
        """The knobs of each worker, as they are in life."""
        limits = {worker.role: worker.limits for worker in reversed(self.workers)}
        return {
            name: read(kind_of(role).load_options(), {**self._limits(self.model_of(name), role, limits), **chunks})
            for name, role in arrangement.roles.items()
            for chunks in ({"chunk_tokens": arrangement.chunks[name]} if name in arrangement.chunks else {},)
        }

    def _for_whole_prompts(self, options: Any, names: Sequence[str]) -> Any:
        """With knobs of these names that count tokens as found or not."""
        counted = {name: tokens for name in names if (tokens := getattr(options, name, None))}
        return replace(options, **{name: round(tokens / (1 - self.cached_share)) for name, tokens in counted.items()})

    @staticmethod
    def _limits(worker: SeenWorker, role: str, limits: Mapping[str, Mapping[str, str]]) -> Mapping[str, str]:
        return worker.limits if role == worker.role else limits.get(role, worker.limits)


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsLatency:
    """What steps take, as the workers have measured it: passes of all stages, of which each takes an even share. A
    handoff takes Seen.handoff_s, whatever its length."""

    prompt_fixed_s: float  # of a step of prompts alone
    prompt_token_s: float
    answers: StepCosts
    stages: int = 1

    @property
    def source(self) -> str:
        return "step times as the workers measure them"

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self._stage_s(self.prompt_fixed_s + self._prompts_s(chunks))

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        step_s = self.answers.step_s(0, batch_size, context_tokens, both=0)
        return DecodeLine(self._stage_s(step_s), self.answers.context_token_s / self.stages)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        if not batch_size:
            return self.prefill_s(chunks)
        step_s = self.answers.step_s(0, batch_size, context_tokens, both=bool(chunks))
        return self._stage_s(step_s + self._prompts_s(chunks))

    def transfer_s(self, num_tokens: int) -> float:
        return 0.0

    def _stage_s(self, pass_s: float) -> float:
        return max(MIN_STEP_S, pass_s / self.stages)

    def _prompts_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return self.prompt_token_s * sum(tokens for tokens, _ in chunks)


def workload_of(rows: Sequence[Row]) -> Workload:
    """Of many, SPANS that lie evenly over the time."""
    rows = _in_spans(sorted(rows))
    return Workload(
        arrival_s=np.array([row.at_s for row in rows]),
        prompt_len=np.array([max(1, row.prompt_tokens) for row in rows], dtype=np.int64),
        output_len=np.array([max(1, row.output_tokens) for row in rows], dtype=np.int64),
        slo_ttft_s=np.array([row.slo_ttft_s for row in rows]),
        slo_tpot_s=np.array([row.slo_tpot_s for row in rows]),
        name="what came lately",
    )


def _in_spans(rows: Sequence[Row]) -> list[Row]:
    """From 0 on."""
    size = MOST_PLAYED // SPANS if len(rows) > MOST_PLAYED else len(rows)
    begins = np.linspace(0, len(rows) - size, SPANS if size < len(rows) else 1).astype(int)
    found: list[Row] = []
    for begin in begins:
        from_s = found[-1].at_s + GAP_S if found else 0.0
        span = rows[begin : begin + size]
        found += [row._replace(at_s=from_s + row.at_s - span[0].at_s) for row in span]
    return found

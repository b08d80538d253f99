"""A trial plays one mix of machines at one rate and judges it. Plain values in and out, so that other processes do it.

By Splitwise's own rules (placement/papers/splitwise/rules.py), whose machines lend themselves to the other phase under
load, or by the live policies (placement/simulator/simulate.py), whose machines do not: the cluster that `kvrelay up`
starts has no mixed role. Under the live rules a baseline is colocated workers with chunked prefill
(placement/simulator/colocated/).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cluster.router.policy import RouterOptions
from decode_worker.policy import DecodeOptions
from placement.build.worker import RolePolicy, sim_worker
from placement.catalogs.base import PlanError
from placement.mixes.designs import Mix, mean_context
from placement.mixes.machines import MachineType, times_for_splitwise
from placement.mixes.slowdowns import SlowdownSlo
from placement.papers.splitwise.rules import SplitwiseCluster
from placement.papers.splitwise.rules import simulate as simulate_splitwise
from placement.plan import Slo
from placement.simulator.cluster import SimCluster, SimWorker
from placement.simulator.colocated.cluster import ColocatedCluster, simulate_colocated
from placement.simulator.outcome import Outcome, percentiles
from placement.simulator.simulate import simulate as simulate_live
from placement.workload.requests import Workload
from prefill_worker.policy import PrefillOptions

Rules = Literal["splitwise", "live"]
Draw = Literal["together", "apart", "replay", "list"]
SPLITWISE_SECONDS = 120.0
PERCENTILES = (50, 90, 99)
ROOMY = RouterOptions(max_queued_requests=1 << 30, max_queued_tokens=1 << 40)  # a queue that is too long misses the SLO


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Arrivals:
    """How requests are made from a workload at any rate. The same seed gives the same lengths and gaps at every rate,
    the gaps stretched: rates and mixes are compared on the same requests.

    together   lengths drawn from the workload's requests
    apart      prompt and output lengths drawn each by itself: Splitwise's way
    replay     the workload's own requests and gaps, all of them, at a pace that gives the rate
    list       the workload's requests; their arrivals are at 1 request/s, divided by the rate

    `burstiness` of drawn arrivals: 1 is Poisson, less is burstier. Drawn and listed ones last `seconds`, or as long as
    `min_requests` take.
    """

    source: Workload
    draw: Draw = "together"
    seconds: float = SPLITWISE_SECONDS
    min_requests: int = 0
    burstiness: float = 1.0

    def at(self, rate: float, seed: int) -> Workload:
        if self.draw == "replay":
            return self.source.to_rate(rate)
        seconds = max(self.seconds, self.min_requests / rate)
        if self.draw == "list":
            arrival_s = np.round(self.source.arrival_s / rate, 6)
            return self._checked(self.source.first(int(np.searchsorted(arrival_s, seconds))), rate)
        return self._drawn(rate, seconds, seed)

    def _checked(self, listed: Workload, rate: float) -> Workload:
        """The list's requests with their times at the rate."""
        return Workload(
            arrival_s=np.round(listed.arrival_s / rate, 6),
            prompt_len=listed.prompt_len,
            output_len=listed.output_len,
            name=listed.name,
        )

    def _drawn(self, rate: float, seconds: float, seed: int) -> Workload:
        gaps, prompts, outputs = (np.random.default_rng([seed, stream]) for stream in range(3))
        most = int(rate * seconds + 8 * (rate * seconds / min(1.0, self.burstiness)) ** 0.5 + 64)
        arrival_s = np.cumsum(gaps.gamma(shape=self.burstiness, scale=1 / self.burstiness, size=most)) / rate
        count = max(1, int(np.searchsorted(arrival_s, seconds)))
        size = len(self.source)
        rows = prompts.integers(0, size, size=most)[:count]
        other = outputs.integers(0, size, size=most)[:count] if self.draw == "apart" else rows
        return Workload(
            arrival_s=arrival_s[:count],
            prompt_len=self.source.prompt_len[rows],
            output_len=self.source.output_len[other],
            name=f"{count} requests after {self.source.name}",
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """What all trials of a search have in common."""

    arrivals: Arrivals
    slo: Slo | SlowdownSlo
    rules: Rules = "splitwise"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`ratios`: each target by its name (tbt_p90, ttft, ...) and how much of its limit is used: below 1 is kept.
    `attainment`: share of requests within both targets; of slowdowns, within the P90 limit of all that are limited."""

    is_met: bool
    attainment: float
    ratios: Mapping[str, float]
    ttft_s: Mapping[str, float]
    tpot_s: Mapping[str, float]
    e2e_s: Mapping[str, float]
    phases_s: Mapping[str, float]
    busy: Mapping[str, float]
    counters: Mapping[str, int]
    num_requests: int
    served: int

    @property
    def missed(self) -> tuple[str, ...]:
        return tuple(name for name, ratio in self.ratios.items() if not ratio < 1)


def judge(scene: Scene, mix: Mix, rate: float, seed: int) -> Verdict:
    """Play the mix at the rate on the requests of the seed. Same arguments, same verdict."""
    outcome = play(mix, scene.arrivals.at(rate, seed), scene.rules)
    return verdict(outcome, scene.slo, mix)


def play(mix: Mix, workload: Workload, rules: Rules) -> Outcome:
    if rules == "splitwise":
        return simulate_splitwise(splitwise_cluster(mix, workload), workload)
    if mix.design.is_baseline:
        return simulate_colocated(colocated_cluster(mix), workload)
    return simulate_live(live_cluster(mix), workload)


def splitwise_cluster(mix: Mix, workload: Workload) -> SplitwiseCluster:
    prompt, token = times_for_splitwise(mix.design.machines, mean_context(workload))
    return SplitwiseCluster(prompt=prompt, num_prompt=mix.num_prompt, token=token, num_token=mix.num_token)


def live_cluster(mix: Mix) -> SimCluster:
    first, second = mix.design.machines
    workers = _workers("prefill", first, mix.num_prompt) + _workers("decode", second, mix.num_token)
    return SimCluster(workers=workers, router=ROOMY)


def _workers(role: str, machine: MachineType, count: int) -> tuple[SimWorker, ...]:
    offer = machine.offer
    policy: RolePolicy = DecodeOptions(max_batch_size=offer.max_batch_size)
    if role == "prefill":
        policy = PrefillOptions(max_batch_tokens=offer.max_batch_tokens, pack_tokens=None)
    return tuple(sim_worker(f"{role}-{i}", role, offer, policy) for i in range(count))


def colocated_cluster(mix: Mix) -> ColocatedCluster:
    offer = mix.design.prompt.offer
    if offer.latency.stages > 1:
        raise PlanError(f"{mix.design.name} has pipeline stages; colocated machines are simulated with PP 1 only")
    return ColocatedCluster(
        latency=offer.latency,
        num_workers=mix.num_prompt,
        num_pages=offer.num_pages,
        page_size=offer.page_size,
        max_batch_tokens=offer.max_batch_tokens,
        max_batch_size=offer.max_batch_size,
        step_overhead_s=offer.step_overhead_s,
    )


def ratios_of(outcome: Outcome, slo: Slo | SlowdownSlo) -> dict[str, float]:
    """Each target by its name, and how much of its limit is used."""
    if isinstance(slo, SlowdownSlo):
        return slo.ratios(outcome)
    share = (100 * slo.attainment,)
    limits_s = {"ttft": (outcome.ttft_s, slo.ttft_s), "tpot": (outcome.tpot_s, slo.tpot_s)}
    return {name: percentiles(values, share)[0] / limit_s for name, (values, limit_s) in limits_s.items()}


def verdict(outcome: Outcome, slo: Slo | SlowdownSlo, mix: Mix) -> Verdict:
    ratios = ratios_of(outcome, slo)
    if isinstance(slo, SlowdownSlo):
        attainment = float(slo.within_p90(outcome).mean())
        is_met = all(ratio < 1 for ratio in ratios.values())
    else:
        attainment = outcome.attainment(slo.ttft_s, slo.tpot_s)
        is_met = attainment >= slo.attainment
    return Verdict(
        is_met=is_met,
        attainment=attainment,
        ratios=ratios,
        ttft_s=_at_percentiles(outcome.ttft_s),
        tpot_s=_at_percentiles(outcome.tpot_s),
        e2e_s=_at_percentiles(outcome.e2e_s),
        phases_s={name: float(np.nanmean(spent)) for name, spent in outcome.phases.items()},
        busy=_busy(outcome, mix),
        counters=dict(outcome.counters),
        num_requests=len(outcome),
        served=outcome.served,
    )


def _at_percentiles(values: np.ndarray[tuple[int], np.dtype[np.float64]]) -> dict[str, float]:
    return {str(share): value for share, value in zip(PERCENTILES, percentiles(values, PERCENTILES), strict=True)}


def _busy(outcome: Outcome, mix: Mix) -> dict[str, float]:
    counts = {"prefill": mix.num_prompt, "decode": mix.num_token, "colocated": mix.num_prompt}
    span_s = float(np.nanmax(outcome.finish_s, initial=0.0) - outcome.workload.arrival_s[0])
    if not span_s > 0:
        return {}
    return {name: spent_s / (span_s * counts[name]) for name, spent_s in outcome.busy_s.items() if counts.get(name)}

"""Search finds the placements worth having: DistServe's two algorithms over a catalogue's offers, and colocation
beside.

Algorithm 1 (high node-affinity: KV may leave over any link) finds each phase's best goodput apart, one worker alone.
The replicas of each follow from a rate or from a number of GPUs by division. Algorithm 2 (low: KV stays within a node)
searches pairs of a prefill and a decode worker whose stages stand side by side in the nodes; whole pairs are repeated.
Both leave out what cannot win: a degree whose bound (placement/goodput/bounds.py) is far below the best found is not
simulated.

What is found of phases apart is only a promise: two phases that each keep the SLO for 90% of requests need not keep it
together, and workers share a router. So whoever asks simulates the whole cluster (placement/search/planner.py).

Searches run side by side in rounds of a fixed size, and what is left out is decided between rounds: the answer does not
depend on the number of processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from placement.build.from_offers import OfferOf, assemble, colocated_of, first_tokens_of, pair_of, phase_alone
from placement.catalogs.base import Catalog, Degrees, Offer, PlanError
from placement.goodput.bounds import (
    decode_alone_s,
    decode_batch,
    decode_bound,
    floor_share,
    floors_s,
    link_bound,
    loosest_tpot_s,
    mean_context,
    prefill_bound,
    relaxed,
)
from placement.goodput.estimate import Effort
from placement.goodput.runner import Runner
from placement.goodput.search import GoodputProblem, Knee, find_goodput
from placement.goodput.targets import Targets
from placement.latency.roofline import narrowed
from placement.plan import Candidate, Interval
from placement.simulator.colocated.cluster import Sharing
from placement.simulator.systems import LiveSystem, System
from placement.workload.traffic import Traffic

ROUND = 4  # searches between two looks at what can be left out
WORTH = 0.75  # of the best goodput per GPU: what is below is not used
CHUNKS = (256, 512, 1024, 2048)
SCREENING = Effort(first_requests=1500, max_requests=6000, half_width=0.02, decides=True)

PhaseRole = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """What is planned for, and what there is to buy."""

    catalog: Catalog
    offer_of: OfferOf
    traffic: Traffic
    targets: Targets
    seed: int = 0
    max_pp: int = 1
    thoroughness: float = 1.0  # so many times the requests of a run

    @property
    def hardware(self) -> str:
        return self.catalog.hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Alone:
    """One worker, simulated alone: a phase of Algorithm 1, or a colocated one. `unit`: the candidate of one worker."""

    offer: Offer
    goodput: Interval  # requests/s of the worker
    unit: Candidate | None = None  # colocated

    @property
    def gpus(self) -> int:
        return self.offer.degrees.gpus

    @property
    def per_gpu(self) -> float:
        return self.goodput.value / self.gpus


@dataclass(slots=True, kw_only=True)
class Spent:
    """What a search cost, and what was refused on its way."""

    num_simulated: int = 0
    cpu_s: float = 0.0
    refused: dict[str, str] = field(default_factory=dict)

    def count(self, found: Knee) -> None:
        self.num_simulated += found.num_simulated
        self.cpu_s += found.cpu_s


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lead:
    """Something to simulate alone, and what it can be worth at most."""

    offer: Offer
    problem: GoodputProblem
    unit: Candidate | None = None

    @property
    def most_per_gpu(self) -> float:
        return self.problem.top / self.offer.degrees.gpus


def usable_degrees(market: Market, max_gpus: int, spent: Spent) -> list[Offer]:
    """The offers that can be had; the others' reasons are noted."""
    offers = []
    for degrees in market.catalog.degrees(max_gpus):
        if degrees.pp > market.max_pp or degrees.gpus > max_gpus:
            continue
        try:
            offers.append(market.offer_of(degrees, True))
        except PlanError as error:
            spent.refused[str(degrees)] = str(error)
    return offers


def find_phase(market: Market, runner: Runner, role: PhaseRole, offers: Sequence[Offer], spent: Spent) -> list[Alone]:
    """Each degree's goodput in one phase, the best per GPU first. Those that miss the target when idle are refused."""
    leads = []
    for offer in offers:
        reason = idle_reason(market, role, offer)
        if reason:
            spent.refused[f"{role} {offer.degrees}"] = reason
        else:
            leads.append(_Lead(offer=offer, problem=_phase_problem(market, role, offer)))
    return _best_first(runner, leads, spent, f"{role} workers alone")


def _phase_problem(market: Market, role: PhaseRole, offer: Offer) -> GoodputProblem:
    source, targets = market.traffic.source, market.targets
    if role == "prefill":
        traffic = replace(market.traffic, source=first_tokens_of(source))
        targets, top = relaxed(targets, tpot=True), prefill_bound(offer, source)
    else:
        traffic = market.traffic
        targets, top = relaxed(targets, ttft=True), decode_bound(offer, source, loosest_tpot_s(targets))
    return GoodputProblem(
        system=LiveSystem(phase_alone(role, offer)),
        traffic=traffic,
        targets=targets,
        top=top,
        effort=SCREENING.times(market.thoroughness),
        precision=0.04,
        seed=market.seed,
    )


def find_colocated(market: Market, runner: Runner, offers: Sequence[Offer], spent: Spent) -> list[Alone]:
    """One colocated worker of each degree, in each way of sharing a step, the best per GPU first."""
    leads = []
    for offer in offers:
        if floor_share(offer, offer, market.traffic.source, market.targets) < 0:
            reason = idle_reason(market, "prefill", offer) or idle_reason(market, "decode", offer)
            spent.refused[f"colocated {offer.degrees}"] = reason or "not enough requests meet both targets when idle"
            continue
        for sharing, tokens in _ways(market, offer):
            unit = colocated_of(offer, 1, market.hardware, sharing, tokens)
            leads.append(_Lead(offer=offer, problem=_colocated_problem(market, offer, unit), unit=unit))
    return _best_first(runner, leads, spent, "colocated workers alone")


def _ways(market: Market, offer: Offer) -> Iterator[tuple[Sharing, int]]:
    """prefill_first, and chunked with full steps and with steps that keep the TPOT target."""
    yield "prefill_first", offer.max_batch_tokens
    source = market.traffic.source
    tpot_s, context = loosest_tpot_s(market.targets), mean_context(source)
    batch = max(1, decode_batch(offer, source, tpot_s) // 2)
    sizes = [size for size in CHUNKS if batch < size < offer.max_batch_tokens] + [offer.max_batch_tokens]
    fitting = [
        size
        for size in sizes
        if offer.latency.mixed_s([(size - batch, 0)], batch, math.ceil(batch * context)) * offer.latency.stages
        <= tpot_s
        and size > batch
    ]
    for size in sorted({max(fitting, default=sizes[0]), offer.max_batch_tokens}):
        yield "chunked", size


def _colocated_problem(market: Market, offer: Offer, unit: Candidate) -> GoodputProblem:
    source = market.traffic.source
    most = (prefill_bound(offer, source), decode_bound(offer, source, loosest_tpot_s(market.targets)))
    return GoodputProblem(
        system=assemble(unit, market.offer_of, within_node=True),
        traffic=market.traffic,
        targets=market.targets,
        top=1 / sum(1 / rate for rate in most) if unit.sharing == "prefill_first" else min(most),
        effort=SCREENING.times(market.thoroughness),
        precision=0.04,
        seed=market.seed,
    )


def _best_first(runner: Runner, leads: list[_Lead], spent: Spent, what: str) -> list[Alone]:
    """Simulate the leads that can be worth it, the most promising first."""
    leads.sort(key=lambda lead: -lead.most_per_gpu)
    found: list[Alone] = []
    best = 0.0
    while leads and leads[0].most_per_gpu >= WORTH * best:
        now, leads = leads[:ROUND], leads[ROUND:]
        for lead, result in zip(now, runner.map(find_goodput, [lead.problem for lead in now], what), strict=True):
            spent.count(result)
            found.append(Alone(offer=lead.offer, goodput=result.goodput, unit=lead.unit))
            best = max(best, found[-1].per_gpu)
    return sorted((one for one in found if one.goodput.value), key=lambda one: -one.per_gpu)


# why not


def idle_reason(market: Market, role: PhaseRole, offer: Offer) -> str:
    """Why a worker misses its target with nobody else there; nothing when it does not."""
    source, targets = market.traffic.source, market.targets
    is_prefill = role == "prefill"
    only = relaxed(targets, tpot=is_prefill, ttft=not is_prefill)
    if floor_share(offer if is_prefill else None, None if is_prefill else offer, source, only) >= 0:
        return ""
    slo = _strictest(targets, is_prefill)
    return floor_sentence(market, role, offer, slo)


def _strictest(targets: Targets, is_prefill: bool) -> float:
    slos = [one.slo for one in targets.classes] or [targets.slo]
    return min(slo.ttft_s if is_prefill else slo.tpot_s for slo in slos)


def floor_sentence(market: Market, role: PhaseRole, offer: Offer, target_s: float) -> str:
    """TTFT 100 ms: a prompt of 2,735 tokens takes 310 ms alone on A100 at TP 8."""
    source, model = market.traffic.source, market.catalog.model
    where = f"on {market.hardware} at {offer.degrees}"
    if role == "decode":
        step_s = decode_alone_s(offer, math.ceil(mean_context(source)))
        return f"TPOT {ms(target_s)}: one decode step of {model} at batch 1 takes {ms(step_s)} {where}"
    ttft, _ = floors_s(offer, None, source)
    order = sorted(range(len(ttft)), key=lambda i: float(ttft[i]))
    at = order[min(len(order) - 1, int(market.targets.slo.attainment * len(order)))]
    prompt = int(source.prompt_len[at])
    share = f"P{100 * market.targets.slo.attainment:.0f}"
    return f"TTFT {ms(target_s)}: a prompt of {prompt:,} tokens ({share}) takes {ms(float(ttft[at]))} alone {where}"


def ms(seconds: float) -> str:
    value = seconds * 1e3
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.3g} ms"


# how many of each


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """A whole cluster to simulate. `promised`: requests/s, from its workers alone. `copies`: so many clusters of one
    pair each, among which requests go by chance, as Algorithm 2 has it."""

    candidate: Candidate
    promised: float
    within_node: bool
    copies: int = 1


def with_candidate(trial: Trial, candidate: Candidate) -> Trial:
    """The same kind of trial of another candidate."""
    copies = candidate.pools[0].replicas if trial.copies > 1 else 1
    return replace(trial, candidate=candidate, copies=copies)


def system_of(trial: Trial, offer_of: OfferOf) -> System:
    """One copy of it."""
    pools = tuple(replace(pool, replicas=pool.replicas // trial.copies) for pool in trial.candidate.pools)
    return assemble(replace(trial.candidate, pools=pools), offer_of, within_node=trial.within_node)


def replicas_for(rate: float, goodput: float) -> int:
    """n = ceil(R / goodput), as both algorithms have it."""
    return max(1, math.ceil(rate / goodput - 1e-9))


def splits(market: Market, prefills: Sequence[Alone], decodes: Sequence[Alone], num_gpus: int) -> list[Trial]:
    """Of each pair of degrees the best split of the GPUs, most promised first; fewest GPUs where they promise alike."""
    trials = []
    is_wide = num_gpus > market.catalog.gpus_per_node
    for prefill in prefills:
        for decode in decodes:
            rate_p, rate_d = _linked(market, prefill, decode) if is_wide else _unlinked(prefill, decode)
            options = [
                (min(n * rate_p, m * rate_d), -(n * prefill.gpus + m * decode.gpus), n, m)
                for n in range(1, num_gpus // prefill.gpus + 1)
                for m in {(num_gpus - n * prefill.gpus) // decode.gpus}
                if m >= 1
            ]
            if options:
                promised, _, n, m = max(options)
                n, m = replicas_for(promised, rate_p), replicas_for(promised, rate_d)
                trials.append(_pair_trial(market, (prefill, n), (decode, m), promised))
    return sorted(trials, key=lambda trial: (-trial.promised, trial.candidate.gpus))


def sized(market: Market, prefills: Sequence[Alone], decodes: Sequence[Alone], rate: float) -> list[Trial]:
    """Of each pair of degrees the replicas that the rate asks for, fewest GPUs first."""
    trials = []
    for prefill in prefills:
        for decode in decodes:
            for rates in (_unlinked(prefill, decode), _linked(market, prefill, decode)):
                n, m = (replicas_for(rate, one) for one in rates)
                trial = _pair_trial(market, (prefill, n), (decode, m), rate)
                if trial.within_node:
                    break
            trials.append(trial)
    return sorted(trials, key=lambda trial: trial.candidate.gpus)


def _unlinked(prefill: Alone, decode: Alone) -> tuple[float, float]:
    return prefill.goodput.value, decode.goodput.value


def _linked(market: Market, prefill: Alone, decode: Alone) -> tuple[float, float]:
    """What a worker of each can be worth where KV leaves its node."""
    near, far = (market.offer_of(one.offer.degrees, False) for one in (prefill, decode))
    link = link_bound(replace(near, latency=narrowed(near.latency, [far.latency])), market.traffic.source)
    return min(link, prefill.goodput.value), min(link, decode.goodput.value)


def _pair_trial(market: Market, prefill: tuple[Alone, int], decode: tuple[Alone, int], promised: float) -> Trial:
    candidate = pair_of((prefill[0].offer, prefill[1]), (decode[0].offer, decode[1]), market.hardware)
    return Trial(candidate=candidate, promised=promised, within_node=candidate.gpus <= market.catalog.gpus_per_node)


def colocated_trials(market: Market, alone: Sequence[Alone], count_of: Callable[[Alone], int]) -> list[Trial]:
    """Whole colocated clusters; `count_of` says how many workers of each."""
    trials = []
    for one in alone:
        count = count_of(one)
        if count and one.unit is not None:
            pool = replace(one.unit.pools[0], replicas=count)
            candidate = replace(one.unit, pools=(pool,))
            trials.append(Trial(candidate=candidate, promised=count * one.goodput.value, within_node=True))
    return trials


def find_pairs(
    market: Market, runner: Runner, prefills: Sequence[Alone], decodes: Sequence[Alone], max_gpus: int, spent: Spent
) -> list[tuple[Trial, Knee]]:
    """Algorithm 2: one prefill and one decode worker whose stages stand in the same nodes, the best per GPU first.

    Stages are spread over as many nodes in both, so that each hands its KV over within its node: a node holds
    1 / nodes of both workers. `promised` is the goodput of the pair.
    """
    trials = [
        trial
        for prefill in prefills
        for decode in decodes
        if any(
            _share_a_node(market, prefill.offer.degrees, decode.offer.degrees, n) for n in range(1, market.max_pp + 1)
        )
        for trial in [_pair_trial(market, (prefill, 1), (decode, 1), min(prefill.goodput.value, decode.goodput.value))]
        if trial.candidate.gpus <= max_gpus
    ]
    trials.sort(key=lambda trial: -trial.promised / trial.candidate.gpus)
    found: list[tuple[Trial, Knee]] = []
    best = 0.0
    while trials and trials[0].promised / trials[0].candidate.gpus >= max(best, 1e-12):
        now, trials = trials[:ROUND], trials[ROUND:]
        problems = [
            goodput_problem(market, replace(trial, within_node=True), effort=SCREENING, precision=0.04) for trial in now
        ]
        for trial, result in zip(now, runner.map(find_goodput, problems, "pairs within nodes"), strict=True):
            spent.count(result)
            kept = replace(trial, promised=result.goodput.value, within_node=True)
            found.append((kept, result))
            best = max(best, result.goodput.value / trial.candidate.gpus)
    found = [(trial, result) for trial, result in found if trial.promised]
    return sorted(found, key=lambda pair: -pair[0].promised / pair[0].candidate.gpus)


def _share_a_node(market: Market, prefill: Degrees, decode: Degrees, nodes: int) -> bool:
    if prefill.pp % nodes or decode.pp % nodes:
        return False
    return (prefill.gpus + decode.gpus) // nodes <= market.catalog.gpus_per_node


def goodput_problem(
    market: Market, trial: Trial, *, effort: Effort, precision: float = 0.02, factor: float = 1.0
) -> GoodputProblem:
    """The goodput of a whole cluster."""
    return GoodputProblem(
        system=system_of(trial, market.offer_of),
        traffic=market.traffic,
        targets=market.targets,
        copies=trial.copies,
        top=1.1 * trial.promised,
        effort=effort.times(market.thoroughness),
        precision=precision,
        seed=market.seed,
        factor=factor,
    )

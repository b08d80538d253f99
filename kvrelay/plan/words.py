"""Says in sentences what a plan holds: the answer, what binds, whether to disaggregate. Words only; no figure is made.

The command's table and the report share them, so that both say the same. Amounts are written by kvrelay.plan.amounts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from kvrelay.plan.amounts import (
    between,
    count,
    is_known,
    num,
    percent,
    percent_between,
    seconds,
    usd,
    usd_per_million,
)
from placement.plan import Candidate, Goodput, Interval, Kind, Plan, PoolPlan, Slo

ALIKE = 0.05  # the search's own precision, and what two sets of requests differ by
POOL_WORDS = {
    "prefill": "the prefill pool",
    "decode": "the decode pool",
    "link": "the link that carries KV",
    "router": "the router",
    "none": "nothing that was counted",
}
COLOCATED_WORDS = POOL_WORDS | {"prefill": "the time to first token", "decode": "the time per output token"}
BUSY_WORDS = {
    "prefill": "prefill workers compute",
    "decode": "decode workers compute",
    "mixed": "workers compute",
    "colocated": "workers compute",
    "prefill_kv": "KV pages of prefill workers held",
    "decode_kv": "KV pages of decode workers held",
    "mixed_kv": "KV pages of workers held",
    "colocated_kv": "KV pages of workers held",
    "link": "link in use",
    "router": "router busy",
}


def targets(slo: Slo) -> str:
    """TTFT of 250 ms and TPOT of 25 ms"""
    parts = [f"{name} of {seconds(at)}" for name, at in (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s)) if at < math.inf]
    return " and ".join(parts) or "no target"


def goal(plan: Plan) -> str:
    """TTFT of 250 ms and TPOT of 25 ms for 90% of requests; of classes, that each has its own met."""
    names = [each["name"] if isinstance(each, Mapping) else each.name for each in plan.asked.get("classes") or ()]
    if names:
        return f"the targets of {' and '.join(names)} for as many of each as asked"
    return f"{targets(plan.slo)} for {percent(plan.slo.attainment)} of requests"


def pool_words(pool: PoolPlan) -> str:
    """two prefill workers of TP 2"""
    capped = f", power capped at {percent(pool.power_cap)}" if pool.power_cap < 1 else ""
    return f"{count(pool.replicas, f'{pool.role} worker')} of {pool.degrees}{capped}"


def placement_words(candidate: Candidate) -> str:
    """two prefill workers of TP 2 and one decode worker of TP 4, on eight H100 GPUs"""
    kinds = list(dict.fromkeys(hardware_words(pool) for pool in candidate.pools))
    if len(kinds) == 1:
        pools = " and ".join(pool_words(pool) for pool in candidate.pools) + sharing_words(candidate)
        return f"{pools}, on {_amount(candidate.gpus, kinds[0], candidate.unit)}"
    return " and ".join(
        f"{pool_words(p)} on {_amount(p.gpus, hardware_words(p), p.degrees.unit)}" for p in candidate.pools
    )


def _amount(number: int, hardware: str, unit: str) -> str:
    """eight H100 GPUs; two cores of Intel(R) Xeon(R) Processor"""
    return count(number, f"{hardware} GPU") if unit == "GPU" else f"{count(number, unit)} of {hardware}"


def sharing_words(candidate: Candidate) -> str:
    """How mixed workers put both phases into their steps, and what is guessed ahead."""
    mixed = [pool for pool in candidate.pools if pool.role == "mixed"]
    chunks = dict.fromkeys(f"{pool.chunk_tokens:,}" for pool in mixed)
    reads = "reads" if sum(pool.replicas for pool in mixed) == 1 else "read"
    said = f", which {reads} prompts in chunks of {' and '.join(chunks)} tokens in steps that decode" if chunks else ""
    guesses = candidate.num_guesses
    return f"{said}, with up to {count(guesses, 'token')} guessed ahead of each request" if guesses else said


def hardware_words(pool: PoolPlan) -> str:
    """The kind of GPU; a power cap is said of the worker."""
    return pool.hardware.removesuffix(f" at {pool.power_cap:.0%} power")


def answer(plan: Plan) -> list[str]:
    """The whole answer: what to run, what it holds, at what cost, and how it compares."""
    chosen = plan.chosen
    first = "Run" if plan.is_disaggregated else "Do not disaggregate: run"
    rate = plan.at_rate.rate
    kept = f"This meets {goal(plan)} up to {between(chosen.goodput)} requests/s"
    sentences = [
        f"{first} {placement_words(chosen.candidate)}.",
        f"{kept}, which is {num(chosen.per_gpu)} per {chosen.candidate.unit}.",
    ]
    if chosen.usd_per_hour:
        cost, each = f"{usd(chosen.usd_per_hour)} an hour", usd_per_million(chosen.usd_per_hour, rate)
        sentences.append(f"That costs {cost}, or {each} for a million requests at {num(rate)} requests/s.")
    sentences.append(verdict(plan))
    return [sentence for sentence in sentences if sentence]


def verdict(plan: Plan) -> str:
    """How the best of each kind compare: two pools with a colocated one, and a hybrid with the better of these; ""
    where only one kind was tried."""
    return " ".join(said for said in (_pure_verdict(plan), _hybrid_verdict(plan)) if said)


def _hybrid_verdict(plan: Plan) -> str:
    tried = _keeping(plan)
    hybrid = best_of(tried, "hybrid")
    pure = next((each for each in tried if each.candidate.kind != "hybrid"), None)
    if hybrid is None or pure is None:
        return ""
    if prices := _prices(plan, hybrid, pure):
        is_cheaper, of_hybrid, of_pure = prices
        if is_cheaper:
            return f"The best without a hybrid takes {of_pure} for it."
        return f"A hybrid of both takes {of_hybrid} for it."
    first, second, unit = hybrid.per_gpu, pure.per_gpu, f"per {pure.candidate.unit}"
    if hybrid.candidate.design:  # of several kinds of GPUs, that are there or not
        first, second, unit = hybrid.goodput.value, pure.goodput.value, "in all"
    figures = f"{num(first)} against {num(second)} requests/s"
    if is_close(first, second):
        return f"A hybrid of both comes out alike: {figures} {unit}."
    if first < second:
        return f"A hybrid of both serves less: {figures} {unit}."
    return f"A hybrid, {hybrid.candidate.label}, serves {num(first / second)} times as much {unit}: {figures}."


def _pure_verdict(plan: Plan) -> str:
    kinds = {placement.candidate.kind for placement in plan.tried}
    if not kinds >= {"two pools", "one pool"}:
        return ""
    apart, together = (best_of(_keeping(plan), kind) for kind in ("two pools", "one pool"))
    if apart is None or together is None:
        if apart is together:
            return ""
        rate = plan.asked.get("rate")
        where = "any rate" if rate is None else f"{num(rate)} requests/s with as few {plan.chosen.candidate.unit}s"
        if together is None:
            return f"No colocated placement meets the targets at {where}, so two pools are what makes this possible."
        return f"No placement with two pools meets the targets at {where}; colocated workers do."
    return _by_price(plan, apart, together) or _by_gpu(apart, together)


def _keeping(plan: Plan) -> list[Goodput]:
    """Those that were tried and keep the rate that was asked for, or any."""
    return [each for each in plan.tried if each is plan.chosen or each.keeps(plan.asked.get("rate"))]


def _by_price(plan: Plan, apart: Goodput, together: Goodput) -> str:
    if not (prices := _prices(plan, apart, together)):
        return ""
    is_cheaper, of_apart, of_together = prices
    if is_cheaper:
        return f"The best colocated placement takes {of_together} for it."
    return f"The best two pools take {of_apart} for it."


def _prices(plan: Plan, one: Goodput, other: Goodput) -> tuple[bool, str, str] | None:
    """Where a rate was to be served for the least: whether the one is cheaper, and what each takes for it. None where
    that is the same."""
    takes = {"cost": "usd_per_hour", "power": "watts"}.get(plan.objective, "") if plan.asked.get("rate") else ""
    first, second = (float(getattr(placement, takes)) if takes else 0.0 for placement in (one, other))
    if not (first and second) or abs(first - second) < 1e-6 * first:
        return None
    told = [f"{usd(at)} an hour" if takes == "usd_per_hour" else f"{num(at / 1e3)} kW" for at in (first, second)]
    return first < second, told[0], told[1]


def _by_gpu(apart: Goodput, together: Goodput) -> str:
    """What each serves with a GPU; where those are not of one kind, for a dollar."""
    kinds = {hardware_words(pool) for each in (apart, together) for pool in each.candidate.pools}
    served, unit = [apart.per_gpu, together.per_gpu], f"per {apart.candidate.unit}"
    if len(kinds) > 1 and apart.usd_per_hour and together.usd_per_hour:
        served = [each.goodput.value / each.usd_per_hour for each in (apart, together)]
        unit = "for each dollar an hour"
    ratio = served[0] / served[1]
    high, low = sorted(served, reverse=True)
    figures = f"{num(high)} against {num(low)} requests/s {unit}"
    if high <= low * (1 + ALIKE):
        return f"Two pools and colocated workers come out alike: {figures}."
    if ratio > 1:
        return f"Two pools serve {num(ratio)} times what the best colocated placement does: {figures}."
    return f"Colocated workers serve {num(1 / ratio)} times what the best two pools do: {figures}."


def goodput_of(placement: Goodput) -> str:
    """With its interval, and a sign where short runs had to do."""
    return ("~ " if placement.is_rough else "") + between(placement.goodput)


def best_of(tried: Sequence[Goodput], kind: Kind) -> Goodput | None:
    """The first of its kind that meets the targets at some rate; `tried` has the best first."""
    return next((each for each in tried if each.candidate.kind == kind and each.goodput.value > 0), None)


def is_close(first: float, second: float) -> bool:
    """Goodputs too near each other to be told apart: candidates are compared on the same requests, and an error of the
    latency model moves all of them alike, so what their intervals share does not count."""
    low, high = sorted((first, second))
    return high <= low * (1 + ALIKE)


def binding(plan: Plan) -> str:
    """What gives way first, and how far away that is."""
    are_apart = any(pool.role in ("prefill", "decode") for pool in plan.chosen.candidate.pools)
    what = (POOL_WORDS if are_apart else COLOCATED_WORDS)[plan.binding]
    if plan.binding == "none":
        return headroom(plan)
    return f"When the rate rises, {what} gives way first. {headroom(plan)}"


def headroom(plan: Plan) -> str:
    rate = num(plan.at_rate.rate)
    if plan.headroom < 0.005:
        return f"At {rate} requests/s the plan stands at its knee: nothing is left for a busier hour."
    return f"At {rate} requests/s, {percent(plan.headroom)} of its goodput is left."


def attained(plan: Plan) -> str:
    """The share at the plan's rate; where the latency model is too uncertain for that, what is known instead."""
    share, low = plan.at_rate.attainment, plan.chosen.goodput.low
    if is_known(share):
        return percent_between(share)
    sure = f"sure up to {num(low)} requests/s" if low else "sure at no rate"
    return f"{percent(share.value)} if the latency model is right; {sure}"


def warnings(plan: Plan) -> Iterator[str]:
    """What a person should know before acting on it."""
    at_rate, low = plan.at_rate, plan.chosen.goodput.low
    if plan.asked.get("rate") and not plan.asked.get("classes") and at_rate.attainment.value < plan.slo.attainment:
        yield (
            f"At {num(at_rate.rate)} requests/s {percent(at_rate.attainment.value)} of requests meet the targets in "
            f"the longest run, and {percent(plan.slo.attainment)} are to: no placement that was tried keeps them there."
        )
    if not at_rate.is_settled:
        yield "The simulation reached its limit before this interval was narrow; treat the figures as rough."
    if at_rate.rate > low * (1 + ALIKE):
        yield (
            f"{num(at_rate.rate)} requests/s lies above the lower end of the goodput, {num(low)}: if the "
            "latency model is as wrong as it may be, the targets are missed. Plan for less, add a worker, or measure: "
            "kvrelay calibrate narrows the interval."
        )


def tries(plan: Plan) -> str:
    """How much work stands behind it."""
    searched = f"{count(len(plan.tried), 'placement').capitalize()} searched"
    return f"{searched}, {plan.num_simulated:,} requests simulated in {num(plan.cpu_s)} s of processor time"


def percentile_rows(plan: Plan) -> list[tuple[str, str, list[str]]]:
    """(name, target, [P50, P90, P99]) of TTFT and TPOT, as text."""
    point, slo = plan.at_rate, plan.slo
    none = "by class" if plan.asked.get("classes") else "none"
    rows = []
    for name, target, by_percentile in (("TTFT", slo.ttft_s, point.ttft_s), ("TPOT", slo.tpot_s, point.tpot_s)):
        cells = [_time_between(by_percentile[at]) if at in by_percentile else "-" for at in ("50", "90", "99")]
        rows.append((name, seconds(target) if target < math.inf else none, cells))
    return rows


def _time_between(interval: Interval) -> str:
    """48.3 ms (44 to 52), 48.3 ms (14.8 ms to 25.9 s), 2.1 s (1.9 s to never)"""
    value, low, high = (
        seconds(at) if math.isfinite(at) else "never" for at in (interval.value, interval.low, interval.high)
    )
    units = {text.partition(" ")[2] for text in (value, low, high)}
    if len(units) == 1:
        low, high = low.partition(" ")[0], high.partition(" ")[0]
    return value if value == "never" else f"{value} ({low} to {high})"


def busy_rows(busy: Mapping[str, float]) -> list[tuple[str, str, float]]:
    """(key, words, share) of what was counted, in the order of a request's life."""
    known = [key for key in BUSY_WORDS if key in busy]
    return [(key, BUSY_WORDS[key], busy[key]) for key in known]

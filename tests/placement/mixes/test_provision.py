"""The mixes found are those that trying them all finds; rates and budgets are kept; what cannot be is said."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest

from placement.catalogs.base import Degrees, Offer, PlanError
from placement.goodput.runner import open_runner
from placement.goodput.targets import Judgement, Targets
from placement.mixes.designs import Mix, all_designs
from placement.mixes.grid import Asking, GridPoint, Limit, Space, prompts_beside
from placement.mixes.load import drawn_load, on_prefixes
from placement.mixes.machines import MachineType
from placement.mixes.options import Provisioning
from placement.mixes.provision import Provisioner, provision
from placement.mixes.report.advice import apart_words
from placement.mixes.report.rated import RatedMix
from placement.mixes.rules import live_cluster, rules_named
from placement.mixes.scenario import LoadPoint, MixTargets, Scenario, simulate_point
from placement.mixes.search import cheapest, fastest, headroom
from placement.mixes.simulations import Simulations
from placement.mixes.slowdowns import SlowdownTargets
from placement.papers.splitwise.machines import splitwise_machines
from placement.papers.splitwise.request_list import ListLoad
from placement.plan import Plan, Slo, to_json
from placement.search.question import PlanQuestion
from placement.workload.requests import Workload, from_rows
from tests.placement.mixes.test_machines import Lines

Oracle = Callable[[GridPoint], bool]


def ask_all(asking: Asking, oracle: Oracle) -> tuple[GridPoint | None, int]:
    """What the search settled on, and how many mixes it asked about."""
    asked = 0
    try:
        points = next(asking)
        while True:
            asked += len(points)
            points = asking.send([oracle(point) for point in points])
    except StopIteration as end:
        best: GridPoint | None = end.value
        return best, asked


def pools(prompt_rate: float, token_rate: float, *, lends: float = 0.0) -> Oracle:
    """Each prompt machine serves so many requests/s, each token machine so many; of what the other pool has to spare, a
    share `lends` can be borrowed."""

    def holds(asked: GridPoint) -> bool:
        prompt, token, rate = asked
        spare = prompt - rate / prompt_rate, token - rate / token_rate
        return min(spare) >= 0 or (lends > 0 and min(spare) + lends * max(spare) >= 0)

    return holds


def best_by_trial(oracle: Oracle, costs: tuple[float, float], rate: int, most: int) -> float:
    return min(
        costs[0] * prompt + costs[1] * token
        for prompt in range(1, most)
        for token in range(1, most)
        if oracle(GridPoint(prompt, token, rate))
    )


@pytest.mark.parametrize("costs", [(1.0, 1.0), (4.76, 2.21), (1.0, 3.3)])
@pytest.mark.parametrize("lends", [0.0, 0.3])
@pytest.mark.parametrize("guess", [(3, 3), (30, 4), (7, 25)])
def test_the_cheapest_of_all_mixes_is_found(costs: tuple[float, float], lends: float, guess: tuple[int, int]) -> None:
    oracle = pools(2.7, 5.3, lends=lends)
    space = Space(guess=guess, floor=(1, 1), unit_costs=costs, is_baseline=False)
    found, asked = ask_all(cheapest(space, 50), oracle)
    assert found is not None
    assert oracle(GridPoint(found.num_prompt, found.num_token, 50))
    assert space.cost(found.num_prompt, found.num_token) == pytest.approx(best_by_trial(oracle, costs, 50, 60))
    assert asked < 250  # of 3,481


@pytest.mark.parametrize("costs", [(1.0, 1.0), (4.76, 2.21), (1.0, 3.3)])
@pytest.mark.parametrize("lends", [0.0, 0.3])
def test_the_highest_rate_of_all_mixes_within_the_limits_is_found(costs: tuple[float, float], lends: float) -> None:
    oracle = pools(2.7, 5.3, lends=lends)
    limits = [Limit(unit_costs=costs, at_most=90.0), Limit(unit_costs=(1.0, 1.0), at_most=40.0)]
    space = Space(guess=(5, 5), floor=(1, 1), unit_costs=costs, is_baseline=False)
    found, asked = ask_all(fastest(space, limits, 40), oracle)
    mixes = [(p, t) for t in range(1, 41) for p in range(1, 1 + prompts_beside(limits, t))]
    best = max(rate for rate in range(1, 200) if any(oracle(GridPoint(p, t, rate)) for p, t in mixes))
    assert found is not None
    assert (found.num_prompt, found.num_token) in mixes
    assert found.rate == best
    assert asked < 120


def test_a_baseline_has_one_kind_of_machine() -> None:
    oracle: Oracle = lambda question: question[0] * 1.5 >= question[2] and question[1] == 0  # noqa: E731
    space = Space(guess=(9, 0), floor=(1, 0), unit_costs=(2.0, 2.0), is_baseline=True)
    assert ask_all(cheapest(space, 50), oracle)[0] == GridPoint(num_prompt=34, num_token=0, rate=50)
    limit = [Limit(unit_costs=(2.0, 2.0), at_most=41.0)]
    assert ask_all(fastest(space, limit, 10), oracle)[0] == GridPoint(num_prompt=20, num_token=0, rate=30)


@pytest.mark.parametrize(("guess", "highest"), [(1, 37), (36, 37), (37, 37), (38, 37), (500, 37), (5, 0), (7, 1)])
def test_the_highest_rate_is_found_from_any_guess(guess: int, highest: int) -> None:
    found, _ = ask_all(headroom(3, 4, guess), lambda question: question[2] <= highest)
    assert found == GridPoint(num_prompt=3, num_token=4, rate=highest)


def test_searches_end_where_nothing_holds() -> None:
    space = Space(guess=(3, 3), floor=(1, 1), unit_costs=(1.0, 1.0), is_baseline=False)
    assert ask_all(cheapest(space, 5), lambda _: False)[0] is None
    assert ask_all(fastest(space, [Limit(unit_costs=(1.0, 1.0), at_most=9.0)], 5), lambda _: False)[0] is None
    assert ask_all(fastest(space, [Limit(unit_costs=(5.0, 5.0), at_most=9.0)], 5), lambda _: True)[0] is None


# with real trials


def shop(scale: float = 1.0) -> list[MachineType]:
    """Two small machines of one model: B twice as fast as C and at 1.8 times the price."""

    def machine(short: str, usd: float, power: float, slower: float) -> MachineType:
        offer = Offer(degrees=Degrees(tp=1), latency=Slower(slower * scale), num_pages=400, max_batch_size=32)
        return MachineType(
            name=short.lower(),
            short=short,
            title=short,
            model="m",
            kind=short.lower(),
            offer=offer,
            usd_per_hour=usd,
            power=power,
        )

    return [machine("B", 1.8, 700.0, 1.0), machine("C", 1.0, 300.0, 2.0)]


class Slower(Lines):
    """Lines whose times are `factor` times as long."""

    def __init__(self, factor: float) -> None:
        object.__setattr__(self, "source", f"lines times {factor:g}")
        object.__setattr__(self, "stages", 1)
        self.__dict__["factor"] = factor

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return float(Lines.prefill_s(self, chunks) * self.__dict__["factor"])


def requests(count: int = 200) -> Workload:
    rng = np.random.default_rng(3)
    rows = [
        [float(i), int(p), int(o)]
        for i, (p, o) in enumerate(zip(rng.integers(20, 200, count), rng.integers(5, 60, count), strict=True))
    ]
    return from_rows(rows, "small")


QUICK = Provisioning(rules="splitwise", seconds=6.0, min_requests=1, seeds=1, interval_seeds=2, compare_rules=False)
SLO = Slo(ttft_s=0.6, tpot_s=0.03, attainment=0.9)


def scenario(rules: str = "splitwise", targets: MixTargets | None = None) -> Scenario:
    load = drawn_load(requests(), seconds=6.0)
    return Scenario(load=load, targets=targets or Targets(slo=SLO), rules=rules_named(rules, SLO))


def judged(of: Scenario, mix: Mix, rate: float, seed: int = 0) -> Judgement:
    return simulate_point((of, LoadPoint(mix, rate, seed))).judgement


def plan(ask: PlanQuestion, options: Provisioning = QUICK, machines: Sequence[MachineType] | None = None) -> Plan:
    return provision(ask, machines or shop(), requests(), options=options)


@pytest.mark.parametrize(("rules", "name"), [("splitwise", "BC"), ("live", "BC"), ("live", "Baseline-B+C")])
def test_the_plan_is_the_best_of_all_mixes(rules: str, name: str) -> None:
    options = replace(QUICK, rules=rules, designs=(name,))
    ask = PlanQuestion(slo=SLO, objective="cost", rate=20.0, processes=0)
    found = plan(ask, options)
    design = all_designs(shop(), [name], are_pooled=True)[0]
    mixes = [Mix(design=design, num_prompt=p, num_token=t) for p in range(1, 6) for t in range(1, 6)]
    draws = range(QUICK.interval_seeds)
    held = [
        mix.total("usd_per_hour")
        for mix in mixes
        if all(judged(scenario(rules), mix, 20.0, seed).is_met for seed in draws)
    ]
    assert found.chosen.usd_per_hour == pytest.approx(min(held))
    assert found.at_rate.rate == 20.0
    assert not found.chosen.candidate.is_colocated


def test_more_rate_costs_no_less_and_more_budget_serves_no_less() -> None:
    options = replace(QUICK, designs=("Baseline-B", "BC", "BB"))
    costs = [
        plan(PlanQuestion(slo=SLO, objective="cost", rate=rate, processes=0), options).chosen.usd_per_hour
        for rate in (8.0, 24.0)
    ]
    assert costs[0] <= costs[1]
    budgets = (5.0, 9.0)
    plans = [plan(PlanQuestion(slo=SLO, budget_usd_per_hour=budget, processes=0), options) for budget in budgets]
    assert all(found.chosen.usd_per_hour <= budget + 1e-9 for found, budget in zip(plans, budgets, strict=True))
    assert plans[0].chosen.goodput.value <= plans[1].chosen.goodput.value


def test_the_objective_and_the_budgets_decide() -> None:
    designs = ("BB", "CC")
    by = {
        objective: plan(
            PlanQuestion(slo=SLO, objective=objective, rate=16.0, processes=0), replace(QUICK, designs=designs)
        )
        for objective in ("cost", "power", "goodput")
    }
    assert by["cost"].chosen.usd_per_hour == min(one.usd_per_hour for one in by["cost"].tried)
    assert by["power"].chosen.watts == min(one.watts for one in by["power"].tried)
    assert by["goodput"].chosen.candidate.gpus == min(one.candidate.gpus for one in by["goodput"].tried)
    ask = PlanQuestion(slo=SLO, budget_usd_per_hour=math.inf, processes=0)
    found = plan(ask, replace(QUICK, designs=designs, budget_power=2500.0))
    assert all(one.watts <= 2500 for one in found.tried)


def test_there_are_no_more_gpus_of_a_kind_than_there_are() -> None:
    there_are = {"b": 3, "c": 1}
    options = replace(QUICK, rules="live", gpus_of=there_are)
    found = plan(PlanQuestion(slo=SLO, num_gpus=4, processes=0), options)
    for one in found.tried:
        taken = Counter[str]()
        for pool in one.candidate.pools:
            taken[str(pool.hardware)] += pool.gpus
        assert all(taken[kind] <= most for kind, most in there_are.items())
    assert found.refused["CC"] == "there are 1 of c, and a machine for each pool takes 2"
    both = next(one.candidate for one in found.tried if one.candidate.design == "Baseline-B+C")
    assert [(pool.role, pool.hardware, pool.replicas) for pool in both.pools] == [("mixed", "b", 3), ("mixed", "c", 1)]
    with pytest.raises(PlanError, match="Baseline-B: there are 0 of b, and a machine for each pool takes 1"):
        plan(PlanQuestion(slo=SLO, num_gpus=4, processes=0), replace(QUICK, gpus_of={"b": 0, "c": 0}))


@pytest.mark.parametrize(
    ("rate", "said"),
    [
        (
            9.0,
            "More is had of a cluster for each kind of its own: BB (2,1) 6 and Baseline-C (2) 4, 10 requests/s in all.",
        ),
        (10.0, ""),
    ],
)
def test_a_cluster_for_each_kind_is_told_of_where_it_serves_more(rate: float, said: str) -> None:
    rated = [
        RatedMix(mix=Mix(design=design, num_prompt=2, num_token=num_token), step=0.1, rate=rate, rates=(rate,))
        for design, num_token, rate in zip(
            all_designs(shop(), ["BC", "BB", "Baseline-B", "Baseline-C"]),
            (1, 1, 0, 0),
            (rate, 6.0, 5.0, 4.0),
            strict=True,
        )
    ]
    assert apart_words(rated, {"b": 3, "c": 2}) == said


def test_a_router_of_machines_that_do_both_knows_the_targets() -> None:
    """As the one that is started: by them it gives the slower ones what they can do in time."""
    designs = all_designs(shop(), are_pooled=True)
    told = {
        design.name: live_cluster(Mix(design=design, num_prompt=1, num_token=1), SLO).router.slo_tpot_ms
        for design in designs
    }
    assert told["Baseline-B+C"] == told["Baseline-B"] == 30.0
    assert told["BC"] == 0.0


def test_a_rate_that_is_hardly_higher_buys_nothing_dearer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of rates within one per cent the cheapest wins, and at one price the simplest; within five no win is sure."""
    highest = {"BC": 25.1, "Baseline-B": 25.0, "CC": 24.9, "Baseline-C": 24.0, "BB": 10.0}

    def rated(self: Provisioner, mixes: Sequence[RatedMix]) -> list[RatedMix]:
        return [replace(mix, rates=(highest[mix.mix.design.name],)) for mix in mixes]

    monkeypatch.setattr(Provisioner, "_with_highest_rates", rated)
    ask = PlanQuestion(slo=SLO, budget_usd_per_hour=5.0, processes=0)

    cheap, close = (plan(ask, replace(QUICK, designs=names)) for names in (tuple(highest), ("CC", "Baseline-C")))
    assert [each.candidate.design for each in cheap.tried] == ["Baseline-B", "BC", "CC", "Baseline-C", "BB"]
    assert cheap.advice[0] == (
        "Do not disaggregate: Baseline-B (2) serves 1.00 times what BC (2,1) does within the same budget, for 3.60 USD "
        "an hour against 4.60."
    )
    assert close.advice[0] == (
        "Disaggregation makes no difference that is sure: CC (4,1) serves 1.04 times what Baseline-C (5) does within "
        "the same budget."
    )


def test_a_plan_says_all_that_was_tried_with_intervals() -> None:
    found = plan(PlanQuestion(slo=SLO, objective="cost", rate=16.0, processes=0), replace(QUICK, interval_seeds=3))
    assert [one.candidate.design for one in found.tried] == sorted(
        (one.candidate.design for one in found.tried),
        key=lambda name: next(o.usd_per_hour for o in found.tried if o.candidate.design == name),
    )
    assert {one.candidate.design for one in found.tried} | set(found.refused) == {
        "Baseline-B", "Baseline-C", "BB", "BC", "CB", "CC",
    }  # fmt: skip
    for one in found.tried:
        assert one.goodput.low <= one.goodput.value <= one.goodput.high
        rates = [point.rate for point in one.curve]
        assert rates == sorted(rates)
        assert len(rates) >= 4
    assert any("lend themselves to the other phase" in sentence for sentence in found.advice)
    assert found.sources["rules"] == "Splitwise's simulator, with its mixed pool"
    assert to_json(found)["chosen"]["candidate"]["design"] == found.chosen.candidate.design


def test_a_plan_keeps_the_rate_that_it_is_for() -> None:
    """Of draws that differ the first two hold more than the others."""
    options = replace(QUICK, designs=("Baseline-B",), seconds=3.0, seeds=2, interval_seeds=6)
    asked = plan(PlanQuestion(slo=SLO, objective="cost", rate=17.0, processes=0), options)
    assert (asked.at_rate.rate, asked.chosen.goodput.low > 17.0) == (17.0, True)
    assert asked.at_rate.attainment.value >= SLO.attainment
    for seed in range(2):
        bought = plan(PlanQuestion(slo=SLO, budget_usd_per_hour=4.0, seed=seed, processes=0), options)
        assert (bought.at_rate.rate, bought.headroom) == (bought.chosen.goodput.value, 0.0)
        missed_at = float(bought.chosen.limit.split()[1])
        assert missed_at > bought.chosen.goodput.value


def test_a_curve_is_of_times_as_the_latency_model_has_them() -> None:
    """Those that are as wrong as it may be count for the interval at the plan's rate alone."""
    wrong = [replace(machine, offer=replace(machine.offer, error=0.3)) for machine in shop()]
    found = plan(PlanQuestion(slo=SLO, budget_usd_per_hour=4.0, processes=0), replace(QUICK, rules="live"), wrong)
    (point,) = (point for point in found.chosen.curve if point.rate == found.at_rate.rate)
    assert point.attainment.value == found.at_rate.attainment.value
    assert point.num_requests == found.at_rate.num_requests
    assert found.at_rate.attainment.low < point.attainment.low


def test_the_other_rules_are_told_where_they_are_asked_for() -> None:
    options = replace(QUICK, designs=("BC",), compare_rules=True)
    said = " ".join(plan(PlanQuestion(slo=SLO, objective="cost", rate=12.0, processes=0), options).advice)
    assert "by the live policies BC (" in said


def test_slowdowns_are_kept_by_the_mix_that_is_chosen() -> None:
    machines = shop()
    slo = SlowdownTargets(reference=machines[1].latency)
    options = replace(QUICK, designs=("BC", "BB"), slowdowns=slo)
    found = plan(PlanQuestion(slo=Slo(), objective="cost", rate=12.0, processes=0), options)
    design = all_designs(machines, [found.chosen.candidate.design])[0]
    counts = [pool.replicas for pool in found.chosen.candidate.pools]
    mix = Mix(design=design, num_prompt=counts[0], num_token=counts[1])
    held = judged(scenario(targets=slo), mix, 12.0)
    assert held.is_met
    assert set(held.ratios) == {f"{name}_p{share}" for name in ("ttft", "tbt", "e2e") for share in (50, 90, 99)}
    assert max(held.ratios.values()) < 1
    assert found.asked["slowdowns"]["tbt"] == [1.25, 1.5, 5.0]


def test_a_slo_that_a_request_alone_misses_is_refused_with_the_reason() -> None:
    ask = PlanQuestion(slo=Slo(ttft_s=1.0, tpot_s=0.005), rate=1.0, processes=0)
    with pytest.raises(PlanError, match=r"no design does what is asked \(Baseline-B: TPOT is 2\.\d+ times its limit"):
        plan(ask)
    both = Slo(ttft_s=0.19, tpot_s=0.03, attainment=0.95)
    options = replace(QUICK, designs=("BB", "CC"), interval_seeds=1)  # of a dozen requests, of which one may miss it
    found = plan(PlanQuestion(slo=both, rate=2.0, processes=0), options)
    assert "alone" in found.refused["CC"]


def test_a_trace_is_not_judged_by_how_it_begins() -> None:
    """Its first requests, a fifteenth of all, cannot meet the SLO."""
    rows = [[i / 100, 4000 if i < 4100 else 50, 5] for i in range(60_000)]
    ask = PlanQuestion(slo=SLO, budget_usd_per_hour=1.8, processes=0)
    found = provision(ask, shop(), from_rows(rows), options=replace(QUICK, designs=("Baseline-B",)))
    assert found.chosen.goodput.value > 0


def test_bad_input_is_a_sentence() -> None:
    def ask(**keys: object) -> PlanQuestion:
        return PlanQuestion(slo=SLO, processes=0, **keys)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match="the budget is infinite; give one in USD per hour, GPUs or power"):
        plan(ask(budget_usd_per_hour=math.inf))
    told = "budget is 0.5 USD an hour, and a machine of c takes 1; give 1 for one pool or 2 for two pools, or machines"
    with pytest.raises(PlanError, match=told):
        plan(ask(budget_usd_per_hour=0.5))
    with pytest.raises(PlanError, match="num_gpus is 1, and a machine of b takes 1; give 2 for two pools, or machines"):
        plan(ask(num_gpus=1, colocated=False))
    with pytest.raises(PlanError, match=r"b has no price per hour, .* objective cost .*; give usd_per_gpu_hour in its"):
        plan(ask(objective="cost", rate=1.0), machines=[replace(shop()[0], usd_per_hour=0.0)])
    with pytest.raises(PlanError, match="colocated is off"):
        plan(ask(rate=1.0, colocated=False), replace(QUICK, designs=("Baseline-B",)))
    with pytest.raises(PlanError, match="seconds is 0; give a number above 0"):
        Provisioning(seconds=0.0)
    with pytest.raises(PlanError, match="slowdown ttfb is not known"):
        SlowdownTargets(reference=Lines(), limits={"ttfb": (1, 2, 3)})
    with pytest.raises(PlanError, match=r"slowdown limits of tbt are \(1, 0, 3\)"):
        SlowdownTargets(reference=Lines(), limits={"tbt": (1, 0, 3)})


def test_a_design_that_the_budget_holds_no_machines_of_is_not_said_to_miss_the_slo() -> None:
    ask = PlanQuestion(slo=SLO, budget_usd_per_hour=2.5, processes=0)
    found = plan(ask, replace(QUICK, designs=("Baseline-B", "BB")))
    assert found.refused == {"BB": "budget is 2.5 USD an hour, and a machine for each pool takes 3.6"}


# draws


@pytest.mark.parametrize("burstiness", [1.0, 0.3])
def test_rates_are_compared_on_the_same_requests(burstiness: float) -> None:
    arrivals = drawn_load(requests(), are_lengths_apart=True, seconds=10.0, burstiness=burstiness)
    slow, fast = arrivals.at(10.0, 7), arrivals.at(20.0, 7)
    count = len(slow)
    assert count < len(fast)
    assert np.array_equal(slow.prompt_len, fast.prompt_len[:count])
    assert np.array_equal(slow.output_len, fast.output_len[:count])
    assert slow.arrival_s == pytest.approx(2 * fast.arrival_s[:count])
    assert slow.arrival_s[-1] < 10
    assert not np.array_equal(arrivals.at(10.0, 8).prompt_len[:50], slow.prompt_len[:50])


def test_apart_breaks_the_tie_between_prompt_and_output() -> None:
    tied = from_rows([[i, 10 + i, 10 + i] for i in range(50)])
    together = drawn_load(tied, seconds=10.0).at(20.0, 0)
    apart = drawn_load(tied, seconds=10.0, are_lengths_apart=True).at(20.0, 0)
    assert np.array_equal(together.prompt_len, together.output_len)
    assert not np.array_equal(apart.prompt_len, apart.output_len)


def test_a_replay_keeps_the_gaps_and_a_list_stops_after_its_seconds() -> None:
    source = from_rows([[0, 5, 5], [1, 6, 6], [5, 7, 7]])
    replay = drawn_load(source, is_replay=True).at(2.0, 0)
    assert np.diff(replay.arrival_s).tolist() == pytest.approx([0.2, 0.8])
    listed = ListLoad(source=source, seconds=2.0).at(2.0, 0)
    assert listed.arrival_s.tolist() == [0.0, 0.5]


@pytest.mark.parametrize("is_replay", [False, True])
def test_prefixes_are_counted_as_computed_and_that_is_told(is_replay: bool) -> None:
    assert not drawn_load(shared(), is_replay=is_replay).at(2.0, 0).blocks
    assert on_prefixes(requests()) == ""
    ask = PlanQuestion(slo=SLO, rate=20.0, processes=0, is_replay=is_replay)
    options = replace(QUICK, designs=("Baseline-B",), interval_seeds=1)
    (told,) = (each for each in provision(ask, shop(), shared(), options=options).advice if "prefixes" in each)
    assert told.startswith("Up to 1")
    assert told.endswith("A plan of one kind counts what is cached.")
    with pytest.raises(PlanError, match=r"alone on a machine\).* or a larger budget\. Up to 1\d% of the prompts'"):
        provision(replace(ask, slo=replace(SLO, ttft_s=1e-6)), shop(), shared(), options=options)


def shared() -> Workload:
    source = requests()
    return replace(source, blocks=[(0,)] * len(source), block_len=16)


# processes


def test_the_same_in_any_number_of_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated in other processes, where results come in whatever order; the pool runs the sources as they are."""
    monkeypatch.setattr("placement.compiled.pool.compiled_folder", lambda cache=None: None)
    options = replace(
        QUICK,
        designs=("Baseline-A100", "HA"),
        seconds=5.0,
        slowdowns=SlowdownTargets(reference=splitwise_machines()[0].latency),
    )
    asks = [PlanQuestion(slo=Slo(), objective="cost", rate=6.0, processes=processes) for processes in (0, 1, 2)]
    plans = [provision(ask, splitwise_machines(), requests(), options=options) for ask in asks]
    plain = [to_json(replace(found, cpu_s=0.0)) for found in plans]
    assert plain[0] == plain[1] == plain[2]


def test_progress_is_told_and_simulations_are_remembered() -> None:
    told: list[tuple[str, int, int]] = []
    design = all_designs(shop(), ["BC"])[0]
    point = LoadPoint(Mix(design=design, num_prompt=1, num_token=1), 2.0, 0)
    with open_runner(0) as runner:
        simulations = Simulations(scenario(), runner, lambda *step: told.append(step))
        simulations.simulate([point])
        simulations.simulate([point])
    assert simulations.num_simulated == simulations.results[point].num_requests
    ask = PlanQuestion(slo=SLO, objective="cost", rate=8.0, processes=0)
    provision(
        ask, shop(), requests(), options=replace(QUICK, designs=("BC",)), on_progress=lambda *step: told.append(step)
    )
    assert told[-1][1:] == (2, 2)
    assert any(what.startswith("mixes for the rate") for what, _, _ in told)

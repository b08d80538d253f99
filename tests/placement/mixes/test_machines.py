"""What can be bought: Splitwise's machines as its table has them, a catalogue's, and any of them under a power cap."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from pydantic import ValidationError

from placement.catalogs.base import Degrees, MachineCost, Offer, PlanError
from placement.catalogs.roofline import RooflineCatalog
from placement.latency.base import DecodeLine
from placement.latency.hardware import PowerCap, load_hardware
from placement.latency.model_files import load_shape
from placement.mixes.demand import work
from placement.mixes.designs import Design, Mix, all_designs
from placement.mixes.machines import MachineType, capped, capped_latency, machine_of
from placement.mixes.rules import live_cluster
from placement.papers.splitwise.machines import CAP, splitwise_machines
from placement.papers.splitwise.mixes import machine_times
from placement.papers.splitwise.table import splitwise_latency
from placement.workload.requests import from_rows

pytestmark = pytest.mark.unit


@dataclass(frozen=True, slots=True)
class Lines:
    """Times that are easy to reckon with: a prompt token takes 1 ms, a decode step 10 ms and 1 us for each token of
    context."""

    source: str = "lines"
    stages: int = 1

    def prefill_s(self, chunks: Sequence[tuple[int, int]]) -> float:
        return sum(length for length, _ in chunks) / 1000

    def decode_line(self, batch_size: int, context_tokens: int) -> DecodeLine:
        return DecodeLine(0.01 + context_tokens / 1e6, 1e-6)

    def mixed_s(self, chunks: Sequence[tuple[int, int]], batch_size: int, context_tokens: int) -> float:
        return self.prefill_s(chunks) + self.decode_line(batch_size, context_tokens).step_s * bool(batch_size)

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens / 1e5


class Shop:
    """A catalogue with one offer."""

    model = "a-model"
    hardware = "b200"
    gpus_per_node = 4
    cost = MachineCost(usd_per_gpu_hour=3.0, watts_per_gpu=1000.0)

    def degrees(self, max_gpus: int) -> Sequence[Degrees]:
        return [Degrees(tp=4)]

    def offer(self, degrees: Degrees, *, within_node: bool = True) -> Offer | str:
        if degrees.tp != 4:
            return f"its 6 heads cannot be cut into {degrees.tp}"
        return Offer(degrees=degrees, latency=Lines(), num_pages=1000, page_size=16)


def h100() -> MachineType:
    return splitwise_machines()[1]


def test_splitwise_machines_cost_and_draw_what_its_table_says() -> None:
    a100, full, held = splitwise_machines()
    assert [m.short for m in (a100, full, held)] == ["A", "H", "Hcap"]
    assert 70 * a100.usd_per_hour / 8 == pytest.approx(154.7)
    assert 40 * full.usd_per_hour / 8 == pytest.approx(190.4)
    assert (70 * a100.power, 40 * full.power) == pytest.approx((1736.0, 1760.0))
    assert held.power == pytest.approx(30.8)
    assert held.usd_per_hour == full.usd_per_hour
    assert a100.gpus == 8


@pytest.mark.parametrize("model", ["bloom-176b", "llama2-70b"])
def test_the_cap_s_time_factors_give_the_rows_of_the_capped_machine(model: str) -> None:
    _, full, held = splitwise_machines(model)
    made = capped(full, CAP)
    for tokens in (512, 1500, 2048, 6000):
        assert made.latency.prefill_s([(tokens, 0)]) == pytest.approx(held.latency.prefill_s([(tokens, 0)]), rel=1e-3)
        assert made.latency.mixed_s([(tokens, 0)], 8, 8) == pytest.approx(
            held.latency.mixed_s([(tokens, 0)], 8, 8), rel=1e-3
        )
    for batch in (1, 16, 64):
        assert made.latency.decode_line(batch, 0) == pytest.approx(held.latency.decode_line(batch, 0))


def test_a_cap_stretches_times_and_not_the_link() -> None:
    held = capped_latency(Lines(), PowerCap(power=0.5, prefill_time=2.0, decode_time=1.5, source="a test"))
    assert held.source == "lines, held to 50% of its power"
    assert held.prefill_s([(100, 0)]) == pytest.approx(0.2)
    assert held.decode_line(2, 1000).step_s == pytest.approx(0.0165)
    assert held.decode_line(2, 1000).per_token_s == pytest.approx(1.5e-6)
    assert held.mixed_s([], 2, 1000) == pytest.approx(0.0165)
    assert held.transfer_s(100) == Lines().transfer_s(100)


def test_a_later_chunk_takes_what_it_adds_to_the_prompt() -> None:
    latency = splitwise_latency("bloom-176b", "h100-80gb")
    whole = latency.prefill_s([(4096, 0)])
    assert latency.prefill_s([(2048, 0)]) + latency.prefill_s([(2048, 2048)]) == pytest.approx(whole)


def test_a_catalogue_s_worker_is_a_machine() -> None:
    machine = machine_of(Shop())
    assert (machine.short, machine.gpus, machine.usd_per_hour, machine.power) == ("B", 4, 12.0, 4000.0)
    shop = Shop()
    for hardware, short in (("NVIDIA H100 80 GB SXM5", "H"), ("L40S", "L"), ("cpu", "C")):
        shop.hardware = hardware
        assert machine_of(shop).short == short
    assert machine_of(shop, short="X").short == "X"
    with pytest.raises(PlanError, match="b200 at TP 3 cannot serve a-model: its 6 heads"):
        machine_of(Shop(), Degrees(tp=3))


def test_kv_goes_from_node_to_node_over_the_narrower_link_also_of_one_held_to_less_power() -> None:
    shape = load_shape("llama-2-70b")
    first, second = (
        replace(machine_of(RooflineCatalog(shape, load_hardware(name))), short=name[0])
        for name in ("h100-sxm", "a100-80g-sxm")
    )
    slower = max((first, second), key=lambda machine: machine.latency.transfer_s(1000))
    wide = RooflineCatalog(shape, load_hardware("h100-sxm")).offer(Degrees(tp=8))
    assert isinstance(wide, Offer)
    assert first.latency.transfer_s(1000) > 5 * wide.latency.transfer_s(1000)
    held = capped(second, PowerCap(power=0.5, prefill_time=2.0, decode_time=1.5, source="a test"))
    for token in (second, held):
        mix = Mix(design=Design(name="HA", prompt=first, token=token), num_prompt=1, num_token=1)
        workers = live_cluster(mix).workers
        assert workers[0].latency.transfer_s(1000) == pytest.approx(slower.latency.transfer_s(1000))


def test_machines_of_two_sources_count_kv_alike_under_splitwise_s_rules() -> None:
    other = replace(machine_of(Shop()), model="bloom-176b")
    own, foreign = machine_times([h100(), other], 1000)
    assert (own.kv_bytes_per_token, foreign.kv_bytes_per_token) == (1, 1)
    assert own.kv_capacity_bytes == h100().offer.kv_tokens
    assert foreign.link_bytes_per_s == pytest.approx(1e5)
    assert foreign.decode_line(4, 4).step_s == pytest.approx(0.01 + 4 * 1000 / 1e6)
    machine = h100()
    assert [id(times) for times in machine_times([machine, machine], 1000)] == [id(machine.latency)] * 2


def test_designs_have_splitwise_s_names_and_a_capped_machine_makes_tokens_only() -> None:
    names = [design.name for design in all_designs(splitwise_machines())]
    assert names == ["Baseline-A100", "Baseline-H100", "AA", "AH", "AHcap", "HA", "HH", "HHcap"]


def test_a_mix_adds_up_and_becomes_a_candidate() -> None:
    design = all_designs(splitwise_machines(), ["HA"])[0]
    mix = Mix(design=design, num_prompt=35, num_token=8)
    assert mix.total("usd_per_hour") / 8 == pytest.approx(184.28)
    assert mix.total("power") == pytest.approx(1738.4)
    assert (mix.total("gpus"), str(mix)) == (344, "HA (35,8)")
    assert mix.candidate().label == "HA: 35 x prefill TP 8 + 8 x decode TP 8"
    (both,) = all_designs(splitwise_machines()[:2], ["Baseline-A100+H100"], are_pooled=True)
    pooled = Mix(design=both, num_prompt=2, num_token=3).candidate("mixed")
    assert pooled.label == "Baseline-A100+H100: 2 x mixed TP 8 + 3 x mixed TP 8, chunks of 2,048"
    assert [pool.hardware for pool in mix.candidate().pools] == ["h100-80gb", "a100-80gb"]


def test_work_is_the_least_that_a_mean_request_asks_for() -> None:
    machine = replace(machine_of(Shop()), short="B", title="B")
    design = all_designs([machine], ["BB"])[0]
    asked = work(design, from_rows([[0, 100, 11], [1, 300, 21]]))
    assert asked.prompt_s == pytest.approx(0.2)
    most = 64  # of 16,000 tokens of KV, 208 a request, rounded down to a power of two
    assert asked.token_s == pytest.approx(15 * (0.01 + most * 208 / 1e6) / most)


def test_work_in_stages_is_that_of_a_batch_in_each() -> None:
    machine = replace(machine_of(Shop()), short="B", title="B")
    staged = replace(machine, offer=replace(machine.offer, latency=Lines(stages=2)))
    workload = from_rows([[0, 100, 11], [1, 300, 21]])
    (design,) = all_designs([staged], ["BB"])
    share = 32  # of the 76 requests that there is room for, half in each stage, rounded down to a power of two
    assert work(design, workload).token_s == pytest.approx(15 * (0.01 + share * 208 / 1e6) / share)
    stage_s = 0.01 + 4 * 208 / 1e6  # with four
    assert work(design, workload, 2 * stage_s).token_s == pytest.approx(15 * stage_s / 4)


def test_what_cannot_be_mixed_is_said_in_a_sentence() -> None:
    a100, full, held = splitwise_machines()
    other = machine_of(Shop())
    for machines, words in (
        ([held], "none at full power"),
        ([a100, splitwise_machines("llama2-70b")[1]], "differ in model .bloom-176b; llama2-70b."),
        ([a100, replace(other, model="bloom-176b")], "differ in power_unit"),
        ([a100, replace(full, short="A")], "two machines have the short name A"),
        ([replace(a100, usd_per_hour=float("nan"))], "usd_per_hour of a100-80gb is nan"),
        ([a100, replace(full, offer=replace(full.offer, page_size=32))], r"differ in page_size \(\[16, 32\]\)"),
    ):
        with pytest.raises(PlanError, match=words):
            all_designs(machines)
    with pytest.raises(PlanError, match="design XX is not known; these machines make Baseline-A100"):
        all_designs([a100], ["XX"])
    with pytest.raises(PlanError, match="has 2 pipeline stages"):
        machine_times([replace(other, offer=replace(other.offer, latency=Lines(stages=2)))], 100)
    for words, power, decode_time in (("power\n.* less than or equal to 1", 1.5, 1.0), ("decode_time\n", 0.5, 0.5)):
        with pytest.raises(ValidationError, match=words):
            PowerCap(power=power, prefill_time=1, decode_time=decode_time, source="a test")

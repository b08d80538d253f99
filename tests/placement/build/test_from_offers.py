"""assemble: a candidate is simulated as the cluster that its spec makes, handoffs and reports too."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from cluster.spec.load import parse_spec
from kvrelay.plan.cluster_file import spec_data
from placement.build.from_offers import OfferOf, assemble, mixed_of, offers_of, pair_of
from placement.build.from_spec import sim_cluster
from placement.build.sources import RooflineWorkers
from placement.catalogs.base import Degrees
from placement.catalogs.roofline import RooflineCatalog
from placement.latency.hardware import Hardware, load_hardware
from placement.latency.model_files import load_shape
from placement.latency.model_shape import ModelShape
from placement.plan import Candidate, Goodput, Interval, Slo
from placement.search.hybrids import hybrids_of
from placement.simulator.systems import LiveSystem
from prefill_worker.options import PrefillOptions
from tests.placement.toys import toy_offer

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(1, 1), (4, 1), (1, 2)])
def test_what_was_planned_is_what_its_spec_simulates(prefill_tp: int, decode_tp: int) -> None:
    shape, hardware = load_shape("llama-3.1-8b"), load_hardware("h100-sxm")
    offer_of = offers_of(RooflineCatalog(shape, hardware))
    offers = offer_of(Degrees(prefill_tp), True), offer_of(Degrees(decode_tp), True)
    candidate = pair_of((offers[0], 1), (offers[1], 2), hardware.name)
    _compare(candidate, offer_of, shape, hardware)


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(4, 4), (1, 4)])
def test_kv_heads_that_several_ranks_hold_are_in_kv_memory(prefill_tp: int, decode_tp: int) -> None:
    shape, hardware = replace(load_shape("llama-3.1-8b"), kv_heads=2), load_hardware("h100-sxm")
    offer_of = offers_of(RooflineCatalog(shape, hardware))
    offers = offer_of(Degrees(prefill_tp), True), offer_of(Degrees(decode_tp), True)
    _compare(pair_of((offers[0], 1), (offers[1], 1), hardware.name), offer_of, shape, hardware)


@pytest.mark.parametrize("slo", [None, Slo(ttft_s=0.3, tpot_s=0.015)])
def test_a_hybrid_is_what_its_spec_simulates(slo: Slo | None) -> None:
    """The targets by which requests are placed, too."""
    shape, hardware = load_shape("llama-3.1-8b"), load_hardware("h100-sxm")
    offer_of = offers_of(RooflineCatalog(shape, hardware))
    offers = offer_of(Degrees(1), True), offer_of(Degrees(2), True)
    for candidate in hybrids_of(pair_of((offers[0], 2), (offers[1], 1), hardware.name)):
        _compare(candidate, offer_of, shape, hardware, slo)


def _compare(
    candidate: Candidate, offer_of: OfferOf, shape: ModelShape, hardware: Hardware, slo: Slo | None = None
) -> None:
    system = assemble(candidate, offer_of, within_node=True, slo=slo)
    assert isinstance(system, LiveSystem)
    planned = system.cluster
    assert planned.router.slo_ttft_ms == (1e3 * slo.ttft_s if slo else 0)
    found = Goodput(candidate=candidate, goodput=Interval(1, 1, 1), curve=(), usd_per_hour=1.0, watts=1.0)
    data = spec_data(found, "llama-3.1-8b", shape, has_gpus=True, slo=slo)
    written = sim_cluster(parse_spec(data), RooflineWorkers(shape, hardware))
    assert (planned.message_s, planned.report_gap_s) == (written.message_s, written.report_gap_s)
    assert (planned.router, planned.handoff_s) == (written.router, written.handoff_s)
    for one, other in zip(planned.workers, written.workers, strict=True):
        assert (one.role, one.num_pages, one.page_size) == (other.role, other.num_pages, other.page_size)
        if candidate.kind == "two pools":
            assert one.name == other.name
        if one.role != "decode":
            assert one.latency.transfer_s(1000) == other.latency.transfer_s(1000)
            assert one.latency.prefill_s([(1000, 0)]) == other.latency.prefill_s([(1000, 0)])
            assert isinstance(one.policy, PrefillOptions)  # MixedOptions, too
            assert replace(one.policy, pack_tokens=one.policy.max_batch_tokens) == other.policy
        else:
            assert one.latency.decode_line(8, 9000) == other.latency.decode_line(8, 9000)
            assert one.policy == other.policy


def test_workers_share_hosts_by_twos_whatever_their_roles() -> None:
    offer = replace(toy_offer(), slowdown=((1, 1.2, 1.1),))
    pair, halves = pair_of((offer, 1), (offer, 1), "toy"), mixed_of(offer, 2, "toy", 128)
    hosts = {}
    for candidate in (pair, halves, hybrids_of(halves)[0], mixed_of(offer, 3, "toy", 128)):
        system = assemble(candidate, lambda degrees, near: offer, within_node=True)
        assert isinstance(system, LiveSystem)
        hosts[candidate.label] = [host.workers for host in system.cluster.hosts]
    assert list(hosts.values()) == [
        [("prefill-0", "decode-0")],
        [("mixed-0", "mixed-1")],
        [("prefill-0", "mixed-0")],
        [("mixed-0", "mixed-1"), ("mixed-2",)],
    ]


def test_messages_and_handoffs_take_what_was_measured() -> None:
    offer = replace(toy_offer(), message_s=0.003, handoff_s=0.02)
    system = assemble(pair_of((offer, 1), (offer, 1), "toy"), lambda degrees, near: offer, within_node=True)
    assert isinstance(system, LiveSystem)
    assert (system.cluster.message_s, system.cluster.handoff_s) == (0.003, 0.02)


def test_steps_are_packed_as_measured_in_plan_and_spec() -> None:
    offer = replace(toy_offer(), pack_tokens=128)
    candidate = pair_of((offer, 1), (offer, 1), "toy")
    system = assemble(candidate, lambda degrees, near: offer, within_node=True)
    assert isinstance(system, LiveSystem)
    expected = PrefillOptions(max_batch_tokens=offer.max_batch_tokens, pack_tokens=128)
    assert system.cluster.workers[0].policy == expected
    found = Goodput(candidate=candidate, goodput=Interval(1, 1, 1), curve=(), usd_per_hour=1.0, watts=1.0)
    pools: Any = parse_spec(spec_data(found, "toy", None, has_gpus=False)).pools
    prefill, decode = pools
    assert (prefill.pack_tokens, "pack_tokens" in decode.model_fields_set) == (128, False)

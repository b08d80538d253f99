"""The roofline: what others measured, within the error its files state; laws that any such model keeps; memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from typing import Any

import numpy as np
import pytest

from bench.common import REPO
from bench.roofline import SOURCES, errors
from bench.static_batches.__main__ import figure_of
from placement.catalogs.base import Degrees, Offer
from placement.catalogs.roofline import RooflineCatalog, open_catalog
from placement.latency.base import decode_s
from placement.latency.hardware import load_hardware
from placement.latency.measured import HARDWARE, PHASES, predicted_s, read_batches
from placement.latency.model_files import load_shape
from placement.latency.roofline import RooflineLatency, roofline_latency

pytestmark = pytest.mark.unit


def latency(model: str = "llama-3.1-8b", hardware: str = "h200-sxm", tp: int = 1, pp: int = 1) -> RooflineLatency:
    return roofline_latency(load_shape(model), load_hardware(hardware), Degrees(tp, pp))


@pytest.mark.parametrize("hardware", sorted(HARDWARE.values()))
def test_nine_of_ten_measured_steps_lie_within_the_error_that_the_file_states(hardware: str) -> None:
    file = load_hardware(hardware)
    for phase in PHASES:
        batches = [batch for batch in read_batches() if batch.setting.hardware == hardware]
        times = zip(batches, predicted_s(batches, {hardware: file}, phase), strict=True)
        errors = [(batch.setting.model, abs(time_s / batch.measured_s[phase] - 1)) for batch, time_s in times]
        known = [error for model, error in errors if model in file.error.models]
        assert len(known) > 100
        assert file.error.fitted is not None
        assert np.quantile(known, 0.9) < 1.5 * file.error.fitted  # which is of both phases together
        other = [error for model, error in errors if model not in file.error.models]
        if other and phase == "prefill":
            assert np.quantile(other, 0.9) < file.error.value


def test_hardware_files_have_the_figures_that_were_fitted() -> None:
    kept = json.loads((REPO / "bench" / "results" / "static_batches.json").read_text())
    for name, figures in kept["figures"].items():
        file = load_hardware(name)
        assert {path: figure_of(file, path) for path in figures} == figures
        assert kept["errors"][name] == {key: getattr(file.error, key) for key in kept["errors"][name]}


def test_kernels_that_others_summed_take_about_as_long() -> None:
    """Of another engine and another year than the figures are from."""
    for source in SOURCES:
        found = [abs(error) for _, error in errors(source, with_engine=True)]
        assert np.median(found) < 0.2, source.name


def test_who_was_fitted_to_is_known_better() -> None:
    error = load_hardware("h100-sxm").error
    assert error.of("llama-2-70b", 4) == error.fitted
    assert error.of("llama-3.1-8b") == error.one_gpu
    assert error.of("llama-3.1-8b", 2) == error.value
    assert load_hardware("a100-40g-sxm").error.of("llama-2-70b") == load_hardware("a100-40g-sxm").error.value


def test_narrow_products_and_few_heads_get_less_of_a_gpu() -> None:
    hardware = load_hardware("h100-sxm")
    assert hardware.matrix_flops_for("float16", 4000) < hardware.matrix_flops_for("float16", 16_000)
    assert hardware.matrix_flops_for("float8", 8000) < 2 * hardware.matrix_flops_for("float16", 8000)
    few, many = latency().decode_line(1, 1000), latency().decode_line(64, 1000)
    assert few.per_token_s > 2 * many.per_token_s


def test_fp8_kv_is_half_the_bytes_in_memory_and_to_read() -> None:
    shape = load_shape("llama-3.1-8b")
    narrow = dataclasses.replace(shape, kv_dtype="float8")
    assert 2 * narrow.kv_bytes_per_token == shape.kv_bytes_per_token
    wide_offer, offer = (RooflineCatalog(of, load_hardware("h100-sxm")).offer(Degrees(1)) for of in (shape, narrow))
    assert isinstance(wide_offer, Offer)
    assert isinstance(offer, Offer)
    assert offer.num_pages == pytest.approx(2 * wide_offer.num_pages, rel=0.001)
    lines = [each.latency.decode_line(64, 1000) for each in (wide_offer, offer)]
    assert lines[0].per_token_s == pytest.approx(2 * lines[1].per_token_s)


def test_a_layer_whose_sums_are_one_waits_for_one_all_reduce() -> None:
    shape = load_shape("falcon-180b")
    assert shape.reduces_per_layer == 1
    of = [
        roofline_latency(dataclasses.replace(shape, reduces_per_layer=count), load_hardware("h100-sxm"), Degrees(8))
        for count in (1, 2)
    ]
    assert of[0].prefill_s([(2048, 0)]) < 0.95 * of[1].prefill_s([(2048, 0)])


@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "mixtral-8x7b", "opt-13b"])
def test_more_work_takes_longer(model: str) -> None:
    of = latency(model, tp=8)
    batches = [decode_s(of, batch, batch * 1000) for batch in (1, 4, 16, 64, 256)]
    contexts = [decode_s(of, 16, tokens) for tokens in (16, 1600, 160_000)]
    prompts = [of.prefill_s([(length, 0)]) for length in (1, 100, 1000, 4000)]
    behind = [of.prefill_s([(512, context)]) for context in (0, 4096, 32_768)]
    for times in (batches, contexts, prompts, behind):
        assert times == sorted(times)
        assert len(set(times)) == len(times)


def test_a_decode_line_is_the_step_at_every_context_on_it() -> None:
    for model, batch in itertools.product(("llama-3.1-8b", "deepseek-v3"), (1, 48)):
        of = latency(model, tp=8)
        line = of.decode_line(batch, 10_000)
        for more in (1, 999, 50_000):
            assert decode_s(of, batch, 10_000 + more) == pytest.approx(line.step_s + more * line.per_token_s)


def test_a_window_bends_the_decode_line_where_it_is_full() -> None:
    shape = load_shape("llama-3.1-8b")
    half = dataclasses.replace(shape, window=1024, num_window_layers=16)
    of = roofline_latency(half, load_hardware("h200-sxm"))
    near = of.decode_line(4, 1000)
    far = of.decode_line(4, 8000)
    assert near.until_tokens == 4 * 1024
    assert far.per_token_s == pytest.approx(near.per_token_s / 2)
    bend = near.step_s + near.per_token_s * (4096 - 1000)
    assert bend == pytest.approx(of.decode_line(4, 4096).step_s)


def test_a_chunk_behind_a_context_costs_the_attention_to_it() -> None:
    of = latency()
    whole = of.prefill_s([(4096, 0)])
    parts = of.prefill_s([(2048, 0)]) + of.prefill_s([(2048, 2048)])
    assert whole < parts < 1.1 * whole  # the weights are read twice


def test_a_mixed_step_costs_less_than_both_and_more_than_either() -> None:
    of = latency()
    prefill, decode = of.prefill_s([(512, 0)]), decode_s(of, 32, 32_000)
    mixed = of.mixed_s([(512, 0)], 32, 32_000)
    assert max(prefill, decode) < mixed < prefill + decode
    assert of.mixed_s([(512, 0)], 0, 0) == prefill
    assert of.mixed_s([], 32, 32_000) == decode


def test_tensor_parallelism_helps_less_than_it_costs() -> None:
    times = [decode_s(latency("llama-3.1-70b", tp=tp), 32, 32_000) for tp in (2, 4, 8)]
    for few, many in itertools.pairwise(times):
        assert few / 2 < many < few


def test_pipeline_stages_share_a_step_and_do_not_shorten_it() -> None:
    one, two = latency("llama-3.1-70b", tp=4), latency("llama-3.1-70b", tp=4, pp=2)
    assert (one.stages, two.stages) == (1, 2)
    assert one.prefill_s([(2048, 0)]) < 2 * two.prefill_s([(2048, 0)]) < 1.1 * one.prefill_s([(2048, 0)])


def test_the_side_with_fewer_links_holds_a_handoff_up() -> None:
    small, large = latency("llama-3.1-70b", tp=2), latency("llama-3.1-70b", tp=8)
    assert large.transfer_s(1000) == pytest.approx(small.transfer_s(1000) / 4)
    assert large.with_peer(small).transfer_s(1000) == small.transfer_s(1000) == small.with_peer(large).transfer_s(1000)
    opt = load_shape("llama-3.1-8b")
    hardware = load_hardware("h200-sxm")
    near = roofline_latency(opt, hardware)
    far = roofline_latency(opt, hardware, within_node=False)
    assert far.transfer_s(1000) == pytest.approx(9 * near.transfer_s(1000))
    assert near.with_peer(far).transfer_s(1000) == far.transfer_s(1000) == far.with_peer(near).transfer_s(1000)


def test_a_power_cap_slows_prefill_as_its_file_says() -> None:
    shape, hardware = load_shape("llama-3.1-8b"), load_hardware("h100-sxm")
    free, capped = roofline_latency(shape, hardware), roofline_latency(shape, hardware, power_cap=0.7)
    assert capped.prefill_s([(8192, 0)]) == pytest.approx(1.3 * free.prefill_s([(8192, 0)]), rel=0.01)
    assert decode_s(capped, 8, 8000) == decode_s(free, 8, 8000)
    assert RooflineCatalog(shape, hardware, power_cap=0.7).cost.watts_per_gpu == pytest.approx(0.7 * 1275)


# The catalogue


def test_pages_are_what_the_weights_leave() -> None:
    catalog = open_catalog("llama-3.1-8b", "h200-sxm")
    offer = catalog.offer(Degrees(1))
    assert not isinstance(offer, str)
    held = offer.kv_tokens * catalog.shape.kv_bytes_per_token + catalog.shape.weight_bytes
    assert 0.85 * 141e9 < held < 0.9 * 141e9
    assert offer.error == catalog.machine.error.one_gpu
    many = catalog.offer(Degrees(8))
    assert not isinstance(many, str)
    assert many.num_pages > 8 * offer.num_pages


def test_heads_that_cannot_be_cut_are_held_more_than_once() -> None:
    catalog = open_catalog("llama-3.1-70b", "h200-sxm")
    assert catalog.kv_bytes_per_token(Degrees(8)) == catalog.shape.kv_bytes_per_token / 8
    one_head = RooflineCatalog(load_shape("qwen3-0.6b"), load_hardware("h200-sxm"))
    assert one_head.kv_bytes_per_token(Degrees(16)) == one_head.kv_bytes_per_token(Degrees(8))


@pytest.mark.parametrize(
    ("model", "hardware", "degrees", "sentence"),
    [
        (
            "llama-3.1-70b",
            "h100-sxm",
            Degrees(1),
            "llama-3.1-70b, 141 GB of weights, does not fit on 1 GPU of 80 GB each (TP 1); give TP 2 or more",
        ),
        (
            "llama-3.1-70b",
            "h100-sxm",
            Degrees(3),
            "TP 3 does not divide the 64 heads of llama-3.1-70b; give TP 1, 2, 4 or 8",
        ),
        (
            "deepseek-v3",  # whose fp8 weights are served in bfloat16
            "h200-sxm",
            Degrees(8),
            "deepseek-v3, 1,342 GB of weights, does not fit on 8 GPUs of 141 GB each (TP 8), and its 61 layers divide "
            "into no 2 to 16 equal stages; give a smaller model, or a GPU with more memory",
        ),
        ("llama-3.1-70b", "h100-sxm", Degrees(16), "TP 16 is more GPUs than a node has, 8; give TP 1, 2, 4 or 8"),
        ("llama-3.1-8b", "h100-sxm", Degrees(1, 33), "PP 33 is more than the 32 layers of llama-3.1-8b"),
        ("llama-3.1-8b", "h100-sxm", Degrees(0), "TP 0 x PP 1 is no worker"),
        (
            "llama-3.1-70b",
            "a100-40g-sxm",
            Degrees(2),
            "does not fit on 2 GPUs of 40 GB each (TP 2); give TP 4 or more",
        ),
        ("opt-175b", "cpu-generic", Degrees(1), "give a smaller model, or a GPU with more memory"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(model: str, hardware: str, degrees: Degrees, sentence: str) -> None:
    answer = open_catalog(model, hardware).offer(degrees)
    assert isinstance(answer, str)
    assert sentence in answer


def test_room_for_less_than_one_request_is_said_so() -> None:
    catalog = open_catalog("llama-3.1-70b", "h200-sxm", max_model_len=1_000_000)
    answer = catalog.offer(Degrees(2))
    assert isinstance(answer, str)
    assert "tokens of KV on 2 GPUs of 141 GB each (TP 2), less than one of 1000000; give TP 4 or more" in answer


def test_degrees_divide_heads_and_layers_and_stay_in_a_node() -> None:
    catalog = open_catalog("llama-3.1-8b", "h200-sxm", max_pp=4)
    found = catalog.degrees(8)
    assert {degrees.tp for degrees in found} == {1, 2, 4, 8}
    assert {degrees.pp for degrees in found} == {1, 2, 4}
    assert all(degrees.gpus <= 8 for degrees in found)
    assert list(found) == sorted(found, key=lambda degrees: (degrees.gpus, degrees.pp))
    boundless = open_catalog("llama-3.1-8b", "h200-sxm", max_pp=10**12).degrees(1024)
    assert {degrees.pp for degrees in boundless} == {1, 2, 4, 8, 16, 32}  # its 32 layers end the list


@pytest.mark.parametrize(
    ("step", "mend"),
    [({"max_batch_tokens": 10**6}, "give TP 8 or more"), ({"max_batch_size": 10**6}, "give a smaller step, or a GPU")],
)
def test_what_leaves_no_room_is_named_where_it_is_the_step(step: dict[str, Any], mend: str) -> None:
    catalog = open_catalog("llama-3.1-8b", "h100-sxm", **step)
    answer = catalog.offer(Degrees(2))
    assert isinstance(answer, str)
    (key,) = step
    assert re.search(rf"does not fit on 2 GPUs of 80 GB each \(TP 2\) beside a step of .*{key} 1000000", answer)
    assert mend in answer

"""Kernels are chosen by right answers and by measured time: on a CPU, by a clock and a capture that the test gives."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.attention.flashinfer import choice as flashinfer_choice
from engine.attention.flashinfer import timing, trial
from engine.attention.flashinfer.backend import FlashInferBackend
from engine.attention.flashinfer.choice import best_by_batch, measured, right, timed
from engine.attention.flashinfer.modules import FOR_EVERY_MODEL, module_of
from engine.attention.flashinfer.shapes import FP8, BatchChoice, KernelChoice, Shape
from engine.attention.flashinfer.timing import DecodeStep, Limits, Stopwatch
from engine.attention.flashinfer.wrappers import FlashInfer, Runner
from engine.attention.tables import PageTables
from engine.attention.torch_backend import TorchBackend
from engine.build_cache import locked
from engine.errors import EngineBroken
from tests.engine.attention import fake_flashinfer
from tests.engine.rehearsal import run_again

CPU = torch.device("cpu")
BACKEND = FlashInferBackend(FlashInfer.on(CPU, fake_flashinfer))
SHAPE = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, scaling=0.125)
SMALL = Limits(sequences=2, keys=40)


@pytest.fixture(autouse=True)
def _small_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "DECODE", (3, 70))
    monkeypatch.setattr(trial, "PREFILL", (1, 40))
    monkeypatch.setattr(timing, "CALLS", 3)


class Clock:
    """Each kernel's time is given by its name; `taken` are those that it was asked for."""

    def __init__(self, seconds: Mapping[str, float]) -> None:
        self.seconds = seconds
        self.taken: list[str] = []
        self.at_work = ""
        self.stopwatch = Stopwatch(run_again, self._measure)

    def _measure(self, run: Callable[[], object]) -> float:
        run()
        self.taken.append(self.at_work)
        return self.seconds[self.at_work]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """What is made last is what runs: each trial has a backend of its own."""
    made = Clock({"fa2": 3.0, "fa3": 2.0, "tensor": 9.0, "cores": 1.0, "xqa": 2.0})
    make = FlashInferBackend._make

    def noted(self: FlashInferBackend, name: str, shape: Shape, static: PageTables | None) -> Runner:
        made.at_work = name
        return make(self, name, shape, static)

    monkeypatch.setattr(FlashInferBackend, "_make", noted)
    return made


def test_the_fastest_is_chosen_for_prompts_and_for_decode_steps(tmp_path: Path, clock: Clock) -> None:
    chosen = measured(BACKEND, [SHAPE], SMALL, clock.stopwatch, tmp_path / "kernels.json").kernels[SHAPE]
    by_batch = (BatchChoice(1, "cores"), BatchChoice(2, "cores"))
    assert chosen == KernelChoice(prefill="fa3", decode="cores", by_batch=by_batch)


def test_a_second_start_reads_what_the_first_measured(tmp_path: Path, clock: Clock) -> None:
    memory = tmp_path / "kernels.json"
    first = measured(BACKEND, [SHAPE], SMALL, clock.stopwatch, memory)
    assert set(clock.taken) == set(clock.seconds)
    clock.taken.clear()
    assert measured(BACKEND, [SHAPE], SMALL, clock.stopwatch, memory).kernels == first.kernels
    assert not clock.taken
    measured(BACKEND, [SHAPE], Limits(sequences=1, keys=40), clock.stopwatch, memory)
    assert clock.taken, "other sizes are measured anew"


def test_who_starts_beside_another_waits_for_what_that_measures(tmp_path: Path, clock: Clock) -> None:
    theirs, memory = tmp_path / "theirs" / "kernels.json", tmp_path / "kernels.json"
    first = measured(BACKEND, [SHAPE], SMALL, clock.stopwatch, theirs)
    clock.taken.clear()
    with ThreadPoolExecutor(1) as pool:
        with locked(tmp_path / "measuring-cpu"):
            second = pool.submit(measured, BACKEND, [SHAPE], SMALL, clock.stopwatch, memory)
            with pytest.raises(TimeoutError):
                second.result(0.3)
            theirs.rename(memory)
        assert second.result(20).kernels == first.kernels
    assert not clock.taken


@pytest.mark.parametrize(
    "spoilt", ['{"prefill": "fa2"}', '{"prefill": "fa2", "decode": "xqa", "by_batch": [[1]]}', "7"]
)
def test_a_memory_that_cannot_be_read_is_measured_again(tmp_path: Path, spoilt: str) -> None:
    memory = tmp_path / "kernels.json"
    first = measured(BACKEND, [SHAPE], SMALL, None, memory)
    [key] = json.loads(memory.read_text())
    memory.write_text(json.dumps({key: json.loads(spoilt)}))
    assert measured(BACKEND, [SHAPE], SMALL, None, memory).kernels == first.kernels
    memory.write_text("{")
    assert measured(BACKEND, [SHAPE], SMALL, None, memory).kernels == first.kernels


@pytest.mark.parametrize(
    "options", [{}, {"window": 9, "sinks": True}, {"softcap": 20.0}, {"kv_dtype": FP8}], ids=["plain", "window, sinks",
                                                                                            "softcap", "fp8"]
)  # fmt: skip
def test_each_kind_of_layer_gets_a_kernel_that_is_right(tmp_path: Path, options: dict[str, object]) -> None:
    shape = Shape(heads=4, kv_heads=2, head_dim=64, page_size=16, scaling=0.125, **options)  # type: ignore[arg-type]
    chosen = measured(BACKEND, [shape], SMALL, None, tmp_path / "kernels.json").kernels
    assert set(chosen) == {shape}
    assert bool(chosen[shape].by_batch) == ("kv_dtype" not in options), "with one candidate nothing is timed"


def test_times_by_size_become_a_kernel_for_each_batch() -> None:
    times = {
        (1, 1024): {"cores": 1.0, "xqa": 2.0},
        (1, 8192): {"cores": 3.0, "xqa": 4.0},
        (32, 1024): {"cores": 2.0, "xqa": 1.0},
        (32, 8192): {"cores": 5.0, "xqa": 6.0},
        (128, 1024): {"xqa": 9.0},
    }
    choice = KernelChoice(by_batch=best_by_batch(times))
    assert choice.by_batch == (
        BatchChoice(1, "cores"),
        BatchChoice(32, "xqa", ((1024, "xqa"), (8192, "cores"))),  # in sum 1 + 6/5 of the best, against 2 + 1
        BatchChoice(128, "xqa"),
    )
    assert [choice.decode_for(n) for n in (1, 4, 8, 40, 128, 999)] == ["cores", "cores", "xqa", "xqa", "xqa", "xqa"]
    assert [choice.decode_for(32, keys) for keys in (10, 2000, 7000)] == ["xqa", "xqa", "cores"]
    assert choice.decode_for(1, 7000) == "cores"
    assert choice.decode_kernels == {"cores", "xqa"}


def test_graphs_and_steps_without_one_run_the_kernel_of_their_size() -> None:
    kernels = KernelChoice(by_batch=(BatchChoice(1, "cores"), BatchChoice(8, "xqa", ((8, "xqa"), (64, "tensor")))))
    backend = FlashInferBackend(BACKEND.flashinfer, {SHAPE: kernels})
    assert backend.reads_block_tables
    steps = []  # a backend knows a graph by its tables' identity: none may be another's

    def kernel_of(sequences: int, keys: int, *, is_static: bool) -> str:
        step = DecodeStep.of(SHAPE, sequences, keys, CPU)
        assert step.meta.tables is not None
        steps.append(replace(step.meta.tables, is_static=is_static))
        runner = backend._runner(SHAPE, steps[-1])
        return {"Xqa": "xqa", "Decode": "plain"}[type(runner).__name__]

    assert kernel_of(1, 64, is_static=True) == "plain"
    assert kernel_of(8, 64, is_static=True) == "xqa"  # whatever comes: a graph is captured once
    assert kernel_of(8, 64, is_static=False) == "plain"
    assert kernel_of(8, 8, is_static=False) == "xqa"


def test_kernels_that_are_wrong_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    errors = {"exact": 0.0, "wrong": 0.5, "nan": float("nan")}

    def error_of(name: str) -> float:
        if name == "broken":
            raise OSError("nvcc\nfailed")
        return errors[name]

    assert right("a shape", ["wrong", "broken", "exact", "nan"], error_of) == ["exact"]
    assert [record.getMessage() for record in caplog.records] == [
        "a shape is not served by wrong: relative error 0.5",
        "a shape is not served by broken: OSError: nvcc failed",
        "a shape is not served by nan: relative error nan",
    ]
    with pytest.raises(RuntimeError, match="a shape: broken: OSError: nvcc failed; nan: relative error nan"):
        right("a shape", ["broken", "nan"], error_of)


def test_a_kernel_that_cannot_run_at_a_size_is_left_out_there(caplog: pytest.LogCaptureFixture) -> None:
    def seconds(name: str) -> float:
        if name != "cores":
            raise RuntimeError("too large")
        return 1e-3

    assert timed("a shape", ["xqa", "cores"], seconds) == {"cores": 1e-3}
    assert "a shape is not served by xqa: RuntimeError: too large" in caplog.text
    with pytest.raises(RuntimeError, match="a shape: xqa: RuntimeError: too large"):
        timed("a shape", ["xqa"], seconds)


def test_a_kernel_that_takes_the_device_with_it_ends_the_load() -> None:
    def seconds_of(name: str) -> float:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    with pytest.raises(EngineBroken, match="the device is lost to this process"):
        timed("a shape", ["xqa", "cores"], seconds_of)


def test_what_cannot_be_captured_is_timed_with_its_launches_and_said(caplog: pytest.LogCaptureFixture) -> None:
    def capture(run: object) -> tuple[Callable[[], object], torch.Tensor]:
        raise RuntimeError("operation not permitted when stream is capturing")

    runs: list[object] = []

    def seconds_of(run: Callable[[], object]) -> float:
        runs.append(run())
        return 6.0

    step = DecodeStep.of(SHAPE, 2, 40, CPU)
    backend = BACKEND.with_choice(SHAPE, KernelChoice(decode="cores"))
    seconds = timing.seconds_of_a_call("cores", backend, step, Stopwatch(capture, seconds_of))
    assert seconds == 2.0, "of three calls"
    assert len(runs) == 1
    assert "cores cannot be captured, and is timed with its launches: operation not permitted" in caplog.text


def test_a_timed_call_reads_pages_that_the_last_one_did_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "BEYOND_CACHES", 2 * 3 * 4 * SHAPE.page_bytes)
    step = DecodeStep.of(SHAPE, 4, 40, CPU)
    assert len(step.pages) == 2, "twice as much as a step reads is beyond the caches"
    starts = {tensor.data_ptr() for pages in step.pages for tensor in pages}
    assert len(starts) == 4
    for k_pages, _ in step.pages:
        assert k_pages.shape == (12, 16, 2, 64)
        assert torch.isfinite(k_pages.float()).all()
    monkeypatch.setattr(timing, "BEYOND_CACHES", 1)
    assert len(DecodeStep.of(SHAPE, 4, 40, CPU).pages) == 1


@pytest.mark.parametrize(
    ("limits", "most_pages", "wanted"),
    [
        (Limits(), 10**6, [(b, k) for b in (1, 32, 128) for k in (1024, 8192)]),
        (Limits(), 128 * 64, [(1, 1024), (1, 8192), (32, 1024), (128, 1024)]),
        (Limits(pages=600), 10**6, [(1, 1024), (1, 8192)]),
        (Limits(sequences=48, keys=2000), 10**6, [(b, k) for b in (1, 32, 48) for k in (1024, 2000)]),
        (Limits(sequences=2, keys=40), 1, [(1, 40)]),
    ],
)
def test_sizes_are_those_that_the_pool_allows(limits: Limits, most_pages: int, wanted: list[tuple[int, int]]) -> None:
    assert timing.sizes(SHAPE, limits, most_pages * SHAPE.page_bytes) == wanted


def test_a_kernel_whose_module_cannot_be_had_is_left_out_with_the_compiler_s_word(tmp_path: Path) -> None:
    failed = {module_of(SHAPE, name): "a.cu(7): error: no" for name in ("fa2", "cores", "xqa")}
    trials = flashinfer_choice._Trials(BACKEND, (9, 0), SMALL, Stopwatch.on(CPU), failed)
    with pytest.raises(RuntimeError, match=r"cores: NotBuilt: a.cu\(7\): error: no; xqa: NotBuilt"):
        trials.choose(SHAPE)
    del failed[module_of(SHAPE, "xqa")]
    chosen = trials.choose(SHAPE)
    assert (chosen.prefill, chosen.decode) == ("fa3", "xqa")


def test_what_was_chosen_without_some_modules_is_not_what_is_chosen_with_all() -> None:
    def key(*lacking: str) -> str:
        failed = {module_of(SHAPE, name): "no nvcc" for name in lacking}
        return flashinfer_choice._Trials(BACKEND, (9, 0), SMALL, Stopwatch.on(CPU), failed).key(SHAPE)

    assert len({key(), key("fa3"), key("fa2"), key("fa2", "xqa")}) == 4
    assert key("fa2").endswith("; without fa2 tensor"), "the same module serves both"


def test_a_module_that_every_model_needs_is_an_error() -> None:
    flashinfer_choice.check_common({})
    with pytest.raises(RuntimeError, match=r"every model needs cannot be had: gen_norm_module: no cublasLt\.h"):
        flashinfer_choice.check_common({FOR_EVERY_MODEL[1]: "no cublasLt.h"})


def test_a_trial_s_pages_hold_nothing_but_the_sequences_own() -> None:
    problem = trial.make_problem(SHAPE, 3, 70, 1, CPU)
    assert torch.isnan(problem.k_pages.float()).any()
    assert torch.isfinite(trial.answer(TorchBackend(), problem).float()).all()


@pytest.mark.parametrize("size", [(3, 70), (1, 40)])
@pytest.mark.parametrize("window", [9, 60, 400])
def test_a_kernel_that_ignores_the_window_fails_its_trial(size: tuple[int, int], window: int) -> None:
    shape = replace(SHAPE, window=window)
    problem = trial.make_problem(shape, *trial.past_window(size, window), 1, CPU)
    blind = replace(problem, call=replace(problem.call, window=0))
    wanted, got = (trial.answer(TorchBackend(), each).float() for each in (problem, blind))
    assert (got - wanted).norm() > 2 * trial.TOLERANCE * wanted.norm()


@pytest.mark.parametrize(
    ("window", "size"), [(0, (32, 1024)), (512, (32, 1024)), (4096, (6, 5120)), (1 << 17, (2, 163840))]
)
def test_a_trial_is_as_large_as_the_window_wants(window: int, size: tuple[int, int]) -> None:
    assert trial.past_window((32, 1024), window) == size

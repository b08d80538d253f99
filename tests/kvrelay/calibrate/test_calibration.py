"""What is asked of a cluster covers what it serves, and the error is of points that no table was made from."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kvrelay.calibrate.calibration import CalibrationError, calibrate
from kvrelay.calibrate.effort import QUICK, Effort, batch_sizes, prefill_lengths
from kvrelay.calibrate.points import errors
from kvrelay.client.types import ClusterStatus, ServedModel, WorkerState
from placement.latency.profile import DecodePoint, Fault, PrefillPoint
from placement.latency.profile_latency import ProfileLatency
from tests.kvrelay.calibrate.test_verifying import status
from tests.placement.latency.test_profile import profile
from tests.served import served_model

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("most", [16, 100, 512, 8192])
@pytest.mark.parametrize("is_coarse", [False, True])
def test_prefill_is_looked_at_from_one_token_to_a_full_step_and_checked_between(most: int, is_coarse: bool) -> None:
    grid, held = prefill_lengths(most, is_coarse)
    assert grid[0] == 1
    assert grid[-1] == most
    assert grid == sorted(set(grid))
    assert held
    assert not set(held) & set(grid)
    assert all(1 < length < most for length in held)


@pytest.mark.parametrize("most", [1, 2, 3, 48, 64])
def test_batches_go_from_one_request_to_the_most(most: int) -> None:
    sizes, held = batch_sizes(most, is_coarse=False)
    assert {1, most} <= set(sizes)
    assert not set(held) & set(sizes)
    assert all(1 < size < most for size in held)
    assert bool(held) == (most > 3)
    assert len(batch_sizes(most, is_coarse=True)[0]) <= len(sizes)


def test_the_error_is_of_the_points_held_out_nine_in_ten() -> None:
    made = profile()
    latency = ProfileLatency(made)

    def held(length: int, factor: float) -> PrefillPoint:
        return PrefillPoint(chunks=((length, 0),), seconds=latency.prefill_s([(length, 0)]) / factor, held_out=True)

    few = replace(made, prefill=(*made.prefill, held(50, 1.04), held(200, 0.9)))
    assert errors(few).prefill == pytest.approx(0.1)
    many = tuple(held(100 + i, 1 + i / 100) for i in range(1, 11))
    assert errors(replace(made, prefill=(*made.prefill, *many))).prefill == pytest.approx(0.09)
    wrong = DecodePoint(
        batch_size=4, context_tokens=400, seconds=latency.decode_line(4, 400).step_s / 0.8, held_out=True
    )
    assert errors(replace(made, decode=(*made.decode, wrong))).decode == pytest.approx(0.2)
    assert errors(made) == Fault()  # nothing was held out


MODEL = served_model(max_model_len=512, eos_token_ids=(1,), fingerprint="f")


class Answers:
    """A client of a cluster that is not fit to be measured."""

    def __init__(self, seen: ClusterStatus, model: ServedModel = MODEL) -> None:
        self.seen, self.model = seen, model

    async def model_info(self) -> ServedModel:
        return self.model

    async def status(self) -> ClusterStatus:
        return self.seen


def pair(**decode: object) -> ClusterStatus:
    found = status("prefill", "decode")
    first, second = (replace(worker, page_size=16, total_pages=100) for worker in found.workers)
    return replace(found, workers=(first, replace(second, **decode)))  # type: ignore[arg-type]


def lone(worker: WorkerState) -> ClusterStatus:
    return replace(status(), workers=(worker,))


@pytest.mark.parametrize(
    ("seen", "model", "says"),
    [
        (lone(pair().workers[0]), MODEL, "no decode worker is ready"),
        (pair(state="lost"), MODEL, "no decode worker is ready"),
        (replace(pair(), num_in_flight=3), MODEL, "3 requests are being served"),
        (
            replace(pair(), workers=(*pair().workers, replace(pair().workers[1], name="d", total_pages=7))),
            MODEL,
            "differ",
        ),
        (status("prefill", "decode"), MODEL, "another version of kvrelay"),
        (pair(), replace(MODEL, max_model_len=32), "max_model_len is 32"),
        (
            pair(limits={"tensor_parallel": "2"}),
            MODEL,
            "^tensor_parallel is 1 in the prefill pool and 2 in the decode pool; a profile is of one degree",
        ),
        (pair(limits={"threads": "2"}), MODEL, "^threads is 0 in the prefill pool and 2 in the decode pool"),
        (pair(role="mixed"), MODEL, "^the workers are prefill-0, decode-1; give one mixed worker, or a prefill and a"),
        (lone(replace(pair().workers[0], role="mixed", limits={"chunk_tokens": "0"})), MODEL, "^chunk_tokens of pre"),
    ],
)
async def test_a_cluster_that_cannot_be_measured_is_told_why(
    seen: ClusterStatus, model: ServedModel, says: str
) -> None:
    with pytest.raises(CalibrationError, match=says):
        await calibrate(Answers(seen, model))  # type: ignore[arg-type]


def test_a_quick_look_asks_for_less() -> None:
    usual = Effort()
    assert (QUICK.repeats, QUICK.steps, QUICK.at_most_s) < (usual.repeats, usual.steps, usual.at_most_s)

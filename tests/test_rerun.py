"""A recorded worker's steps, as they are simulated: each of its own work and time, however many were under way."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.pages.pool import PagePool
from mixed_worker.options import MixedOptions
from mixed_worker.policy import MixedPolicy
from placement.checks.replay import Recording, read_recording
from tests.rerun import fitted
from worker import recording

pytestmark = pytest.mark.unit

TOKEN_S = 1e-3  # of a prompt
ROW_S = 0.05


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


def _add(policy: MixedPolicy, name: str, length: int) -> None:
    assert policy.decode.expect(name, num_tokens=length, max_len=length) is None
    policy.prefill.add(name, length, [])


def _recorded(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Recording:
    """Of two stages. Each round an answer is under way when a prompt of its own pass begins; then a pass has both."""
    clock = Clock()
    monkeypatch.setattr(recording, "time", clock)
    policy = MixedPolicy(PagePool(512, 16), MixedOptions(chunk_tokens=512), num_stages=2)
    recording.record_calls(policy, folder, "mixed-0", num_stages=2)
    policy.decode.reserve("answer", num_tokens=16, max_new_tokens=300, hashes=[])
    policy.decode.on_committed("answer")
    for index in range(10):
        length, begun_s = 60 + 10 * index, clock.now_s
        answer = policy.decode.next_batch()
        _add(policy, f"alone-{index}", length)
        clock.now_s = begun_s + 0.02
        assert not policy.decode.next_batch().entries, "the answer is in the other stage"
        alone = policy.prefill.next_batch()
        clock.now_s = begun_s + ROW_S
        policy.decode.on_batch_done(answer)
        clock.now_s = begun_s + 0.02 + length * TOKEN_S
        assert alone is not None
        policy.prefill.on_batch_done(alone)
        _add(policy, f"beside-{index}", length)
        answer, beside = policy.decode.next_batch(), policy.prefill.next_batch()
        clock.now_s += ROW_S + length * TOKEN_S
        policy.decode.on_batch_done(answer)
        assert beside is not None
        policy.prefill.on_batch_done(beside)
    return read_recording(folder / "mixed-0.jsonl")


def test_each_stage_takes_its_share_of_a_pass_and_each_pass_its_own_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = fitted(_recorded(tmp_path, monkeypatch))
    assert steps.stages == 2
    assert steps.prefill_s([(100, 0)]) == pytest.approx(100 * TOKEN_S / 2, rel=0.02)
    assert steps.decode_line(1, 20).step_s == pytest.approx(ROW_S / 2, rel=0.02)
    assert steps.mixed_s([(100, 0)], 1, 20) == pytest.approx((100 * TOKEN_S + ROW_S) / 2, rel=0.02)

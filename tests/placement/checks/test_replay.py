"""What is recorded of a policy is read back as it was, and a file that is no recording is refused in a sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from cluster.router.accounts import Past, Report, RequestShape, WorkerView
from cluster.router.decisions import Assigned
from cluster.router.options import RouterOptions
from cluster.router.policy import RouterPolicy
from decode_worker.options import DecodeOptions
from decode_worker.policy import DecodePolicy
from engine.pages.pool import PagePool, page_hashes
from placement.checks.replay import RecordingError, main, read_recording, replay
from worker.recording import record_calls

pytestmark = pytest.mark.unit


def _record_router(folder: Path) -> Path:
    policy = RouterPolicy()
    record_calls(policy, folder, "router-0")
    for name in ("p0", "p1", "d0"):
        role = "prefill" if name.startswith("p") else "decode"
        policy.on_worker_up(WorkerView(name=name, role=role, total_pages=100, page_size=16), 0.1)
    for i in range(4):
        hashes = page_hashes([1] * 40, 16)
        past = Past(avoid=frozenset({"p1"}))
        shape = RequestShape(id=f"r{i}", prompt_len=40, max_tokens=9, page_hashes=hashes, past=past)
        assert isinstance(policy.assign(shape, 0.2 + i, is_resent=i == 2), Assigned)
    policy.on_report("d0", Report(made_s=1.0, available_pages=9, request_ids=frozenset({"r1", "r0"})), 1.1)
    policy.on_worker_lost("d0", "it said nothing", 1.2)
    return folder / "router-0.jsonl"


def test_a_recording_replays_and_only_the_drivers_calls_are_in_it(tmp_path: Path) -> None:
    recording = read_recording(_record_router(tmp_path))
    assert [call.method for call in recording.calls] == ["on_worker_up"] * 3 + ["assign"] * 4 + [
        "on_report",
        "on_worker_lost",
    ]
    replayed = replay(recording)
    assert (replayed.calls, replayed.decisions, replayed.difference) == (9, 8, None)


def test_a_batch_that_comes_back_as_an_argument_is_the_replays_own(tmp_path: Path) -> None:
    policy = DecodePolicy(PagePool(8, 16), DecodeOptions(max_batch_size=2), name="d0")
    record_calls(policy, tmp_path, "d0")
    for name in ("a", "b"):
        policy.reserve(name, num_tokens=20, max_new_tokens=30, hashes=[])
        policy.on_committed(name)
    first = policy.next_batch()
    policy.next_batch()
    policy.on_batch_done(first)
    recording = read_recording(tmp_path / "d0.jsonl")
    assert recording.calls[-1].args == [{"result": 4}]
    assert replay(recording).difference is None
    difference = replay(recording, max_batch_size=1).difference
    assert difference is not None
    assert (difference.at, difference.call.method) == (4, "next_batch")
    assert [call.method for call in difference.before] == ["reserve", "on_committed", "reserve", "on_committed"]


def test_a_batch_comes_back_after_any_number_of_reservations(tmp_path: Path) -> None:
    policy = DecodePolicy(PagePool(64, 16), DecodeOptions(), name="d0")
    record_calls(policy, tmp_path, "d0")
    policy.reserve("a", num_tokens=20, max_new_tokens=30, hashes=[])
    policy.on_committed("a")
    batch = policy.next_batch()
    for i in range(20):
        policy.reserve(f"b{i}", num_tokens=20, max_new_tokens=30, hashes=[])
    policy.on_batch_done(batch)
    assert replay(read_recording(tmp_path / "d0.jsonl")).difference is None


def test_a_router_whose_options_have_changed_replays(tmp_path: Path) -> None:
    policy = RouterPolicy()
    record_calls(policy, tmp_path, "router-0")
    policy.take_options(RouterOptions(unavailable_grace_s=0.0))
    assert policy.refusal() is not None
    recording = read_recording(tmp_path / "router-0.jsonl")
    assert (replay(recording).difference, replay(recording).decisions) == (None, 1)


def test_a_second_recording_of_one_name_leaves_the_first_alone(tmp_path: Path) -> None:
    first = _record_router(tmp_path).read_text()
    _record_router(tmp_path)
    assert (tmp_path / "router-0.jsonl").read_text() == first
    assert len((tmp_path / "router-0.1.jsonl").read_text().splitlines()) == len(first.splitlines())


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    path = _record_router(tmp_path)
    path.write_text(path.read_text()[:-5])
    assert len(read_recording(path).calls) == 8


def test_the_command_says_what_differs_and_what_it_cannot_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _record_router(tmp_path)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == "router-0: 8 decisions in 9 calls are the same again\n"
    path.write_text(path.read_text().replace('"prefill": "p0"', '"prefill": "p1"', 1))
    assert main([str(path)]) == 1
    assert "router-0: differs at call 3, assign(" in capsys.readouterr().out
    other = tmp_path / "other.jsonl"
    other.write_text('{"policy": "RouterPolicy", "name": "r", "limits": {}}\n[1]\n')
    assert main([str(other)]) == 2
    assert f"{other}:2 is no recorded call" in capsys.readouterr().err
    other.write_text("{}\n")
    with pytest.raises(RecordingError, match=":1 is no"):
        read_recording(other)

"""Other servers beside ours: what they are told and say, what their ratios are, and what results are made of."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench import arrangements, engine
from bench.peers.__main__ import rates_for, rows_of
from bench.peers.install import CHILDREN, PEERS, peer_names
from bench.peers.serve import Server
from bench.plots import SHORT

FAKE = f"""
import sys
sys.path.insert(0, {str(CHILDREN)!r})
from lines import Lines
lines = Lines()
lines.ready()
print("a library prints this")
while (requests := lines.asked()) is not None:
    if not requests:
        sys.exit(1)
    lines.played(10.0, [([10.0 + at_s, 10.5 + at_s], prompt[:2]) for at_s, prompt, _ in requests])
"""


@pytest.fixture
def peer(tmp_path: Path) -> Iterator[Server]:
    program = tmp_path / "fake.py"
    program.write_text(FAKE)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    served = Server("vllm", subprocess.Popen([sys.executable, str(program)], text=True, **pipes))
    yield served
    served.stop()
    assert served.pids() == []


def test_a_peer_tells_times_since_the_start_and_tokens(peer: Server) -> None:
    asked = [(0.25, [5, 6, 7], 2), (1.0, [8, 9], 2)]
    assert peer.token_times(asked) == [[0.25, 0.75], [1.0, 1.5]]
    assert peer.tokens(asked) == [[5, 6], [8, 9]]


def test_a_peer_is_stopped_but_for_its_turn(peer: Server) -> None:
    [pid] = peer.pids()
    with peer.awake():
        peer.tokens([(0.0, [1, 2], 2)])
        assert psutil.Process(pid).status() != psutil.STATUS_STOPPED
    deadline = time.monotonic() + 10  # the kernel stops it when it runs next
    while psutil.Process(pid).status() != psutil.STATUS_STOPPED:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_peer_that_ends_is_named(peer: Server) -> None:
    with pytest.raises(SystemExit, match="vLLM ended"), peer.awake():
        peer.tokens([])


@pytest.mark.parametrize("name", PEERS)
def test_each_peer_has_a_program(name: str) -> None:
    assert (CHILDREN / PEERS[name].program).exists()
    assert SHORT[name]


def test_an_unknown_peer_is_refused_by_name() -> None:
    assert peer_names("vllm,llamacpp") == ["vllm", "llamacpp"]
    with pytest.raises(Exception, match="'sglang' is no other server; give some of openvino, vllm, llamacpp"):
        peer_names("vllm,sglang")


def test_no_prompt_begins_another() -> None:
    """A server that keeps prefixes would compute the rest alone."""
    beginnings = [
        prompt[:16] for tokens in (128, 256, 512) for turn in (1, 2) for prompt in engine.prompts(2, tokens, turn)
    ]
    assert len({*map(tuple, beginnings)}) == len(beginnings)


def turn(noise: str = "", **seconds: float) -> dict[str, Any]:
    return {"seconds": seconds, "noise": noise, "played_again": []}


def test_a_row_of_the_engine_is_of_its_clean_turns() -> None:
    turns = [turn(kvrelay=1.0, vllm=2.0), turn("stolen", kvrelay=9.0, vllm=1.0), turn(kvrelay=2.0, vllm=8.0)]
    [row] = engine.summary({"decode 8": turns}, {"decode 8": 0.5})
    assert row["ms"] == {"kvrelay": 1500.0, "vllm": 5000.0}
    assert row["ratio_to"] == {"vllm": {"median": 3.0, "least": 2.0, "most": 4.0, "rounds": 2}}
    assert row["ratio_to_better"] is None, "transformers' two had no turn"


def test_one_that_is_far_behind_keeps_the_turns_that_it_had() -> None:
    turns = [turn("busy", kvrelay=1.0, generate=20.0), turn(kvrelay=1.0)]
    [row] = engine.summary({"decode 1": turns}, {"decode 1": 0.5})
    assert row["ratio_to"]["generate"]["median"] == 20.0


def run(rate: float, ttft_ms: float, noise: str = "") -> dict[str, Any]:
    latency = {"p50": ttft_ms, "p90": 2 * ttft_ms}
    return {"asked_per_s": rate, "noise": noise, "latency_ms": {"ttft": latency, "tpot": latency}}


def test_arrivals_are_compared_where_both_were_clean_in_one_repeat() -> None:
    ours = "one mixed, whole steps of 512"
    runs = {
        ours: [run(2.0, 10), run(4.0, 10), run(2.0, 10)],
        "llamacpp": [run(2.0, 30), run(4.0, 50), run(2.0, 1, noise="stolen")],
    }
    found = arrangements.ratios(runs, [2.0, 4.0])
    assert [(row["ours"], row["asked_per_s"]) for row in found] == [(ours, 2.0), (ours, 4.0)]
    of_ttft = [row["ratio_to"]["llamacpp"]["ttft p90"] for row in found]
    assert [(one["median"], one["rounds"]) for one in of_ttft] == [(3.0, 1), (5.0, 1)]
    rows = {ours: [run(2.0, 10), run(4.0, 11)]}
    said = rows_of({"rows": []}, {"ratios": found, "rows": rows})
    assert said[-1]["what"] == "1 mixed, 4/s, TPOT P90"
    assert (said[-1]["ms"], said[-1]["ratio_to"]["llamacpp"]["median"]) == (22, 5.0)


def test_rates_are_shares_of_what_the_engine_would_just_do() -> None:
    speeds = {"prefill 512": 2560.0, "decode 8": 160.0}  # 0.1 s for a prompt, 0.4 s for an answer
    rows = [{"what": what, "tokens_per_s": {"kvrelay": speed}} for what, speed in speeds.items()]
    assert rates_for(rows, (0.5, 1.0)) == [1.0, 2.0]

"""The GPU check's own arithmetic, on CPU: what counts as wrong, what is sent, what the colocated engine computes."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from bench.colocated import Arrival, Colocated
from bench.gpu import cluster as gpu_cluster
from bench.gpu import table as gpu_table
from bench.gpu import transports as gpu_transports
from bench.gpu.cluster import Ask
from bench.gpu.common import WrongResult
from cluster.spec.load import load_spec
from cluster.spec.resolve import Machine, resolve, workers_of
from engine.engine import Engine
from engine.loading import capacity
from engine.options import EngineOptions
from kvrelay.client.types import Completion, Receipt
from kvrelay.demo_model import make_demo_model

ROOT = Path(__file__).resolve().parents[2]


class Gaps:
    """A reference that only knows how far apart two tokens are."""

    def __init__(self, gap: float) -> None:
        self.asked: list[tuple[list[int], int]] = []
        self._gap = gap

    def gap(self, prompt: list[int], theirs: int) -> float:
        self.asked.append((prompt, theirs))
        return self._gap


@pytest.mark.parametrize(("gap", "ties", "wrong"), [(0.05, 1, 0), (0.2, 0, 1), (float("inf"), 0, 1)])
def test_a_first_difference_is_a_tie_or_wrong(gap: float, ties: int, wrong: int) -> None:
    wanted = [Ask((1, 2), 3), Ask((3,), 2)]
    reference = Gaps(gap)
    found = gpu_cluster.compare(wanted, [[7, 8, 9], [4, 5]], [[7, 6, 1], [4, 5]], reference)
    assert (found["equal"], len(found["ties"]), len(found["wrong"])) == (1, ties, wrong)
    assert reference.asked == [([1, 2, 7], 8)], "the first difference is judged, after what both agree on"


def test_an_answer_of_another_length_is_wrong() -> None:
    with pytest.raises(WrongResult, match="request 0 has 1 tokens, and 2 were asked for"):
        gpu_cluster.compare([Ask((1,), 2)], [[5]], [[5, 6]], Gaps(0.0))


def receipt(**changes: Any) -> Receipt:
    base: dict[str, Any] = {
        "transport": "cuda_ipc",
        "pages": 3,
        "bytes": 9,
        "checksums_ok": True,
        "cached_pages": 0,
        "recomputed_tokens": 0,
        "resends": 0,
        "transfer_s": 0.0,
        "exposed_s": 0.0,
    }
    return Receipt(**base | changes)


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (None, "without a good receipt"),
        (receipt(checksums_ok=False), "without a good receipt"),
        (receipt(recomputed_tokens=4), "without a good receipt"),
        (receipt(transport="process_group"), "KV went by process_group, not by cuda_ipc"),
    ],
)
def test_kv_that_did_not_go_as_it_should_is_wrong(found: Receipt | None, reason: str) -> None:
    gpu_cluster.check_receipts([Completion(request_id="r", choices=(), receipt=receipt())], "cuda_ipc")
    with pytest.raises(WrongResult, match=reason):
        gpu_cluster.check_receipts([Completion(request_id="r", choices=(), receipt=found)], "cuda_ipc")


def test_the_segments_of_a_prompt_cover_it_once() -> None:
    layout = gpu_transports.layout_of(2048, rehearse=False)
    pages = list(range(layout.num_pages))
    segments = gpu_transports.segments_of(layout, pages, pages[::-1])
    covered = [
        (layer, src, dst)
        for segment in segments
        for layer in segment.layers
        for src, dst in zip(segment.src_pages, segment.dst_pages, strict=True)
    ]
    assert sorted(covered) == sorted(
        (layer, src, dst) for layer in range(layout.num_layers) for src, dst in zip(pages, pages[::-1], strict=True)
    )
    assert len(segments) <= 8, "an 8B model's 2k prompt leaves in few large messages"


def test_asks_are_mixed_and_the_same_each_time() -> None:
    wanted = gpu_cluster.asks(200, 4000, 3000, rehearse=False)
    assert wanted == gpu_cluster.asks(200, 4000, 3000, rehearse=False)
    lengths = [len(ask.prompt) for ask in wanted]
    assert min(lengths) < 20
    assert max(lengths) > 2000
    shared = [a.prompt[:16] == b.prompt[:16] for a, b in itertools.combinations(wanted[::3], 2)]
    assert any(shared), "some begin alike, so that cached pages are handed over too"


def test_the_colocated_engine_computes_what_the_reference_does(tmp_path: Path) -> None:
    model = str(make_demo_model(tmp_path / "m"))
    engine = Engine.load(EngineOptions(model=model, num_pages=64, threads=1, parity_check=False))
    asks = [Ask(tuple(range(10, 10 + n)), m) for n, m in ((40, 5), (3, 9), (70, 1), (17, 4))]
    served = Colocated(engine, max_batch_tokens=32, max_batch_size=3)
    made: dict[str, list[int]] = {}
    step = engine.step

    def watch(one: Any) -> Any:
        tokens = step(one)
        for token in tokens:
            made.setdefault(token.request_id, []).append(token.token_id)
        return tokens

    engine.step = watch  # type: ignore[method-assign,assignment]
    outcomes, _ = served.play([Arrival(at_s=0.0, prompt=ask.prompt, new_tokens=ask.new_tokens) for ask in asks])
    engine.step = step  # type: ignore[method-assign]
    reference = gpu_cluster.Reference.__new__(gpu_cluster.Reference)
    reference.engine = engine
    assert [made[str(i)] for i in range(4)] == reference.tokens(asks)
    assert [outcome.output_len for outcome in outcomes] == [5, 9, 1, 4]
    assert served._pool.usage.held == 0


@pytest.mark.parametrize("name", ["h200-1p1d-one-gpu", "h200-1p1d", "h200-2p2d", "h100-8"])
def test_the_gpu_specs_make_options_that_the_engine_takes(name: str) -> None:
    machine = Machine(cores=tuple(range(16)), memory_bytes=1 << 38, gpus=8, why_no_cuda="")
    for plan in workers_of(resolve(load_spec(ROOT / "configs" / f"{name}.yaml"), machine)):
        options = EngineOptions(**plan.engine)
        options.validate()
        assert options.device == "cuda"


@pytest.mark.parametrize(
    ("rows", "code"), [("a\t0\t1\nb\t0\t2\n", 0), ("a\t0\t1\nb\t1\t2\n", 1), ("a\t124\t9\n", 1), ("a\t5\t1\n", 1)]
)
def test_the_check_fails_if_any_part_did(rows: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status = tmp_path / "parts.tsv"
    status.write_text(rows)
    monkeypatch.setattr("sys.argv", ["gpu_table", str(status), "--out", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        gpu_table.main()
    assert bool(ended.value.code) == bool(code)


def test_a_figure_of_an_earlier_run_is_not_shown(tmp_path: Path) -> None:
    summary = [{"what": "decode", "found": "3 ms", "wanted": "2 ms"}]
    path = tmp_path / "gpu_engine.json"
    path.write_text(json.dumps({"summary": summary}))
    written_s = path.stat().st_mtime
    assert list(gpu_table.figures(tmp_path, written_s)) == [("decode", "3 ms", "2 ms")]
    assert not list(gpu_table.figures(tmp_path, written_s + 1))


def test_the_tests_that_the_script_leaves_out_exist() -> None:
    """pytest says nothing of a name to deselect that it does not know."""
    script = (ROOT / "bench" / "gpu_check.sh").read_text()
    names = re.search(r"^for name in (.*?); do", script, flags=re.DOTALL | re.MULTILINE)
    assert names is not None
    source = (ROOT / "tests" / "gpu" / "test_transports.py").read_text()
    left_out = names[1].replace("\\", " ").split()
    assert left_out
    assert all(f"def test_{name}(" in source for name in left_out)
    assert (ROOT / "tests" / "gpu" / "test_cluster.py").exists()


def test_the_script_is_shell_and_names_programs_that_exist() -> None:
    script = ROOT / "bench" / "gpu_check.sh"
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    called = {
        word for line in script.read_text().splitlines() if "bash -c" in line for word in line.split() if "gpu." in word
    }
    assert called
    for word in called:
        assert (ROOT / "bench" / f"{word.strip(chr(39)).replace('.', '/')}.py").exists(), word


# What a worker may take of a GPU


def test_two_workers_on_one_gpu_each_take_their_own_share() -> None:
    total, weights, peak = 141 << 30, 16 << 30, 2 << 30
    budgets = [
        capacity.kv_budget(total_bytes=total, used_bytes=weights, peak_bytes=peak, utilization=share)
        for share in (0.3, 0.6)
    ]
    assert sum(budgets) + 2 * (weights + peak) <= 0.9 * total
    free = total - 2 * (weights + peak)  # whichever comes first
    assert capacity.checked_free(budgets[1], free_bytes=free, utilization=0.6) == budgets[1]
    assert capacity.checked_free(budgets[0], free_bytes=free - budgets[1], utilization=0.3) == budgets[0]


def test_a_share_that_others_have_taken_is_told() -> None:
    with pytest.raises(ValueError, match=r"utilization is 0\.6, which leaves 64\.0 GiB .* only 10\.0 GiB .* are free"):
        capacity.checked_free(64 << 30, free_bytes=10 << 30, utilization=0.6)


# The extras


def pins(name: str) -> dict[str, str]:
    lines = [line for line in (ROOT / name).read_text().splitlines() if line and not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("extra", ["gpu", "gpu-cu12"])
def test_the_pinned_versions_are_those_that_the_package_asks_for(extra: str) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pinned = pins(f"constraints-{extra}.txt")
    for text in [*project["dependencies"], *project["optional-dependencies"][extra]]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(pinned[canonicalize_name(wanted.name)]), text


def test_each_extra_has_its_own_cuda_and_nccl() -> None:
    new, old = pins("constraints-gpu.txt"), pins("constraints-gpu-cu12.txt")
    assert "nvidia-nccl-cu13" in new
    assert "nvidia-nccl-cu12" not in new, "it would overwrite the other's library"
    assert "nvidia-nccl-cu12" in old
    assert "nvidia-nccl-cu13" not in old
    assert Version(old["torch"]) < Version("2.11") <= Version(new["torch"])

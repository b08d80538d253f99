"""The GPU check's own arithmetic, on CPU: what counts as wrong, what is sent, what the colocated engine computes."""

from __future__ import annotations

import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version
from safetensors.torch import load_file

from bench.colocated import Arrival, Colocated
from bench.gpu import cluster as gpu_cluster
from bench.gpu import env as gpu_env
from bench.gpu import transports as gpu_transports
from bench.gpu import weights as gpu_weights
from bench.gpu.cluster import Ask
from bench.gpu.common import WrongResult
from bench.gpu.idle import Stretch, idle_of, steps_of
from cluster.spec.load import load_spec
from cluster.spec.resolve import Machine, resolve, workers_of
from engine.engine import Engine
from engine.gpu.graphs import sizes_up_to
from engine.loading import capacity
from engine.options import EngineOptions
from kvrelay.client.types import Completion, Receipt
from kvrelay.demo_model import make_demo_model
from tests.engine.test_engine import save
from tests.gpu.conftest import MODELS, SHAPE
from tests.gpu.test_engine import eager_model

ROOT = Path(__file__).resolve().parents[2]


class Gaps:
    """A reference that only knows how far each token is from the likeliest."""

    def __init__(self, *gaps: float) -> None:
        self._gaps = torch.tensor(gaps)

    def gaps(self, ask: Ask, tokens: list[int]) -> torch.Tensor:
        return self._gaps[: len(tokens)]


@pytest.mark.parametrize(
    ("gaps", "ties", "wrong"),
    [((0.0, 0.0), 0, 0), ((0.0, 0.05), 1, 0), ((0.05, 0.2), 0, 1), ((0.0, float("nan")), 0, 1)],
)
def test_every_token_is_the_likeliest_or_a_tie_or_wrong(gaps: tuple[float, ...], ties: int, wrong: int) -> None:
    found = gpu_cluster.compare([Ask((1, 2), 2)], [[7, 8]], Gaps(*gaps), 0.1)
    assert (found["equal"], len(found["ties"]), len(found["wrong"])) == (1 - ties - wrong, ties, wrong)
    assert [row["position"] for row in (*found["ties"], *found["wrong"])] == [1] * (ties + wrong)


def test_an_answer_of_another_length_is_wrong() -> None:
    with pytest.raises(WrongResult, match="request 0 has 1 tokens, and 2 were asked for"):
        gpu_cluster.compare([Ask((1,), 2)], [[5]], Gaps(0.0, 0.0))


@pytest.mark.parametrize(("spread", "nats"), [(1e-6, 0.1), (0.12, 0.24), (3.0, 0.5)])
def test_what_counts_as_a_tie_goes_by_the_reference_s_own_spread_within_bounds(spread: float, nats: float) -> None:
    assert gpu_cluster.tie_nats(spread) == nats


def test_the_reference_reads_in_chunks_what_it_reads_at_once(tmp_path: Path) -> None:
    """The spread that it measures of itself is of summation alone: next to nothing in float32."""
    model = str(make_demo_model(tmp_path / "m"))
    engine = Engine.load(EngineOptions(model=model, num_pages=64, threads=1, parity_check=False))
    reference, ask = gpu_cluster.Reference(engine), Ask(tuple(range(10, 210)), 5)
    assert reference.logits(ask, [1, 2, 3, 4, 5], 4096).shape == (5, engine.info.vocab_size)
    assert 0.0 <= reference.spread(ask, [1, 2, 3, 4, 5]) < 1e-3
    assert (reference.gaps(ask, [1, 2, 3, 4, 5]) > 0).any(), "these are not what it would say"


def test_the_gpu_tests_reference_for_gemma_2_caps_its_scores(tmp_path: Path) -> None:
    """The fused attention of some releases of transformers does not: a kernel without the cap would look right."""
    config, changes = MODELS["gemma2"]
    directory = save(tmp_path, config, **{**SHAPE, **changes})
    model, ids = eager_model(directory), torch.arange(3, 60)[None]
    with torch.no_grad():
        capped = model(ids).logits.float()
        for layer in model.model.layers:
            layer.self_attn.attn_logit_softcapping = None
        plain = model(ids).logits.float()
    assert float((capped - plain).norm() / capped.norm()) > 0.05


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


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_where_no_gpu_can_be_used_the_versions_are_told_before_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["env"])
    with pytest.raises(SystemExit, match=r"^WRONG: "):
        gpu_env.main()
    assert f"torch {torch.__version__}" in capsys.readouterr().out


def test_a_transport_that_fails_keeps_no_other_from_being_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(*args: object) -> None:
        raise RuntimeError("CUDA error: peer access is not supported\nadvice")

    def check_lost_peer(name: str, *args: object) -> dict[str, str]:
        if name == "shared_memory":
            raise WrongResult("a killed receiver was noticed late")
        return {"transport": name}

    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    monkeypatch.setattr(gpu_transports, "measure", measure)
    monkeypatch.setattr(gpu_transports, "check_lost_peer", check_lost_peer)
    monkeypatch.setattr(gpu_transports, "check_nccl", lambda rehearse: {"way": "gloo", "refused": []})
    found = gpu_transports.bench(rehearse=True)
    assert found["wrong"] == [
        "RuntimeError: CUDA error: peer access is not supported",
        "a killed receiver was noticed late",
    ]
    assert (found["bytes"], found["lost_peer"]) == ([], [{"transport": "process_group"}])
    assert found["nccl"]["way"] == "gloo"
    assert not found["reaches_wanted_share"]


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
    reference = gpu_cluster.Reference(engine)
    assert gpu_cluster.compare(asks, [made[str(i)] for i in range(4)], reference, 0.0)["equal"] == 4
    assert [outcome.output_len for outcome in outcomes] == [5, 9, 1, 4]
    assert served._pool.usage.held == 0


@pytest.mark.parametrize("name", ["h200-1p1d-one-gpu", "h200-1p1d", "h200-2p2d", "h100-8"])
def test_the_gpu_specs_make_options_that_the_engine_takes(name: str) -> None:
    machine = Machine(cores=tuple(range(16)), memory_bytes=1 << 38, gpus=8, why_no_cuda="")
    for plan in workers_of(resolve(load_spec(ROOT / "configs" / f"{name}.yaml"), machine)):
        options = EngineOptions(**plan.engine)
        options.validate()
        assert options.device == "cuda"


def test_weights_are_written_so_that_safetensors_reads_them(tmp_path: Path) -> None:
    shapes = {f"layers.{i}.q_proj": torch.Size((64, 32)) for i in range(3)} | {"norm": torch.Size((32,))}
    gpu_weights.write_shards(tmp_path, shapes, "cpu")
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    loaded = {name: load_file(tmp_path / file)[name] for name, file in index["weight_map"].items()}
    assert {name: (weight.shape, weight.dtype) for name, weight in loaded.items()} == {
        name: (shape, torch.bfloat16) for name, shape in shapes.items()
    }
    assert not torch.equal(loaded["layers.0.q_proj"], loaded["layers.1.q_proj"])
    assert torch.equal(loaded["norm"], torch.ones(32, dtype=torch.bfloat16))
    assert 0.25 < float(loaded["layers.0.q_proj"].float().std()) < 0.45, "twice one over the root of 32"


def test_shards_hold_every_weight_once() -> None:
    shapes = {str(i): torch.Size((1 << 14, 1 << 14)) for i in range(5)}  # half of a shard each
    assert list(gpu_weights._shards(shapes)) == [["0", "1"], ["2", "3"], ["4"]]


# When a GPU waits


def stretches(*spans: tuple[float, float], to_host: tuple[float, float] | None = None) -> list[Stretch]:
    found = [Stretch(start, end, "kernel") for start, end in spans]
    return found + ([Stretch(*to_host, "Memcpy DtoH (Device -> Pinned)")] if to_host else [])


def test_short_gaps_within_a_step_are_the_work_s_own_and_all_gaps_between_steps_count() -> None:
    first = stretches((0, 10), (12, 30), (40, 58), to_host=(58, 60))  # 2 us between nodes, 10 us of waiting
    second = stretches((63, 80), (75, 98), to_host=(98, 100))  # 3 us after the first; what overlaps is no gap
    found = idle_of(steps_of(first + second))
    assert found is not None
    assert found.steps == 2
    shares = (found.within_steps, found.between_steps, found.short_gaps)
    assert shares == pytest.approx((0.10, 0.03, 0.02))


def test_several_copies_to_the_host_end_one_step() -> None:
    copies = [Stretch(10, 11, "Memcpy DtoH"), Stretch(11, 12, "Memcpy DtoH")]
    assert len(steps_of([*stretches((0, 10)), *copies, *stretches((12, 20), to_host=(20, 21))])) == 2


def test_nothing_seen_is_no_share() -> None:
    assert idle_of([]) is None


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


def test_the_graphs_of_many_rows_are_left_more() -> None:
    row_bytes = 2 * 128_256  # of logits, in bfloat16
    small, large = (capacity.graph_bytes(sizes_up_to(rows), row_bytes, 1) / (1 << 30) for rows in (128, 512))
    assert small < 1.0
    assert 4.9 < large < 5.1


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

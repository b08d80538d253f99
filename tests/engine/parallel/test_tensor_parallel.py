"""An engine over several processes keeps the promise of one: the same tokens, the same bits in any batch and chunking.

What a lost process breaks is told, and none is left behind, whoever dies first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
import torch
import transformers

from engine.engine import Engine
from engine.errors import EngineBroken, UnsupportedModel
from engine.execution import run_step
from engine.options import EngineOptions
from engine.pages.layout import LayerKv
from engine.parallel import sharding
from engine.parallel.shard import Shard
from engine.types import Chunk, SampleSpec, SamplingParams, Step
from engine.weights.experts import OwnExperts
from tests.engine.test_engine import LENGTHS, MODELS, SHAPE, all_logits, page_tables, prompts, save
from tests.zoo import make_tiny_model

NAMES = {"qwen3": {}, "deepseek": {}, "mixtral": {"expert_parallel": True}}  # and a llama in four
NEW_TOKENS = 12
SOON_S = 20.0
SEEDED = SamplingParams(temperature=1.0, seed=11, top_p=0.9)
GREEDY = SamplingParams(temperature=0.0)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    found = {
        name: save(tmp_path_factory.mktemp(name), config_class, **changes)
        for name, (config_class, changes) in MODELS.items()
    }
    return found | {"phi3": str(make_tiny_model("phi3", tmp_path_factory.mktemp("phi3")))}


def load(directory: str, size: int, **options: Any) -> Engine:
    fixed: dict[str, Any] = {"dtype": "float32", "num_pages": 64, "threads": 1}
    return Engine.load(EngineOptions(model=directory, tensor_parallel=size, **fixed, **options))


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest, directories: dict[str, str]) -> Iterator[tuple[Engine, Engine]]:
    """The same model in one process and in two."""
    two = load(directories[request.param], 2, **NAMES[request.param])
    yield load(directories[request.param], 1), two
    two.close()


def tokens_of(
    engine: Engine, params: SamplingParams, chunk: int, lengths: tuple[int, ...] = LENGTHS
) -> list[list[int]]:
    """Every unfinished request takes part in every step, its prompt in chunks."""
    sequences = [list(prompt) for prompt in prompts(lengths)]
    tables = page_tables(engine, [len(s) + NEW_TOKENS for s in sequences])
    done, ends = [0] * len(sequences), [len(s) + NEW_TOKENS for s in sequences]
    while any(len(s) < end for s, end in zip(sequences, ends, strict=True)):
        chunks = []
        for i, sequence in enumerate(sequences):
            if len(sequence) == ends[i]:
                continue
            start, done[i] = done[i], min(done[i] + chunk, len(sequence))
            sample = SampleSpec(params=params, position=done[i]) if done[i] == len(sequence) else None
            ids = sequence[start : done[i]]
            chunks.append(Chunk(request_id=str(i), token_ids=ids, start=start, block_table=tables[i], sample=sample))
        for token in engine.step(Step(chunks=chunks)):
            sequences[int(token.request_id)].append(token.token_id)
    return [sequence[-NEW_TOKENS:] for sequence in sequences]


def whole_pages(engine: Engine, layer: int, pages: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V, [pages, tokens, heads, head dim] each, whoever has the heads."""
    layout = engine.layout
    shape = layout.layers[layer]
    assert isinstance(shape, LayerKv)
    out = np.empty(len(pages) * layout.page_bytes(range(layer, layer + 1)), np.uint8)
    engine.memory.rows.gather(range(layer, layer + 1), pages, out)
    k_bytes, page = layout.k_page_bytes(layer) * len(pages), (len(pages), layout.page_size, shape.kv_heads, -1)
    k, v = (torch.from_numpy(part.view(np.float32)).view(page) for part in (out[:k_bytes], out[k_bytes:]))
    return k, v


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pids: tuple[int, ...]) -> None:
    deadline = time.monotonic() + SOON_S
    while not all(is_gone(pid) for pid in pids):
        assert time.monotonic() < deadline, f"some of the processes {pids} live on"
        time.sleep(0.05)


@pytest.mark.parametrize("params", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_two_processes_give_the_tokens_of_one(pair: tuple[Engine, Engine], params: SamplingParams) -> None:
    one, two = pair
    wanted = tokens_of(one, params, chunk=512)
    assert tokens_of(two, params, chunk=512) == wanted
    assert tokens_of(two, params, chunk=16) == wanted


def test_logits_are_the_same_bits_in_any_batch_and_chunking(pair: tuple[Engine, Engine]) -> None:
    _, two = pair
    wanted = all_logits(two, prompts(), chunk=512, together=False)
    for chunk, together in ((512, True), (7, True)):
        got = all_logits(two, prompts(), chunk, together)
        assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True)), f"chunks of {chunk}"


def test_a_layer_is_reported_when_every_process_has_written_its_heads(pair: tuple[Engine, Engine]) -> None:
    one, two = pair
    assert one.info == two.info
    assert one.layout == two.layout
    ids = prompts((20,))[0]
    seen: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {"one": [], "two": []}
    for name, engine in (("one", one), ("two", two)):
        everything = range(engine.layout.num_layers)
        engine.memory.rows.scatter(everything, [4, 2], np.zeros(2 * engine.layout.page_bytes(), np.uint8))

        def copy_pages(layer: int, engine: Engine = engine, name: str = name) -> None:
            assert threading.current_thread() is threading.main_thread()
            assert layer == len(seen[name])
            seen[name].append(whole_pages(engine, layer, [4, 2]))

        chunk = Chunk(request_id="a", token_ids=ids, start=0, block_table=[4, 2])
        engine.step(Step(chunks=[chunk], on_layer=copy_pages))
    assert len(seen["two"]) == one.layout.num_layers
    for layer, (got, wanted) in enumerate(zip(seen["two"], seen["one"], strict=True)):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4, msg=f"layer {layer}")
        assert all(part[0].abs().sum(-1).gt(0).all() for part in got), f"layer {layer}: a head is missing"
    assert [other.num_bytes for other in two.memory.others] == [one.memory.bytes.nbytes // 2]


def test_four_processes_give_the_same_tokens_and_a_lost_one_breaks_them_all(directories: dict[str, str]) -> None:
    directory = directories["llama"]  # of two KV heads
    one, four = load(directory, 1), load(directory, 4)
    try:
        for params in (GREEDY, SEEDED):
            assert tokens_of(four, params, chunk=16) == tokens_of(one, params, chunk=512)
        assert four.model.page_bytes(four.layout) == 2 * one.layout.page_bytes()  # each KV head stands twice
        pids = four.model.ranks.pids  # type: ignore[union-attr]
        os.kill(pids[1], signal.SIGKILL)
        step = Step(chunks=[Chunk(request_id="a", token_ids=[5, 6], start=0, block_table=[0])] * 2)
        with pytest.raises(EngineBroken, match=rf"^rank 2 \(process {pids[1]}\) was ended by signal 9$"):
            run_step(four, step, max_failed_steps=3)
        with pytest.raises(EngineBroken, match="was ended by signal 9"):
            four.check()
        wait_until_gone(pids)
    finally:
        four.close()


def test_processes_have_no_port_and_end_with_their_engine_and_with_its_process(directories: dict[str, str]) -> None:
    script = (
        "import sys, time; from engine.engine import Engine; from engine.options import EngineOptions\n"
        "engine = Engine.load(EngineOptions(model=sys.argv[1], num_pages=8, threads=1, tensor_parallel=2,"
        " dtype='float32', parity_check=False))\n"
        "print(*engine.model.ranks.pids, flush=True); time.sleep(600)"
    )
    root = str(Path(__file__).resolve().parents[3])
    leader = subprocess.Popen([sys.executable, "-c", script, directories["llama"]], stdout=subprocess.PIPE, cwd=root)
    try:
        assert leader.stdout is not None
        pids = tuple(map(int, leader.stdout.readline().split()))
        assert len(pids) == 1
        assert not any(is_gone(pid) for pid in pids)
        assert [end for pid in (leader.pid, *pids) for end in psutil.Process(pid).net_connections()] == []
    finally:
        leader.kill()
        leader.wait()
    wait_until_gone(pids)


REFUSED = {
    "gpt2": "GPT2LMHeadModel has no tensor-parallel plan in transformers, and tensor_parallel is 2; "
    "give tensor_parallel 1",
    "phi3": "Phi3ForCausalLM cuts layers.*.self_attn.qkv_proj as colwise_gather_output by its tensor-parallel plan, "
    "which is not known here; give tensor_parallel 1, and not 2",
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_model_that_cannot_be_cut_is_refused_by_name(directories: dict[str, str], name: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(directories[name], 2)
    assert str(caught.value) == REFUSED[name]


def test_a_plan_of_experts_alone_is_refused_before_weights_are_read() -> None:
    class ExpertsAlone(transformers.MixtralConfig):  # type: ignore[misc]
        base_model_tp_plan: ClassVar = {  # as of Granite MoE in transformers 5.23
            "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
            "layers.*.mlp.experts.down_proj": "rowwise",
            "layers.*.mlp.experts": "moe_tp_experts",
        }

    with pytest.raises(UnsupportedModel) as caught:
        sharding.check_config(ExpertsAlone(**SHAPE, architectures=["Model"]), 2)
    assert str(caught.value) == (
        "Model does not cut its attention by its tensor-parallel plan; give tensor_parallel 1, and not 2"
    )


def test_a_model_whose_layers_differ_in_their_latents_is_refused_in_a_sentence() -> None:
    class Differing(transformers.LlamaConfig):  # type: ignore[misc]
        @property
        def kv_lora_rank(self) -> int:
            raise RuntimeError("'kv_lora_rank' is a per-layer attribute")  # as transformers of dots3_note

    with pytest.raises(
        UnsupportedModel, match=r"^Model has layers whose kv_lora_rank differs, which are not cut; give"
    ):
        sharding.check_config(Differing(**SHAPE, architectures=["Model"]), 2)


def test_layers_of_several_widths_are_refused_in_a_sentence() -> None:
    config = transformers.Gemma3nTextConfig(architectures=["Model"])
    with pytest.raises(UnsupportedModel, match=r"^Model has an intermediate_size for each layer, which are not cut; "):
        sharding.check_config(config, 2)


def test_a_model_whose_norms_cannot_be_cut_is_refused_when_they_are_found(tmp_path: Path) -> None:
    directory = make_tiny_model("cohere", tmp_path / "cohere")  # a norm with a weight for each head
    with pytest.raises(UnsupportedModel, match=r"^cut for tensor_parallel 2, CohereForCausalLM cannot run on packed"):
        load(str(directory), 2)


@pytest.mark.parametrize(
    ("changes", "size", "reason"),
    [
        ({}, 3, "tensor_parallel is 3, which does not divide 4 attention heads; give 1, 2 or 4"),
        (
            {"num_attention_heads": 8, "num_key_value_heads": 8},
            3,
            "tensor_parallel is 3, which does not divide 8 attention heads; give 1, 2, 4 or 8",
        ),
        (
            {"intermediate_size": 129},
            2,
            "tensor_parallel is 2, which does not divide 129 columns of the MLP (intermediate_size); give 1",
        ),
    ],
)
def test_a_degree_that_does_not_divide(tmp_path: Path, changes: dict[str, int], size: int, reason: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        load(save(tmp_path, "LlamaConfig", **changes), size)
    assert str(caught.value) == reason


EIGHT_HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
DEEPSEEK = {"kv_lora_rank": 32, "num_key_value_heads": 8, "num_attention_heads": 8, "moe_intermediate_size": 6}


@pytest.mark.unit
@pytest.mark.parametrize(
    ("config", "size", "is_whole", "reason"),
    [
        (
            transformers.MixtralConfig(**{**SHAPE, "intermediate_size": 129, "num_local_experts": 4}),
            *(2, False),
            "tensor_parallel is 2, which does not divide 129 columns of the MLP (intermediate_size); "
            "give 1 or 2 with expert_parallel: true",
        ),
        (
            transformers.MixtralConfig(**{**SHAPE, **EIGHT_HEADS, "num_local_experts": 6}),
            *(4, True),
            "tensor_parallel is 4, which does not divide 6 experts; give 1 or 2",
        ),
        (
            transformers.DeepseekV3Config(**{**SHAPE, **DEEPSEEK, "n_routed_experts": 8, "n_shared_experts": 3}),
            *(4, True),
            "tensor_parallel is 4, which does not divide 18 columns of the MLP (moe_intermediate_size); give 1 or 2",
        ),
        (
            transformers.LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"]),
            *(2, True),
            "expert_parallel is true, and LlamaForCausalLM has no experts; leave it out",
        ),
    ],
)
def test_experts_that_ranks_cannot_share_out(config: Any, size: int, is_whole: bool, reason: str) -> None:
    with pytest.raises(UnsupportedModel) as caught:
        sharding.check_config(config, size, is_whole)
    assert str(caught.value) == reason
    for degree in (1, 2):  # what is advised
        if "no experts" not in reason:
            sharding.check_config(config, degree, has_whole_experts=True)


def test_options_that_do_not_go_with_it() -> None:
    with pytest.raises(ValueError, match=r"^tensor_parallel is 0; give 1 or more$"):
        load("anything", 0)
    with pytest.raises(ValueError, match=r"^tensor_parallel is 2 with kv_dtype 'fp8_e4m3'; give one of the two$"):
        load("anything", 2, kv_dtype="fp8_e4m3")
    with pytest.raises(ValueError, match=r"^expert_parallel is True with tensor_parallel 1, whose one process has all"):
        load("anything", 1, expert_parallel=True)


# Without processes: ranks as threads


class Meeting:
    """The collectives of `size` threads."""

    def __init__(self, size: int) -> None:
        self.parts: list[torch.Tensor] = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size, timeout=SOON_S)

    def all(self, rank: int, x: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = x
        self.barrier.wait()
        parts = list(self.parts)
        self.barrier.wait()
        return parts


class ThreadRank:
    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.meeting, self.rank = meeting, rank

    def sum(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.all(self.rank, x)).sum(0)

    def gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self.meeting.all(self.rank, x), dim=-1)


CUT_ANYHOW = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "starcoder2", "granite", "phi")
EXPERTS = (
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "olmoe",
    "deepseek_v3",
)  # olmoe: norms over all heads; deepseek: latents
MORE_RANKS_THAN_KV_HEADS = ("llama", "olmo2", "qwen3_moe")


@pytest.mark.parametrize(
    ("name", "size"),
    [*((name, 2) for name in (*CUT_ANYHOW, *EXPERTS, "olmo2")), *((name, 4) for name in MORE_RANKS_THAN_KV_HEADS)],
)
def test_a_cut_model_says_what_the_whole_one_says(name: str, size: int, tmp_path: Path) -> None:
    says_what_the_whole_one_says(name, [Shard(rank, size) for rank in range(size)], None, tmp_path)


@pytest.mark.parametrize("form", ["eager", "grouped_mm"])
@pytest.mark.parametrize(("name", "size"), [*((name, 2) for name in EXPERTS), ("mixtral", 4), ("deepseek_v3", 4)])
def test_a_model_whose_ranks_have_whole_experts_says_the_same(name: str, size: int, form: str, tmp_path: Path) -> None:
    if name == "qwen2_moe" and sharding.EXPERTS not in transformers.Qwen2MoeConfig.base_model_tp_plan.values():
        pytest.skip("this transformers cuts none of its experts")
    shards = [Shard(rank, size, has_whole_experts=True) for rank in range(size)]
    cut, *_ = says_what_the_whole_one_says(name, shards, form, tmp_path)
    own = {module for module in cut.modules() if isinstance(module, OwnExperts)}
    num_experts = 8 if name == "deepseek_v3" else 4
    assert {len(weight) for each in own for weight in each.parameters()} == {num_experts // size}


def says_what_the_whole_one_says(
    name: str, shards: list[Shard], form: str | None, tmp_path: Path
) -> list[transformers.PreTrainedModel]:
    """The cut models, each run by a thread. `form`: of experts' products; None: as transformers chooses."""
    from engine.parallel.meetings import connect
    from engine.weights.loader import probe_model, set_attention

    directory = make_tiny_model(name, tmp_path / name)
    ids = torch.randint(5, 500, (1, 40), generator=torch.Generator().manual_seed(3))

    def fresh() -> transformers.PreTrainedModel:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", experts_implementation=form
        )
        for parameter in model.parameters():  # tiny models begin without biases worth the name
            if parameter.dim() == 1:
                parameter.data += torch.linspace(-0.1, 0.1, parameter.numel())
        return model.eval().requires_grad_(False)

    size = len(shards)
    told: list[list[int]] = [[] for _ in shards]
    whole, meeting = fresh(), Meeting(size)
    sharding.check_config(whole.config, size, shards[0].has_whole_experts)
    wanted = whole(input_ids=ids, use_cache=False).logits
    got: dict[int, torch.Tensor] = {}
    models = [fresh() for _ in range(size)]  # one by one: transformers patches its own classes while it loads

    def run(rank: int) -> None:
        model = models[rank]
        probe = probe_model(model, 64)
        cuts = sharding.shard_model(model, shards[rank], probe)
        sharding.check_shapes(model, probe, range(len(probe.layers)), shards[rank])
        set_attention(model, "eager")
        connect(cuts, ThreadRank(meeting, rank), told[rank].append)
        with torch.inference_mode():
            got[rank] = model(input_ids=ids, use_cache=False).logits

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for rank in range(size):
        torch.testing.assert_close(got[rank], wanted, rtol=1e-4, atol=1e-4)
        assert told[rank] == list(range(whole.config.num_hidden_layers))
    return models

"""What cannot be served exactly is refused at load, in one sentence that says why; so are options out of range."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from engine.engine import Engine
from engine.errors import UnsupportedModel
from engine.loading import parity
from engine.options import EngineOptions
from tests.engine.test_engine import MODELS, save
from tests.hub import as_downloaded
from tests.zoo import make_tiny_model

UNSUPPORTED = {
    "no attention interface": ("FalconConfig", {"alibi": True, "multi_query": False}, "attention interface"),
    "attends twice": ("HrmTextConfig", {}, "twice"),
    "temperature from the cache": ("LlamaConfig", {"attn_temperature_tuning": True}, "attn_temperature_tuning"),
    "looks up blocks of keys": (
        "MiniMaxM3VLTextConfig",
        {
            "dense_intermediate_size": 64,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
            "head_dim": 16,
            "layer_types": ["full_attention", "minimax_m3_sparse"],
            "index_n_heads": 2,
            "index_head_dim": 16,
        },
        "keys that an index chooses",
    ),
    "looks up keys": ("DeepseekV32Config", MODELS["deepseek"][1], "keys that an index chooses"),
    "bounds a prompt's steps, and no lone token's": (
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "time_step_limit": (0.5, 0.6)},
        "gives other logits through pages",
    ),
}


def load(directory: str, **options: Any) -> Engine:
    return Engine.load(EngineOptions(model=directory, **{"num_pages": 16, **options}))


@pytest.mark.parametrize(("config_class", "changes", "reason"), UNSUPPORTED.values(), ids=UNSUPPORTED.keys())
def test_an_architecture_that_pages_cannot_carry(
    tmp_path: Path, config_class: str, changes: dict[str, Any], reason: str
) -> None:
    directory = save(tmp_path, config_class, **changes)
    with pytest.raises(UnsupportedModel, match=reason) as refusal:
        load(directory)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(("key", "value"), [("kv_dtype", "fp8_e4m3"), ("speculative_model", "itself")])
def test_what_a_state_beside_kv_cannot_have(tmp_path: Path, key: str, value: Any) -> None:
    directory = str(make_tiny_model("qwen3_5_text", tmp_path))
    value = directory if value == "itself" else value
    with pytest.raises(ValueError, match=f"{key} is {value!r}, but Qwen3_5ForCausalLM keeps a state .*; leave it out"):
        load(directory, **{key: value})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save(tmp_path_factory.mktemp("llama"), "LlamaConfig")


def test_the_parity_check_refuses_a_model_whose_two_paths_disagree(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    own = parity.reference_logits

    def shifted(*args: Any) -> parity.Reference:
        reference = own(*args)
        return parity.Reference(reference.token_ids, tuple(x.roll(1, 0) for x in reference.logits), reference.tolerance)

    monkeypatch.setattr(parity, "reference_logits", shifted)
    with pytest.raises(UnsupportedModel, match="LlamaForCausalLM gives other logits through pages"):
        load(llama)


def test_what_a_model_stumbles_at_by_itself_is_one_sentence(llama: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def stumbles(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("got (Tensor),\n but expected one of:\n * (int)")

    monkeypatch.setattr(transformers.LlamaForCausalLM, "forward", stumbles)
    with pytest.raises(UnsupportedModel, match=r"on a plain prompt: got \(Tensor\), but expected one of: \* \(int\)$"):
        load(llama)


def test_a_directory_without_a_config(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no config\.json"):
        load(str(tmp_path))


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"gone' is not there; give a Hugging Face model directory"):
        load(str(tmp_path / "gone"))


def test_a_directory_without_weights(llama: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match="cannot be loaded"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda whole: b"\x10" * 100, r"damaged or cut short \(.*header too large\); copy it anew"),
        (lambda whole: whole[: len(whole) // 2], r"damaged or cut short \(.*not fully covered\); copy it anew"),
        (lambda whole: b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer; fetch what it stands for"),
    ],
    ids=["damaged", "cut short", "a pointer"],
)
def test_a_file_that_is_not_whole_is_named(
    damage: Callable[[bytes], bytes], why: str, llama: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes(damage((Path(llama) / "model.safetensors").read_bytes()))
    with pytest.raises(UnsupportedModel, match=rf"cannot be loaded: model\.safetensors is {why}"):
        load(str(tmp_path))


def test_of_shards_the_one_that_is_cut_short_is_named(llama: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="100KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(UnsupportedModel, match=f"cannot be loaded: {shard.name} is damaged or cut short"):
        load(str(tmp_path))


@pytest.mark.parametrize("left", [b"", b"<html>", b"PK" * 2000])
def test_of_torch_s_shards_the_one_that_is_not_whole_is_named(left: bytes, llama: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    weights = {name: f"pytorch_model-{len(name) % 2}.bin" for name in load_file(f"{llama}/model.safetensors")}
    index = {"metadata": {}, "weight_map": weights}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    for shard in set(weights.values()):
        torch.save({name: torch.ones(64, 64) for name in weights if weights[name] == shard}, tmp_path / shard)
    (tmp_path / "pytorch_model-1.bin").write_bytes(left)
    with pytest.raises(UnsupportedModel, match=r"cannot be loaded: pytorch_model-1\.bin is damaged or cut short; copy"):
        load(str(tmp_path))


def test_a_pickle_that_is_more_than_tensors_is_not_run(llama: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    torch.save({"model.norm.weight": torch.ones(64), "args": Path("a")}, tmp_path / "pytorch_model.bin")
    with pytest.raises(UnsupportedModel, match=r"a \.bin has more than tensors, .* give one in safetensors$"):
        load(str(tmp_path))


def test_shards_without_their_index_are_told(llama: str, tmp_path: Path) -> None:
    transformers.AutoModelForCausalLM.from_pretrained(llama).save_pretrained(tmp_path, max_shard_size="100KB")
    (tmp_path / "model.safetensors.index.json").unlink()
    with pytest.raises(UnsupportedModel, match=r"it has model-00001-of-.*, nor model\.safetensors\.index\.json, which"):
        load(str(tmp_path))


@pytest.mark.parametrize("is_on_the_hub", [False, True])
def test_a_weight_that_two_shards_hold_is_named(
    is_on_the_hub: bool, llama: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers takes that of the last one, whatever the index says."""
    directory = tmp_path / "model"
    transformers.AutoModelForCausalLM.from_pretrained(llama).save_pretrained(directory, max_shard_size="100KB")
    first, second = sorted(directory.glob("*.safetensors"))[:2]
    name, weight = next(iter(load_file(first).items()))
    save_file({**load_file(second), name: weight + 1}, second, {"format": "pt"})
    hub = as_downloaded(directory, "org/name", tmp_path / "hub", monkeypatch)
    with pytest.raises(UnsupportedModel, match=rf"has {name} in {first.name} and in {second.name}; give each weight"):
        load(hub if is_on_the_hub else str(directory))


@pytest.mark.parametrize(
    ("name", "why"),
    [
        (
            "model.gguf",
            r"it has no weights \(.*\), but model\.gguf, in a format that is not read; give a checkpoint in saf",
        ),
        (
            "model.safetensors.index.json",
            r"model\.safetensors\.index\.json is damaged or cut short \(Expecting property",
        ),
    ],
)
def test_what_is_there_in_place_of_weights_is_named(name: str, why: str, llama: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    (tmp_path / name).write_text("{")
    with pytest.raises(UnsupportedModel, match=f"cannot be loaded: {why}"):
        load(str(tmp_path))


@pytest.mark.parametrize("told", [[], {"weight_map": {"a": "b"}}, {"metadata": None, "weight_map": {"a": "b"}}])
def test_an_index_that_transformers_stumbles_at_is_named(told: object, llama: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(told))
    with pytest.raises(UnsupportedModel, match=r'be loaded: model\.safetensors\.index\.json holds no {"metadata": {.*'):
        load(str(tmp_path))


def test_an_adapter_beside_weights_is_not_added_to_them(llama: str, tmp_path: Path) -> None:
    """By transformers it is where peft is installed, also to weights that it was merged in."""
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModel, match=r"has an adapter beside its weights .*; move it elsewhere, and where"):
        load(str(tmp_path))


def test_a_file_is_no_model(llama: str) -> None:
    with pytest.raises(UnsupportedModel, match=r"/config\.json' is a file; give a Hugging Face model directory"):
        load(f"{llama}/config.json")


def test_incomplete_weights(llama: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    state = {name: w for name, w in model.state_dict().items() if "layers.1.mlp.up_proj" not in name}
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UnsupportedModel, match="lacks 1 of its weights"):
        load(str(tmp_path))


def test_weights_of_another_shape(llama: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    state = dict(model.state_dict())
    name = "model.layers.1.mlp.up_proj.weight"
    state[name] = state[name][:-1].clone()
    model.save_pretrained(tmp_path, state_dict=state)
    with pytest.raises(UnsupportedModel, match=rf"1 of its weights in another shape .* first {name}: \(127, 64\) for"):
        load(str(tmp_path))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_damaged_weights_are_not_laid_to_the_pages(value: float, llama: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = value
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="own logits are not finite in float32: weights are damaged"):
        load(str(tmp_path))


CONFIGS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "an activation": ({"hidden_act": "nope"}, UnsupportedModel, "transformers finds no 'nope': config.json gives"),
    "a RoPE": (
        {"rope_parameters": {"rope_type": "nope", "rope_theta": 1e4}},
        UnsupportedModel,
        "transformers finds no 'nope': config.json gives",
    ),
    "a dtype": (
        {"dtype": "torch.bfloat16"},
        UnsupportedModel,
        r"dtype in config\.json of .* is 'torch\.bfloat16'; give",
    ),
    "an older dtype": ({"torch_dtype": "auto"}, UnsupportedModel, r"torch_dtype in config\.json of .* is 'auto'; give"),
    "no layers": ({"num_hidden_layers": 0}, UnsupportedModel, r"num_hidden_layers in config\.json is 0"),
    "less than none": ({"num_hidden_layers": -1}, UnsupportedModel, r"num_hidden_layers in config\.json is -1"),
    "half a RoPE": (
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}},
        UnsupportedModel,
        r"cannot be read: Missing required keys in `rope_parameters` for 'rope_type'='yarn': \{'factor'\}$",
    ),
    "one position": ({"max_position_embeddings": 1}, ValueError, "a prompt and its answer have 2 or more"),
    "code of its own": (
        {"model_type": "martian", "auto_map": {"AutoConfig": "code.MartianConfig"}},
        UnsupportedModel,
        "code of its own, which is not run; give one of a type that transformers knows",
    ),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_a_config_that_says_what_cannot_be(llama: str, tmp_path: Path, case: str) -> None:
    changes, kind, reason = CONFIGS[case]
    config = json.loads((Path(llama) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    (tmp_path / "model.safetensors").write_bytes((Path(llama) / "model.safetensors").read_bytes())
    (tmp_path / "code.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(kind, match=reason):
        load(str(tmp_path))


def test_an_eos_that_is_no_token(llama: str, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": true}')
    with pytest.raises(UnsupportedModel, match=r"eos_token_id of the model is \(True,\); give a token id"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("[]", "holds no JSON object that can be read"),
        ("{bad", "holds no JSON object that can be read"),
        ('{"max_new_tokens": 0}', "cannot be read by transformers: `max_new_tokens` must be greater than 0, but is 0"),
        ('{"max_new_tokens": "7"}', "cannot be read by transformers: TypeError: .*'str' and 'int'"),
        ('{"watermarking_config": {"b": 1}}', "cannot be read by transformers: TypeError: .* 'b'"),
    ],
)
def test_a_generation_config_that_cannot_be_read(llama: str, tmp_path: Path, text: str, why: str) -> None:
    (tmp_path / "config.json").write_text((Path(llama) / "config.json").read_text())
    (tmp_path / "generation_config.json").write_text(text)
    (tmp_path / "model.safetensors").write_bytes((Path(llama) / "model.safetensors").read_bytes())
    with pytest.raises(UnsupportedModel, match=rf"/generation_config\.json {why}.?; mend it, or remove it"):
        load(str(tmp_path))


def test_an_architecture_that_transformers_does_not_know(llama: str, tmp_path: Path) -> None:
    config = json.loads((Path(llama) / "config.json").read_text())
    config |= {"model_type": "martian", "architectures": ["MartianForCausalLM"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedModel, match="martian"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dtype": "int3"}, "dtype is 'int3'; give one of auto, float32, bfloat16"),
        ({"max_model_len": 257}, "max_model_len is 257, but the model has 256 positions"),
        ({"max_model_len": 0}, "max_model_len is 0"),
        ({"num_pages": None, "kv_bytes": 100}, "kv_memory is 100 bytes, less than one page"),
        ({"kv_bytes": 1 << 20}, "give one of the two"),
        ({"page_size": 0}, "page_size is 0"),
        ({"attention": "magic"}, "attention is 'magic'"),
        ({"device": "tpu"}, "device is 'tpu'; give one of auto, cpu, cuda, cuda:N"),
        ({"kv_dtype": "int4"}, "kv_dtype is 'int4'; give one of auto, fp8_e4m3"),
        ({"gpu_memory_utilization": 0.0}, "gpu_memory_utilization is 0"),
        ({"max_graph_batch": 0}, "max_graph_batch is 0"),
    ],
)
def test_an_option_out_of_range(llama: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        load(llama, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_where_there_is_none(llama: str) -> None:
    with pytest.raises(ValueError, match=r"device is 'cuda:1', but torch .* (without CUDA|finds no GPU)"):
        load(llama, device="cuda:1")


def test_auto_dtype_takes_float16_as_bfloat16(tmp_path: Path) -> None:
    directory = save(tmp_path, "LlamaConfig", dtype=torch.float16)
    engine = load(directory)
    assert engine.info.dtype == "bfloat16"
    assert engine.layout.dtype == "bfloat16"

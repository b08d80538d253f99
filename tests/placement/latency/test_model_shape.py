"""ModelShape: the counts of transformers' own classes, bytes of KV and weights, one sentence for the rest."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.pages.layout import KvLayout, LayerKv
from engine.pages.share import Share
from placement.catalogs.base import PlanError
from placement.latency.cut_types import RANKS
from placement.latency.families import NOT_COUNTED
from placement.latency.model_config import shape_of
from placement.latency.model_files import known_models, load_shape, loadable_name
from placement.named_files import CONFIGS
from tests.hub import as_downloaded

unit = pytest.mark.unit

PUBLISHED = {  # parameters, as the models' cards count them
    "opt-13b": 12_853_473_280,
    "opt-66b": 65_719_701_504,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "mixtral-8x7b": 46_702_792_704,
    "bloom-176b": 176_247_271_424,
    "qwen3-0.6b": 596_049_920,
}
OTHERS = ("gpt2", "qwen2", "qwen2_moe", "gemma2", "gpt_neox", "falcon", "phi", "deepseek_v3")


def config(**changes: Any) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONFIGS / "models" / "llama-3.1-8b.json").read_text())
    return {key: value for key, value in (found | changes).items() if value is not None}


@unit
def test_a_worker_is_told_a_hub_id_or_a_full_path(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((CONFIGS / "models" / "llama-3.1-8b.json").read_text())
    assert loadable_name("llama-3.1-8b") == "meta-llama/Llama-3.1-8B"
    assert loadable_name("somebody/llama-3.1-8b") == "somebody/llama-3.1-8b"
    assert loadable_name(str(tmp_path)) == loadable_name(str(tmp_path / "config.json")) == str(tmp_path)


@unit
def test_a_name_on_the_hub_that_was_downloaded_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(config()))
    name = as_downloaded(tmp_path / "mine", "org/Mine-8B", tmp_path / "hub", monkeypatch)
    assert load_shape(name) == replace(load_shape(tmp_path / "mine"), name="Mine-8B")
    assert loadable_name(name) == name
    with pytest.raises(PlanError, match="model is 'org/Other-8B', which is no directory"):
        load_shape("org/Other-8B")


@unit
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_known_models_are_exact(name: str) -> None:
    assert load_shape(name).num_params == PUBLISHED[name]


@pytest.mark.parametrize("name", [*known_models(), *OTHERS])
def test_parameters_are_those_that_transformers_makes(name: str) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    given = (
        json.loads((CONFIGS / "models" / f"{name}.json").read_text()) if name not in OTHERS else {"model_type": name}
    )
    given.pop("quantization_config", None)
    made = AutoConfig.for_model(**given)
    with torch.device("meta"):
        true = AutoModelForCausalLM.from_config(made).num_parameters()
    counted = shape_of(json.loads(made.to_json_string(use_diff=False)), name).num_params
    assert counted == pytest.approx(true, rel=1e-3)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
SMALL: dict[str, Any] = {"num_hidden_layers": 4, "pad_token_id": 0}
MORE: dict[str, dict[str, Any]] = {  # that a family's own defaults lack or contradict
    **{name: {"is_decoder": True} for name in ("bert", "bert-generation", "electra", "ernie", "roc_bert")},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "cohere2_moe": {"first_k_dense_replace": 1, "prefix_dense_intermediate_size": 4096},
    "dbrx": {
        "attn_config": {"kv_n_heads": 4, "rope_theta": 1e4},
        "ffn_config": {"ffn_hidden_size": 640, "moe_num_experts": 8, "moe_top_k": 2},
    },
    "deepseek_v2": {"num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 2, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "glm4_moe": {"head_dim": 128},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoeshared": {"shared_intermediate_size": 1024},
    "hunyuan_v1_moe": {"head_dim": 128, "num_experts": 8, "moe_topk": [2] * 4},
    "llama4_text": {"interleave_moe_layer_step": 2},
    "ministral": {"head_dim": 128},
}
OF_FEW = (  # no ranks of these
    *("afmoe", "aria_text", "beam", "bert", "bert-generation", "dbrx", "electra", "ernie", "gpt_neo"),
    *("granitemoeshared", "hunyuan_v1_moe", "llama4_text", "mimo_v2_flash", "mpt", "roc_bert"),
    "xglm",
)


@pytest.mark.parametrize("model_type", sorted((RANKS | set(OF_FEW)) - set(NOT_COUNTED)))
def test_a_family_is_counted_as_transformers_makes_it(model_type: str) -> None:
    """Whether its config says all, or leaves what is so in each model of the family to transformers."""
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    defaults = CONFIG_MAPPING[model_type]()
    layers = defaults.get_text_config().num_hidden_layers
    lists = {k: v[:4] for k, v in defaults.to_dict().items() if isinstance(v, list) and len(v) == layers}
    made = CONFIG_MAPPING[model_type](**lists | SMALL | MORE.get(model_type, {}))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(made)
    said = json.loads(made.to_json_string(use_diff=False))
    unsaid = {key: value for key, value in said.items() if key != "tie_word_embeddings"}
    if not MORE.get(model_type):
        unsaid = {
            k: v for k, v in unsaid.items() if k not in ("mlp_layer_types", "first_k_dense_replace", "moe_layers")
        }
    for config in (said, unsaid):
        assert shape_of(config, model_type).num_params == pytest.approx(model.num_parameters(), rel=1e-2)


@unit
def test_llama_4_has_a_shared_expert_beside_the_others_and_layers_without_experts() -> None:
    """Maverick, as its model card counts it: 400B, of which a token uses 17B, embeddings and head and all."""
    maverick = config(
        model_type="llama4_text",
        hidden_size=5120,
        num_hidden_layers=48,
        num_attention_heads=40,
        intermediate_size=8192,
        intermediate_size_mlp=16384,
        num_key_value_heads=8,
        head_dim=128,
        num_local_experts=128,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        vocab_size=202048,
    )
    shape = shape_of(maverick, "maverick")
    assert shape.num_params == pytest.approx(400.7e9, rel=1e-3)
    assert shape.active_params + 2 * shape.head_params == pytest.approx(17e9, rel=0.02)


@unit
@pytest.mark.parametrize("model_type", NOT_COUNTED)
def test_what_a_config_does_not_tell_in_full_is_refused(model_type: str) -> None:
    with pytest.raises(PlanError, match=f"{model_type}.*; give a profile that kvrelay calibrate measured"):
        shape_of(config(model_type=model_type))


@unit
def test_grouped_queries_share_keys_and_values() -> None:
    assert load_shape("llama-3.1-8b").kv_bytes_per_token == 32 * 2 * 8 * 128 * 2
    assert load_shape("llama-2-70b").kv_bytes_per_token == 80 * 2 * 8 * 128 * 2
    assert load_shape("bloom-176b").kv_bytes_per_token == 70 * 2 * 14336 * 2


@unit
def test_mla_is_counted_as_kvrelay_pages_it() -> None:
    shape = load_shape("deepseek-v3")
    assert shape.kv_bytes_per_token == 61 * 128 * (192 + 128) * 2


@unit
@pytest.mark.parametrize("model", ["llama-3.1-8b", "deepseek-v3", "qwen3-0.6b"])
@pytest.mark.parametrize("tp", [1, 2, 8, 16])
def test_a_worker_keeps_as_much_kv_of_a_token_as_the_engine_counts(model: str, tp: int) -> None:
    shape = load_shape(model)
    layers = (LayerKv(shape.kv_heads, shape.k_dim, shape.v_dim),) * shape.num_layers
    layout = KvLayout(16, "bfloat16", layers, 1)
    held = sum(Share(rank, tp).of(layout).page_bytes() for rank in range(tp))
    assert 16 * shape.worker_kv_bytes_per_token(tp) == held


@unit
def test_experts_cost_memory_by_their_number_and_work_by_their_share() -> None:
    shape = load_shape("mixtral-8x7b")
    assert shape.active_params < 0.3 * shape.num_params
    assert shape.flops_per_token == 2 * shape.active_params
    experts = shape.num_moe_layers * shape.experts * shape.expert_params * 2
    everything = shape.weight_bytes - shape.embedding_params * 2 - shape.num_layers * shape.other_layer_params * 2
    assert shape.dense_bytes + experts + shape.head_bytes == pytest.approx(everything, rel=1e-6)


@unit
def test_a_window_is_of_the_layers_that_have_one() -> None:
    assert shape_of(config(sliding_window=512)).num_window_layers == 32
    assert shape_of(config(sliding_window=512, use_sliding_window=False)).window == 0
    mixed = config(sliding_window=512, layer_types=["sliding_attention", "full_attention"] * 16)
    assert shape_of(mixed).num_window_layers == 16


@pytest.mark.parametrize("name", ["gemma2", "gemma3_text", "cohere2", "olmo3", "exaone4", "qwen2", "qwen3", "mistral"])
def test_windowed_layers_are_those_of_transformers_where_a_config_does_not_list_them(name: str) -> None:
    """As hubs keep them: the configs of Gemma 2 and its like are older than the key layer_types."""
    from transformers import AutoConfig

    given = {"num_hidden_layers": 26, "sliding_window": 512, "use_sliding_window": True, "max_window_layers": 20}
    made = AutoConfig.for_model(name, **given)
    every_layer = ["sliding_attention"] * 26
    kinds = list(getattr(made, "layer_types", None) or every_layer)
    shape = shape_of(config(model_type=name, **given))
    assert (shape.window, shape.num_window_layers) == (512, kinds.count("sliding_attention"))


@unit
@pytest.mark.parametrize(
    ("quantised", "bits", "dtype"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4.15625, "bfloat16"),
        ({"quant_method": "gptq", "bits": 8}, 8.0, "bfloat16"),
        ({"quant_method": "fp8"}, 8.0, "float8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8.0, "bfloat16"),
    ],
)
def test_quantised_weights_are_smaller_and_their_embeddings_are_not(
    quantised: dict[str, Any], bits: float, dtype: str
) -> None:
    plain, shape = shape_of(config()), shape_of(config(quantization_config=quantised))
    assert (shape.weight_bits, shape.compute_dtype) == (bits, dtype)
    outer = 2 * (shape.embedding_params + shape.head_params + 32 * shape.other_layer_params)
    assert shape.weight_bytes - outer == pytest.approx((plain.weight_bytes - outer) * bits / 16)
    assert shape.kv_bytes_per_token == plain.kv_bytes_per_token


@unit
@pytest.mark.parametrize("quantised", [{"quant_method": "awq", "bits": 4, "group_size": 128}, {"quant_method": "fp8"}])
def test_a_quantised_checkpoint_is_served_in_full_width(quantised: dict[str, Any]) -> None:
    plain, shape = shape_of(config()), shape_of(config(quantization_config=quantised))
    assert shape.as_served() == plain.as_served() == plain
    assert shape.as_served().with_dtype("float32") == plain.with_dtype("float32")


@unit
def test_a_dtype_asked_for_changes_weights_and_kv() -> None:
    shape = load_shape("llama-3.1-8b")
    assert shape.with_dtype("float32").weight_bytes == 2 * shape.weight_bytes
    assert load_shape("opt-13b").with_dtype("auto").dtype == "bfloat16"
    with pytest.raises(PlanError, match="dtype is 'int3'; give one of auto"):
        shape.with_dtype("int3")


@unit
@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"hidden_size": None}, "hidden_size is missing; give it in its config.json"),
        ({"num_hidden_layers": "many"}, "num_hidden_layers is 'many'; give a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; give 1 or more"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"num_attention_heads": 33}, "33 heads do not divide hidden_size 4096; give head_dim"),
        ({"num_key_value_heads": 5}, "num_key_value_heads is 5, which does not divide 32 heads"),
        ({"torch_dtype": "int7"}, "dtype is 'int7'; give one of"),
        ({"is_encoder_decoder": True}, "is an encoder-decoder; give a decoder-only model"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "has layers of linear_attention, which is not KV"),
        ({"model_type": "mamba"}, "has layers of a recurrent state"),
        (
            {"model_type": "glm_moe_dsa"},
            "attends to those keys that an index chooses, which is not served; give another",
        ),
        ({"layer_types": ["minimax_m3_sparse"]}, "attends to those keys that an index chooses, which is not served"),
        ({"head_dim": "wide"}, "head_dim is 'wide'; give a whole number"),
        ({"head_dim": -128}, "head_dim is -128; give a whole number"),
        ({"num_hidden_layers": 10**400}, "give a whole number"),
        ({"sliding_window": "far"}, "sliding_window is 'far'; give a whole number"),
        ({"layer_types": 5}, "layer_types is 5; give a list of names"),
        ({"quantization_config": "gptq"}, "quantization_config is 'gptq'; give keys and values"),
        ({"quantization_config": {"config_groups": [1]}}, r"config_groups is \[1\]; give keys and values"),
        ({"text_config": "x"}, "text_config is 'x'; give keys and values"),
        ({"num_local_experts": 8, "num_experts_per_tok": 16}, "num_experts_per_tok is 16; give 1 to its 8 experts"),
        (
            {"num_local_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": ["last"]},
            r"mlp_only_layers is \['last'\]; give a list of whole numbers",
        ),
        (
            {"quantization_config": {"quant_method": "odd"}},
            "quantization_config.bits is None; give the bits of a weight",
        ),
    ],
)
def test_what_is_wrong_with_a_config_is_one_sentence(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(PlanError, match=sentence) as caught:
        shape_of(config(**changes))
    assert "\n" not in str(caught.value)


@unit
def test_a_model_is_found_by_directory_file_name_and_hub_id(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config()))
    by_name = load_shape("meta-llama/Llama-3.1-8B")
    assert load_shape(tmp_path).num_params == load_shape(tmp_path / "config.json").num_params == by_name.num_params
    assert load_shape(tmp_path).name == tmp_path.name


@unit
def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    for wrong, sentence in (
        ("llama-9", "model is 'llama-9', which is no directory and no config.json"),
        (str(tmp_path), "has no config.json"),
        (str(tmp_path / "list.json"), "is no object"),
        (str(tmp_path / "torn.json"), "is not JSON: line 1"),
    ):
        (tmp_path / "list.json").write_text("[]")
        (tmp_path / "torn.json").write_text("{")
        with pytest.raises(PlanError, match=sentence):
            load_shape(wrong)


@unit
@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({}, 131_072),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, 131_072),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, 131_072),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, 131_072),
    ],
)
def test_positions_are_those_that_a_worker_takes_unless_it_is_told(rope: dict[str, Any], positions: int) -> None:
    assert shape_of(config(rope_scaling=None) | rope).max_positions == positions

"""What configs of model families leave unsaid: tables, by `model_type`. Whatever is not in them is as Llama."""

from __future__ import annotations

from typing import Any

WINDOW_TYPES = ("sliding_attention", "chunked_attention", "local")
FULL_EVERY = {  # where a config lists no layer_types: one layer in so many looks at all of its context
    "gemma2": 2,
    "gpt_oss": 2,
    "cohere2": 4,
    "olmo3": 4,
    "exaone4": 4,
    "llama4_text": 4,
    "gemma3n_text": 5,
    "gemma3_text": 6,
}
WINDOW_IF_ASKED = ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe")  # by use_sliding_window, from max_window_layers on
PLAIN_MLP = (  # one matrix up, one down; all others have a gate beside the first
    *("opt", "gpt2", "bloom", "gpt_neox", "gptj", "falcon", "phi", "starcoder2", "mpt", "gpt_bigcode", "codegen"),
    *("gpt_neo", "biogpt", "persimmon", "nemotron", "xglm", "apertus", "arcee", "jais2", "nanochat"),
    *("bert", "bert-generation", "electra", "ernie", "roc_bert"),
)
FIRST_DENSE = {  # where a config does not say which layers have experts: so many of the first have none
    **dict.fromkeys(("axk1", "dots3_note_text", "exaone_moe", "glm4_moe_lite", "hy_v3"), 1),
    **dict.fromkeys(("afmoe", "ernie4_5_moe", "glm4_moe", "laguna", "mimo_v2_flash"), 1),
    **dict.fromkeys(("beam", "deepseek_v3"), 3),
}
NOT_COUNTED = (  # their configs' keys mean something else, or layers and their KV differ by more than a window
    *("deepseek_v4", "doge", "gemma3n_text", "gemma4_text", "gemma4_unified_text", "hrm_text", "jetmoe"),
    *("longcat_flash", "moshi"),
)
NO_KV_TYPES = (  # and others whose configs list layers of STATE_LAYERS, which not all of these do
    *("mamba", "mamba2", "rwkv", "falcon_mamba", "xlstm", "recurrent_gemma", "jamba", "bamba", "zamba", "zamba2"),
    *("falcon_h1", "lfm2", "lfm2_moe", "lfm3", "nemotron_h", "zaya", "minimax", "kimi_linear", "bailing_hybrid"),
    *("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text", "olmo_hybrid"),
    *("hymba", "minimax_text_01", "phi4flash", "plamo2"),  # these come with code of their own
)
INDEXED_TYPES = ("axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4")  # an index chooses the keys that a token attends to
INDEXED_LAYERS = ("sparse",)
STATE_LAYERS = ("linear_attention", "recurrent", "mamba", "conv", "lightning", "delta", "rwkv", "retention")
NEW_ERA = {"bias": False, "norm_bias": False, "positions": 0, "embedding_norm": False, "final_norm": True}
BERT = dict.fromkeys(("bias", "norm_bias", "has_positions", "embedding_norm", "head_bias", "tied"), True)
FAMILIES: dict[str, dict[str, Any]] = {  # what these configs leave unsaid; the rest are as Llama
    "opt": {"bias": True, "norm_bias": True, "positions": 2, "tied": True},
    "gpt2": {"bias": True, "norm_bias": True, "positions": 0, "has_positions": True, "tied": True},
    "bloom": {"bias": True, "norm_bias": True, "embedding_norm": True, "tied": True},
    "gpt_neox": {"bias": True, "norm_bias": True},
    "falcon": {"norm_bias": True, "tied": True},
    "phi": {"bias": True, "norm_bias": True, "head_bias": True, "norms": 1},
    "gptj": {"norm_bias": True, "norms": 1, "mlp_bias": True, "head_bias": True},
    "starcoder2": {"bias": True, "norm_bias": True, "tied": True},
    "gpt_bigcode": {"bias": True, "norm_bias": True, "has_positions": True, "tied": True, "kv_heads": 1},
    "qwen2": {"qkv_bias": True},
    "qwen2_moe": {"qkv_bias": True, "shared_gate": True},
    "qwen3": {"qk_norm": True},
    "qwen3_moe": {"qk_norm": True},
    "gemma": {"tied": True},
    "gemma2": {"tied": True, "norms": 4},
    "gemma3_text": {"tied": True, "norms": 4, "qk_norm": True},
    "cohere": {"tied": True, "norms": 1},
    "cohere2": {"tied": True, "norms": 1},
    "cohere2_moe": {"tied": True, "norms": 1},
    "llama4_text": {"shared_experts": 1},
    "hunyuan_v1_dense": {"qk_norm": True},
    "hunyuan_v1_moe": {"qk_norm": True, "shared_experts": 1},
    "xglm": {"bias": True, "norm_bias": True, "tied": True},
    "gpt_neo": {"norm_bias": True, "mlp_bias": True, "has_positions": True, "tied": True},
    "jais2": {"bias": True, "norm_bias": True},
    "gpt_oss": {"bias": True, "sinks": True, "expert_bias": True, "router_bias": True},
    "glm4_moe": {"router_bias": True},
    "deepseek_v3": {"router_bias": False},
    **dict.fromkeys(("bert", "ernie"), BERT | {"head_transform": True}),
    **dict.fromkeys(("bert-generation", "electra"), BERT),
    "roc_bert": BERT | {"head_transform": True, "joined_embeddings": ("shape", "pronunciation")},
    **{name: {"tied": True} for name in ("biogpt", "cohere_compass_text", "ernie4_5", "ernie4_5_moe", "granite_swa")},
    **{name: {"tied": True} for name in ("minicpm3", "modernbert-decoder", "mpt", "smollm3", "vaultgemma", "youtu")},
}

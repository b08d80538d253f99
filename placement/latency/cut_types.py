"""Which model types are cut over processes: by transformers' own tensor-parallel plans, which are not asked here.

What is in no list is planned whole: an unknown type, and one that only some of the transformers that kvrelay runs with
cut. tests/placement/latency/test_cut_types.py holds the lists against the engine.
"""

from __future__ import annotations

RANKS = frozenset(  # whose plan says nothing that engine/parallel/sharding.py does not know, and cuts their attention
    (
        *("apertus", "arcee", "axk1", "cohere", "cohere2", "cohere2_moe", "cohere_compass_text", "cwm"),
        *("deepseek_v2", "deepseek_v3", "dots1", "ernie4_5", "ernie4_5_moe", "exaone4", "exaone_moe"),
        *("flex_olmo", "gemma", "gemma2", "gemma3_text", "gemma4_text", "gemma4_unified_text", "glm4_moe"),
        *("glm4_moe_lite", "gpt_neox", "granite", "helium", "hy_v3", "hyperclovax", "internlm3"),
        *("iquestcoder", "jais2", "kolibri1", "laguna", "llama", "mellum", "minicpm3", "minimax_m2"),
        *("minimax_m3_vl_text", "ministral", "ministral3", "mistral", "mixtral", "nanochat", "olmo", "olmo2", "olmo3"),
        *("olmoe", "phi", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "solar_open"),
        *("starcoder2", "vaultgemma", "youtu"),
    )
)

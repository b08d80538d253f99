"""Tiny models of many architectures with random weights, saved as Hugging Face directories with one small tokenizer.

TEN are the architectures that must be served token for token; EXTRA are others that a user may bring, each exact or
refused; UNSUPPORTED must be refused at load, in a sentence. Weights are spread so that greedy output wanders, depends
on far context and seldom comes near a tie.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from kvrelay.demo_model import BOS_ID, EOS_ID, train_tokenizer

VOCAB = 512
MAX_POSITIONS = 1024
WINDOW = 32  # tokens; shorter than the longest test prompts

SPECIAL: dict[str, Any] = {"bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": None}
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "tie_word_embeddings": False,
    **SPECIAL,
}
MOE: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
ALTERNATING = ["sliding_attention", "full_attention", "sliding_attention"]

Builder = Callable[[], PreTrainedConfig]


def _like_llama(config_class: str, **changes: Any) -> Builder:
    """The named config class of transformers with the small shape."""
    return lambda: getattr(hf, config_class)(**{**SHAPE, **changes})


TEN: dict[str, Builder] = {
    "llama": _like_llama("LlamaConfig"),
    "qwen2": _like_llama("Qwen2Config"),
    "qwen3": _like_llama("Qwen3Config", head_dim=32),
    "mistral_window": _like_llama("MistralConfig", sliding_window=WINDOW),
    "gemma2": _like_llama(
        "Gemma2Config",
        head_dim=16,
        query_pre_attn_scalar=24,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=0.3,
        tie_word_embeddings=True,
    ),
    "gemma3_text": _like_llama(
        "Gemma3TextConfig", head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, layer_types=ALTERNATING
    ),
    "mixtral": _like_llama("MixtralConfig", num_local_experts=4),
    "opt": _like_llama(
        "OPTConfig",
        ffn_dim=128,
        word_embed_proj_dim=64,
        pad_token_id=EOS_ID,
    ),
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=MAX_POSITIONS, **SPECIAL
    ),
    "deepseek_v3": _like_llama(
        "DeepseekV3Config",
        num_key_value_heads=4,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
    ),
}

EXTRA: dict[str, Builder] = {
    "phi": _like_llama("PhiConfig", num_key_value_heads=4),
    "phi3": _like_llama("Phi3Config"),
    "qwen2_moe": _like_llama("Qwen2MoeConfig", shared_expert_intermediate_size=64, **MOE),
    "qwen3_moe": _like_llama("Qwen3MoeConfig", head_dim=16, **MOE),
    "olmo2": _like_llama("Olmo2Config"),
    "olmo3": _like_llama("Olmo3Config", sliding_window=WINDOW, layer_types=ALTERNATING),
    "olmoe": _like_llama("OlmoeConfig", num_experts=4, num_experts_per_tok=2),
    "gemma": _like_llama("GemmaConfig", head_dim=16),
    "gpt_oss": _like_llama(
        "GptOssConfig",
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=WINDOW,
        layer_types=ALTERNATING,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    ),
    "starcoder2": _like_llama("Starcoder2Config", sliding_window=None),
    "granite": _like_llama("GraniteConfig", embedding_multiplier=2.0, attention_multiplier=0.1, logits_scaling=2.0),
    "granitemoe": _like_llama("GraniteMoeConfig", num_local_experts=4, num_experts_per_tok=2),
    "cohere": _like_llama("CohereConfig", use_qk_norm=True, logit_scale=1.0),
    "cohere2": _like_llama("Cohere2Config", sliding_window=WINDOW, layer_types=ALTERNATING, logit_scale=1.0),
    "stablelm": _like_llama("StableLmConfig", use_qkv_bias=True, qk_layernorm=True),
    "gpt_neox": _like_llama("GPTNeoXConfig"),
    "gptj": lambda: hf.GPTJConfig(
        vocab_size=VOCAB,
        n_embd=64,
        n_layer=3,
        n_head=4,
        n_positions=MAX_POSITIONS,
        rotary_dim=8,
        tie_word_embeddings=False,
        **SPECIAL,
    ),
    "gpt_bigcode": lambda: hf.GPTBigCodeConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=MAX_POSITIONS, **SPECIAL
    ),
    "falcon": _like_llama("FalconConfig", alibi=False, new_decoder_architecture=True, num_kv_heads=2),
    "falcon_alibi": _like_llama("FalconConfig", alibi=True, multi_query=False, new_decoder_architecture=False),
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCAB, hidden_size=64, n_layer=3, n_head=4, **SPECIAL),
    "mpt": lambda: hf.MptConfig(
        vocab_size=VOCAB, d_model=64, n_layers=3, n_heads=4, max_seq_len=MAX_POSITIONS, expansion_ratio=2, **SPECIAL
    ),
    "glm": _like_llama("GlmConfig", head_dim=16),
    "glm4": _like_llama("Glm4Config", head_dim=16),
    "glm4_moe": _like_llama(
        "Glm4MoeConfig",
        head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        n_shared_experts=1,
        first_k_dense_replace=1,
    ),
    "smollm3": _like_llama("SmolLM3Config", no_rope_layers=[1, 0, 1]),
    "deepseek_v2": _like_llama(
        "DeepseekV2Config",
        num_key_value_heads=4,
        head_dim=8,
        q_lora_rank=32,
        kv_lora_rank=32,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        first_k_dense_replace=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        n_shared_experts=1,
        topk_method="greedy",
    ),
    "exaone4": _like_llama("Exaone4Config", sliding_window=WINDOW, layer_types=ALTERNATING),
    "ministral": _like_llama("MinistralConfig", head_dim=16, sliding_window=WINDOW, layer_types=ALTERNATING),
    "nemotron": _like_llama("NemotronConfig", head_dim=16),
    "persimmon": _like_llama("PersimmonConfig"),
    "helium": _like_llama("HeliumConfig", head_dim=16),
    "arcee": _like_llama("ArceeConfig"),
    "seed_oss": _like_llama("SeedOssConfig", head_dim=16),
    "ernie4_5": _like_llama("Ernie4_5Config", head_dim=16),
    "hunyuan_v1_dense": _like_llama("HunYuanDenseV1Config", head_dim=16),
    "apertus": _like_llama("ApertusConfig"),
    "llama_linear_rope": _like_llama(
        "LlamaConfig", rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    ),
    "llama3_rope": _like_llama(
        "LlamaConfig",
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "qwen3_yarn": _like_llama(
        "Qwen3Config",
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 256,
        },
    ),
    "xglm": lambda: hf.XGLMConfig(
        vocab_size=VOCAB,
        d_model=64,
        ffn_dim=128,
        num_layers=3,
        attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        bos_token_id=BOS_ID,
        eos_token_id=EOS_ID,
    ),
    "gpt_neo": lambda: hf.GPTNeoConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_layers=2,
        attention_types=[[["global", "local"], 1]],
        num_heads=4,
        window_size=WINDOW,
        max_position_embeddings=MAX_POSITIONS,
        **SPECIAL,
    ),
    "llama4_text": _like_llama(
        "Llama4TextConfig",
        head_dim=16,
        intermediate_size_mlp=128,
        num_local_experts=2,
        num_experts_per_tok=1,
        attention_chunk_size=WINDOW,
        no_rope_layers=[1, 1, 0],
        floor_scale=16,  # of the queries' temperatures: as if positions were hundreds of times further
    ),
    "diffllama": _like_llama("DiffLlamaConfig"),
    "codegen": lambda: hf.CodeGenConfig(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=MAX_POSITIONS, rotary_dim=8, **SPECIAL
    ),
}

# Beside EXTRA, whose sweep they would only make longer.
OTHERS: dict[str, Builder] = {
    "bert_decoder": lambda: hf.BertConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=MAX_POSITIONS,
        is_decoder=True,
        **SPECIAL,
    ),
    "modernbert_decoder": _like_llama("ModernBertDecoderConfig", local_attention=WINDOW, pad_token_id=EOS_ID),
    "dbrx": lambda: hf.DbrxConfig(
        vocab_size=VOCAB,
        d_model=64,
        n_heads=4,
        n_layers=2,
        max_seq_len=MAX_POSITIONS,
        attn_config={"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8},
        ffn_config={"ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
        **SPECIAL,
    ),
    "gemma3n_text": _like_llama(
        "Gemma3nTextConfig",
        head_dim=16,
        num_hidden_layers=5,
        num_kv_shared_layers=2,
        layer_types=[*ALTERNATING, "sliding_attention", "full_attention"],
        sliding_window=WINDOW,
        activation_sparsity_pattern=[0.95, 0.95, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB,
        laurel_rank=8,
        altup_num_inputs=2,
    ),
    "hunyuan_v1_moe": _like_llama("HunYuanMoEV1Config", head_dim=16, num_experts=4, moe_topk=2, pad_token_id=EOS_ID),
    "phi4_multimodal": _like_llama(  # of text: its parts for images and sound are small, and not run
        "Phi4MultimodalConfig",
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": 28,
            "patch_size": 14,
        },
        audio_config={"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1, "num_attention_heads": 2},
    ),
}

LINEAR = ["linear_attention", "full_attention", "linear_attention"]
DELTA: dict[str, Any] = {  # of gated delta rules
    "head_dim": 16,
    "layer_types": LINEAR,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}

HYBRIDS: dict[str, Builder] = {  # keep a state beside KV, or only that
    "qwen3_next": _like_llama("Qwen3NextConfig", shared_expert_intermediate_size=64, **DELTA, **MOE),
    "qwen3_5_text": _like_llama("Qwen3_5TextConfig", **DELTA),
    "nemotron_h": _like_llama(
        "NemotronHConfig",
        layers_block_type=["mamba", "attention", "mlp", "mamba"],
        num_hidden_layers=4,
        head_dim=16,
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=16,
        n_groups=2,
        chunk_size=16,
    ),
    "falcon_mamba": lambda: hf.FalconMambaConfig(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, state_size=8, **SPECIAL
    ),
    "recurrent_gemma": _like_llama("RecurrentGemmaConfig", lru_width=64, attention_window_size=WINDOW),
}

# Beside HYBRIDS, whose sweep they would only make longer.
MORE_HYBRIDS: dict[str, Builder] = {
    "mamba": lambda: hf.MambaConfig(vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, **SPECIAL),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCAB, hidden_size=64, num_hidden_layers=2, num_heads=8, head_dim=16, state_size=16, **SPECIAL
    ),
    "minimax": _like_llama(
        "MiniMaxConfig", head_dim=16, num_local_experts=2, num_experts_per_tok=1, block_size=16, layer_types=LINEAR
    ),
    "lfm2": _like_llama("Lfm2Config", layer_types=["conv", "full_attention", "conv"]),
    "jamba": _like_llama("JambaConfig", num_experts=2, attn_layer_period=2, attn_layer_offset=1, mamba_d_state=8),
    "falcon_h1": _like_llama("FalconH1Config", mamba_d_ssm=64, mamba_n_heads=4, mamba_d_state=8, mamba_d_head=16),
    "bamba": _like_llama(
        "BambaConfig", attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16, mamba_chunk_size=16
    ),
    "granitemoehybrid": _like_llama(
        "GraniteMoeHybridConfig",
        layer_types=LINEAR,
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=64,
        mamba_n_heads=8,
        mamba_d_head=16,
        mamba_d_state=16,
        mamba_n_groups=1,
        mamba_chunk_size=16,
    ),
    "lfm2_moe": _like_llama(
        "Lfm2MoeConfig",
        layer_types=["conv", "full_attention", "conv"],
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        num_dense_layers=1,
    ),
}

ROPE_LIMIT = 40  # tokens, up to which the frequencies of these do not go by the length
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "original_max_position_embeddings": ROPE_LIMIT,
    "short_factor": [1.0] * 8,
    "long_factor": [2.0 + i for i in range(8)],
}
LENGTH_ROPES: dict[str, Builder] = {
    "llama_dynamic_rope": _like_llama(
        "LlamaConfig",
        max_position_embeddings=ROPE_LIMIT,
        rope_parameters={"rope_type": "dynamic", "factor": 16.0, "rope_theta": 10000.0},
    ),
    "llama_longrope": _like_llama("LlamaConfig", rope_parameters=LONGROPE),
    "phi3_longrope": _like_llama("Phi3Config", original_max_position_embeddings=ROPE_LIMIT, rope_parameters=LONGROPE),
}

UNSUPPORTED: dict[str, Builder] = {
    "t5": lambda: hf.T5Config(
        vocab_size=VOCAB,
        d_model=64,
        d_ff=128,
        d_kv=16,
        num_layers=2,
        num_heads=4,
        eos_token_id=EOS_ID,
        decoder_start_token_id=BOS_ID,
    ),
    "bert": lambda: hf.BertLMHeadModel.config_class(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        is_decoder=False,
    ),
}

ZOO: dict[str, Builder] = {**TEN, **EXTRA, **OTHERS, **HYBRIDS, **MORE_HYBRIDS, **LENGTH_ROPES, **UNSUPPORTED}


def make_tiny_model(name: str, directory: str | Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write the architecture's config, weights, generation config and tokenizer; return the directory."""
    torch.manual_seed(seed)  # what the spread leaves as the library made it
    return save_spread(_instantiate(ZOO[name]()), directory, seed, dtype)


def save_spread(model: PreTrainedModel, directory: str | Path, seed: int = 0, dtype: str = "float32") -> Path:
    """Write a model, its weights spread, with generation config and tokenizer; return the directory."""
    target = Path(directory)
    target.mkdir(parents=True, exist_ok=True)
    _spread_weights(model, seed)
    model.generation_config = GenerationConfig(bos_token_id=BOS_ID, eos_token_id=EOS_ID)
    model.to(getattr(torch, dtype)).save_pretrained(target)
    _tokenizer().save_pretrained(target)
    return target


@cache
def _tokenizer() -> Any:
    return train_tokenizer(VOCAB)


def _instantiate(config: PreTrainedConfig) -> PreTrainedModel:
    if getattr(config, "is_encoder_decoder", False):
        return hf.AutoModelForSeq2SeqLM.from_config(config)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _spread_weights(model: PreTrainedModel, seed: int) -> None:
    """Embeddings of size 1, projections that keep the size of their input, norms and biases off their neutral values.

    Queries and keys are larger, so that attention picks few tokens and the output depends on far ones. Where the head
    is tied to the embedding, that is small beside what layers add: else the likeliest token is the last one again.
    """
    generator = torch.Generator().manual_seed(seed)
    is_tied = model.config.get_text_config().tie_word_embeddings
    embedding, gain = (0.02, 3.0) if is_tied else (1.0, 1.0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float32)
            if weight.ndim < 2:
                weight.add_(0.1 * noise)
            else:
                weight.copy_(noise * _spread(name, weight, embedding, gain))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(0.1 * torch.randn(buffer.shape, generator=generator))


def _spread(name: str, weight: torch.Tensor, embedding: float, gain: float) -> float:
    if any(part in name for part in ("embed", "wte", "wpe")):
        return embedding
    if any(part in name for part in ("q_proj", "k_proj", "q_b_proj")):
        return 2.0 / math.sqrt(weight.shape[-1])
    if "lm_head" in name:
        return 3.0 / math.sqrt(weight.shape[-1])
    return gain / math.sqrt(min(weight.shape[-2:]))

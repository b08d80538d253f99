"""A model's FlashInfer modules by its config alone are those that a load of it goes by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine.loading.gpu import shapes_of
from engine.loading.outline import modules_needed, probe_of
from engine.options import EngineOptions
from engine.weights.config import served_config
from tests.engine.rehearsal import rehearse
from tests.engine.test_engine import save

BF16 = torch.bfloat16
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": 20}),
    "gemma2": ("Gemma2Config", {"head_dim": 16, "sliding_window": 24}),
    "gpt2": ("GPT2Config", {"n_embd": 64, "n_head": 4, "n_layer": 2, "n_positions": 256}),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4}),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_shapes_are_those_of_the_loaded_model(tmp_path: Path, name: str) -> None:
    config, changes = MODELS[name]
    directory = save(tmp_path, config, **changes)
    loaded = rehearse(directory, fused=False, cuda_graphs=False, parity_check=False)
    outline = probe_of(served_config(EngineOptions(model=directory, dtype="float32")))
    assert outline.layers == loaded.model.probe.layers
    assert shapes_of(outline, 16, BF16) == shapes_of(loaded.model.probe, 16, BF16)


def directory_of(folder: Path, config: transformers.PretrainedConfig, architecture: str) -> str:
    config.save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"architectures": [architecture], "dtype": "bfloat16"}))
    return str(folder)


def test_a_model_of_many_gigabytes_is_outlined_without_them(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(
        hidden_size=8192, intermediate_size=28672, num_hidden_layers=8, num_attention_heads=64, num_key_value_heads=8
    )
    options = EngineOptions(model=directory_of(tmp_path, config, "LlamaForCausalLM"))
    names = [name for name, _ in modules_needed(options, (9, 0))]
    assert names[4:] == [*["gen_batch_prefill_module"] * 2, "gen_batch_decode_module", "gen_xqa_module"]
    assert len(modules_needed(options, (8, 0))) == 6


@pytest.mark.parametrize(
    ("config", "architecture", "reason"),
    [
        (
            transformers.DeepseekV3Config(num_hidden_layers=2, hidden_size=256, num_attention_heads=4),
            "DeepseekV3ForCausalLM",
            "runs without FlashInfer; layer 0: its keys are 192 wide and its values 128",
        ),
        (
            transformers.LlamaConfig(num_hidden_layers=2, hidden_size=384, num_attention_heads=4),
            "LlamaForCausalLM",
            "runs without FlashInfer; layer 0: its heads are 96 wide",
        ),
    ],
)
def test_a_model_that_flashinfer_cannot_serve_is_told_so(
    tmp_path: Path, config: transformers.PretrainedConfig, architecture: str, reason: str
) -> None:
    with pytest.raises(ValueError, match=reason):
        modules_needed(EngineOptions(model=directory_of(tmp_path, config, architecture)), (9, 0))

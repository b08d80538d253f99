"""LoRA adapters made by PEFT for the tiny models, and what PEFT makes of a model with one merged into it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from engine.adapters.files import read_adapter
from engine.types import Adapter
from tests.greedy import eager_model

KINDS: dict[str, dict[str, Any]] = {
    "usual": {"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "everywhere": {"r": 16, "lora_alpha": 16, "target_modules": "all-linear"},
    "odd": {
        "r": 5,
        "lora_alpha": 9,
        "use_rslora": True,
        "target_modules": ["o_proj", "down_proj", "up_proj"],
        "rank_pattern": {"down_proj": 3},
        "alpha_pattern": {"layers.1.mlp.up_proj": 20},
    },
}
SPREAD = 0.15  # of random weights: enough to change most tokens


def make_adapter(model: Path, kind: str | dict[str, Any], directory: Path, seed: int = 0) -> Path:
    """As PEFT saves one, with random weights."""
    config = LoraConfig(task_type="CAUSAL_LM", **(KINDS[kind] if isinstance(kind, str) else kind))
    made = get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in made.named_parameters():
            if ".lora_" in name:
                weight.copy_(SPREAD * torch.randn(weight.shape, generator=generator))
    made.save_pretrained(directory)
    return directory


def adapter_at(directory: Path) -> Adapter:
    return Adapter(name=directory.name, path=str(directory), digest=read_adapter(str(directory)).digest)


def merged(model: Path, adapter: Path | None) -> Any:
    """The model with the adapter merged into its weights, by PEFT."""
    made = eager_model(model)
    return made if adapter is None else PeftModel.from_pretrained(made, str(adapter)).merge_and_unload()

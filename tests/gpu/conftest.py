"""Everything here needs a CUDA GPU; without one it is skipped, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.test_engine import save

# Half precision and a head_dim that FlashInfer has kernels for; small weights, so that logits stay well apart.
# Eight query heads on two, 128 wide, as in the contract's cases: few kernels to compile.
SHAPE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {"head_dim": 128}),
    "qwen2": ("Qwen2Config", {"hidden_size": 1024}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "mistral": ("MistralConfig", {"head_dim": 128, "sliding_window": 20}),
    # Weights wide and a soft cap low enough to matter: a kernel that leaves it out says other tokens.
    "gemma2": (
        "Gemma2Config",
        {"head_dim": 128, "sliding_window": 24, "attn_logit_softcapping": 0.5, "initializer_range": 0.1},
    ),
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here not in Path(item.path).parents:
            continue
        item.add_marker(pytest.mark.gpu)
        item.add_marker(pytest.mark.alone)
        if not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch finds none here"))


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return {
        name: save(tmp_path_factory.mktemp(name), config, **{**SHAPE, **changes})
        for name, (config, changes) in MODELS.items()
    }

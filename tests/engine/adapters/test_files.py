"""What of an adapter's files cannot be served is told in a sentence; what can is read as PEFT means it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engine.adapters.files import CONFIG, WEIGHTS, AdapterError, describe, read_adapter

pytestmark = pytest.mark.unit

LAYER = "model.layers.0.self_attn.q_proj"
PLAIN = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 4, "lora_alpha": 8, "bias": "none"}


def save(folder: Path, *, shapes: dict[str, tuple[int, ...]] | None = None, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(PLAIN | config))
    shapes = shapes or {"lora_A": (4, 8), "lora_B": (6, 4)}
    save_file(
        {f"base_model.model.{LAYER}.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()},
        folder / WEIGHTS,
    )
    return folder


def test_it_says_what_is_added_where(tmp_path: Path) -> None:
    files = read_adapter(str(save(tmp_path)))
    assert files.parts == {LAYER: (4, 8, 6, 2.0)}
    assert (files.rank, files.num_params) == (4, 4 * (8 + 6))


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({"use_rslora": True}, 4.0),
        ({"alpha_pattern": {"q_proj": 2}}, 0.5),
        ({"alpha_pattern": {r"layers\.\d.self_attn.q_proj": 1}}, 0.25),
        ({"alpha_pattern": {"v_proj": 2}}, 2.0),
        ({"r": 16, "rank_pattern": {"q_proj": 4}}, 2.0),
    ],
)
def test_the_scale_is_pefts(tmp_path: Path, config: dict[str, Any], scale: float) -> None:
    parts = describe(str(save(tmp_path, **config)))
    assert parts[LAYER].scale == scale


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', and LORA adapters are served"),
        ({"task_type": "SEQ_CLS"}, "task_type is 'SEQ_CLS', and CAUSAL_LM is served"),
        ({"use_dora": True}, "use_dora is True, which is not served; train it without"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\], which is not served"),
        ({"bias": "all"}, "bias is 'all', and none is served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base model"),
        ({"alpha_pattern": {"q_proj(": 2}}, r"alpha_pattern is \{'q_proj\(': 2\}; give each by modules' names"),
        ({"alpha_pattern": {"([a-z_.0-9]+)+!": 2}}, "alpha_pattern is .*; give each by modules' names"),
        ({"alpha_pattern": {"q_proj\\": 2}}, "alpha_pattern is .*"),
        ({"alpha_pattern": ["q_proj"]}, "alpha_pattern is .*; give each by modules' names"),
        ({"lora_alpha": 10**400}, "cannot be read"),
        ({"r": 5}, f"r of {LAYER} is 5, and its weights have rank 4; give files of one adapter"),
        ({"r": 0}, f"r of {LAYER} is 0, and its weights have rank 4"),
        ({"r": None}, f"r of {LAYER} is None, and its weights have rank 4"),
        ({"rank_pattern": {"q_proj": 8}}, f"r of {LAYER} is 8, and its weights have rank 4"),
        ({"rank_pattern": {"q_proj(": 4}}, r"rank_pattern is \{'q_proj\(': 4\}; give each by modules' names"),
        ({"use_new_thing": True}, "use_new_thing is True, which is not served"),
        ({"lora_alpha": None}, f"lora_alpha of {LAYER} is None; give a number"),
        ({"shapes": {"lora_A": (4, 8), "lora_B": (6, 5)}}, f"lora_A and lora_B of {LAYER} do not fit each other"),
        ({"shapes": {"lora_A": (4, 8)}}, f"lora_A and lora_B of {LAYER} do not fit each other"),
        ({"shapes": {"lora_A": (600, 8), "lora_B": (6, 600)}}, f"{LAYER} has rank 600; up to 512 is served"),
        ({"shapes": {"lora_A": (4, 8), "lora_magnitude_vector": (6, 1)}}, "which is no part of a plain LoRA"),
    ],
)
def test_what_cannot_be_served_is_refused(tmp_path: Path, config: dict[str, Any], why: str) -> None:
    with pytest.raises(AdapterError, match=why):
        describe(str(save(tmp_path, **config)))


@pytest.mark.parametrize(
    ("module", "part"),
    [("lm_head", "base_layer.weight"), ("model.embed_tokens", "lora_embedding_A")],
)
def test_heads_and_embeddings_are_not_served(tmp_path: Path, module: str, part: str) -> None:
    """PEFT keeps the whole layer beside what is added to it."""
    folder = save(tmp_path)
    save_file({f"base_model.model.{module}.{part}": np.ones((4, 8), np.float32)}, folder / WEIGHTS)
    with pytest.raises(AdapterError, match=f"changes {module}, and adapters of heads and embeddings are not served; "):
        describe(str(folder))


def test_files_that_are_not_there_or_broken_are_told(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no adapter_config.json; give a directory as PEFT saves one"):
        describe(str(tmp_path / "nowhere"))
    folder = save(tmp_path / "a")
    (folder / CONFIG).write_text("[")
    with pytest.raises(AdapterError, match="cannot be read"):
        describe(str(folder))
    (folder / WEIGHTS).write_bytes(b"no safetensors")
    with pytest.raises(AdapterError, match="cannot be read"):
        describe(str(folder))
    (folder / WEIGHTS).unlink()
    with pytest.raises(AdapterError, match=r"has no adapter_model.safetensors"):
        describe(str(folder))


def test_the_digest_is_of_all_that_it_is(tmp_path: Path) -> None:
    digest = read_adapter(str(save(tmp_path / "a"))).digest
    assert read_adapter(str(save(tmp_path / "b"))).digest == digest
    assert read_adapter(str(save(tmp_path / "c", lora_alpha=9))).digest != digest
    weights = {
        f"base_model.model.{LAYER}.lora_{w}.weight": np.full(s, 2, np.float32)
        for w, s in (("A", (4, 8)), ("B", (6, 4)))
    }
    save_file(weights, tmp_path / "b" / WEIGHTS)
    assert read_adapter(str(tmp_path / "b")).digest != digest


@pytest.mark.parametrize("name", [CONFIG, WEIGHTS])
def test_what_an_open_could_wait_for_is_not_opened(tmp_path: Path, name: str) -> None:
    path = save(tmp_path)
    (path / name).unlink()
    os.mkfifo(path / name)
    for read in (describe, read_adapter):
        with pytest.raises(AdapterError, match=f"{name} is no regular file; give a directory as PEFT saves one"):
            read(str(path))

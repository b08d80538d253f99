"""What models with a state beside KV take for a step, beside transformers' own `generate`.

    python -m bench.states [--rounds 5] [--quick]

Models of 50 to 107 million random parameters in bfloat16 on two threads, one for each kind of state: gated delta rules
with attention in every fourth layer (Qwen3-Next), Mamba 2 with attention (Bamba), Mamba 1 alone (Falcon-Mamba). The
engine takes turns with transformers: decode steps at batch 1, 8 and 32, prefill of 128, 512 and 2,048 tokens. Both run
the same code of each such layer; the engine's has its states in pages, from which they are read and to which they are
written in each step. Writes bench/results/states.json.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console

from bench.common import about, save
from bench.engine import DECODE_BATCHES, compared, generate, in_turns, ours
from engine.engine import Engine
from engine.options import EngineOptions
from engine.pages.layout import kv_and_state_bytes
from engine.process import set_environment
from tests import zoo

PREFILLS = (128, 512, 2048)
STEPS = 8  # of a turn
THREADS = 2
SHAPE: Mapping[str, Any] = {
    "vocab_size": 30_000,
    "hidden_size": 768,
    "num_hidden_layers": 12,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    **zoo.SPECIAL,
}
ATTENTION: Mapping[str, Any] = {"num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048}
KINDS: Mapping[str, Callable[[], Any]] = {
    "Qwen3-Next": lambda: transformers.Qwen3NextConfig(
        **SHAPE,
        **ATTENTION,
        head_dim=64,
        mlp_only_layers=list(range(12)),
        linear_num_key_heads=4,
        linear_num_value_heads=8,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
    ),
    "Bamba": lambda: transformers.BambaConfig(
        **SHAPE,
        **ATTENTION,
        attn_layer_indices=[3, 7, 11],
        mamba_n_heads=24,
        mamba_d_head=64,
        mamba_d_state=64,
    ),
    "Falcon-Mamba": lambda: transformers.FalconMambaConfig(**SHAPE, state_size=16),
}


def measure(kind: str, folder: Path, rounds: int) -> dict[str, Any]:
    zoo.save_spread(transformers.AutoModelForCausalLM.from_config(KINDS[kind]()), folder, dtype="bfloat16")
    engine = Engine.load(EngineOptions(model=str(folder), threads=THREADS, max_model_len=4096, kv_bytes=1 << 30))
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    contenders = {"kvrelay": ours(engine, STEPS), "generate": generate(model, STEPS)}
    with torch.inference_mode():
        took = in_turns(contenders, DECODE_BATCHES, PREFILLS, rounds)
    layout = engine.layout
    kv, state = kv_and_state_bytes(layout.layers, layout.page_size, layout.dtype)
    return {
        "params_m": round(engine.info.num_params / 1e6, 1),
        "page_tokens": layout.page_size,
        "page_kv_mb": round(kv / 1e6, 2),
        "page_state_mb": round(state / 1e6, 2),
        "times": {name: compared(by, "kvrelay", "generate") for name, by in took.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.states", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="turns of each")
    parser.add_argument("--quick", action="store_true", help="two turns; writes no file")
    args = parser.parse_args()
    set_environment(THREADS)
    torch.set_num_threads(THREADS)
    result: dict[str, Any] = about() | {"transformers": transformers.__version__, "kinds": {}}
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as folder:
            result["kinds"][kind] = measure(kind, Path(folder), 2 if args.quick else args.rounds)
        Console().print({kind: result["kinds"][kind]})
    if not args.quick:
        print(f"written to {save('states', result)}")


if __name__ == "__main__":
    main()

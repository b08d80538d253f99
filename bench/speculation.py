"""What guessing ahead brings: decode tokens/s with a draft model, by prompt lookup, by heads, and without, in turns.

    python -m bench.speculation [--rounds 3] [--heads] [--quick]

A model of 303M parameters whose later layers add little, and a draft model that is its first two: a kind of pair that
agrees on most tokens and not on all. One mixed worker with two threads (`kvrelay up`) serves 1, 8 and 32 requests at
once, at temperature 0 and 1, each with the same seeds by all three ways, which must have the same tokens. Tokens/s are
those of all requests after their first token. Writes bench/results/speculation.json. Exit code 1 where a token differs.

With --heads: a model of the same shape whose tokens mostly follow each other in a chain, and Medusa's heads that know
seven of ten links of it. Writes bench/results/speculation_heads.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bench.common import MODELS, about, save
from bench.e2e import cluster, console, spec
from bench.rounds import spread
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion

WAYS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "lookup": {"num_speculative_tokens": 4},
    "draft model": {"num_speculative_tokens": 4, "speculative_model": "draft"},
}
HEAD_WAYS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "heads": {"num_speculative_tokens": 4, "speculative_model": "heads"},
}
BATCHES = {1: 96, 8: 96, 32: 64}  # requests at once, and tokens of each
TEMPERATURES = (0.0, 1.0)
PROMPT_TOKENS = 64
SHAPE = {
    "vocab_size": 16000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
DRAFT_LAYERS = 2
ADDED = 0.04  # by each later layer, of what the first ones add
HEAD = 6.0  # times as wide: a token is as likely as those of trained models are, two nats


def pair() -> dict[str, Path]:
    """The model and its draft model, made once in .bench/."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvrelay.demo_model import train_tokenizer

    made = {name: MODELS / f"speculation-{name}" for name in ("model", "draft")}
    if all((path / "tokenizer.json").exists() for path in made.values()):
        return made
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).to(torch.bfloat16)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5)
        model.lm_head.weight *= HEAD
        for layer in model.model.layers[DRAFT_LAYERS:]:
            layer.self_attn.o_proj.weight *= ADDED
            layer.mlp.down_proj.weight *= ADDED
    model.save_pretrained(made["model"])
    model.model.layers = model.model.layers[:DRAFT_LAYERS]
    model.config.num_hidden_layers = DRAFT_LAYERS
    model.save_pretrained(made["draft"])
    for path in made.values():
        train_tokenizer(SHAPE["vocab_size"]).save_pretrained(path)
    return made


CHAIN = 0.36  # how sure the next link is: as likely as three of four at temperature 1
KNOWN = 0.7  # of the links, by each head


def chain() -> dict[str, Path]:
    """A model whose next token is mostly that of a chain, and heads that know most of it, made once in .bench/."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvrelay.demo_model import train_tokenizer

    made = {name: MODELS / f"speculation-{name}" for name in ("chain", "heads")}
    if (made["heads"] / "config.json").exists():
        return {"model": made["chain"], "heads": made["heads"]}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)).to(torch.bfloat16)
    vocab, hidden = SHAPE["vocab_size"], SHAPE["hidden_size"]
    before, tensors = torch.randperm(vocab), {}  # the link before each
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim > 1:
                weight.normal_(0.0, 1.0 if "embed_tokens" in name else weight.shape[1] ** -0.5)
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= ADDED
            layer.mlp.down_proj.weight *= ADDED
        rows = model.model.embed_tokens.weight * (CHAIN * hidden**-0.5)
        link = before
        model.lm_head.weight.copy_(rows[link])
        for head in range(HEAD_WAYS["heads"]["num_speculative_tokens"]):
            link = before[link]
            known = torch.where(torch.rand(vocab) < KNOWN, link, link.roll(1))
            tensors[f"{head}.0.linear.weight"] = torch.zeros(hidden, hidden, dtype=torch.bfloat16)
            tensors[f"{head}.0.linear.bias"] = torch.zeros(hidden, dtype=torch.bfloat16)
            tensors[f"{head}.1.weight"] = rows[known].contiguous()
    model.save_pretrained(made["chain"])
    train_tokenizer(vocab).save_pretrained(made["chain"])
    made["heads"].mkdir(parents=True, exist_ok=True)
    save_file(tensors, made["heads"] / "medusa_lm_head.safetensors")
    (made["heads"] / "config.json").write_text(json.dumps({"medusa_num_heads": len(tensors) // 3}))
    return {"model": made["chain"], "heads": made["heads"]}


async def served(endpoint: str) -> list[dict[str, Any]]:
    """Of each batch and temperature: tokens/s, guesses, and a word for all tokens."""
    rows = []
    async with AsyncClient(endpoint) as client:
        await _batch(client, 2, 8, 1.0)
        for temperature in TEMPERATURES:
            for batch, tokens in BATCHES.items():
                answers = await _batch(client, batch, tokens, temperature)
                timelines = [each.timeline for each in answers if each.timeline is not None]
                rows.append(
                    {
                        "temperature": temperature,
                        "batch": batch,
                        "tokens_per_s": sum(1 / each.tpot_s for each in timelines),
                        "drafted": sum(each.drafted_tokens for each in timelines),
                        "accepted": sum(each.accepted_tokens for each in timelines),
                        "tokens": [list(each.token_ids) for each in answers],
                    }
                )
    return rows


async def _batch(client: AsyncClient, batch: int, tokens: int, temperature: float) -> Sequence[Completion]:
    def prompt(seed: int) -> list[int]:
        rng = random.Random(seed)
        return [rng.randrange(10, SHAPE["vocab_size"]) for _ in range(PROMPT_TOKENS)]

    asked = [
        client.generate(
            prompt(seed), seed=seed, max_tokens=tokens, ignore_eos=True, temperature=temperature, timeout_s=300
        )
        for seed in range(batch)
    ]
    return await asyncio.gather(*asked)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.speculation", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times that each way is played")
    parser.add_argument("--heads", action="store_true", help="by heads, in place of a draft model and prompt lookup")
    parser.add_argument("--quick", action="store_true", help="one round; writes no file")
    args = parser.parse_args()
    result, made = about(), chain() if args.heads else pair()
    tried = HEAD_WAYS if args.heads else WAYS
    found: dict[tuple[float, int], dict[str, list[dict[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    for number in range(1 if args.quick else args.rounds):
        for way, keys in list(tried.items())[:: -1 if number % 2 else 1]:
            draft = {key: str(made[name]) for key, name in keys.items() if key == "speculative_model"}
            pool = {"role": "mixed", "threads": 2, "kv_memory": "512MiB", **keys, **draft}
            with cluster(spec(made["model"]) | {"pools": [pool]}) as running:
                for row in asyncio.run(served(running.endpoint)):
                    found[row["temperature"], row["batch"]][way].append(row)
                    console.print(f"{number} {way}: {json.dumps({k: v for k, v in row.items() if k != 'tokens'})}")
    differing = sum(
        row["tokens"] != ways["none"][0]["tokens"] for ways in found.values() for rows in ways.values() for row in rows
    )
    result |= {"rows": [_row(*case, ways) for case, ways in found.items()], "answers_that_differ": differing}
    console.print(result["rows"], f"batches with other tokens: {differing}")
    if not args.quick:
        console.print(f"written to {save('speculation_heads' if args.heads else 'speculation', result)}")
    return 1 if differing else 0


def _row(temperature: float, batch: int, ways: Mapping[str, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    row: dict[str, Any] = {"temperature": temperature, "batch": batch, "ways": {}}
    plain = [each["tokens_per_s"] for each in ways["none"]]
    for way, rows in ways.items():
        speeds, drafted = [each["tokens_per_s"] for each in rows], sum(each["drafted"] for each in rows)
        row["ways"][way] = {
            "tokens_per_s": round(median(speeds), 1),
            "ratio": spread(list(zip(plain, speeds, strict=True))),
            "drafted": drafted // len(rows),
            "accepted_share": round(sum(each["accepted"] for each in rows) / drafted, 3) if drafted else None,
        }
    return row


if __name__ == "__main__":
    raise SystemExit(main())

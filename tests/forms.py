"""A tokenizer of single bytes and some words, and answers drawn at random of the tokens that a form allows."""

from __future__ import annotations

import random
from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engine.sampling.structured import Constraint, StructuredOutputs
from engine.types import ModelInfo

EOS, EOS_ID = "</s>", 0
WORDS = ("true", "false", "null", '{"', '":', '", "', "name", "12", "  ", "\n  ", "yes", "no")
MODEL = ModelInfo(
    name="m",
    architecture="a",
    fingerprint="f",
    dtype="float32",
    vocab_size=320,  # more than the tokenizer has
    max_model_len=4096,
    eos_token_ids=(EOS_ID,),
    num_layers=1,
    num_params=1,
    weight_bytes=4,
)


def byte_tokenizer(added: Sequence[str] = (), *, are_special: bool = True) -> Tokenizer:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [split.pre_tokenize_str(word)[0][0] for word in WORDS]
    texts = dict.fromkeys([EOS, *added, *sorted(pre_tokenizers.ByteLevel.alphabet()), *words])
    made = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    made.pre_tokenizer, made.decoder = split, decoders.ByteLevel()
    made.add_special_tokens([AddedToken(EOS, special=True)])
    made.add_tokens([AddedToken(text, special=are_special, normalized=False) for text in added])
    return made


def allowed(constraint: Constraint, ids: Sequence[int]) -> list[int]:
    """What may follow these tokens."""
    bits = constraint.after(ids).bits()
    assert len(bits) == MODEL.vocab_size // 8
    return [i for i in range(MODEL.vocab_size) if bits[i >> 3] >> (i & 7) & 1]


def walk(
    outputs: StructuredOutputs,
    grammar: str,
    chance: random.Random,
    liked: Sequence[Sequence[int]] = (),
    most: int = 1000,
) -> list[int]:
    """Tokens drawn of those allowed, without the EOS at their end. `liked`: what is said rather than anything."""
    constraint, ids, saying = outputs.constraint(grammar), list[int](), list[int]()
    for _ in range(most):
        may_follow = allowed(constraint, ids)
        assert may_follow, constraint.error
        if not saying:
            if EOS_ID in may_follow and chance.random() < 0.3:
                return ids
            if liked and chance.random() < 0.6:
                saying = list(chance.choice(liked))
        if saying and saying[0] in may_follow:
            token = saying.pop(0)
        else:
            token, saying = chance.choice(may_follow), []
        if token != EOS_ID:
            ids.append(token)
    raise AssertionError("it does not end")

"""The parity check: does the paged path say what the model's own eager path says?

Two short prompts of different lengths run through the pages as a server would run them (packed together, the second in
three chunks, one of them a single token, then single tokens), in pages taken in no order, after the memory was filled
with NaN. Every row's logits are compared with those of each sequence alone through the model's own eager attention,
before any weight was repacked.
"""

from __future__ import annotations

import inspect
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from engine.errors import UnsupportedModel
from engine.state import mixers
from engine.types import Chunk
from engine.weights.config import first_sentence
from engine.weights.loader import set_attention

TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 8e-2}  # of a row's centred logits, relative to their norm
NOISE_FACTOR = (
    3.0  # a deep model may differ more than that between two of its own attentions; this times so much is let be
)
MAX_TOLERANCE = 0.4
NARROW_FACTOR = 2.5  # pages in fp8 round 32 times as coarsely as bfloat16 does, but only K and V
MAX_NARROW_TOLERANCE = 0.8  # nothing of the KV read at all gives 1
MIN_EXACT_ROUTED = 0.75  # with routed experts in low precision a near-tie may fall the other way in a few rows
EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_experts_per_tok")
PROMPT_TOKENS = (13, 22)
FIRST_CHUNK = 9  # of the second prompt
DECODED = 4
SEED = 20

RunStep = Callable[[Sequence[Chunk]], torch.Tensor]  # chunks -> logits of every row [T, vocab]


class ParityMismatch(UnsupportedModel):
    """The two paths disagree. `share_good`: of the rows, how many are within the tolerance."""

    def __init__(self, share_good: float, message: str) -> None:
        super().__init__(message)
        self.share_good = share_good


@dataclass(frozen=True, slots=True)
class Reference:
    token_ids: tuple[tuple[int, ...], ...]
    logits: tuple[torch.Tensor, ...]  # [tokens, vocab] of each sequence
    tolerance: float


def reference_logits(model: PreTrainedModel, vocab_size: int, max_len: int) -> Reference:
    """Each sequence alone through the model's own eager attention."""
    generator = torch.Generator().manual_seed(SEED)
    sequences = [
        torch.randint(0, vocab_size, (min(prompt + DECODED, max_len),), generator=generator) for prompt in PROMPT_TOKENS
    ]
    set_attention(model, "eager")
    logits = [_own_logits(model, ids) for ids in sequences]
    if not all(bool(rows.isfinite().all()) for rows in logits):
        dtype = str(model.dtype).removeprefix("torch.")
        raise UnsupportedModel(
            f"{type(model).__name__}'s own logits are not finite in {dtype}: weights are damaged, or too large for it; "
            "give a whole checkpoint, or another dtype"
        )
    tolerance = TOLERANCE[model.dtype]
    if model.dtype != torch.float32:
        noise = _own_noise(model, sequences, logits)
        tolerance = min(max(tolerance, NOISE_FACTOR * noise), MAX_TOLERANCE)
    return Reference(tuple(tuple(ids.tolist()) for ids in sequences), tuple(logits), tolerance)


def _own_logits(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    ids = ids[None].to(model.device)
    try:
        if (cache_name := mixers.cache_name(model)) and mixers.has_any(model):
            return _as_generated(model, ids, cache_name)
        logits: torch.Tensor = model(input_ids=ids, use_cache=False, return_dict=True).logits[0]
    except Exception as error:  # a model's own code raises what it likes
        name = type(model).__name__
        raise UnsupportedModel(f"{name} fails by itself on a plain prompt: {first_sentence(error)}") from error
    return logits


def _as_generated(model: PreTrainedModel, ids: torch.Tensor, name: str) -> torch.Tensor:
    """A prompt, then a token at a time: layers that keep a state compute those by other code, which may round and clamp
    otherwise."""
    known = inspect.signature(model.forward).parameters
    positions = torch.arange(ids.shape[1], device=ids.device)[None]

    def run(rows: slice, cache: Any) -> Any:
        where = {"position_ids": positions[:, rows]} if "position_ids" in known else {}
        return model(input_ids=ids[:, rows], use_cache=True, return_dict=True, **where, **{name: cache})

    prompt = slice(max(1, ids.shape[1] - DECODED))
    output = run(prompt, None)
    if (cache := output.get(name)) is None:  # it takes one and gives none
        cache = DynamicCache(config=model.config)
        output = run(prompt, cache)
    logits = [output.logits[0]]
    logits += [run(slice(at, at + 1), cache).logits[0] for at in range(prompt.stop, ids.shape[1])]
    return torch.cat(logits)


def _own_noise(model: PreTrainedModel, sequences: Sequence[torch.Tensor], eager: Sequence[torch.Tensor]) -> float:
    """The median relative error between the model's eager and its fused attention; 0 where it has only eager."""
    try:
        set_attention(model, "sdpa")
        errors = [_relative_errors(_own_logits(model, ids), e) for ids, e in zip(sequences, eager, strict=True)]
    except (ValueError, RuntimeError, UnsupportedModel):
        return 0.0
    return statistics.median(itertools.chain.from_iterable(errors))


def difference(one: Reference, other: Reference) -> tuple[float, float]:
    """Of two sets of weights: the median relative error of a row, and at what share the likeliest token is the same."""
    pairs = list(zip(one.logits, other.logits, strict=True))
    errors = [error for mine, wanted in pairs for error in _relative_errors(mine, wanted)]
    same = torch.cat([mine.argmax(-1) == wanted.argmax(-1) for mine, wanted in pairs])
    return statistics.median(errors), float(same.double().mean())


def narrow_tolerance(reference: Reference) -> float:
    """How far logits may be off with narrow pages: what shows wrong scales or pages, not what rounding costs."""
    return min(max(MAX_TOLERANCE, NARROW_FACTOR * reference.tolerance), MAX_NARROW_TOLERANCE)


def pages_needed(page_size: int) -> int:
    return sum(-(-(p + DECODED) // page_size) for p in PROMPT_TOKENS)


def check(model: PreTrainedModel, reference: Reference, run: RunStep, page_size: int) -> float:
    """The largest relative error of a row. Raises UnsupportedModel when the two paths disagree."""
    name = type(model).__name__
    errors: list[float] = []
    for chunks in _schedule(reference.token_ids, page_size):
        try:
            logits = run(chunks)
        except UnsupportedModel:
            raise
        except Exception as error:
            raise UnsupportedModel(f"{name} failed in the parity check: {first_sentence(error)}") from error
        row = 0
        for chunk in chunks:
            rows = logits[row : row + len(chunk.token_ids)]
            wanted = reference.logits[int(chunk.request_id)][chunk.start : chunk.start + len(chunk.token_ids)]
            wanted = wanted.to(rows.device)  # of a model that was loaded elsewhere
            errors.extend(_relative_errors(rows, wanted))
            row += len(chunk.token_ids)
    _judge(model, errors, reference.tolerance)
    return max(errors)


def _judge(model: PreTrainedModel, errors: list[float], tolerance: float) -> None:
    good = sum(e <= tolerance for e in errors) / len(errors)
    text = model.config.get_text_config()
    is_exact = model.dtype == torch.float32 and tolerance <= TOLERANCE[torch.float32]
    may_tie = not is_exact and any(getattr(text, key, None) for key in EXPERT_KEYS)
    if good >= (MIN_EXACT_ROUTED if may_tie else 1.0):
        return
    raise ParityMismatch(
        good,
        f"{type(model).__name__} gives other logits through pages than by its own eager attention "
        f"(relative error {max(errors):.2g}, tolerance {tolerance:.2g}, {good:.0%} of rows within it), "
        "so it cannot be served exactly",
    )


def _schedule(sequences: Sequence[tuple[int, ...]], page_size: int) -> Iterator[list[Chunk]]:
    """The steps: a prompt with the first part of another, that one's next token, its rest, then one token of each at a
    time. A layer with a state computes one token by other code than several, whatever it is of."""
    first, second = sequences
    last_page = pages_needed(page_size) - 1
    tables: list[list[int]] = [[], []]
    for page in range(last_page, -1, -1):  # backwards and by turns, so that no table is in order
        shorter = 0 if len(tables[0]) * page_size < len(first) and len(tables[0]) <= len(tables[1]) else 1
        tables[shorter].append(page)

    def chunk(index: int, start: int, end: int) -> Chunk:
        ids = sequences[index][start:end]
        pages = tables[index][: -(-(start + len(ids)) // page_size)]
        length = len(sequences[index])  # its own forward was of all of them
        return Chunk(request_id=str(index), token_ids=ids, start=start, block_table=pages, rope_len=length)

    prompts = [max(1, len(first) - DECODED), max(1, len(second) - DECODED)]
    cuts = [min(cut, prompts[1]) for cut in (FIRST_CHUNK, FIRST_CHUNK + 1, prompts[1])]
    yield [chunk(0, 0, prompts[0]), chunk(1, 0, cuts[0])]
    for start, end in itertools.pairwise(cuts):
        if start < end:
            yield [chunk(1, start, end)]
    for i in range(DECODED):
        step = [chunk(n, p + i, p + i + 1) for n, p in enumerate(prompts) if p + i < len(sequences[n])]
        if step:
            yield step


def _relative_errors(got: torch.Tensor, wanted: torch.Tensor) -> list[float]:
    """Of each row; a NaN counts as infinite."""
    got, wanted = got.double(), wanted.double()
    got, wanted = got - got.mean(-1, keepdim=True), wanted - wanted.mean(-1, keepdim=True)
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp_min(1e-30)
    result: list[float] = torch.nan_to_num(error, nan=float("inf")).tolist()
    return result

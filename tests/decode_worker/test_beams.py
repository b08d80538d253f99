"""A BeamSearch finds what transformers' beam search finds on the same rows, and BeamTables lose no page."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LlamaConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from decode_worker.beam_tables import BeamTables
from decode_worker.beams import BeamSearch
from engine.pages.pool import PagePool
from engine.sampling.host import sample
from engine.types import BeamOptions, FinishReason, SampleSpec, SamplingParams, banned_token_ids

VOCAB, PROMPT, NEW_TOKENS, EOS = 24, [3, 4, 5], 12, (0, 1)
STOP_ID = 2
OPTIONS = [
    BeamOptions(num_beams=beams, length_penalty=penalty, early_stopping=stopping)
    for beams, penalty in ((2, 1.0), (3, 1.0), (4, 0.0), (4, 2.0), (5, -0.7), (8, 1.3))
    for stopping in (False, True, "never")
]


class Table(PreTrainedModel, GenerationMixin):  # type: ignore[misc]
    """What follows the last two tokens is drawn once, from a wide or a narrow distribution."""

    config_class = LlamaConfig

    def __init__(self, seed: int, spread: float, towards_eos: float) -> None:
        super().__init__(LlamaConfig(vocab_size=VOCAB, pad_token_id=0, bos_token_id=5))
        generator = torch.Generator().manual_seed(seed)
        self.table = spread * torch.randn(VOCAB, VOCAB, VOCAB, generator=generator)
        self.table[..., [*EOS, STOP_ID]] += towards_eos
        self.anchor = torch.nn.Parameter(torch.zeros(1))  # says which device it is on

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        return self.table[ids[:, -2], ids[:, -1]]

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        return CausalLMOutput(logits=self.rows(input_ids)[:, None])

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **_: Any) -> dict[str, Any]:
        return {"input_ids": input_ids}


def _transformers(model: Table, params: SamplingParams) -> list[tuple[list[int], float]]:
    search = params.beam_search
    assert search is not None
    given: dict[str, Any] = {"min_new_tokens": params.min_tokens} if params.min_tokens else {}
    if params.repetition_penalty != 1.0:
        given["repetition_penalty"] = params.repetition_penalty
    if params.logit_bias:
        given["sequence_bias"] = [[[token_id], bias] for token_id, bias in params.logit_bias]
    if params.bad_token_ids:
        given["bad_words_ids"] = [list(ids) for ids in params.bad_token_ids]
    if params.allowed_token_ids:
        given["prefix_allowed_tokens_fn"] = lambda *_: list(params.allowed_token_ids)
    prompt = torch.tensor([PROMPT])
    found = model.generate(
        prompt,
        do_sample=False,
        use_cache=False,
        num_beams=search.num_beams,
        num_return_sequences=params.n,
        length_penalty=search.length_penalty,
        early_stopping=search.early_stopping,
        max_new_tokens=params.max_tokens,
        eos_token_id=None if params.ignore_eos else [*EOS, *params.stop_token_ids],
        pad_token_id=VOCAB,
        return_dict_in_generate=True,
        output_scores=True,
        **given,
    )
    told = [[token for token in ids if token != VOCAB] for ids in found.sequences[:, len(PROMPT) :].tolist()]
    return list(zip(told, found.sequences_scores.tolist(), strict=True))


def _ours(model: Table, params: SamplingParams) -> list[tuple[list[int], float]]:
    search, steps = BeamSearch(params, EOS), 0
    while not search.is_over:
        specs = [
            SampleSpec(
                params=params,
                position=len(PROMPT) + steps,
                prompt_ids=PROMPT,
                output_ids=beam.token_ids,
                banned_ids=banned_token_ids(params, beam.token_ids, steps, EOS),
                num_candidates=search.num_candidates,
            )
            for beam in search.live
        ]
        sequences = torch.tensor([[*PROMPT, *beam.token_ids] for beam in search.live])
        lives = [beam.token_ids for beam in search.live]
        parents = search.step([top for _, _, top in sample(model.rows(sequences), specs)])
        assert [beam.token_ids[:-1] for beam in search.live] == [lives[parent] for parent in parents]
        steps += 1
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else EOS)}
    assert all((each.reason is FinishReason.STOP) == (each.token_ids[-1] in ends) for each in search.best)
    return [(list(each.token_ids), each.score) for each in search.best]


def _compare(seed: int, params: SamplingParams, *, spread: float, towards_eos: float) -> None:
    model = Table(seed, spread, towards_eos)
    ours, theirs = _ours(model, params), _transformers(model, params)
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in theirs]
    assert [score for _, score in ours] == [score for _, score in theirs]  # to the last bit


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_it_finds_what_transformers_finds(options: BeamOptions) -> None:
    for seed in range(12):
        n = 1 + seed % options.num_beams
        params = SamplingParams(temperature=0.0, n=n, max_tokens=NEW_TOKENS, beam_search=options)
        if seed % 3 == 0:
            params = SamplingParams(n=n, max_tokens=1 + seed, stop_token_ids=(STOP_ID,), beam_search=options)
        _compare(seed, params, spread=0.5 + seed % 4, towards_eos=(0.0, 2.0, -1.0)[seed % 3])


@pytest.mark.parametrize(
    "changes",
    [
        {"ignore_eos": True},
        {"min_tokens": 5},
        {"repetition_penalty": 1.4},
        {"logit_bias": ((1, 2.5), (7, -3.0))},
        {"bad_token_ids": ((9,), (10, 11), (12, 13, 14))},
        {"allowed_token_ids": (0, 6, 7, 8, 9, 10, 11, 12)},
    ],
    ids=str,
)
def test_what_changes_the_rows_changes_them_as_there(changes: dict[str, Any]) -> None:
    for seed, options in enumerate(OPTIONS[3:12]):
        params = SamplingParams(n=2, max_tokens=NEW_TOKENS, beam_search=options, **changes)
        _compare(seed, params, spread=1.0, towards_eos=1.0)


def test_no_page_is_lost_and_none_is_written_by_two() -> None:
    rng, page_size = random.Random(3), 4
    for length in range(1, 14):
        pool = PagePool(120, page_size)
        pages = pool.allocate(-(-length // page_size))
        beams, content = BeamTables(pages, length, pool), [list(range(length))]
        stored = {page: content[0][i * page_size : (i + 1) * page_size] for i, page in enumerate(pages)}
        for step in range(length, length + 30):
            fresh = pool.allocate(beams.missing(step))
            beams.grow(step, fresh)
            for source, target in beams.take_copies():
                stored[target] = list(stored[source])
            written = [table[step // page_size] for table in beams.tables]
            assert len(set(written)) == len(written)
            for beam, page in enumerate(written):
                token = 1000 * step + rng.randrange(1000)
                stored[page] = [*stored.get(page, [])[: step % page_size], token]
                content[beam].append(token)
            for table, tokens in zip(beams.tables, content, strict=True):
                assert [token for page in table for token in stored[page]] == tokens
            parents = [rng.randrange(len(content)) for _ in range(rng.randrange(1, 6))]
            beams.fork(parents)
            content = [list(content[parent]) for parent in parents]
            pool.check_invariants()
            assert pool.usage.held == len(set(beams.held))
        pool.release(beams.held)
        assert pool.usage.held == 0

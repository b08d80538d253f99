"""What an answer says: text, tokens, why it ended, log-probabilities, counts and times; streamed or whole alike."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cluster.deploy.local import LocalCluster
from engine.types import FinishReason
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Completion, GenerateOptions
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, ROUTER, WAIT_S, WORKER, random_prompt, transformers_tokens

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = random_prompt(40, seed=4)
PHASES = ["route", "prefill_queue", "prefill", "handoff", "decode_queue", "decode"]


@dataclass
class Served:
    client: AsyncClient
    tokens: list[int]  # greedy, after PROMPT, as transformers generates them
    directory: Path

    async def ask(self, options: GenerateOptions, prompt: list[int] | str = PROMPT) -> Completion:
        return await self.client.generate(prompt, timeout_s=WAIT_S, **options)

    def text(self, tokens: list[int]) -> str:
        """As people read it: without special tokens."""
        return str(AutoTokenizer.from_pretrained(self.directory).decode(tokens, skip_special_tokens=True))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(model_dir: ModelDir, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A model whose end-of-sequence token is the one that it would say tenth."""
    directory = tmp_path_factory.mktemp("ending") / "llama"
    shutil.copytree(model_dir("llama"), directory)
    [tokens] = transformers_tokens(directory, [PROMPT], 40)
    assert tokens[9] not in tokens[:9]
    for name in ("config.json", "generation_config.json"):
        config = json.loads((directory / name).read_text())
        (directory / name).write_text(json.dumps({**config, "eos_token_id": tokens[9]}))
    cluster = LocalCluster(str(directory), engine=ENGINE, worker=WORKER, router=ROUTER)
    async with cluster, AsyncClient(cluster.endpoint) as client:
        yield Served(client, tokens, directory)
        await cluster.settled()
        cluster.check_invariants()


def _greedy(**options: object) -> GenerateOptions:
    return cast(GenerateOptions, {"temperature": 0.0, **options})


async def test_it_ends_with_the_end_of_sequence_token(served: Served) -> None:
    answer = await served.ask(_greedy(max_tokens=40))
    assert list(answer.token_ids) == served.tokens[:10]
    assert answer.text == served.text(served.tokens[:9])
    assert answer.finish_reason is FinishReason.STOP
    assert answer.choices[0].stop_string == ""


async def test_ignore_eos_goes_on(served: Served) -> None:
    answer = await served.ask(_greedy(max_tokens=40, ignore_eos=True))
    assert list(answer.token_ids) == served.tokens
    assert answer.finish_reason is FinishReason.LENGTH


async def test_min_tokens_keeps_it_from_ending(served: Served) -> None:
    """The end token cannot be drawn before: another one stands in its place, as in transformers."""
    answer = await served.ask(_greedy(max_tokens=40, min_tokens=14))
    model = AutoModelForCausalLM.from_pretrained(served.directory, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, min_new_tokens=14, max_new_tokens=40
    )
    assert list(answer.token_ids) == expected[0, len(PROMPT) :].tolist()
    assert len(answer.token_ids) >= 14
    assert answer.token_ids[9] != served.tokens[9]


@pytest.mark.parametrize(
    ("repetition", "presence", "frequency"), [(1.3, 0.0, 0.0), (1.0, 2.0, 0.0), (1.0, 0.0, 1.0), (1.2, 0.5, 0.4)]
)
async def test_penalties_count_prompt_and_output(
    repetition: float, presence: float, frequency: float, served: Served
) -> None:
    """Held to the formula, token by token: repetition over prompt and output, presence and frequency over output."""
    answer = await served.ask(
        _greedy(
            max_tokens=40,
            ignore_eos=True,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
        )
    )
    assert list(answer.token_ids) == _penalised(served.directory, 40, repetition, presence, frequency)
    assert list(answer.token_ids) != served.tokens


def _penalised(directory: Path, num_tokens: int, repetition: float, presence: float, frequency: float) -> list[int]:
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    output: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + output])).logits[0, -1]
        for token in {*PROMPT, *output}:
            logits[token] *= repetition if logits[token] < 0 else 1 / repetition
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        output.append(int(logits.argmax()))
    return output


async def test_a_bias_forbids_and_forces(served: Served) -> None:
    without = await served.ask(_greedy(max_tokens=8, logit_bias={served.tokens[0]: -100.0}))
    assert served.tokens[0] not in without.token_ids
    forced = await served.ask(_greedy(max_tokens=8, logit_bias={7: 100.0}))
    assert list(forced.token_ids) == [7] * 8


async def test_none_but_allowed_tokens_are_drawn(served: Served) -> None:
    answer = await served.ask(GenerateOptions(max_tokens=30, allowed_token_ids=[11, 12, 13], seed=1))
    assert {*answer.token_ids} <= {11, 12, 13}
    assert len({*answer.token_ids}) > 1


async def test_a_bad_word_does_not_come_and_its_beginning_may(served: Served) -> None:
    """As the tokenizer would write it: where the model writes the same text in other tokens, it may."""
    encode = AutoTokenizer.from_pretrained(served.directory).encode
    pairs = [served.tokens[i : i + 2] for i in range(len(served.tokens) - 1)]
    at = next(i for i, pair in enumerate(pairs) if encode(served.text(pair), add_special_tokens=False) == pair)
    answer = await served.ask(_greedy(max_tokens=40, ignore_eos=True, bad_words=[served.text(pairs[at])]))
    tokens = list(answer.token_ids)
    assert tokens[: at + 1] == served.tokens[: at + 1]
    assert pairs[at] not in [tokens[i : i + 2] for i in range(len(tokens) - 1)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens(max_tokens: int, served: Served) -> None:
    answer = await served.ask(_greedy(max_tokens=max_tokens))
    assert list(answer.token_ids) == served.tokens[:max_tokens]
    assert answer.finish_reason is FinishReason.LENGTH
    assert (answer.receipt is None) == (max_tokens == 1)


async def test_the_end_at_the_first_token_needs_no_decode_worker(served: Served) -> None:
    answer = await served.ask(_greedy(stop_token_ids=[served.tokens[0]]))
    assert list(answer.token_ids) == served.tokens[:1]
    assert answer.text == ""
    assert answer.finish_reason is FinishReason.STOP
    assert answer.receipt is None
    assert answer.timeline is not None
    assert answer.timeline.decode_worker == ""


async def test_a_stop_string_may_span_tokens(served: Served) -> None:
    text = served.text(served.tokens)
    ends = [len(served.text(served.tokens[:count])) for count in range(len(served.tokens) + 1)]
    at = next(i for i in range(5, 30) if ends[i] - ends[i - 1] > 1 and ends[i + 1] - ends[i] > 1)
    stop = text[ends[at] - 1 : ends[at] + 1]  # the end of one token and the beginning of the next
    found = text.index(stop)
    answer = await served.ask(_greedy(stop=["not this", stop], max_tokens=40, ignore_eos=True))
    assert answer.text == text[:found]
    assert answer.finish_reason is FinishReason.STOP
    assert answer.choices[0].stop_string == stop
    assert list(answer.token_ids) == served.tokens[: len(answer.token_ids)]
    assert ends[len(answer.token_ids)] >= found + len(stop) > ends[len(answer.token_ids) - 1]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(answer.token_ids)


async def test_log_probabilities_are_those_of_the_model(served: Served) -> None:
    answer = await served.ask(_greedy(max_tokens=8, logprobs=3))
    model = AutoModelForCausalLM.from_pretrained(served.directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + served.tokens[:7]])).logits[0, len(PROMPT) - 1 :]
    likeliest = logits.log_softmax(-1).topk(3)
    assert len(answer.choices[0].logprobs) == 8
    for position, values, ids in zip(answer.choices[0].logprobs, *likeliest, strict=True):
        assert [top.token_id for top in position.top] == ids.tolist()
        assert [top.logprob for top in position.top] == pytest.approx(values.tolist(), abs=1e-3)
        assert position.chosen == position.top[0]


@pytest.mark.parametrize("length", [2, 40, 65, 150])
async def test_log_probabilities_of_the_prompt_are_those_of_the_model(length: int, served: Served) -> None:
    """Whatever of it is cached, in however many chunks it is read."""
    prompt = random_prompt(length, seed=4)
    plain = await served.ask(_greedy(max_tokens=4), prompt)
    answer = await served.ask(_greedy(max_tokens=4, prompt_logprobs=2, n=2), prompt)
    assert answer.token_ids == plain.token_ids
    assert len(answer.choices) == 2
    model = AutoModelForCausalLM.from_pretrained(served.directory, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        logprobs = model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    likeliest = logprobs.topk(2)
    assert [position.chosen.token_id for position in answer.prompt_logprobs] == prompt[1:]
    for at, (position, values, ids) in enumerate(zip(answer.prompt_logprobs, *likeliest, strict=True)):
        assert position.chosen.logprob == pytest.approx(float(logprobs[at, prompt[at + 1]]), abs=1e-3)
        assert [top.token_id for top in position.top] == ids.tolist()
        assert [top.logprob for top in position.top] == pytest.approx(values.tolist(), abs=1e-3)


async def test_choice_i_is_what_seed_plus_i_gives(served: Served) -> None:
    options = GenerateOptions(temperature=0.9, max_tokens=12, ignore_eos=True)
    three = await served.ask(GenerateOptions(**options, n=3, seed=70))
    alone = [await served.ask(GenerateOptions(**options, seed=70 + i)) for i in range(3)]
    assert [choice.index for choice in three.choices] == [0, 1, 2]
    assert [choice.token_ids for choice in three.choices] == [answer.token_ids for answer in alone]
    assert len({choice.token_ids for choice in three.choices}) == 3
    assert three.usage is not None
    assert (three.usage.prompt_tokens, three.usage.completion_tokens) == (len(PROMPT), 36)


async def test_without_a_seed_answers_differ(served: Served) -> None:
    answers = [await served.ask(GenerateOptions(max_tokens=12, ignore_eos=True)) for _ in range(2)]
    assert answers[0].token_ids != answers[1].token_ids


async def test_text_is_tokenised_as_tokenize_says(served: Served) -> None:
    text = "Once upon a time, über alles"
    ids = await served.client.tokenize(text)
    by_text, by_ids = await served.ask(_greedy(), text), await served.ask(_greedy(), ids)
    assert by_text.token_ids == by_ids.token_ids
    assert by_text.usage is not None
    assert by_text.usage.prompt_tokens == len(ids)


@pytest.mark.parametrize(
    "options",
    [
        GenerateOptions(temperature=0.0, max_tokens=20),
        GenerateOptions(temperature=0.8, seed=3, max_tokens=20, n=3, logprobs=2),
        GenerateOptions(temperature=0.8, seed=4, max_tokens=30, stop=["e", "a"]),
    ],
)
async def test_a_stream_adds_up_to_the_whole_answer(options: GenerateOptions, served: Served) -> None:
    whole = await served.ask(options)
    stream = served.client.stream(PROMPT, timeout_s=WAIT_S, **options)
    deltas = [delta async for delta in stream]
    assert stream.completion().choices == whole.choices
    for choice in whole.choices:
        mine = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(delta.text for delta in mine) == choice.text
        assert [bool(delta.finish_reason) for delta in mine] == [False] * (len(mine) - 1) + [True]
    streamed = stream.completion().usage
    assert streamed is not None
    assert whole.usage is not None
    assert streamed.completion_tokens == whole.usage.completion_tokens


async def test_the_phases_of_a_request_sum_to_its_time(served: Served) -> None:
    prompts = [random_prompt(length, seed=length) for length in (5, 50, 100, 150)]
    answers = await asyncio.gather(
        *(served.ask(GenerateOptions(temperature=0.0, max_tokens=20, ignore_eos=True), prompt) for prompt in prompts)
    )
    for answer, prompt in zip(answers, prompts, strict=True):
        timeline, usage = answer.timeline, answer.usage
        assert timeline is not None
        assert usage is not None
        assert list(timeline.phases_s) == PHASES
        assert all(seconds >= 0 for seconds in timeline.phases_s.values())
        assert sum(timeline.phases_s.values()) == pytest.approx(timeline.e2e_s, abs=1e-9)
        assert 0 < timeline.ttft_s < timeline.e2e_s
        assert timeline.tpot_s == pytest.approx((timeline.e2e_s - timeline.ttft_s) / 19)
        before_decode = timeline.e2e_s - timeline.phases_s["decode"]
        assert timeline.phases_s["prefill"] > 0
        assert before_decode > timeline.phases_s["prefill"]
        assert (timeline.prefill_worker, timeline.decode_worker) == ("prefill-0", "decode-0")
        assert timeline.attempts == 1
        assert (usage.prompt_tokens, usage.completion_tokens) == (len(prompt), 20)


async def test_a_cached_prefix_is_counted(served: Served) -> None:
    prompt = random_prompt(70, seed=77)
    first, second = await served.ask(_greedy(), prompt), await served.ask(_greedy(), prompt)
    longer = await served.ask(_greedy(), [*prompt[:50], 9, 8, 7])
    counts = [answer.usage.cached_tokens for answer in (first, second, longer) if answer.usage is not None]
    assert counts == [0, 64, 48]
    assert first.token_ids == second.token_ids
    pages = [answer.receipt.cached_pages for answer in (first, second, longer) if answer.receipt is not None]
    assert pages == [0, 4, 3]

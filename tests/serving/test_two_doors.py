"""What a request gets over HTTP is what it gets over gRPC: texts, token ids, log-probabilities, and why it ended."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import httpx2
import pytest
import pytest_asyncio

from cluster.deploy.local import LocalCluster
from engine.types import FinishReason
from kvrelay.client.client import AsyncClient
from kvrelay.client.types import Choice, GenerateOptions, PositionLogprobs
from tests.serving.conftest import ModelDir
from tests.serving.harness import ENGINE, WAIT_S, WORKER, random_prompt, router_with

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = random_prompt(40, seed=4)
TOKENS = 24
FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
SEEDED: Mapping[str, Any] = {"temperature": 0.9, "top_p": 0.95, "seed": 11, "max_tokens": TOKENS}
GREEDY: Mapping[str, Any] = {"temperature": 0.0, "max_tokens": TOKENS, "ignore_eos": True}
Position = tuple[int, float, dict[int, float]]  # token, its log-probability, the likeliest ones' with its own


@dataclass(frozen=True)
class Said:
    text: str
    token_ids: Sequence[int]
    finish_reason: FinishReason | None
    stop_string: str
    logprobs: Sequence[Position]


@dataclass
class Doors:
    grpc: AsyncClient
    http: httpx2.AsyncClient
    greedy: list[int]
    texts: list[str]  # of the first, the first two, ... greedy tokens

    def options(self, case: str) -> dict[str, Any]:
        """Those that go by what the model says."""
        at = next(i for i in range(3, TOKENS) if all(self._adds(i + step) > 1 for step in (0, 1)))
        end = len(self.texts[at])
        across = self.texts[at + 1][end - 1 : end + 1]  # the end of one token and the beginning of the next
        return {
            "a stop string across tokens": {**GREEDY, "stop": ["not this", across]},
            "stop token ids": {**GREEDY, "stop_token_ids": [self.greedy[6]]},
            "a bias": {**GREEDY, "logit_bias": {self.greedy[0]: -100.0, 7: 2.5}},
            "bad words": {**GREEDY, "bad_words": [across, self.texts[0]]},
        }[case]

    def _adds(self, at: int) -> int:
        return len(self.texts[at]) - len(self.texts[at - 1])


CASES: Mapping[str, Mapping[str, Any] | None] = {  # None: Doors.options
    "greedy": GREEDY,
    "seeded": SEEDED,
    "n": {**SEEDED, "n": 3},
    "logprobs": {**SEEDED, "logprobs": 4},
    "logprobs of n": {**SEEDED, "n": 3, "logprobs": 0},
    "prompt_logprobs": {**GREEDY, "prompt_logprobs": 3, "logprobs": 2},
    "min_tokens": {**SEEDED, "temperature": 1.4, "min_tokens": 20},
    "penalties": {**SEEDED, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "narrow": {**SEEDED, "top_k": 20, "min_p": 0.05, "typical_p": 0.9, "allowed_token_ids": [*range(5, 200)]},
    **dict.fromkeys(("a stop string across tokens", "stop token ids", "a bias", "bad words")),
}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def doors(model_dir: ModelDir) -> AsyncIterator[Doors]:
    cluster = LocalCluster(str(model_dir("llama")), engine=ENGINE, worker=WORKER, router=router_with(http_ports=(0,)))
    async with cluster, AsyncClient(cluster.endpoint) as grpc:
        assert cluster.server is not None
        base = f"http://127.0.0.1:{cluster.server.http_port}"
        async with httpx2.AsyncClient(base_url=base, timeout=WAIT_S) as http:
            deltas = [delta async for delta in grpc.stream(PROMPT, **cast(GenerateOptions, GREEDY))]
            greedy = [token for delta in deltas for token in delta.token_ids]
            texts = [await _text(http, greedy[: count + 1]) for count in range(len(greedy))]
            yield Doors(grpc, http, greedy, texts)


async def _text(http: httpx2.AsyncClient, tokens: list[int]) -> str:
    return str((await http.post("/detokenize", json={"tokens": tokens})).json()["prompt"])


@pytest.mark.parametrize("case", CASES)
async def test_both_say_the_same_whole_and_streamed(case: str, doors: Doors) -> None:
    options = dict(CASES[case] or doors.options(case))
    prompt = "The relay of pages" if case == "seeded" else PROMPT
    whole = await doors.grpc.generate(prompt, timeout_s=WAIT_S, **cast(GenerateOptions, options))
    wanted, of_prompt = _said(whole.choices), _positions(whole.prompt_logprobs)
    assert len(wanted) == options.get("n", 1)
    assert all(said.token_ids for said in wanted)
    assert _said(await _streamed(doors.grpc, prompt, options)) == wanted
    for stream in (False, True):
        choices = await _over_http(doors.http, prompt, options, stream=stream)
        assert [_said_over_http(choice) for choice in choices] == wanted
        assert _prompt_over_http(choices[0]) == of_prompt


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_an_echo_has_the_prompt_as_grpc_scores_it(stream: bool, doors: Doors) -> None:
    scored = await doors.grpc.generate(PROMPT, timeout_s=WAIT_S, prompt_logprobs=2, logprobs=2, **_grpc(GREEDY))
    [wanted] = _said(scored.choices)
    [choice] = await _over_http(doors.http, PROMPT, {**GREEDY, "echo": True, "logprobs": 2}, stream=stream)
    assert choice["logprobs"]["tokens"][0] == f"token_id:{PROMPT[0]}"
    assert choice["logprobs"]["token_logprobs"][0] is None
    echoed = {key: values[1:] for key, values in choice["logprobs"].items()}
    assert _from_lists(echoed) == [*_positions(scored.prompt_logprobs), *wanted.logprobs]
    assert choice["text"] == await _text(doors.http, PROMPT) + wanted.text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_a_chat_says_what_grpc_says_to_its_prompt(stream: bool, doors: Doors) -> None:
    chat = {"messages": [{"role": "user", "content": "Hello, relay"}]}
    ids = (await doors.http.post("/tokenize", json=chat)).json()["tokens"]
    wanted = _said((await doors.grpc.generate(ids, timeout_s=WAIT_S, logprobs=0, n=2, **_grpc(SEEDED))).choices)
    asked = {**chat, **SEEDED, "n": 2, "logprobs": True, "return_token_ids": True}
    answer = await doors.http.post("/v1/chat/completions", json={**asked, "stream": stream})
    told = [choice for body in _bodies(answer) for choice in body["choices"]]
    for index, said in enumerate(wanted):
        own = [choice for choice in told if choice["index"] == index]
        scores = [token["logprob"] for each in own if each["logprobs"] for token in each["logprobs"]["content"]]
        assert "".join((each.get("message") or each["delta"]).get("content") or "" for each in own) == said.text
        assert [token for each in own for token in each.get("token_ids", [])] == said.token_ids
        assert scores == [logprob for _, logprob, _ in said.logprobs]
        assert FINISH[own[-1]["finish_reason"]] is said.finish_reason


def _grpc(options: Mapping[str, Any]) -> Any:
    return dict(options)


# what gRPC's client says


async def _streamed(client: AsyncClient, prompt: str | list[int], options: dict[str, Any]) -> list[Choice]:
    stream = client.stream(prompt, timeout_s=WAIT_S, **cast(GenerateOptions, options))
    deltas = [delta async for delta in stream]
    choices = []
    for index in range(options.get("n", 1)):
        own = [delta for delta in deltas if delta.index == index]
        choices.append(
            Choice(
                index=index,
                text="".join(delta.text for delta in own),
                token_ids=tuple(token for delta in own for token in delta.token_ids),
                finish_reason=own[-1].finish_reason,
                logprobs=tuple(position for delta in own for position in delta.logprobs),
                stop_string=own[-1].stop_string,
            )
        )
    return choices


def _said(choices: Iterable[Choice]) -> list[Said]:
    return [
        Said(each.text, [*each.token_ids], each.finish_reason, each.stop_string, _positions(each.logprobs))
        for each in choices
    ]


def _positions(positions: Iterable[PositionLogprobs]) -> list[Position]:
    return [
        (
            each.chosen.token_id,
            each.chosen.logprob,
            {token.token_id: token.logprob for token in (*each.top, each.chosen)},
        )
        for each in positions
    ]


# what HTTP says


async def _over_http(
    http: httpx2.AsyncClient, prompt: str | list[int], options: Mapping[str, Any], *, stream: bool
) -> list[dict[str, Any]]:
    """Choices, those of a stream put together."""
    asked = {"prompt": prompt, "return_token_ids": True, "return_tokens_as_token_ids": True, "stream": stream}
    answer = await http.post("/v1/completions", json={**asked, **options})
    assert answer.status_code == 200, answer.text
    whole: dict[int, dict[str, Any]] = {}
    for part in (choice for body in _bodies(answer) for choice in body["choices"]):
        whole[part["index"]] = _joined(whole[part["index"]], part) if part["index"] in whole else part
    return [choice for _, choice in sorted(whole.items())]


def _bodies(answer: httpx2.Response) -> list[dict[str, Any]]:
    if answer.headers["content-type"] == "application/json":
        return [answer.json()]
    *events, done, _ = answer.text.split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _joined(before: dict[str, Any], part: dict[str, Any]) -> dict[str, Any]:
    old, new = before["logprobs"], part["logprobs"]
    logprobs = {key: old[key] + new[key] for key in old} if old and new else old or new
    longer = {key: before[key] + part[key] for key in ("text", "token_ids")}
    scores = {"prompt_logprobs": before.get("prompt_logprobs") or part.get("prompt_logprobs")}
    return {**part, **longer, **scores, "logprobs": logprobs}


def _said_over_http(choice: Mapping[str, Any]) -> Said:
    reason = choice["stop_reason"]
    stop_string = reason if isinstance(reason, str) else ""
    logprobs = _from_lists(choice["logprobs"]) if choice["logprobs"] else []
    return Said(choice["text"], choice["token_ids"], FINISH[choice["finish_reason"]], stop_string, logprobs)


def _from_lists(logprobs: Mapping[str, Sequence[Any]]) -> list[Position]:
    told = zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True)
    return [(_id(token), own, {_id(name): value for name, value in top.items()}) for token, own, top in told]


def _id(name: str) -> int:
    return int(name.removeprefix("token_id:"))


def _prompt_over_http(choice: Mapping[str, Any]) -> list[Position]:
    """The chosen token comes first."""
    told = [
        {int(key): each["logprob"] for key, each in one.items()} for one in (choice.get("prompt_logprobs") or [])[1:]
    ]
    return [(first := next(iter(each)), each[first], each) for each in told]

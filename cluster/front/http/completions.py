"""CompletionAnswer is the answer to a completion: text, for each prompt and choice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cluster.front.generation import Generation
from cluster.front.http.answers import Answer, Made
from cluster.front.http.guard import HttpCall
from cluster.front.http.schemas import CompletionRequest, proto_prompts
from cluster.front.http.shapes import CompletionChoice
from cluster.front.http.tellers import CompletionTeller
from cluster.front.models.catalog import Served
from cluster.front.tokenizer import PromptTooLong
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2


class CompletionAnswer(Answer):
    prefix = "cmpl"
    whole_object = part_object = "text_completion"

    def __init__(self, generation: Generation, call: HttpCall, asked: CompletionRequest) -> None:
        """Raises InvalidRequest."""
        asked.check_served()
        requests = list(proto_prompts(asked, call.request_id))
        served = generation.catalog.probably(asked.model or "")
        special = _special(served) if not asked.skip_special_tokens else frozenset[int]()
        shows_tokens = not asked.echoes_alone
        super().__init__(generation, call, asked, requests, shows_tokens=shows_tokens, shown_special=special)
        echoes = [_text(served, prompt) if asked.echo else "" for prompt in asked.prompts()]
        self._tellers = [
            CompletionTeller(
                names=self.names,
                stop_token_ids=self.stop_token_ids,
                shows_stop=asked.include_stop_str_in_output,
                shows_ids=bool(asked.return_token_ids),
                echoed=echo,
                echoes_logprobs=asked.echoes_logprobs,
                shows_prompt=asked.prompt_logprobs is not None,
            )
            for echo in echoes
            for _ in range(asked.num_choices)
        ]

    def shown(self, response: generate_pb2.GenerateResponse) -> generate_pb2.GenerateResponse:
        if not self._shows_tokens:
            for key in ("text", "token_ids", "logprobs", "stop_string"):
                response.ClearField(key)
            response.finish_reason = generate_pb2.FINISH_REASON_LENGTH
        return response

    def told(self, made: Made) -> Iterator[CompletionChoice]:
        index = made.prompt * self.asked.num_choices + made.part.index
        yield self._tellers[index].choice(index, made.part, made.submission.choices[0].prompt_ids)

    def whole_choice(self, told: list[CompletionChoice]) -> CompletionChoice:
        return _whole(told)


def _whole(parts: Sequence[CompletionChoice]) -> CompletionChoice:
    whole: CompletionChoice = {**parts[-1], "text": "".join(part["text"] for part in parts)}
    logprobs = [part["logprobs"] for part in parts if part["logprobs"] is not None]
    if logprobs:
        whole["logprobs"] = {
            "tokens": [token for each in logprobs for token in each["tokens"]],
            "token_logprobs": [logprob for each in logprobs for logprob in each["token_logprobs"]],
            "top_logprobs": [top for each in logprobs for top in each["top_logprobs"]],
            "text_offset": [offset for each in logprobs for offset in each["text_offset"]],
        }
    if scores := next((part["prompt_logprobs"] for part in parts if part.get("prompt_logprobs")), None):
        whole["prompt_logprobs"] = scores
    if "token_ids" in whole:
        whole["token_ids"] = [token for part in parts for token in part.get("token_ids", [])]
        whole["prompt_token_ids"] = parts[0]["prompt_token_ids"]
    return whole


def _text(served: Served, prompt: str | list[int]) -> str:
    if isinstance(prompt, str):
        return prompt
    if served.codec is None:
        raise InvalidRequest("echo is true, and no tokenizer is loaded; leave it out")
    if len(prompt) > (longest := served.ready().info.max_model_len):
        raise PromptTooLong(f"{len(prompt)} tokens", longest)
    return served.codec.text_of(prompt)


def _special(served: Served) -> frozenset[int]:
    return served.codec.special_ids if served.codec is not None else frozenset()

"""`kvrelay generate`: sends one prompt and prints the answer as it comes.

It owns the flags, what is printed, and the exit code; what a flag may be is for the server to say. The text goes to
stdout and nothing else does; one line of figures goes to stderr. With --json stdout is one object.

Exit codes: 0 done; 1 the server or the network failed; 2 the request can never be served (wrong usage, or the server
says INVALID_ARGUMENT or NOT_FOUND); 124 the --timeout passed (as timeout(1)); 130 interrupted (the request is
cancelled).
"""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from kvrelay.cli import completing
from kvrelay.cli.connection import Router, refusals, until_interrupted
from kvrelay.cli.console import JsonOption
from kvrelay.cli.groups import grouped
from kvrelay.client.streams import Stream
from kvrelay.client.types import Choice, Completion, GenerateOptions, KvrelayError

HELP = """Send one prompt and print the answer as it comes.

The text goes to stdout, one line of figures to stderr; with --json stdout is one object. Exit codes: 0 done, 1 the
server or the network failed, 2 the request can never be served, 124 --timeout passed, 130 interrupted.

Examples:

  kvrelay generate "The capital of France is" --max-tokens 32

  kvrelay generate --token-ids 1,2,3 --temperature 0.8 --top-p 0.95 --seed 7 --json

  kvrelay generate - --stop END --timeout 10 < prompt.txt

  kvrelay generate "A city:" --json-schema '{"type": "object", "properties": {"name": {"type": "string"}}}'
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to generate: kvrelay.client.types.GenerateOptions, as flags. None: the server's default."""

    max_tokens: Annotated[int, typer.Option(help="Generate at most this many tokens.")] = 128
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's, else 1.")] = None
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens; 0 is off.")] = None
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest that reach this probability.")] = None
    min_p: Annotated[float | None, typer.Option(help="Draw from those this likely, relative to the best.")] = None
    top_n_sigma: Annotated[float | None, typer.Option(help="Draw from logits this many deviations below.")] = None
    typical_p: Annotated[float | None, typer.Option(help="Draw from the most typical that reach this.")] = None
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same tokens. Default: random.")] = None
    stop: Annotated[list[str] | None, typer.Option(help="End before this string; may be repeated.")] = None
    stop_token_ids: Annotated[str | None, typer.Option(help="End after any of these, such as 7,8.")] = None
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after the end-of-sequence token.")] = False
    min_tokens: Annotated[int | None, typer.Option(help="Do not end before this many tokens.")] = None
    logprobs: Annotated[int | None, typer.Option(help="With --json: log-probabilities, and the N likeliest.")] = None
    prompt_logprobs: Annotated[int | None, typer.Option(help="With --json: likewise of the prompt's tokens.")] = None
    repetition_penalty: Annotated[float | None, typer.Option(help="Over prompt and output; 1 is off.")] = None
    presence_penalty: Annotated[float | None, typer.Option(help="Over output; 0 is off.")] = None
    frequency_penalty: Annotated[float | None, typer.Option(help="Over output, for each time; 0 is off.")] = None
    logit_bias: Annotated[str | None, typer.Option(help="Added to logits, by token id, such as 7:-100,8:2.5.")] = None
    allowed_token_ids: Annotated[str | None, typer.Option(help="Draw none but these, such as 7,8.")] = None
    bad_words: Annotated[list[str] | None, typer.Option(help="Never in the output; may be repeated.")] = None
    json_schema: Annotated[str | None, typer.Option(help="The answer is JSON of this schema; @FILE reads it.")] = None
    json_object: Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")] = False
    regex: Annotated[str | None, typer.Option(help="The answer matches this regular expression.")] = None
    choice: Annotated[list[str] | None, typer.Option(help="The answer is one of these; may be repeated.")] = None
    grammar: Annotated[str | None, typer.Option(help="The answer keeps this (Lark's or GBNF); @FILE reads it.")] = None
    n: Annotated[int | None, typer.Option("-n", "--n", help="How many choices.")] = None
    num_beams: Annotated[int | None, typer.Option(help="Search along so many beams; the n best are told.")] = None
    length_penalty: Annotated[float | None, typer.Option(help="Of the search; above 0 longer ones gain.")] = None
    early_stopping: Annotated[str | None, typer.Option(help="When it ends: true, false or never.")] = None
    model: Annotated[str | None, typer.Option(help="The model's name. Default: the one that is served.")] = None

    adapter: Annotated[
        str | None, typer.Option(help="A LoRA adapter of the cluster's.", autocompletion=completing.adapters)
    ] = None

    cache_salt: Annotated[str | None, typer.Option(help="Share cached prefixes with the same salt only.")] = None
    kv_window_tokens: Annotated[
        int | None, typer.Option(help="Keep KV of the last so many tokens only; 0: all. Default: the server's.")
    ] = None
    kv_sink_tokens: Annotated[int | None, typer.Option(help="And of the first so many.")] = None
    kv_heavy_tokens: Annotated[
        int | None, typer.Option(help="And of so many of the prompt's that were attended to most.")
    ] = None
    slo_ttft_ms: Annotated[
        float | None, typer.Option(help="Time its first token should take. Default: the server's.")
    ] = None
    slo_tpot_ms: Annotated[float | None, typer.Option(help="Likewise each token after it.")] = None
    priority: Annotated[int | None, typer.Option(help="Lower goes first; below 0 for operators. Default: 0.")] = None

    def options(self) -> GenerateOptions:
        """Those that were given. Raises KvrelayError."""
        given: dict[str, Any] = dataclasses.asdict(self)
        given |= {key: given[key] or None for key in ("ignore_eos", "json_object")}
        given |= {key: _text_of(f"--{key.replace('_', '-')}", given[key]) for key in ("json_schema", "grammar")}
        if self.stop_token_ids is not None:
            given["stop_token_ids"] = _ids("--stop-token-ids", self.stop_token_ids)
        if self.allowed_token_ids is not None:
            given["allowed_token_ids"] = _ids("--allowed-token-ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            given["logit_bias"] = _biases(self.logit_bias)
        if self.early_stopping is not None:
            given["early_stopping"] = {"true": True, "false": False}.get(self.early_stopping, self.early_stopping)
        chosen: Any = {key: value for key, value in given.items() if value not in (None, [])}
        return cast(GenerateOptions, chosen)


def _text_of(flag: str, given: str | None) -> str | None:
    """@FILE: what is in the file. Raises KvrelayError."""
    if given is None or not given.startswith("@"):
        return given
    try:
        return Path(given[1:]).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise KvrelayError("INVALID_ARGUMENT", f"{flag} is {given}, which cannot be read: {error}") from error


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(grouped(generate))


def generate(
    sampling: Sampling,
    router: Router,
    prompt: Annotated[str | None, typer.Argument(help="The text to continue; - reads it from stdin.")] = None,
    token_ids: Annotated[str | None, typer.Option(help="A prompt of token ids instead, such as 1,2,3.")] = None,
    timeout: Annotated[float | None, typer.Option(help="Seconds until the request is given up.")] = None,
    as_json: JsonOption = False,
) -> None:
    with refusals(as_json, interrupted="interrupted; the request was cancelled"):
        _generate(router, _prompt(prompt, token_ids), sampling.options(), timeout, as_json)


def _generate(
    router: Router, prompt: str | list[int], options: GenerateOptions, timeout_s: float | None, as_json: bool
) -> None:
    if timeout_s is not None and not timeout_s > 0:
        raise KvrelayError("INVALID_ARGUMENT", f"--timeout is {timeout_s:g}; give seconds above 0")
    with router.client() as client, client.stream(prompt, timeout_s=timeout_s, **options) as stream:
        live = not as_json and options.get("n", 1) == 1
        if live:
            _print_live(stream)
        else:
            for _ in until_interrupted(stream):
                pass
        if as_json:
            print(json.dumps(_as_object(stream)))
            return
        if not live:
            _write("".join(_heading_and_text(choice) for choice in stream.completion().choices))
        _write("\n")
        print(_summary(stream), file=sys.stderr)


def _print_live(stream: Stream) -> None:
    """Ends the line when the answer breaks off, so that the error stands on its own."""
    begun = False
    try:
        for delta in until_interrupted(stream):
            if delta.text:
                _write(delta.text)
                begun = True
    except (KvrelayError, KeyboardInterrupt):
        if begun:
            _write("\n")
        raise


def _prompt(prompt: str | None, token_ids: str | None) -> str | list[int]:
    if (prompt is None) == (token_ids is None):
        given = "both" if prompt is not None else "neither"
        raise KvrelayError("INVALID_ARGUMENT", f"PROMPT and --token-ids: {given} given; give one of them")
    if token_ids is not None:
        return _ids("--token-ids", token_ids)
    return _from_stdin() if prompt == "-" else str(prompt)


def _from_stdin() -> str:
    """Every character counts, a last newline too."""
    try:
        return sys.stdin.buffer.read().decode("utf-8")
    except UnicodeDecodeError as error:
        raise KvrelayError("INVALID_ARGUMENT", f"stdin is not UTF-8 at byte {error.start}; convert it first") from None


def _ids(flag: str, text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise KvrelayError(
            "INVALID_ARGUMENT", f"{flag} is {text!r}; give whole numbers joined by commas, such as 1,2,3"
        ) from None


def _biases(text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(token_id): float(bias) for token_id, bias in pairs}
    except ValueError:
        why = f"--logit-bias is {text!r}; give id:bias joined by commas, such as 7:-100,8:2.5"
        raise KvrelayError("INVALID_ARGUMENT", why) from None


def _write(text: str) -> None:
    """To stdout at once. A terminal that cannot show a character gets a question mark, not a stack trace."""
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, "replace").decode(encoding))
    sys.stdout.flush()


def _heading_and_text(choice: Choice) -> str:
    reason = choice.finish_reason.value if choice.finish_reason else "not ended"
    lead = "\n" if choice.index else ""
    return f"{lead}--- choice {choice.index} ({reason})\n{choice.text}"


def _summary(stream: Stream) -> str:
    answer = stream.completion()
    parts = [f"{_num_tokens(answer)} tokens"]
    if answer.finish_reason is not None:
        parts.append(answer.finish_reason.value)
    parts.append(f"ttft {_ms_text(stream.ttft_s)}")
    parts.append(f"tpot {_ms_text(stream.tpot_s)}")
    if answer.receipt is not None and answer.receipt.pages:
        receipt = answer.receipt
        checked = "ok" if receipt.checksums_ok else "off"
        parts.append(f"handoff {receipt.pages} pages, {receipt.bytes / 1e6:.2f} MB, checksums {checked}")
    return "[" + " | ".join(parts) + "]"


def _num_tokens(answer: Completion) -> int:
    if answer.usage is not None:
        return answer.usage.completion_tokens
    return sum(len(choice.token_ids) for choice in answer.choices)


def _as_object(stream: Stream) -> dict[str, Any]:
    """ttft_ms and tpot_ms are what this client saw; the timeline is what the server saw."""
    answer = stream.completion()
    result: dict[str, Any] = {
        "request_id": answer.request_id,
        "text": answer.text,
        "token_ids": list(answer.token_ids),
        "finish_reason": answer.finish_reason,
        "usage": _plain(answer.usage),
        "ttft_ms": _ms(stream.ttft_s),
        "tpot_ms": _ms(stream.tpot_s),
        "timeline": _plain(answer.timeline),
        "receipt": _plain(answer.receipt),
        "moved": [_plain(receipt) for receipt in answer.moved],
    }
    if answer.choices and answer.choices[0].stop_string:
        result["stop_string"] = answer.choices[0].stop_string
    if answer.choices and answer.choices[0].score is not None:
        result["score"] = answer.choices[0].score
    if answer.choices and answer.choices[0].logprobs:
        result["logprobs"] = [_plain(position) for position in answer.choices[0].logprobs]
    if answer.prompt_logprobs:
        result["prompt_logprobs"] = [_plain(position) for position in answer.prompt_logprobs]
    if len(answer.choices) > 1:
        result["choices"] = [_plain(choice) for choice in answer.choices]
    return result


def _plain(value: Any) -> dict[str, Any] | None:
    return None if value is None else dataclasses.asdict(value)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000.0, 3)


def _ms_text(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1000.0:.1f} ms"

"""`kvrelay chat`: a conversation in the terminal, over OpenAI's API of a router here or of any other server.

Every turn sends the whole conversation, of which a server keeps the KV that it has cached: the line of figures says how
much. Text goes to stdout, all else to stderr.
"""

from __future__ import annotations

import asyncio
import sys
import time
from contextlib import aclosing
from typing import Annotated, Any, NamedTuple

import typer

from kvrelay import known_clusters
from kvrelay.cli.connection import refusals
from kvrelay.cli.console import CliError, note
from kvrelay.client.access import KEY_VARIABLE, token_of
from kvrelay.client.openai_http import MALFORMED, OpenAIServer
from kvrelay.client.types import KvrelayError

HELP = """Talk with the model that is served. An empty line does nothing, Ctrl-C ends an answer, Ctrl-D ends the talk.

Of an answer's prompt what the server had cached is told: a conversation's beginning is not computed again.

Examples:

  kvrelay chat

  kvrelay chat --system "Answer in one sentence." --max-tokens 200

  kvrelay chat --base-url http://127.0.0.1:8001/v1 --model other
"""
PROMPT = "you> "


def register(app: typer.Typer) -> None:
    app.command(help=HELP)(chat)


def chat(
    base_url: Annotated[
        str | None,
        typer.Option(help=f"Any server of OpenAI's API, with {KEY_VARIABLE}. Default: the one started here."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="The model's name. Default: the first that is served.")] = None,
    system: Annotated[str | None, typer.Option(help="What the model is told before all.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of each answer. Default: as many as fit.")] = None,
    temperature: Annotated[float | None, typer.Option(help="0 is greedy. Default: the model's, else 1.")] = None,
    seed: Annotated[int | None, typer.Option(help="The same seed gives the same answers. Default: random.")] = None,
) -> None:
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "seed": seed}
    given = {key: value for key, value in sampling.items() if value is not None}
    said: list[dict[str, str]] = [{"role": "system", "content": system}] if system else []
    to = _server(base_url)
    with refusals(as_json=False):
        name = model or asyncio.run(_first_model(to))
        note(f"{name} at {to.url}; Ctrl-D ends")
        while (text := _line()) is not None:
            if text.strip():
                _turn(to, {"model": name, **given}, said, text)


class Place(NamedTuple):
    url: str
    key: str | None = None  # None: it is found
    tls_ca: str = ""

    def server(self) -> OpenAIServer:
        return OpenAIServer(self.url, key=self.key, tls_ca=self.tls_ca)


def _server(base_url: str | None) -> Place:
    """Raises CliError."""
    if base_url is not None:
        return Place(base_url)
    served = [(cluster, url) for cluster in known_clusters.alive() for url in cluster.http[:1]]
    if len(served) != 1:
        why = "none runs here that serves HTTP" if not served else f"{len(served)} run here"
        raise CliError(f"which server? {why}; give --base-url")
    [(cluster, url)] = served
    return Place(url, token_of(cluster), cluster.tls_ca)


async def _first_model(to: Place) -> str:
    async with to.server() as server:
        return str((await server.models())[0]["id"])


def _line() -> str | None:
    """None at the end."""
    try:
        return input(PROMPT) if sys.stdin.isatty() else next(sys.stdin, None)
    except (EOFError, KeyboardInterrupt):
        return None


def _turn(to: Place, asked: dict[str, Any], said: list[dict[str, str]], text: str) -> None:
    """One question and its answer, which join what was said; a question that is refused does not. Raises KvrelayError
    where the questions come from a program, which hears of it by the exit code."""
    question = {"role": "user", "content": text.rstrip("\n")}
    parts: list[str] = []
    try:
        figures = asyncio.run(_answer(to, asked | {"messages": [*said, question]}, parts))
    except KvrelayError as error:
        if not sys.stdin.isatty():
            print(end="\n" if parts else "", flush=True)
            raise
        note(f"\nerror: {error.message}")
        if error.code == "INVALID_ARGUMENT" or not parts:
            return
        figures = "broken off"
    except KeyboardInterrupt:
        figures = "ended here"
    said += [question, {"role": "assistant", "content": "".join(parts)}]
    print(flush=True)
    note(f"[{figures}]")


def _texts(to: Place, event: dict[str, Any]) -> list[tuple[str, str]]:
    """What each choice says and thinks. Raises KvrelayError."""
    try:
        deltas = [choice.get("delta") or {} for choice in event.get("choices") or ()]
        return [(str(d.get("content") or ""), str(d.get("reasoning_content") or "")) for d in deltas]
    except MALFORMED as error:
        raise KvrelayError("UNAVAILABLE", f"{to.url} answers otherwise: {error!r}") from None


async def _answer(to: Place, asked: dict[str, Any], parts: list[str]) -> str:
    """Printed as it comes; returns its figures."""
    began_s, first_s, usage = time.perf_counter(), 0.0, dict[str, Any]()
    asked = asked | {"stream_options": {"include_usage": True}}
    async with to.server() as server, aclosing(server.events("/v1/chat/completions", asked)) as events:
        async for event in events:
            usage = event.get("usage") or usage
            for said, thought in _texts(to, event):
                first_s = first_s or (time.perf_counter() if said or thought else 0.0)
                parts.append(said)
                print(said or thought, end="", flush=True)
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    first = f"first after {1e3 * (first_s - began_s):.0f} ms" if first_s else "no text"
    return (
        f"{usage.get('completion_tokens', 0)} tokens, {first}; "
        f"prompt {usage.get('prompt_tokens', 0)} tokens, {cached} of them cached"
    )

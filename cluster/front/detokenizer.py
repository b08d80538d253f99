"""Detokenizer turns one request's token ids into text as they come, and finds its stop strings. It samples nothing.

A token's way to the client, each stage holding back only what a later token could change:

    push(ids) -> _TextStream: whole characters -> pending: no beginning of a stop string -> returned

Promise: what push and finish return, joined, is what `tokenizer.decode(all ids, skip_special_tokens=True)` has behind
the prompt, up to the stop string; half a character that the prompt ends with is not completed. One exception:
SentencePiece byte fallback turns a whole run of bytes into U+FFFD when one of them is invalid; characters of that run
which were whole before the bad byte came have been sent, and stay.

Only backend tokenizers (Hugging Face `tokenizers`) are read; a wrapper's clean-up of spaces is not applied, since it
changes text that has been sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

from engine.types import InvalidRequest

REPLACEMENT = "\ufffd"
_MAX_HELD_CHARS = 3  # an incomplete UTF-8 character is at most three bytes, at most three U+FFFD
_MAX_WINDOW_TOKENS = 24  # a longer window happens only inside a run of undecodable bytes
_SHORT_WINDOW_TOKENS = 8  # enough bytes to resynchronise UTF-8


class Detokenizer:
    """One choice of one request.

    `stop` strings count once a token with number >= `min_tokens` completes them. Of several, the one that ends first
    in the text wins, and of those that end together the longest: what reading character by character would find.
    Do not push a token that ended the request by its id where its text is not to be part of the answer.
    Without a tokenizer all text is empty.
    """

    def __init__(
        self,
        tokenizer: Any | None,
        *,
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        hidden: frozenset[int] | None = None,
        before: Sequence[int] = (),
    ) -> None:
        """`tokenizer` is a fast tokenizer of transformers or a tokenizers.Tokenizer; None: the model has none.
        `hidden`: tokens that are left out of the text; None: the special ones, looked up here. `before`: the prompt,
        or its end, which the text goes on from; it is not part of it.

        Raises InvalidRequest for stop strings without a tokenizer.
        """
        if stop and tokenizer is None:
            raise InvalidRequest(f"stop has {len(stop)} strings but the model has no tokenizer; give stop_token_ids")
        self._stream = None if tokenizer is None else _TextStream(tokenizer, hidden, before)
        self._stops = tuple(stop)
        self._min_tokens = min_tokens
        self._pending = ""  # may begin a stop string
        self.num_tokens = 0  # pushed so far; once stopped, up to the token that completed the stop string
        self.stop_string: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found. What is pushed later is ignored."""
        return self.stop_string is not None

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens make certain; often that of the last but one."""
        if self._stream is None:
            self.num_tokens += len(token_ids)
            return ""
        if self.stopped:
            return ""
        pieces = []
        for token_id in token_ids:
            self.num_tokens += 1
            if text := self._stream.push(token_id):
                pieces.append(self._release(text))
                if self.stopped:
                    break
        return "".join(pieces)

    def finish(self) -> str:
        """The text still held back, after the last token; half a character becomes U+FFFD. Call it once."""
        if self.stopped or self._stream is None:
            return ""
        text = self._release(self._stream.finish())
        tail, self._pending = self._pending, ""
        return text + tail

    def _release(self, text: str) -> str:
        """Take in new text, give back what cannot belong to a stop string."""
        if not self._stops:
            return text
        already = len(self._pending)
        self._pending += text
        cut = self._find_stop(already)
        if cut is None:
            cut = self._first_possible_start()
        released, self._pending = self._pending[:cut], "" if self.stopped else self._pending[cut:]
        return released

    def _find_stop(self, already: int) -> int | None:
        """Where the stop string starts that ends first within the new text; sets `stop_string`."""
        if self.num_tokens < self._min_tokens:
            return None
        matches: list[tuple[int, int, str]] = []
        for stop in self._stops:
            start = self._pending.find(stop, max(0, already - len(stop) + 1))
            if start >= 0:
                matches.append((start + len(stop), start, stop))
        if not matches:
            return None
        _, start, self.stop_string = min(matches)
        return start

    def _first_possible_start(self) -> int:
        """Where the longest end of the pending text starts that begins a stop string; its length if there is none."""
        return min(_possible_start(self._pending, stop) for stop in self._stops)


def _possible_start(text: str, stop: str) -> int:
    start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while start >= 0:
        if stop.startswith(text[start:]):
            return start
        start = text.find(stop[0], start + 1)
    return len(text)


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Of a tokenizers.Tokenizer."""
    added = tokenizer.get_added_tokens_decoder()
    return frozenset(token_id for token_id, token in added.items() if token.special)


class _TextStream:
    """Whole characters from tokens: decodes a short window again for each token and emits what is new.

    The window begins with the tokens of the last emission, as context: how a token decodes (its leading space, bytes
    of a character) depends on its neighbours, and never on more than these. After vLLM and Text Generation Inference.

        window:  [ context | tokens not fully emitted ]
        text:    [ shown           | new | held: U+FFFD that may become a character ]
    """

    def __init__(self, tokenizer: Any, hidden: frozenset[int] | None, before: Sequence[int]) -> None:
        """`before`: the first context. Without one a text begins: Llama 2's decoder strips a space there."""
        self._tokenizer = getattr(tokenizer, "backend_tokenizer", tokenizer)
        self._special = special_ids(self._tokenizer) if hidden is None else hidden
        behind = (each for each in reversed(before) if each not in self._special)
        seen = [*islice(behind, _SHORT_WINDOW_TOKENS)][::-1]
        cuts = [seen[at:] for at in range(len(seen))]  # whose start may cut a character
        cuts += [seen[:at] for at in range(len(seen) - 1, 0, -1)]  # half a character may end it, or U+FFFD itself
        self._window = next((each for each in cuts if not self._decode(each).endswith(REPLACEMENT)), [])
        self._context_len = len(self._window)  # tokens
        self._shown = self._decode(self._window)

    def push(self, token_id: int) -> str:
        if token_id in self._special:
            return ""
        self._window.append(token_id)
        text = self._decode_window()
        is_full = len(self._window) > _MAX_WINDOW_TOKENS
        held = _trailing_replacements(text)
        if is_full:
            held = min(held, _MAX_HELD_CHARS)
        stable = len(text) - held
        emitted = text[len(self._shown) : stable]
        if emitted and not held:
            self._move_window(self._context_len)
            self._context_len = len(self._window)
            self._shown = self._decode(self._window)
        elif is_full:
            self._move_window(len(self._window) - _SHORT_WINDOW_TOKENS)
            self._context_len = 0
            shorter = self._decode(self._window)
            self._shown = shorter[: len(shorter) - held]
        elif emitted:
            self._shown += emitted
        return emitted

    def finish(self) -> str:
        return self._decode_window()[len(self._shown) :]

    def _decode_window(self) -> str:
        """Text of the window. Where it contradicts what was shown (byte fallback, see above) the context is dropped."""
        text = self._decode(self._window)
        if text.startswith(self._shown):
            return text
        self._move_window(self._context_len)
        self._context_len = 0
        self._shown = ""
        return self._decode(self._window)

    def _move_window(self, start: int) -> None:
        del self._window[:start]

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False))


def _trailing_replacements(text: str) -> int:
    return len(text) - len(text.rstrip(REPLACEMENT)) if text.endswith(REPLACEMENT) else 0

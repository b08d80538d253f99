"""TextCodec turns a prompt into token ids, once, in the router; cluster/front/detokenizer.py makes text of the answer.

A long text is tokenised in a thread by `encode_batch_fast`, which lets go of the interpreter lock (`encode` holds it):
4 MB of text take seconds there, and the event loop is held up for 20 ms at most, by copies. What may wait is bounded in
bytes. A text that is long for the tokens that the model takes is counted in pieces first and refused when the model's
length is passed: neither time nor memory (170 bytes a token) is spent on what could not be served.

Loaded without torch where the model directory allows it: importing transformers' AutoTokenizer costs a second and
200 MB more, and is needed only for tokenizers that are a class of their own.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import grpc

from cluster.front.detokenizer import REPLACEMENT, special_ids
from cluster.front.options import FrontOptions
from cluster.front.structured import Forms
from cluster.router.live.requests import RequestFailed
from engine.hub import name_and_commit, why_not_had
from engine.types import InvalidRequest
from engine.weights.files import file_of, has_tokenizer, why_damaged, why_not_there

T = TypeVar("T")
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # what tokenizer.json says is all there is
INLINE_CHARS = 1024  # 0.4 ms; a longer text is tokenised in a thread, so that the event loop does not wait for it
THREADS = 2
PIECE_CHARS = 65_536  # that are counted at once; others' texts take their turn in between
USUAL_CHARS = 4  # a token's; a text with more for each token that the model takes is counted first
SURELY_TOO_LONG = 2  # times the model's length, counted in pieces: more than pieces' ends can add
RETRY_AFTER_S = 1.0
SPACE = "\u2581"  # SentencePiece's
BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")  # SentencePiece's
TEKKEN = "tekken.json"  # of mistral-common
NO_VOCABULARY = "its vocabulary is not there; copy the model's own tokenizer.json"
MAX_WAITING_BYTES = FrontOptions().max_tokenizing_bytes


class TokenizerError(ValueError):
    """The model directory has no tokenizer that can be loaded. One sentence with the mend."""


class PromptTooLong(InvalidRequest):
    """For the model. Said in vLLM's words, by which clients know that they are to send less."""

    def __init__(self, size: str, max_model_len: int, why: str = "") -> None:
        why = why or f"so give at most {max_model_len - 1}"
        super().__init__(f"the prompt is {size}; this model's maximum context length is {max_model_len} tokens, {why}")


class TextCodec:
    def __init__(self, tokenizer: Any, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> None:
        """`tokenizer` is a fast tokenizer of transformers. Raises TokenizerError for one that is not."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"{type(tokenizer).__name__} is no fast tokenizer; convert it to a tokenizer.json")
        backend.no_truncation()
        backend.no_padding()
        self.tokenizer = tokenizer
        self.backend = backend
        self.forms = Forms(backend)
        self.longest_token_bytes = max((len(token.encode()) for token in backend.get_vocab()), default=1)
        self.max_waiting_bytes = max_waiting_bytes
        self.waiting_bytes = 0  # of texts that are tokenised in threads, or wait for one
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="tokenizer")
        self._slots = asyncio.Semaphore(THREADS)  # so that what waits is here, and can leave

    @cached_property
    def special_ids(self) -> frozenset[int]:
        return special_ids(self.backend)

    def ids_of(self, tokens: Iterable[str]) -> frozenset[int]:
        """Of those that are one special token each."""
        return self.special_ids & {self.backend.token_to_id(token) for token in tokens}

    def id_of_mark(self, text: str) -> int | None:
        """Of a token that is no text to llguidance: a special one, or any that was added and is like `<think>`."""
        added = self._added.get(text)
        is_mark = added is not None and (added in self.special_ids or (text[0] == "<" and text[-1] == ">"))
        return added if is_mark else None

    @cached_property
    def _added(self) -> dict[str, int]:
        return {token.content: token_id for token_id, token in self.backend.get_added_tokens_decoder().items()}

    def token_text(self, token_id: int) -> str:
        """With the space before it, which decoders of SentencePiece's kind take from a first token."""
        text = str(self.backend.decode([token_id], skip_special_tokens=False))
        is_spaced = (self.backend.id_to_token(token_id) or "").startswith(SPACE) and not text.startswith(" ")
        return f" {text}" if is_spaced else text

    def token_bytes(self, token_id: int, text: str) -> bytes:
        """Of its text; of a part of a character, those that it is, and not those of what stands for them (U+FFFD)."""
        token = self.backend.id_to_token(token_id) if REPLACEMENT in text else None
        if token is None:
            return text.encode()
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        known = self._bytes_of_letters
        return bytes(known[letter] for letter in token) if known.keys() >= set(token) else text.encode()

    @cached_property
    def _bytes_of_letters(self) -> dict[str, int]:
        """In which tokens of byte-level BPE are spelled."""
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(token_ids), skip_special_tokens=False))

    def spellings(self, word: str) -> list[tuple[int, ...]]:
        """The tokens of a word by itself; and of one that follows a space, where that is a token of its own (as vLLM
        takes bad words)."""
        bare, spaced = (tuple(self._tokenise(prefix + word.lstrip(), False).ids) for prefix in ("", " "))
        is_other = len(spaced) == len(bare) and spaced[:1] != bare[:1]
        return [ids for ids in (bare, spaced if is_other else ()) if ids]

    async def encode(self, text: str, max_model_len: int, *, special_tokens: bool = True) -> list[int]:
        """Token ids, with `special_tokens` those that the tokenizer adds to a prompt.

        Raises InvalidRequest where no output would fit behind them, RequestFailed (RESOURCE_EXHAUSTED) when too much
        waits.
        """
        num_bytes = self._checked_bytes(text, max_model_len)
        if len(text) <= INLINE_CHARS:
            return self._encode(text, max_model_len, special_tokens)
        with self._waiting(num_bytes):
            if len(text) > USUAL_CHARS * max_model_len:
                await self._check_pieces(text, max_model_len)
            return await self._in_thread(lambda: self._encode(text, max_model_len, special_tokens))

    def _checked_bytes(self, text: str, max_model_len: int) -> int:
        """How many the text has. Refuses, before it is tokenised, one with more than so many of the longest token."""
        limit = max_model_len * self.longest_token_bytes
        num_bytes = len(text.encode())
        if num_bytes > limit:
            why = f"{limit} bytes at most, so give a shorter one"
            raise PromptTooLong(f"{num_bytes} bytes", max_model_len, why)
        return num_bytes

    @contextmanager
    def _waiting(self, num_bytes: int) -> Iterator[None]:
        """A text may always wait alone."""
        if self.waiting_bytes and self.waiting_bytes + num_bytes > self.max_waiting_bytes:
            raise RequestFailed(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"{self.waiting_bytes} bytes of text wait to be tokenised, of {self.max_waiting_bytes}",
                retry_after_s=RETRY_AFTER_S,
            )
        self.waiting_bytes += num_bytes
        try:
            yield
        finally:
            self.waiting_bytes -= num_bytes

    async def _check_pieces(self, text: str, max_model_len: int) -> None:
        num_tokens = 0
        for start in range(0, len(text), PIECE_CHARS):
            piece = text[start : start + PIECE_CHARS]
            num_tokens += await self._in_thread(lambda piece=piece: len(self._tokenise(piece)))  # type: ignore[misc]
            if num_tokens > SURELY_TOO_LONG * max_model_len:
                raise PromptTooLong(f"more than {num_tokens // SURELY_TOO_LONG} tokens", max_model_len)

    async def _in_thread(self, work: Callable[[], T]) -> T:
        """A thread cannot be interrupted: it keeps its slot though nobody waits for its answer any more."""
        await self._slots.acquire()
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._on_done)
        return await asyncio.shield(future)

    def _on_done(self, future: asyncio.Future[T]) -> None:
        self._slots.release()
        if not future.cancelled():
            future.exception()  # is heard by now: who has left does not ask

    def _encode(self, text: str, max_model_len: int, special_tokens: bool) -> list[int]:
        encoding = self._tokenise(text, special_tokens)
        if len(encoding) >= max_model_len:  # before a list is made of them, which holds the interpreter lock
            raise PromptTooLong(f"{len(encoding)} tokens", max_model_len)
        return list(encoding.ids)

    def _tokenise(self, text: str, special_tokens: bool = True) -> Any:
        try:
            return self.backend.encode_batch_fast([text], add_special_tokens=special_tokens)[0]
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic in Rust is no Exception
            raise InvalidRequest(f"the tokenizer cannot read this text: {str(error)[:200]}") from error

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.forms.close()


def load_codec(model: str, *, max_waiting_bytes: int = MAX_WAITING_BYTES) -> TextCodec:
    """The tokenizer of a model directory or of a name on the hub. Raises TokenizerError."""
    if why := why_not_there(model):
        raise TokenizerError(why)
    if file_of(model, TEKKEN) is not None and file_of(model, "tokenizer.json", fetch=True) is None:
        mend = "copy a tokenizer.json and a tokenizer_config.json there, of the model in Hugging Face's format"
        raise TokenizerError(f"{model} has no tokenizer.json, and its {TEKKEN} is not read; {mend}")
    config = _tokenizer_config(model)
    if config is None:
        raise TokenizerError(f"{model} has no tokenizer.json and no tokenizer_config.json; copy the model's own there")
    try:
        codec = TextCodec(_load(model, config), max_waiting_bytes=max_waiting_bytes)
        _check_vocabulary(model, codec.backend)
        return codec
    except TokenizerError:
        raise
    except Exception as error:  # tokenizers raises Exception itself, transformers what it stumbles at
        if "trust_remote_code" in str(error):
            mend = "put a tokenizer.json there, and take auto_map out of tokenizer_config.json"
            raise TokenizerError(f"the tokenizer of {model} has code of its own, which is not run; {mend}") from error
        path = file_of(model, "tokenizer.json")
        why = (why_damaged(path) if path is not None else "") or why_not_had(model, error)
        why = why or str(error).strip().split("\n", 1)[0]
        if "pip install tiktoken" in why:  # what transformers tries last, where SentencePiece is what is missing
            why = (
                "it has no tokenizer.json, and tokenizer.model is read by sentencepiece or tiktoken, whichever wrote "
                "it; `pip install sentencepiece tiktoken`, or put a tokenizer.json there"
            )
        elif why.startswith("Couldn't instantiate the backend tokenizer"):  # and a list of what may be there
            why = NO_VOCABULARY
        raise TokenizerError(f"the tokenizer of {model} cannot be loaded: {why}") from error


def _check_vocabulary(model: str, backend: Any) -> None:
    """Where there is none, transformers makes a tokenizer of special tokens alone, to which any text is empty."""
    is_whole = file_of(model, "tokenizer.json") is not None
    if not is_whole and backend.get_vocab_size() == len(backend.get_added_tokens_decoder()):
        raise TokenizerError(f"the tokenizer of {model} cannot be loaded: {NO_VOCABULARY}")


def _tokenizer_config(model: str) -> Mapping[str, Any] | None:
    """tokenizer_config.json, empty if there is only a tokenizer.json or the hub gives none; None of a directory that
    has neither."""
    if (path := file_of(model, "tokenizer_config.json", fetch=True)) is not None:
        try:
            loaded = json.loads(path.read_text())
        except ValueError as error:
            raise TokenizerError(f"{path} is no JSON: {error}") from error
        if not isinstance(loaded, dict):
            raise TokenizerError(f"{path} holds no JSON object; copy the model's own there")
        return loaded
    return {} if has_tokenizer(Path(model)) or not Path(model).is_dir() else None


def _load(model: str, config: Mapping[str, Any]) -> Any:
    name, commit = name_and_commit(model)
    is_whole = file_of(model, "tokenizer.json", fetch=True) is not None
    if is_whole and config.get("tokenizer_class") in GENERIC_CLASSES:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(name, revision=commit)
    from transformers import AutoTokenizer

    # where mistral-common is installed a tekken.json would be read first, by a tokenizer that is not fast
    by_tekken = {"mistral_format": False} if is_whole else {}
    return AutoTokenizer.from_pretrained(name, revision=commit, trust_remote_code=False, **by_tekken)

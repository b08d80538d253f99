"""TextCodec turns a prompt into token ids, once, in the router; cluster/front/detokenizer.py makes text of the answer.

Loaded without torch where the model directory allows it: importing transformers' AutoTokenizer costs a second and
200 MB more, and is needed only for tokenizers that are a class of their own.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from engine.types import InvalidRequest

GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")  # what tokenizer.json says is all there is
INLINE_BYTES = 1024  # a longer text is tokenised in a thread, so that the event loop does not wait for it


class TokenizerError(ValueError):
    """The model directory has no tokenizer that can be loaded. One sentence with the mend."""


class TextCodec:
    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is a fast tokenizer of transformers. Raises TokenizerError for one that is not."""
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if backend is None:
            raise TokenizerError(f"{type(tokenizer).__name__} is no fast tokenizer; convert it to a tokenizer.json")
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.longest_token_bytes = max((len(token.encode()) for token in backend.get_vocab()), default=1)
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    async def encode(self, text: str) -> list[int]:
        """Token ids with the special tokens that the tokenizer adds to a prompt."""
        if len(text) <= INLINE_BYTES:
            return self._encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._encode, text)

    def _encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text).ids)

    def check_length(self, text: str, max_model_len: int) -> None:
        """Refuse, before it is tokenised, a text that has more bytes than so many of the longest token."""
        limit = max_model_len * self.longest_token_bytes
        if len(text) > limit or len(text.encode()) > limit:
            raise InvalidRequest(
                f"the prompt is {len(text.encode())} bytes; the model takes {max_model_len} tokens, "
                f"which are {limit} bytes at most, so give a shorter one"
            )

    def close(self) -> None:
        self._threads.shutdown(wait=False)


def load_codec(model: str) -> TextCodec:
    """The tokenizer of a model directory or of a name on the hub. Raises TokenizerError."""
    config = _tokenizer_config(Path(model))
    if config is None:
        raise TokenizerError(f"{model} has no tokenizer.json and no tokenizer_config.json; copy the model's own there")
    try:
        return TextCodec(_load(model, config))
    except (OSError, ValueError, ImportError, KeyError, TypeError) as error:  # what transformers raises for a bad one
        if isinstance(error, TokenizerError):
            raise
        first_line = str(error).strip().split("\n", 1)[0]
        raise TokenizerError(f"the tokenizer of {model} cannot be loaded: {first_line}") from error


def _tokenizer_config(directory: Path) -> Mapping[str, Any] | None:
    """tokenizer_config.json, empty if there is only a tokenizer.json or the directory is none; None if it has none."""
    if not directory.is_dir():
        return {}
    path = directory / "tokenizer_config.json"
    if path.exists():
        try:
            loaded = json.loads(path.read_text())
        except ValueError as error:
            raise TokenizerError(f"{path} is no JSON: {error}") from error
        return loaded if isinstance(loaded, dict) else {}
    names = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")
    return {} if any((directory / name).exists() for name in names) else None


def _load(model: str, config: Mapping[str, Any]) -> Any:
    if config.get("tokenizer_class") in GENERIC_CLASSES and (Path(model) / "tokenizer.json").exists():
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast.from_pretrained(model)
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)

"""Loading a model's tokenizer: as transformers would, without torch where that can be, or one sentence."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.front.http.shapes import TokenNames
from cluster.front.requests import encode
from cluster.front.tokenizer import TextCodec, TokenizerError, load_codec
from cluster.router.live.requests import RequestFailed
from engine.types import InvalidRequest
from kvrelay.v1 import generate_pb2
from tests.hub import as_downloaded


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "?": 1, "hello": 2, "world": 3}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return tmp_path


async def test_ids_are_those_of_transformers(directory: Path) -> None:
    codec = load_codec(str(directory))
    text = "hello world and more"
    wanted = AutoTokenizer.from_pretrained(directory)(text)["input_ids"]
    assert await codec.encode(text, 512) == wanted == [0, 2, 3, 1, 1]


async def test_a_prompt_is_empty_when_no_token_comes_of_it(directory: Path) -> None:
    codec, model = load_codec(str(directory)), generate_pb2.GetModelInfoResponse(max_model_len=16)
    assert await encode("", model, codec) == [0]
    with pytest.raises(InvalidRequest, match="the prompt is empty; give text with at least one token"):
        await encode("", model, codec, special_tokens=False)


@pytest.mark.parametrize("kind", ["letters for bytes", "bytes by number"])
def test_tokens_have_names_that_differ_and_the_bytes_that_they_are(kind: str) -> None:
    """The three bytes of a character, a word behind a space, and an id that is no token's."""
    if kind == "letters for bytes":
        tokenizer = Tokenizer(models.BPE({"æ": 0, "¼": 1, "¢": 2, "Ġword": 3}, []))
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE({"<0xE6>": 0, "<0xBC>": 1, "<0xA2>": 2, "▁word": 3}, []))
        first, rest = decoders.Replace("▁", " "), (decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0))
        tokenizer.decoder = decoders.Sequence([first, *rest])
    codec = TextCodec(PreTrainedTokenizerFast(tokenizer_object=tokenizer))
    names = TokenNames(codec)
    raw = [names.token(token_id).raw for token_id in range(5)]
    assert raw == [b"\xe6", b"\xbc", b"\xa2", b" word", b"token_id:4"]
    assert [names.of(i) for i in range(5)] == ["bytes:\\xe6", "bytes:\\xbc", "bytes:\\xa2", " word", "token_id:4"]
    assert b"".join(raw[:3]).decode() == codec.text_of([0, 1, 2]) == "漢"
    assert TokenNames(codec, by_id=True).of(0) == "token_id:0"


async def test_a_long_text_is_not_cut_by_settings_of_the_file(directory: Path) -> None:
    saved = json.loads((directory / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    codec = load_codec(str(directory))
    assert len(await codec.encode("hello " * 1000, 2000)) == 1001


def test_a_generic_tokenizer_is_loaded_without_torch(directory: Path) -> None:
    load = f"from cluster.front.tokenizer import load_codec; load_codec({str(directory)!r})"
    is_there = "print('torch' in sys.modules)"
    code = f"import sys; from transformers import PreTrainedTokenizerFast; {is_there}; {load}; {is_there}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    by_transformers, by_us = done.stdout.split()
    if by_transformers == "True":  # 5.17 does, for GGUF files
        pytest.skip(f"PreTrainedTokenizerFast of transformers {transformers.__version__} imports torch itself")
    assert by_us == "False"


async def test_of_a_name_on_the_hub_it_is_the_same(
    directory: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers itself would take the tokenizer that is usual for the type of the model."""
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    name = as_downloaded(directory, "org/name", tmp_path_factory.mktemp("hub"), monkeypatch)
    text = "hello world and more"
    by_name, by_path = [await load_codec(model).encode(text, 512) for model in (name, str(directory))]
    assert by_name == by_path == [0, 2, 3, 1, 1]


async def test_a_text_with_more_bytes_than_the_model_could_take_is_refused_untokenised(directory: Path) -> None:
    codec = load_codec(str(directory))
    assert codec.longest_token_bytes == 5
    assert await codec.encode("x" * 50, 10) == [0, 1]
    with pytest.raises(InvalidRequest, match="51 bytes; this model's maximum context length is 10 tokens"):
        await codec.encode("x" * 51, 10)
    with pytest.raises(InvalidRequest, match="the prompt is 52 bytes"):
        await codec.encode("é" * 26, 10)


class Encoded(list[int]):
    @property
    def ids(self) -> list[int]:
        return self


class StuckBackend:
    """A tokenizer that is at work until it is told to end, and calls each character a token."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.go_on = threading.Event()

    def no_truncation(self) -> None: ...

    def no_padding(self) -> None: ...

    def get_vocab(self) -> dict[str, int]:
        return {"x" * 100: 0}

    def encode_batch_fast(self, texts: list[str], add_special_tokens: bool = True) -> list[Encoded]:
        self.texts += texts
        assert self.go_on.wait(20)
        return [Encoded([0] * len(text)) for text in texts]


def stuck_codec(max_waiting_bytes: int = 100_000) -> tuple[StuckBackend, TextCodec]:
    backend = StuckBackend()
    return backend, TextCodec(SimpleNamespace(backend_tokenizer=backend), max_waiting_bytes=max_waiting_bytes)


async def test_the_event_loop_goes_on_while_a_long_text_is_tokenised(directory: Path) -> None:
    """`encode` of the tokenizer holds the interpreter lock: three ticks came."""
    codec = load_codec(str(directory))
    text = "hello " * 150_000
    encoding = asyncio.ensure_future(codec.encode(text, 200_000))
    ticks = 0
    while not encoding.done():
        await asyncio.sleep(0.001)
        ticks += 1
    assert len(await encoding) == 150_001
    assert ticks > 10


async def test_texts_that_wait_are_bounded_in_bytes_and_leave_with_their_client() -> None:
    backend, codec = stuck_codec()
    waiting = [asyncio.ensure_future(codec.encode("x" * 30_000, 100_000)) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RequestFailed, match="90000 bytes of text wait to be tokenised, of 100000") as refused:
        await codec.encode("x" * 20_000, 100_000)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.retry_after_s
    for each in waiting[1:]:
        each.cancel()
    await asyncio.wait(waiting[1:])
    assert codec.waiting_bytes == 30_000
    backend.go_on.set()
    assert len(await waiting[0]) == 30_000
    assert len(backend.texts) < 3, "a text whose client had left was tokenised"
    assert codec.waiting_bytes == 0


async def test_a_text_that_is_refused_after_its_client_has_left_fills_no_log() -> None:
    backend, codec = stuck_codec()
    unheard: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, trouble: unheard.append(trouble["message"]))
    encoding = asyncio.ensure_future(codec.encode("x" * 2000, 2000))
    while not backend.texts:
        await asyncio.sleep(0.001)
    encoding.cancel()
    await asyncio.wait([encoding])
    backend.go_on.set()
    assert len(await codec.encode("x" * 1999, 2000)) == 1999
    codec.close()
    await asyncio.sleep(0.01)
    del encoding
    gc.collect()
    assert not unheard


async def test_a_text_that_is_far_too_long_is_never_tokenised_whole() -> None:
    backend, codec = stuck_codec(10_000_000)
    backend.go_on.set()
    with pytest.raises(InvalidRequest, match="length is 50000 tokens, so give at most 49999"):
        await codec.encode("x" * 4_000_000, 50_000)
    assert sum(map(len, backend.texts)) <= 3 * 65_536


async def test_a_panic_of_the_tokenizer_refuses_the_text_that_caused_it() -> None:
    class Panic(BaseException):
        pass

    backend, codec = stuck_codec()

    def panic(texts: list[str], add_special_tokens: bool = True) -> list[Encoded]:
        raise Panic("index out of bounds")

    backend.encode_batch_fast = panic  # type: ignore[method-assign]
    for text in ("x", "x" * 5000):
        with pytest.raises(InvalidRequest, match="the tokenizer cannot read this text: index out of bounds"):
            await codec.encode(text, 10_000)


def test_a_directory_that_is_not_there_is_taken_for_no_name_on_the_hub(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"gone' is not there; give a Hugging Face model directory"):
        load_codec(str(tmp_path / "gone"))


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json and no tokenizer_config\.json") as error:
        load_codec(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "Qwen2Tokenizer", "PreTrainedTokenizerFast"])
def test_a_tokenizer_config_without_a_vocabulary_is_one_sentence(directory: Path, kind: str) -> None:
    """Of some classes transformers makes a tokenizer that has none."""
    (directory / "tokenizer.json").unlink()
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": kind, "bos_token": "<s>"}))
    with pytest.raises(TokenizerError, match=r"its vocabulary is not there; copy the model's own tokenizer\.json$"):
        load_codec(str(directory))


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("", r"tokenizer\.json is damaged or cut short \(.*\); copy it anew"),
        ("{", r"tokenizer\.json is damaged or cut short \(.*\); copy it anew"),
        ("[]", r"tokenizer\.json holds no object; copy it anew"),
        ("version https://git-lfs.github.com/spec/v1\n", r"tokenizer\.json is a Git LFS pointer; fetch what it stands"),
        ('{"model": 3}', "cannot be loaded"),
    ],
)
def test_a_broken_tokenizer_is_one_sentence(directory: Path, content: str, why: str) -> None:
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError, match=why) as error:
        load_codec(str(directory))
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_tokenizer_with_code_of_its_own_is_told_so(directory: Path) -> None:
    own = {"tokenizer_class": "OwnTokenizer", "auto_map": {"AutoTokenizer": ["own.OwnTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(own))
    (directory / "own.py").write_text("raise SystemExit('it was run')")
    with pytest.raises(TokenizerError, match=r"has code of its own, which is not run; put a tokenizer\.json there"):
        load_codec(str(directory))


def test_what_is_wanted_to_read_a_tokenizer_model_is_named(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks for tiktoken alone, whoever wrote the file."""
    monkeypatch.setitem(sys.modules, "tiktoken.load", None)
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "LlamaTokenizer"}))
    with pytest.raises(TokenizerError, match=r"`pip install sentencepiece tiktoken`, or put a tokenizer\.json"):
        load_codec(str(directory))


def test_a_tekken_alone_is_not_read(directory: Path) -> None:
    (directory / "tokenizer.json").rename(directory / "tekken.json")
    with pytest.raises(TokenizerError, match=r"no tokenizer\.json, and its tekken\.json is not read; copy a tokenizer"):
        load_codec(str(directory))


async def test_a_tekken_beside_a_tokenizer_json_changes_nothing(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where mistral-common is installed transformers makes its tokenizer of it, which has no backend."""
    by_itself = AutoTokenizer.from_pretrained

    def where_it_is_installed(model: str, *, mistral_format: bool | None = None, **more: object) -> object:
        return object() if mistral_format is None else by_itself(model, mistral_format=mistral_format, **more)

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", where_it_is_installed)
    (directory / "tekken.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "config.json").write_text(json.dumps({"model_type": "mistral"}))
    assert await load_codec(str(directory)).encode("hello world", 512) == [0, 2, 3]


def test_a_tokenizer_config_that_is_no_object_is_named(directory: Path) -> None:
    (directory / "tokenizer_config.json").write_text("[]")
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json holds no JSON object; copy the model's"):
        load_codec(str(directory))


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError, match="object is no fast tokenizer"):
        TextCodec(object())

"""Loading a model's tokenizer: as transformers would, without torch where that can be, or one sentence."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from cluster.front.tokenizer import TextCodec, TokenizerError, load_codec
from engine.types import InvalidRequest


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
    assert await codec.encode(text) == AutoTokenizer.from_pretrained(directory)(text)["input_ids"] == [0, 2, 3, 1, 1]


async def test_a_long_text_is_not_cut_by_settings_of_the_file(directory: Path) -> None:
    saved = json.loads((directory / "tokenizer.json").read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(saved))
    codec = load_codec(str(directory))
    assert len(await codec.encode("hello " * 1000)) == 1001


def test_a_generic_tokenizer_is_loaded_without_torch(directory: Path) -> None:
    load = f"from cluster.front.tokenizer import load_codec; load_codec({str(directory)!r})"
    code = f"import sys; {load}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.strip() == "False"


def test_a_text_with_more_bytes_than_the_model_could_take_is_refused_before_it_is_tokenised(directory: Path) -> None:
    codec = load_codec(str(directory))
    assert codec.longest_token_bytes == 5
    codec.check_length("x" * 50, max_model_len=10)
    with pytest.raises(InvalidRequest, match="the prompt is 51 bytes; the model takes 10 tokens"):
        codec.check_length("x" * 51, max_model_len=10)
    with pytest.raises(InvalidRequest, match="the prompt is 52 bytes"):
        codec.check_length("é" * 26, max_model_len=10)


def test_a_directory_without_a_tokenizer_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TokenizerError, match=r"has no tokenizer\.json and no tokenizer_config\.json") as error:
        load_codec(str(tmp_path))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("content", ["", "{", '{"model": 3}'])
def test_a_broken_tokenizer_is_one_sentence(directory: Path, content: str) -> None:
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(TokenizerError) as error:
        load_codec(str(directory))
    assert str(directory) in str(error.value)
    assert "\n" not in str(error.value)


def test_a_slow_tokenizer_is_refused() -> None:
    with pytest.raises(TokenizerError, match="object is no fast tokenizer"):
        TextCodec(object())

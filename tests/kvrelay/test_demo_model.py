"""A demo model loads like any other, generates varied text, and is written whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kvrelay import demo_model
from kvrelay.demo_model import DemoModelError, make_demo_model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_demo_model(tmp_path_factory.mktemp("models") / "tiny")


def test_it_loads_as_a_llama_in_the_dtype_asked_for(tiny: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == 8192
    assert model.generation_config.eos_token_id == 1


@pytest.mark.parametrize("text", ["def f(x):\n  return  x", "wörld 日本語 🙂👩‍👩‍👧 é", " leading", "", "\x00\x7f"])
def test_its_tokenizer_gives_back_any_text_and_begins_with_bos(tiny: Path, text: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    ids = tokenizer(text).input_ids
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_its_chat_template_marks_turns_with_single_tokens(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    chat = [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<s><|user|>Hi</s><|assistant|>"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    assert ids[:2] == tokenizer.convert_tokens_to_ids(["<s>", "<|user|>"])


def test_greedy_output_wanders_and_depends_on_the_prompt(tiny: Path) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(tiny), AutoModelForCausalLM.from_pretrained(tiny)
    outputs = []
    for prompt in ("The router sends", "A router sends"):
        inputs = tokenizer(prompt, return_tensors="pt")
        generated = model.generate(**inputs, do_sample=False, min_new_tokens=48, max_new_tokens=48)
        outputs.append(generated[0, inputs.input_ids.shape[1] :].tolist())
    assert len(set(outputs[0])) > 24
    assert outputs[0] != outputs[1]


def test_the_same_recipe_gives_the_same_bytes_and_another_seed_other_weights(tiny: Path, tmp_path: Path) -> None:
    again, other = make_demo_model(tmp_path / "again"), make_demo_model(tmp_path / "other", seed=1)
    for file in sorted(tiny.iterdir()):
        assert (again / file.name).read_bytes() == file.read_bytes(), file.name
    assert (other / "model.safetensors").read_bytes() != (tiny / "model.safetensors").read_bytes()
    assert (other / "tokenizer.json").read_bytes() == (tiny / "tokenizer.json").read_bytes()


def test_a_directory_with_the_same_recipe_is_reused_and_one_with_another_replaced(tmp_path: Path) -> None:
    directory = make_demo_model(tmp_path / "m")
    inode = (directory / "model.safetensors").stat().st_ino
    make_demo_model(directory)
    assert (directory / "model.safetensors").stat().st_ino == inode
    make_demo_model(directory, dtype="float32")
    assert AutoModelForCausalLM.from_pretrained(directory).dtype == torch.float32
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_a_directory_of_somebody_elses_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("dear reader")
    with pytest.raises(DemoModelError, match="no demo model"):
        make_demo_model(tmp_path)
    with pytest.raises(DemoModelError, match="is a file"):
        make_demo_model(tmp_path / "thesis.tex")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full_disk(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(demo_model, "save_file", full_disk)
    with pytest.raises(OSError, match="no space"):
        make_demo_model(tmp_path / "m")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("wrong", "named"), [({"size": "7b"}, "size is '7b'"), ({"dtype": "int4"}, "dtype is 'int4'")])
def test_an_unknown_size_or_dtype_is_named(tmp_path: Path, wrong: dict[str, str], named: str) -> None:
    with pytest.raises(DemoModelError, match=named):
        make_demo_model(tmp_path / "m", **wrong)  # type: ignore[arg-type]

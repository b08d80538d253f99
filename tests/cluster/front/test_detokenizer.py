"""Pieces join to what decoding everything at once gives, up to the stop string, and no piece is half a character."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from cluster.front.detokenizer import Detokenizer
from engine.types import InvalidRequest

SPECIAL = "</s>"
CORPUS = ["the router sends the prompt to the prefill pool, the tokens stream back 🙂 日本語 über"] * 3


@cache
def byte_level() -> Tokenizer:
    """Like GPT-2's and Llama 3's: a rare character is split over tokens anywhere between its bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=[SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    return tokenizer


@cache
def sentencepiece_like() -> Tokenizer:
    """Like Llama 2's: ▁ for spaces, one token for each byte of an unknown character, the first space stripped."""
    pieces = ["<unk>", SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorstu", "日"]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("▁", "r"), ("o", "u")]
    pieces += ["".join(pair) for pair in merges]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([SPECIAL])
    return tokenizer


@cache
def metaspace() -> Tokenizer:
    """Like T5's and Gemma's first: words that carry their space, no bytes."""
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>", SPECIAL], show_progress=False)
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


TOKENIZERS = {"byte_level": byte_level, "sentencepiece_like": sentencepiece_like, "metaspace": metaspace}
every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)

TEXTS = st.lists(
    st.one_of(
        st.sampled_from(list("the router sends \n\t")),
        st.sampled_from(["🙂", "👩‍👩‍👧‍👦", "🇩🇪", "👍🏽", "日", "本", "한", "e\u0301", "\u200d", "\ufffd", "ß", "ก็"]),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=40,
).map("".join)


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False).ids)


def id_of(tokenizer: Tokenizer, token: str) -> int:
    known = tokenizer.token_to_id(token)
    assert known is not None
    return known


def decoded(tokenizer: Tokenizer, ids: list[int]) -> str:
    return str(tokenizer.decode(ids, skip_special_tokens=True))


def one_by_one(detokenizer: Detokenizer, ids: list[int]) -> list[str]:
    return [*(detokenizer.push([token_id]) for token_id in ids), detokenizer.finish()]


# --- the same text


@every_tokenizer
@given(text=TEXTS, chunk=st.integers(1, 5))
@settings(max_examples=150, deadline=None)
def test_pieces_join_to_the_whole_text(name: str, text: str, chunk: int) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, text)
    whole = decoded(tokenizer, ids)
    assert "".join(one_by_one(Detokenizer(tokenizer), ids)) == whole
    detokenizer = Detokenizer(tokenizer)
    chunks = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    assert "".join(chunks) + detokenizer.finish() == whole
    assert detokenizer.num_tokens == len(ids)


@pytest.mark.parametrize("name", ["byte_level", "metaspace"])
@given(seeds=st.lists(st.integers(0, 10_000), max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_ids_even_undecodable_bytes_and_unknown_ones_join_to_the_whole(name: str, seeds: list[int]) -> None:
    """What a model with random weights writes: lone continuation bytes, special tokens anywhere, padding ids."""
    tokenizer = TOKENIZERS[name]()
    ids = [seed % (tokenizer.get_vocab_size() + 5) for seed in seeds]
    assert "".join(one_by_one(Detokenizer(tokenizer), ids)) == decoded(tokenizer, ids)


@given(before=TEXTS, repeats=st.integers(1, 120), after=TEXTS, cut=st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_a_long_run_of_half_characters_is_sent_on_and_ends_right(
    before: str, repeats: int, after: str, cut: int
) -> None:
    tokenizer = byte_level()
    half = [
        id_of(tokenizer, token)
        for token in pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("𓀀")[0][0]
    ]
    ids = ids_of(tokenizer, before) + half[:cut] * repeats + ids_of(tokenizer, after)
    pieces = one_by_one(Detokenizer(tokenizer), ids)
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert max(map(len, pieces)) <= 30 + len(before) + len(after)


@given(before=TEXTS, bad=st.lists(st.integers(0x80, 0xFF), min_size=1, max_size=40), after=st.just("the router"))
@settings(max_examples=150, deadline=None)
@example(before="日本", bad=[0xFF], after="the router")
def test_byte_fallback_keeps_what_was_sent_and_goes_on_after_bad_bytes(before: str, bad: list[int], after: str) -> None:
    tokenizer = sentencepiece_like()
    first = ids_of(tokenizer, before)
    detokenizer = Detokenizer(tokenizer)
    sent = detokenizer.push(first)
    detokenizer.push([id_of(tokenizer, f"<0x{byte:02X}>") for byte in bad])
    rest = detokenizer.push(ids_of(tokenizer, after)) + detokenizer.finish()
    assert decoded(tokenizer, first).startswith(sent)
    assert rest.endswith("the router")


# --- behind a prompt


@every_tokenizer
@given(prompt=TEXTS, answer=TEXTS, chunk=st.integers(1, 5))
@example(prompt="the", answer=" router", chunk=1)
@example(prompt="\ufffd", answer="t", chunk=1)
@settings(max_examples=150, deadline=None)
def test_an_answer_goes_on_from_its_prompt(name: str, prompt: str, answer: str, chunk: int) -> None:
    tokenizer = TOKENIZERS[name]()
    special = id_of(tokenizer, SPECIAL)
    before, ids = [special, *ids_of(tokenizer, "the" + prompt), special], ids_of(tokenizer, answer)
    detokenizer = Detokenizer(tokenizer, before=before)
    pieces = [detokenizer.push(ids[i : i + chunk]) for i in range(0, len(ids), chunk)]
    whole = decoded(tokenizer, before + ids)
    assert decoded(tokenizer, before) + "".join(pieces) + detokenizer.finish() == whole


@given(prompt=st.lists(st.integers(2, 329), max_size=30), answer=st.lists(st.integers(2, 329), max_size=60))
@settings(max_examples=300, deadline=None)
def test_a_byte_level_answer_is_the_same_behind_any_prompt(prompt: list[int], answer: list[int]) -> None:
    """Half a character at the prompt's end, too, is not the answer's."""
    tokenizer = byte_level()
    pieces = one_by_one(Detokenizer(tokenizer, before=prompt), answer)
    assert "".join(pieces) == decoded(tokenizer, answer)


def test_a_stop_string_may_begin_with_the_space_behind_the_prompt() -> None:
    tokenizer = sentencepiece_like()
    detokenizer = Detokenizer(tokenizer, stop=(" the",), before=ids_of(tokenizer, "the"))
    assert "".join(one_by_one(detokenizer, ids_of(tokenizer, "the router"))) == ""
    assert detokenizer.stop_string == " the"


# --- one token at a time


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece_like"])
@pytest.mark.parametrize("text", ["🙂", "日本語", "👩‍👩‍👧‍👦", "ü"])
def test_no_piece_holds_half_a_character_and_each_comes_with_its_last_byte(name: str, text: str) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, text)
    *pieces, rest = one_by_one(Detokenizer(tokenizer), ids)
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == decoded(tokenizer, ids)
    assert rest == ""


def test_plain_text_comes_at_once_with_its_spaces() -> None:
    tokenizer = sentencepiece_like()
    ids = ids_of(tokenizer, "the the router")
    assert one_by_one(Detokenizer(tokenizer), ids)[:2] == ["the", " the"]


@every_tokenizer
def test_special_tokens_are_left_out_and_do_not_eat_the_space_after_them(name: str) -> None:
    tokenizer = TOKENIZERS[name]()
    special = id_of(tokenizer, SPECIAL)
    word = ids_of(tokenizer, "the") + [special] * 40 + ids_of(tokenizer, "the the")[1:]
    assert "".join(one_by_one(Detokenizer(tokenizer), word)) == decoded(tokenizer, word)


def test_half_a_character_at_the_end_is_told_by_finish() -> None:
    tokenizer = byte_level()
    ids = ids_of(tokenizer, "a𓀀")[:-1]
    detokenizer = Detokenizer(tokenizer)
    assert detokenizer.push(ids) == "a"
    assert detokenizer.finish() == "\ufffd"


def test_without_a_tokenizer_text_is_empty_and_stop_strings_are_refused() -> None:
    detokenizer = Detokenizer(None)
    assert detokenizer.push([1, 2, 3]) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == 3
    with pytest.raises(InvalidRequest, match="no tokenizer; give stop_token_ids"):
        Detokenizer(None, stop=("x",))


# --- stop strings


def by_character(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule, spelt out: read character by character, stop at the first that completes a stop, longest first."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


STOP_ALPHABET = "ab日🙂 "


@every_tokenizer
@given(
    text=st.text(STOP_ALPHABET, max_size=40),
    stops=st.lists(st.text(STOP_ALPHABET, min_size=1, max_size=6), max_size=4),
)
@settings(max_examples=300, deadline=None)
@example(text="aababab", stops=["abab", "b"])
def test_text_is_cut_before_the_stop_string_wherever_tokens_end(name: str, text: str, stops: list[str]) -> None:
    tokenizer = TOKENIZERS[name]()
    ids = ids_of(tokenizer, text)
    expected, stop = by_character(decoded(tokenizer, ids), stops)
    detokenizer = Detokenizer(tokenizer, stop=stops)
    pieces = one_by_one(detokenizer, ids)
    assert "".join(pieces) == expected
    assert detokenizer.stop_string == stop
    assert detokenizer.stopped == (stop is not None)
    if stop is not None:
        assert stop in decoded(tokenizer, ids[: detokenizer.num_tokens])
        assert stop not in decoded(tokenizer, ids[: detokenizer.num_tokens - 1])


def test_a_beginning_of_a_stop_string_is_held_until_it_is_none() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=("xyz!",))
    pieces = [detokenizer.push(ids_of(tokenizer, char)) for char in "axyxyz?"]
    assert pieces == ["a", "", "", "xy", "", "", "xyz?"]
    assert detokenizer.push(ids_of(tokenizer, "xyz")) == ""
    assert detokenizer.finish() == "xyz"
    assert not detokenizer.stopped


def test_tokens_after_the_stop_string_are_neither_told_nor_counted() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=("x",))
    assert detokenizer.push(ids_of(tokenizer, "q")) == "q"
    assert detokenizer.push(ids_of(tokenizer, "zxzzz")) == "z"
    assert detokenizer.num_tokens == 3
    assert detokenizer.push(ids_of(tokenizer, "zz")) == ""
    assert detokenizer.finish() == ""
    assert detokenizer.num_tokens == 3
    assert detokenizer.stop_string == "x"


@pytest.mark.parametrize(
    ("min_tokens", "expected"),
    [(0, "a"), (2, "a"), (3, "axa"), (4, "axa"), (5, "axaxx"[:4]), (6, "axaxxb")],
)
def test_a_stop_string_counts_from_the_token_that_makes_min_tokens(min_tokens: int, expected: str) -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=("x",), min_tokens=min_tokens)
    pieces = one_by_one(detokenizer, [ids_of(tokenizer, char)[0] for char in "axaxxb"])
    assert "".join(pieces) == expected


def test_a_stop_string_may_begin_before_min_tokens_and_end_after() -> None:
    tokenizer = byte_level()
    detokenizer = Detokenizer(tokenizer, stop=("xyz",), min_tokens=3)
    assert "".join(one_by_one(detokenizer, ids_of(tokenizer, "axyzb"))) == "a"
    assert detokenizer.num_tokens == 4

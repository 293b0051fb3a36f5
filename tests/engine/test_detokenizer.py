"""The law of the incremental detokenizer (C44, C46), on tokenizers built here: byte-level and SentencePiece-like."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from enginebay.engine.detokenizer import Detokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

BYTES = [f"<0x{b:02X}>" for b in range(256)]


def byte_level() -> Tokenizer:
    """Every byte, some merges that cut characters, special and ordinary added tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate(alphabet)}
    merges = [("a", "ä"), ("½", "ł"), ("Ġ", "a"), ("ð", "Ł")]  # "a" + E4 | BD A0 | " a" | F0 9F
    for left, right in merges:
        vocab[left + right] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|a b|>"])
    tokenizer.add_tokens([AddedToken("<think>"), AddedToken("→ x"), AddedToken("\ufffd")])
    return tokenizer


def sentencepiece(*, strip: bool = True) -> Tokenizer:
    """Llama 2's decoder over byte-fallback tokens and words."""
    words = ["<unk>", *BYTES, "▁", "▁▁", "a", "▁a", "▁Paris", ".", "é", "你", "\u0301", "\ufffd", "", "<0xZZ>"]
    vocab = {w: i for i, w in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.add_tokens([AddedToken("  ", normalized=False)])
    return tokenizer


def metaspace() -> Tokenizer:
    vocab = {w: i for i, w in enumerate(["<unk>", "▁", "a", "▁a", "▁Paris", "▁你", "."])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    vocab = {w: i for i, w in enumerate(["[UNK]", "a", "##b", "n't", ".", "do", "##é"])}
    tokenizer = Tokenizer(models.WordPiece(vocab=vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def suffixed() -> Tokenizer:
    vocab = {w: i for i, w in enumerate(["a</w>", "b", "c</w>", "é"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], end_of_word_suffix="</w>"))
    tokenizer.decoder = decoders.BPEDecoder()
    return tokenizer


def no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel(vocab={"a": 0, "b": 1, "c": 2}, unk_token="a"))


TOKENIZERS: dict[str, Tokenizer] = {
    make.__name__: make() for make in (byte_level, sentencepiece, metaspace, wordpiece, suffixed, no_decoder)
} | {"gemma": sentencepiece(strip=False)}


def id_of(tokenizer: Tokenizer, token: str) -> int:
    found = tokenizer.token_to_id(token)
    assert found is not None
    return found


def text_of(tokenizer: Tokenizer, prompt: Sequence[int], chunks: Sequence[Sequence[int]], skip: bool = True) -> str:
    stream = Detokenizer(tokenizer).stream(prompt, skip)
    return "".join([*(stream.push(chunk) for chunk in chunks), stream.flush()])


@st.composite
def chunked(draw: st.DrawFn, tokenizer: Tokenizer) -> list[list[int]]:
    """Token sequences, random or with much text in them, cut anywhere; two ids are outside the vocabulary."""
    size = tokenizer.get_vocab_size()
    rare = st.integers(max(0, size - 16), size + 1)  # the end of each vocabulary holds its odd tokens
    some = st.lists(st.one_of(st.integers(0, size + 1), rare), max_size=12)
    character = st.sampled_from("é你😀👩\u200d\u0301\ufffd a.")
    pieces = st.one_of(some, st.text(character, max_size=4).map(lambda text: tokenizer.encode(text).ids))
    tokens = [t for piece in draw(st.lists(pieces, max_size=5)) for t in piece]
    cuts = sorted(draw(st.lists(st.integers(0, len(tokens)), max_size=6)))
    return [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_deltas_add_up_to_the_full_decoding(name: str, data: st.DataObject, skip: bool) -> None:
    """C44: for every token sequence and chunking, without anything before it."""
    tokenizer = TOKENIZERS[name]
    chunks = data.draw(chunked(tokenizer))
    tokens = [t for chunk in chunks for t in chunk]
    assert text_of(tokenizer, [], chunks, skip) == tokenizer.decode(tokens, skip_special_tokens=skip)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(data=st.data(), skip=st.booleans())
def test_prompt_and_deltas_add_up_to_the_full_decoding(name: str, data: st.DataObject, skip: bool) -> None:
    """C46: nothing is lost or doubled at the seam. The prompt ends in a whole character."""
    tokenizer = TOKENIZERS[name]
    ending = {"byte_level": "a", "sentencepiece": "▁Paris", "gemma": "▁Paris"}.get(name)
    last = id_of(tokenizer, ending) if ending else data.draw(st.integers(0, tokenizer.get_vocab_size() - 1))
    prompt = [*(t for chunk in data.draw(chunked(tokenizer)) for t in chunk), last]
    chunks = data.draw(chunked(tokenizer))
    tokens = [t for chunk in chunks for t in chunk]
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    full = tokenizer.decode([*prompt, *tokens], skip_special_tokens=skip)
    assert before + text_of(tokenizer, prompt, chunks, skip) == full


@given(data=st.data())
@pytest.mark.parametrize("make", [byte_level, sentencepiece])
def test_no_delta_ends_inside_a_character(make: Callable[[], Tokenizer], data: st.DataObject) -> None:
    """C44: valid text streams without any U+FFFD, one token at a time."""
    tokenizer = TOKENIZERS[make.__name__]
    text = data.draw(st.text(st.characters(codec="utf-8", exclude_characters="\ufffd"), max_size=12))
    ids = tokenizer.encode("a" + text).ids
    stream = Detokenizer(tokenizer).stream(ids[:1])
    deltas = [*(stream.push([t]) for t in ids[1:]), stream.flush()]
    assert "\ufffd" not in "".join(deltas)
    assert "a" + "".join(deltas) == tokenizer.decode(ids)


@pytest.mark.parametrize("text", ["你好世界", "👩\u200d👩\u200d👧 family", "e\u0301 n\u0303", "naïve 😀."])
@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_hard_characters_arrive_whole(name: str, text: str) -> None:
    """C44: CJK, emoji with joiners, combining marks."""
    tokenizer = TOKENIZERS[name]
    prompt = [id_of(tokenizer, "a")]
    ids = tokenizer.encode(text.replace(" ", "▁") if name == "sentencepiece" else text).ids
    assert text_of(tokenizer, prompt, [[t] for t in ids]) == text


def test_bytes_that_never_complete_are_flushed_as_replacement() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("😀").ids
    stream = Detokenizer(tokenizer).stream([])
    assert stream.push(ids[:-1]) == ""
    assert stream.flush() == "\ufffd"


def test_endless_invalid_bytes_do_not_hold_the_text_back() -> None:
    """A byte that can begin no character is settled at once, so that nothing piles up."""
    tokenizer = TOKENIZERS["byte_level"]
    stray = id_of(tokenizer, "ł")  # byte A0
    stream = Detokenizer(tokenizer).stream([])
    assert [stream.push([stray]) for _ in range(3)] == ["\ufffd"] * 3


def test_a_byte_run_is_held_until_it_ends() -> None:
    """One bad byte turns a whole run of byte-fallback tokens into U+FFFD, so no part of it can be shown early."""
    tokenizer = TOKENIZERS["sentencepiece"]
    good = [id_of(tokenizer, f"<0x{b:02X}>") for b in "é".encode()]
    bad, word = id_of(tokenizer, "<0xFF>"), id_of(tokenizer, "▁a")
    stream = Detokenizer(tokenizer).stream([word])
    assert [stream.push([t]) for t in [*good, word, *good, bad, word]] == [
        "",
        "",
        "é a",
        "",
        "",
        "",
        "\ufffd" * 3 + " a",
    ]


@pytest.mark.parametrize(
    ("prompt", "tokens", "text"),
    [
        (["▁a"], ["▁Paris"], " Paris"),
        (["<s>"], ["▁Paris"], "Paris"),
        (["▁a", "</s>"], ["▁Paris"], " Paris"),
        (["▁"], ["▁Paris"], " Paris"),
        (["▁a", "▁"], ["a"], "a"),
        (["▁a", ""], ["▁Paris"], " Paris"),
        (["▁a"], ["", "▁Paris"], " Paris"),
        (["▁a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>"], ["▁Paris"], " Paris"),
        (["▁a", "<0xF0>", "<0x9F>"], ["<0x98>", "<0x80>", "."], "😀."),
    ],
)
def test_the_leading_space_at_the_seam(prompt: list[str], tokens: list[str], text: str) -> None:
    """C46: the space belongs to the completion exactly when the prompt has text before it."""
    tokenizer = TOKENIZERS["sentencepiece"]
    ids = [id_of(tokenizer, t) for t in tokens]
    assert text_of(tokenizer, [id_of(tokenizer, t) for t in prompt], [[t] for t in ids]) == text


def test_a_character_begun_by_the_prompt_comes_whole() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = tokenizer.encode("x😀").ids
    assert text_of(tokenizer, ids[:-1], [ids[-1:]]) == "😀"


@pytest.mark.parametrize(("skip", "text"), [(True, "aa"), (False, "a<|a b|>a<|end|>")])
def test_special_tokens_are_left_out_on_request(skip: bool, text: str) -> None:
    tokenizer = TOKENIZERS["byte_level"]
    ids = [id_of(tokenizer, t) for t in ("a", "<|a b|>", "a", "<|end|>")]
    assert text_of(tokenizer, [], [ids], skip) == text


def test_streams_do_not_share_state() -> None:
    tokenizer = TOKENIZERS["byte_level"]
    shared = Detokenizer(tokenizer)
    ids = tokenizer.encode("😀").ids
    first, second = shared.stream([]), shared.stream([])
    assert first.push(ids[:-1]) == ""
    assert second.push([id_of(tokenizer, "a")]) == "a"
    assert first.push(ids[-1:]) == "😀"


@pytest.mark.parametrize(
    ("name", "token", "text"),
    [
        ("byte_level", "Ġa", " a"),
        ("byte_level", "ð", "\ufffd"),
        ("byte_level", "<|end|>", "<|end|>"),
        ("byte_level", "→ x", "→ x"),
        ("sentencepiece", "▁Paris", " Paris"),
        ("sentencepiece", "▁", " "),
        ("sentencepiece", "<0x41>", "A"),
        ("sentencepiece", "<0xE4>", "\ufffd"),
        ("sentencepiece", "</s>", "</s>"),
        ("metaspace", "▁a", " a"),
        ("wordpiece", "##b", "b"),
        ("wordpiece", "do", " do"),
        ("suffixed", "b", "b"),
        ("no_decoder", "c", " c"),
    ],
)
def test_a_token_alone_reads_as_behind_another(name: str, token: str, text: str) -> None:
    """C46: its space is not lost."""
    tokenizer = TOKENIZERS[name]
    assert Detokenizer(tokenizer).token_text(id_of(tokenizer, token)) == text


def test_an_id_without_a_token_has_no_text() -> None:
    """A model's vocabulary may be larger than its tokenizer's."""
    assert Detokenizer(TOKENIZERS["metaspace"]).token_text(9999) == ""

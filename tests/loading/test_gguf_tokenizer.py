"""Tokenizers of GGUF files, against ids that llama.cpp gave (``data/*_tokens.json``) and on tiny vocabularies."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
from enginebay.errors import ModelError
from enginebay.loading.gguf_tokenizer import build_tokenizer
from enginebay.models.catalogue import find
from gguf import TokenType
from transformers import PreTrainedTokenizerFast

DATA = Path(__file__).parent / "data"
#: an alphabet, two merged words, two control tokens and a user-defined one
WORDS = [*"!'abcdefghijs1234", "Ġ", "Ċ", "ab", "Ġab", "<s>", "</s>", "<think>"]
ID = {word: index for index, word in enumerate(WORDS)}
Write = Callable[..., Path]


def golden(name: str) -> dict[str, list[int]]:
    return {row["text"]: row["ids"] for row in json.loads((DATA / f"{name}_tokens.json").read_text())}


def differing(tokenizer: Any, expected: dict[str, list[int]]) -> dict[str, list[int]]:
    found = {text: tokenizer.encode(text, add_special_tokens=False) for text in expected}
    return {text: ids for text, ids in found.items() if ids != expected[text]}


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(
        pre: str | None = "gpt-2",
        *,
        model: str | None = "gpt2",
        architecture: str = "llama",
        words: Sequence[str] = WORDS,
        whole: dict[str, TokenType] | None = None,
        merges: Sequence[str] | None = ("a b", "Ġ ab"),
        bos: bool | None = None,
        eos: bool | None = None,
    ) -> Path:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(1)
        if model is not None:
            writer.add_tokenizer_model(model)
            writer.add_token_list(list(words))
            control = {"<s>": TokenType.CONTROL, "</s>": TokenType.CONTROL, "<think>": TokenType.USER_DEFINED}
            kinds = control | (whole or {})
            writer.add_token_types([kinds.get(word, TokenType.NORMAL) for word in words])
            writer.add_bos_token_id(list(words).index("<s>"))
            writer.add_eos_token_id(list(words).index("</s>"))
            writer.add_chat_template("{{ messages[0].content }}")
        if pre is not None:
            writer.add_tokenizer_pre(pre)
        if merges is not None:
            writer.add_token_merges(list(merges))
        if bos is not None:
            writer.add_add_bos_token(bos)
        if eos is not None:
            writer.add_add_eos_token(eos)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def pieces(tokenizer: Any, text: str) -> list[str]:
    return [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(text)]


# --- real vocabularies -----------------------------------------------------------------------------------------------


def test_golden_files_are_varied() -> None:
    for name in ("smollm2", "gemma3"):
        rows = golden(name)
        assert len(rows) > 75
        assert all(isinstance(token, int) for ids in rows.values() for token in ids)


@pytest.mark.model
def test_smollm2_equals_llama_cpp(smollm2: Path) -> None:
    expected = golden("smollm2")
    assert differing(build_tokenizer(smollm2), expected) == {}


@pytest.mark.model
def test_the_golden_texts_tell_a_wrong_split(smollm2: Path) -> None:
    tokenizer = build_tokenizer(smollm2)
    backend = tokenizer.backend_tokenizer
    backend.pre_tokenizer = backend.pre_tokenizer[1]  # without the digits' step
    assert len(differing(tokenizer, golden("smollm2"))) == 5


@pytest.mark.model
def test_smollm2_keeps_its_chat_template_and_round_trips(smollm2: Path) -> None:
    tokenizer = build_tokenizer(smollm2)
    messages = [{"role": "user", "content": "Hi 42"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi 42<|im_end|>\n<|im_start|>assistant\n")
    for text in (chat, *golden("smollm2")):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token, tokenizer.eos_token, len(tokenizer)) == ("<|im_start|>", "<|im_end|>", 49152)


@pytest.mark.model
@pytest.mark.skipif(not find("gemma3-270m").is_cached, reason="gemma3-270m is not in the cache")
def test_gemma3_equals_llama_cpp() -> None:
    tokenizer = build_tokenizer(find("gemma3-270m").path)
    assert differing(tokenizer, golden("gemma3")) == {}
    assert tokenizer.encode("Hi")[0] == tokenizer.bos_token_id == 2
    assert len(tokenizer) == 262144


# --- tiny vocabularies -----------------------------------------------------------------------------------------------


def test_merges_roles_and_template(write: Write) -> None:
    tokenizer = build_tokenizer(write())
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    assert tokenizer.encode("ab ab") == [ID["ab"], ID["Ġab"]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (ID["<s>"], ID["</s>"], None)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert len(tokenizer) == len(WORDS)


def test_control_and_user_defined_tokens_stay_whole(write: Write) -> None:
    tokenizer = build_tokenizer(write())
    ids = tokenizer.encode("a<s><think>b")
    assert ids == [ID["a"], ID["<s>"], ID["<think>"], ID["b"]]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<think>b"


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("gpt-2", ["ab", "Ġ1234", "'s", "ĊĊĠ", "Ġb"]),
        ("smollm", ["ab", "Ġ", "1", "2", "3", "4", "'s", "ĊĊĠ", "Ġb"]),
        ("llama-bpe", ["ab", "Ġ", "123", "4", "'s", "ĊĊ", "Ġ", "Ġb"]),
        ("qwen2", ["ab", "Ġ", "1", "2", "3", "4", "'s", "ĊĊ", "Ġ", "Ġb"]),
    ],
)
def test_splits(write: Write, pre: str, expected: list[str]) -> None:
    assert pieces(build_tokenizer(write(pre)), "ab 1234's\n\n  b") == expected


@pytest.mark.parametrize("pre", ["surprise", None])
def test_an_unknown_split_is_refused(write: Write, pre: str | None) -> None:
    with pytest.raises(ModelError, match=rf"splits text by {pre!r} \(tokenizer\.ggml\.pre\)"):
        build_tokenizer(write(pre))


def test_llama3_takes_a_known_word_whatever_the_merges(write: Write) -> None:
    words = [*WORDS, "abc"]  # no merge makes it
    assert build_tokenizer(write("llama-bpe", words=words, bos=False)).encode("abc") == [len(WORDS)]
    assert build_tokenizer(write("gpt-2", words=words)).encode("abc") == [ID["ab"], ID["c"]]


def test_qwen_composes_its_text(write: Write) -> None:
    composed = "Ã©"  # é in the byte alphabet
    tokenizer = build_tokenizer(write("qwen2", words=[*WORDS, "Ã", "©", composed], merges=["Ã ©"]))
    assert tokenizer.encode(unicodedata.normalize("NFD", "é")) == [len(WORDS) + 2]


@pytest.mark.parametrize(
    ("pre", "bos", "eos", "expected"),
    [
        ("gpt-2", None, None, ["a"]),
        ("gpt-2", True, None, ["<s>", "a"]),
        ("gpt-2", True, True, ["<s>", "a", "</s>"]),
        ("gpt-2", False, True, ["a", "</s>"]),
        ("llama-bpe", None, None, ["<s>", "a"]),
        ("llama-bpe", False, None, ["a"]),
    ],
)
def test_what_is_put_around_a_text(
    write: Write, pre: str, bos: bool | None, eos: bool | None, expected: list[str]
) -> None:
    tokenizer = build_tokenizer(write(pre, bos=bos, eos=eos))
    assert tokenizer.convert_ids_to_tokens(tokenizer.encode("a")) == expected
    assert tokenizer.encode("a", add_special_tokens=False) == [ID["a"]]


GEMMA = ["<s>", "</s>", "<unk>", "<0xC3>", "<0xA9>", *"abc", "▁", "bc", "ab", "abc", "▁a", "   ", "<tab>"]


def gemma(write: Write) -> Any:
    whole = {"   ": TokenType.USER_DEFINED, "<tab>": TokenType.USER_DEFINED}
    return build_tokenizer(
        write(None, model="llama", architecture="gemma3", words=GEMMA, whole=whole, merges=None, bos=False)
    )


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("abc", ["abc"]),
        ("bca", ["bc", "a"]),
        (" a", ["▁a"]),
        ("a   b", ["a", "▁▁▁", "b"]),
        ("a<tab>b", ["a", "<tab>", "b"]),
        ("é", ["<0xC3>", "<0xA9>"]),
    ],
)
def test_gemma_merges_come_from_the_vocabulary(write: Write, text: str, expected: list[str]) -> None:
    tokenizer = gemma(write)
    ids = tokenizer.encode(text)
    assert tokenizer.convert_ids_to_tokens(ids) == expected
    assert tokenizer.decode(ids) == text


def test_gemma_puts_its_first_token_unless_told(write: Write) -> None:
    path = write(None, model="llama", architecture="gemma3", words=GEMMA, merges=None)
    assert build_tokenizer(path).encode("a")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": None, "pre": None, "merges": None}, "holds no tokenizer"),
        ({"model": "llama"}, "tokenizer of kind 'llama', which cannot be read"),
        ({"merges": None}, r"lacks tokenizer\.ggml\.merges"),
    ],
)
def test_files_that_do_not_serve(write: Write, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_tokenizer(write(**arguments))

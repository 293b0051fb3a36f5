"""Tokenizers of folders, and which builder a model's files get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from enginebay.errors import ModelError
from enginebay.loading.tokenizer import load_tokenizer
from enginebay.models.reference import ModelFiles
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    backend = Tokenizer(WordLevel({"hello": 0, "world": 1, "<s>": 2}, unk_token="<s>"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    return ModelFiles(kind="hf_dir", path=tmp_path, name="m")


def test_tokenizer_json_alone(folder: ModelFiles) -> None:
    assert load_tokenizer(folder).encode("hello world") == [0, 1]


def test_folder_with_a_configuration_and_a_chat_template(folder: ModelFiles) -> None:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<s>"}
    (folder.path / "tokenizer_config.json").write_text(json.dumps(config))
    (folder.path / "chat_template.jinja").write_text("{{ messages[0].content }}!")
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token_id == 2
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False) == "hello!"


def test_missing_tokenizer_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no tokenizer\.json"):
        load_tokenizer(ModelFiles(kind="hf_dir", path=tmp_path, name="m"))


def test_damaged_tokenizer_file(folder: ModelFiles) -> None:
    (folder.path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"the tokenizer of m in .* cannot be read"):
        load_tokenizer(folder)


def test_gguf_file_goes_to_its_own_builder(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(b"PK\x03\x04" + bytes(40))
    with pytest.raises(ModelError, match="is not a GGUF file"):
        load_tokenizer(ModelFiles(kind="gguf", path=tmp_path, gguf_file="m.gguf", name="m"))

"""The model's configuration and the tokens that end its answers."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from enginebay.errors import ModelError
from enginebay.loading.hf_config import eos_token_ids, load_hf_config
from enginebay.models.reference import ModelFiles
from transformers import AutoConfig

QWEN3 = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 64, "eos_token_id": 5}


@pytest.fixture
def folder(tmp_path: Path) -> ModelFiles:
    write(tmp_path, QWEN3)
    return ModelFiles(kind="hf_dir", path=tmp_path, name="m")


def write(path: Path, fields: Any, name: str = "config.json") -> None:
    (path / name).write_text(json.dumps(fields))


def test_folder(folder: ModelFiles) -> None:
    config = load_hf_config(folder)
    assert (config.model_type, config.architectures, config.hidden_size) == ("qwen3", ["Qwen3ForCausalLM"], 64)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({**QWEN3, "model_type": "qwen33"}, r"model_type 'qwen33', which .* does not know\. Did you mean"),
        ({**QWEN3, "model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}, "code in a checkpoint is never run"),
        ({"architectures": ["X"]}, "has no model_type"),
        ({"model_type": "qwen3"}, "names no architectures"),
        ({**QWEN3, "hidden_size": "many"}, "not a valid qwen3 configuration"),
        ([], "holds no JSON object"),
    ],
)
def test_faulty_configurations(folder: ModelFiles, fields: Any, message: str) -> None:
    write(folder.path, fields)
    with pytest.raises(ModelError, match=message):
        load_hf_config(folder)


def test_missing_and_damaged_files(folder: ModelFiles) -> None:
    (folder.path / "config.json").write_text("{")
    with pytest.raises(ModelError, match=r"config\.json cannot be read"):
        load_hf_config(folder)
    (folder.path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"config\.json does not exist"):
        load_hf_config(folder)


def test_eos_of_the_configuration(folder: ModelFiles) -> None:
    assert eos_token_ids(folder, load_hf_config(folder)) == (5,)


@pytest.mark.parametrize(("stated", "expected"), [(9, (9, 2)), ([9, 2, 8], (9, 2, 8)), (None, (5, 2))])
def test_generation_config_comes_first_and_the_tokenizers_is_added(
    folder: ModelFiles, stated: Any, expected: tuple[int, ...]
) -> None:
    write(folder.path, {"eos_token_id": stated}, "generation_config.json")
    tokenizer: Any = SimpleNamespace(eos_token_id=2)
    assert eos_token_ids(folder, load_hf_config(folder), tokenizer) == expected


def test_an_eos_that_is_no_id_is_refused(folder: ModelFiles) -> None:
    write(folder.path, {"eos_token_id": "</s>"}, "generation_config.json")
    with pytest.raises(ModelError, match=r"eos_token_id '</s>' is not a token's id"):
        eos_token_ids(folder, load_hf_config(folder))


def test_no_eos_at_all(folder: ModelFiles) -> None:
    write(folder.path, {**QWEN3, "eos_token_id": None})
    tokenizer: Any = SimpleNamespace(eos_token_id=None)
    assert eos_token_ids(folder, load_hf_config(folder), tokenizer) == ()


@pytest.mark.model
def test_smollm2_as_transformers_reads_it(smollm2: Path) -> None:
    files = ModelFiles(kind="gguf", path=smollm2.parent, gguf_file=smollm2.name, name="smollm2")
    ours = load_hf_config(files)
    theirs = AutoConfig.from_pretrained(smollm2.parent, gguf_file=smollm2.name)
    assert ours.architectures == ["LlamaForCausalLM"]
    assert eos_token_ids(files, ours) == (2,)
    keys = set(theirs.to_dict()) - {
        "architectures",
        "rms_norm_eps",
        "unk_token_id",
        "_name_or_path",
        "_model_name_or_path",
    }
    assert {key: getattr(ours, key) for key in keys} == {key: getattr(theirs, key) for key in keys}
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps)

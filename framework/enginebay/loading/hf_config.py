"""The model's configuration, always in Hugging Face form, and the tokens that end its answers.

Code in a checkpoint is never run. It knows no model class: whether a plugin serves the architecture is the resolver's
question.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginebay.errors import ModelError
from enginebay.loading.gguf_config import config_dict
from enginebay.loading.gguf_header import GGUFHeader
from enginebay.models.reference import ModelFiles
from enginebay.plugins.suggest import did_you_mean

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerFast


def load_hf_config(files: ModelFiles) -> PreTrainedConfig:
    """Read the configuration of a folder or of a GGUF file. ``architectures`` is always set.

    Raises
    ------
    ModelError
        config.json is missing, damaged, names no architecture or an unknown ``model_type``, or the GGUF file's
        metadata cannot be honoured.
    """
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING, AutoConfig

    if files.kind == "gguf":
        where, fields = files.gguf_path, config_dict(GGUFHeader.read(files.gguf_path))
    else:
        where = files.path / "config.json"
        fields = _read_json(where)
    model_type = fields.get("model_type")
    if not model_type:
        raise ModelError(f"{where} has no model_type, so it is not a model's configuration; add the key")
    if model_type not in CONFIG_MAPPING:
        raise ModelError(
            f"{where} has model_type {model_type!r}, which the installed transformers does not know."
            f"{did_you_mean(str(model_type), CONFIG_MAPPING.keys())} A newer transformers may; code in a checkpoint is "
            "never run"
        )
    if not fields.get("architectures"):
        raise ModelError(f"{where} names no architectures, so no model plugin can be chosen; add the key")
    try:
        if files.kind == "gguf":
            return AutoConfig.for_model(**fields)
        return AutoConfig.from_pretrained(files.path, trust_remote_code=False, local_files_only=True)
    except (StrictDataclassError, ValueError, TypeError, KeyError, AttributeError) as error:  # bad fields
        raise ModelError(f"{where} is not a valid {model_type} configuration: {error}") from error


def eos_token_ids(
    files: ModelFiles, config: PreTrainedConfig, tokenizer: PreTrainedTokenizerFast | None = None
) -> tuple[int, ...]:
    """Tokens that end an answer, each once.

    They are generation_config.json's, or where it names none the configuration's; then the tokenizer's own, and a GGUF
    file's end-of-turn token.
    """
    found: list[int] = []
    for value in _eos_values(files, config, tokenizer):
        ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
        if wrong := [token for token in ids if not isinstance(token, int)]:
            raise ModelError(
                f"{files.path}: eos_token_id {wrong[0]!r} is not a token's id; correct generation_config.json or config.json"
            )
        found.extend(token for token in ids if token >= 0)
    return tuple(dict.fromkeys(found))


def _eos_values(files: ModelFiles, config: Any, tokenizer: Any) -> Iterator[Any]:
    generation = files.path / "generation_config.json"
    stated = _read_json(generation).get("eos_token_id") if files.kind == "hf_dir" and generation.is_file() else None
    yield config.eos_token_id if stated is None else stated
    if tokenizer is not None:
        yield tokenizer.eos_token_id
    if files.kind == "gguf":
        yield GGUFHeader.read(files.gguf_path).metadata.get("tokenizer.ggml.eot_token_id")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path} does not exist; a model's folder needs it") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds no JSON object")
    return value

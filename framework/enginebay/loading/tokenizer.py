"""The model's tokenizer: a folder's as transformers reads it, a GGUF file's as built from its vocabulary.

It knows tokens, not the engine's requests. Code in a checkpoint is never run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginebay.errors import ModelError
from enginebay.loading.gguf_tokenizer import build_tokenizer
from enginebay.models.reference import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Any of these makes a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder or of a GGUF file, chat template included.

    Raises
    ------
    ModelError
        There is no tokenizer, it cannot be read, or it has no fast form.
    """
    if files.kind == "gguf":
        return build_tokenizer(files.gguf_path)
    if not any((files.path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{files.path} has no {_TOKENIZER_FILES[0]} (nor {', '.join(_TOKENIZER_FILES[1:])}); add it, or name "
            "another folder under tokenizer:"
        )
    try:
        tokenizer = _from_folder(files)
    except (
        OSError,
        ValueError,
        TypeError,
        KeyError,
        AttributeError,
        ImportError,
    ) as error:  # bad files, in transformers
        raise ModelError(f"the tokenizer of {files.name} in {files.path} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{files.path} has a tokenizer without a fast form ({type(tokenizer).__name__}); "
            "convert it to tokenizer.json"
        )
    return tokenizer


def _from_folder(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    # Without a configuration nothing says which class; tokenizer.json is complete in itself.
    named = any((files.path / name).is_file() for name in ("config.json", "tokenizer_config.json"))
    loader = AutoTokenizer if named else PreTrainedTokenizerFast
    return loader.from_pretrained(files.path, local_files_only=True)

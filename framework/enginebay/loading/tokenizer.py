"""The model's tokenizer, as transformers builds it, cured where GGUF files lose something on the way.

llama.cpp's ids are the measure for GGUF files. It knows tokens, not the engine's requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from enginebay.errors import ModelError
from enginebay.loading.gguf_header import GGUFHeader
from enginebay.models.reference import ModelFiles

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

#: Any of these makes a tokenizer.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "tekken.json")
#: ``tokenizer.ggml.pre`` of vocabularies split as GPT-2's, each digit apart
_DIGITS_APART = frozenset({"smollm"})
#: ``tokenizer.ggml.pre`` of vocabularies split as GPT-2's, which is also what transformers falls back to
_AS_GPT2 = frozenset({"gpt-2"})
#: Gemma's vocabulary has runs of 2 to 31 spaces as words of their own.
_GEMMA_SPACE_RUNS = range(2, 32)


def load_tokenizer(files: ModelFiles) -> PreTrainedTokenizerFast:
    """Load the tokenizer of a folder or of a GGUF file, chat template included.

    Raises
    ------
    ModelError
        The folder has no tokenizer file, it cannot be read, or the GGUF file splits text in a way that is not known.
    """
    try:
        tokenizer = _from_gguf(files) if files.kind == "gguf" else _from_folder(files)
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:  # what transformers raises on bad files
        raise ModelError(f"the tokenizer of {files.name} in {files.path} cannot be read: {error}") from error
    if not tokenizer.is_fast:
        raise ModelError(
            f"{files.path} has a tokenizer without a fast form ({type(tokenizer).__name__}); "
            "convert it to tokenizer.json"
        )
    return tokenizer


def _from_folder(files: ModelFiles) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any((files.path / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(
            f"{files.path} has no {_TOKENIZER_FILES[0]} (nor {', '.join(_TOKENIZER_FILES[1:])}); add it, or name "
            "another folder under tokenizer:"
        )
    # Without a configuration nothing says which class; tokenizer.json is complete in itself.
    named = any((files.path / name).is_file() for name in ("config.json", "tokenizer_config.json"))
    loader = AutoTokenizer if named else PreTrainedTokenizerFast
    return loader.from_pretrained(files.path, local_files_only=True)


def _from_gguf(files: ModelFiles) -> Any:
    # The class directly: AutoTokenizer reads the whole file once more to find it, which takes seconds.
    from transformers import PreTrainedTokenizerFast

    header = GGUFHeader.read(files.gguf_path)
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind is None:
        raise ModelError(f"{files.gguf_path} holds no tokenizer; name a folder with one under tokenizer:")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(files.path, gguf_file=files.gguf_file, local_files_only=True)
    if kind == "gpt2":
        _cure_split(tokenizer.backend_tokenizer, header)
    elif header.architecture.startswith("gemma"):
        _cure_space_runs(tokenizer)
    return tokenizer


def _cure_split(backend: Any, header: GGUFHeader) -> None:
    """Split text as the vocabulary's merges were learned.

    transformers knows the splits of some families and silently takes GPT-2's for all others, which is right for few.
    """
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    split = header.metadata.get("tokenizer.ggml.pre")
    if split in _DIGITS_APART:
        backend.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )
    elif isinstance(backend.pre_tokenizer, ByteLevel) and split not in _AS_GPT2:
        raise ModelError(
            f"{header.path} splits text by {split!r} (tokenizer.ggml.pre), which is not known here; name a folder with "
            "the model's tokenizer.json under tokenizer:"
        )


def _cure_space_runs(tokenizer: Any) -> None:
    """Keep runs of spaces whole. They are matched after spaces became ``▁``, hence normalized."""
    from tokenizers import AddedToken

    vocabulary = tokenizer.get_vocab()
    runs = ["▁" * length for length in _GEMMA_SPACE_RUNS]
    tokenizer.add_tokens([AddedToken(run, normalized=True, special=False) for run in runs if run in vocabulary])

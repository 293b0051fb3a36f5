"""A tokenizer out of a GGUF file's vocabulary, for byte-level vocabularies and for Gemma's.

It is built here since transformers' reader loses things that depend on its version: how text is split, tokens of
several spaces, Gemma's merges. llama.cpp's ids are the measure (``tests/loading/data``). It knows no chat, only carries
the template.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from enginebay.errors import ModelError
from enginebay.loading.gguf_header import GGUFHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_PREFIX = "tokenizer.ggml."
_TOKENS, _MERGES = f"{_PREFIX}tokens", f"{_PREFIX}merges"
#: role in transformers -> role in the metadata
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Values of tokenizer.ggml.pre, grouped by how their vocabularies were learned. Patterns are those of the families'
# tokenizer.json files; the two differ in how many digits stand together.
_GPT2 = frozenset({"gpt-2"})
_GPT2_SINGLE_DIGITS = frozenset({"smollm"})
_LLAMA3 = frozenset({"llama-bpe", "llama3", "llama-v3"})
_QWEN2 = frozenset({"qwen2", "deepseek-r1-qwen"})
_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(path: Path) -> PreTrainedTokenizerFast:
    """Build the tokenizer of the file at `path`, chat template included.

    Raises
    ------
    ModelError
        The file holds no tokenizer, or one of a kind or split that is not known here.
    """
    from transformers import PreTrainedTokenizerFast

    header = GGUFHeader.read(path, string_arrays=(_TOKENS, _MERGES))
    metadata = header.metadata
    kind = metadata.get(f"{_PREFIX}model")
    if kind is None or _TOKENS not in metadata:
        raise ModelError(f"{path} holds no tokenizer; name a folder with one under tokenizer:")
    if kind == "gpt2":
        backend = _byte_level(header)
    elif kind == "llama" and header.architecture.startswith("gemma"):
        backend = _gemma(header)
    else:
        raise ModelError(
            f"{path} has a tokenizer of kind {kind!r}, which cannot be read from GGUF; name a folder with the model's "
            "tokenizer.json under tokenizer:"
        )
    roles = {role: _token(metadata, name) for role, name in _ROLES.items()}
    backend.post_processor = _frame(metadata, roles["bos_token"], roles["eos_token"])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        **{role: token for role, token in roles.items() if token is not None},
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
    )


def _byte_level(header: GGUFHeader) -> Any:
    """Byte-level merges over text that is split first."""
    split = header.metadata.get(f"{_PREFIX}pre")
    steps = _split_steps(split)
    if steps is None:
        raise ModelError(
            f"{header.path} splits text by {split!r} (tokenizer.ggml.pre), which is not known here; name a folder with "
            "the model's tokenizer.json under tokenizer:"
        )
    tokens, merges = header.metadata[_TOKENS], header.metadata.get(_MERGES)
    if not isinstance(merges, list):
        raise ModelError(f"{header.path} lacks {_MERGES}, without which a byte-level vocabulary cannot be used")
    pairs = [tuple(merge.split(" ", 1)) for merge in merges]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    # Llama 3 takes a word that is a token as that token, whatever the merges would make of it.
    backend = Tokenizer(BPE(vocab=vocabulary, merges=pairs, ignore_merges=split in _LLAMA3))
    if split in _QWEN2:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_whole_tokens(backend, tokens, header.metadata)
    return backend


def _split_steps(split: Any) -> list[Any] | None:
    """How text is split before merges, by the name that the file gives; None if the name is not known."""
    if split in _GPT2:
        return [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if split in _GPT2_SINGLE_DIGITS:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
    if split in _LLAMA3 or split in _QWEN2:
        pattern = Regex(_PATTERN.format(digits="{1,3}" if split in _LLAMA3 else ""))
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [pre_tokenizers.Split(pattern, "isolated"), byte_level]
    return None


def _gemma(header: GGUFHeader) -> Any:
    """Merges over text whose spaces became ``▁``; the file lists none, so they come from the vocabulary."""
    # Words of several spaces are stored as spaces, where the text will have ▁.
    tokens = [
        token.replace(" ", "▁") if token.isspace() and " " in token else token for token in header.metadata[_TOKENS]
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    unknown = _token(header.metadata, "unknown")
    model = BPE(
        vocab=vocabulary, merges=list(_implied_merges(vocabulary)), unk_token=unknown, fuse_unk=True, byte_fallback=True
    )
    backend = Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_whole_tokens(backend, tokens, header.metadata)
    return backend


def _implied_merges(vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Every pair of tokens that makes a token, earlier tokens first, longer left parts first."""
    for token in vocabulary:
        for cut in range(len(token) - 1, 0, -1):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                yield left, right


def _add_whole_tokens(backend: Any, tokens: list[str], metadata: dict[str, Any]) -> None:
    """Have control and user-defined tokens matched whole, before text is split."""
    types = metadata.get(f"{_PREFIX}token_type") or []
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=False) if token]
    backend.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in whole if kind == TokenType.CONTROL]
    )
    # Words of spaces are matched after the spaces became ▁, hence normalized.
    backend.add_tokens(
        [
            AddedToken(token, normalized=token.strip("▁") == "", special=False)
            for token, kind in whole
            if kind == TokenType.USER_DEFINED
        ]
    )


def _token(metadata: dict[str, Any], name: str) -> str | None:
    """The token of a role, or None."""
    index = metadata.get(f"{_PREFIX}{name}_token_id")
    tokens = metadata[_TOKENS]
    return tokens[index] if index is not None and index < len(tokens) else None


def _frame(metadata: dict[str, Any], bos: str | None, eos: str | None) -> Any:
    """What is put around a text: the tokens that the file asks for, by llama.cpp's defaults where it is silent."""
    by_default = metadata.get(f"{_PREFIX}model") == "llama" or metadata.get(f"{_PREFIX}pre") in _LLAMA3
    before = bos if metadata.get(f"{_PREFIX}add_bos_token", by_default) else None
    after = eos if metadata.get(f"{_PREFIX}add_eos_token", False) else None
    tokens = metadata[_TOKENS]
    ends = [token for token in (before, after) if token is not None]
    return processors.TemplateProcessing(
        single=[*([before] if before else []), "$A", *([after] if after else [])],
        pair=[*([before] if before else []), "$A", "$B:1", *([after] if after else [])],
        special_tokens=[(token, tokens.index(token)) for token in dict.fromkeys(ends)],
    )

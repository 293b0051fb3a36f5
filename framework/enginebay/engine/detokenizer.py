"""The incremental detokenizer: token ids in, text out, with no character ever split, lost or doubled.

It knows the `tokenizers` library's decoders; it knows no request, no stop rule and no model. The law: whatever the
chunking, the prompt's text followed by the pushed texts and the flush equals the decoding of prompt and tokens at once
(`tokenizers.Tokenizer.decode`, without any clean-up of spaces). The cost is constant a token.

`tokenizers.decoders.DecodeStream` was not taken: it waits for ever behind bytes that never form a character (at a cost
that grows with each token), and raises where a later byte token changes what earlier ones decode to.

A decoder is of one of two families:

* *byte level* (GPT-2, Llama 3, Qwen): each token stands for bytes, and the text is their UTF-8 decoding. An incremental
  codec does exactly that.
* *anything else* (SentencePiece-like, WordPiece): a token's text depends on its neighbour on the left at most, except
  for byte-fallback tokens ``<0xE4>``: a run of those is text only once it ends, since one bad byte turns the whole run
  into U+FFFD. So a run is held until its end, and other tokens are decoded behind the token before them.
"""

from __future__ import annotations

import codecs
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

#: No incomplete UTF-8 character is longer, in bytes.
_LONGEST_INCOMPLETE = 3
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TextStream(ABC):
    """The text of one request as its tokens come."""

    @abstractmethod
    def push(self, token_ids: Sequence[int]) -> str:
        """Take further tokens; return the text that can no longer change."""

    @abstractmethod
    def flush(self) -> str:
        """End the stream: return what was held back, with U+FFFD for bytes that never became a character."""


class Detokenizer:
    """Makes the text streams of one tokenizer; holds the tables that they share.

    Parameters
    ----------
    backend
        The `tokenizers` object (``tokenizer.backend_tokenizer`` in transformers). Its added tokens must be complete.
    """

    def __init__(self, backend: Tokenizer) -> None:
        kinds = _decoder_kinds(backend)
        vocabulary = _Vocabulary(backend)
        self._byte_level = "ByteLevel" in kinds
        self._bytes = {skip: _TokenBytes(vocabulary, skip) for skip in (True, False)}
        self._tokens = {skip: _TokenKinds(vocabulary, skip, "ByteFallback" in kinds) for skip in (True, False)}
        self._texts = _TokenTexts(backend)
        self._backend = backend

    def stream(self, prompt_token_ids: Sequence[int], skip_special_tokens: bool = True) -> TextStream:
        """Open the stream of the text that follows the prompt.

        A character that the prompt leaves incomplete comes whole with the stream's first text.
        """
        if self._byte_level:
            return _ByteLevelStream(self._bytes[skip_special_tokens], prompt_token_ids)
        return _NeighbourStream(self._backend, self._tokens[skip_special_tokens], prompt_token_ids)

    def token_text(self, token_id: int) -> str:
        """The text of a token alone, as it reads behind another one: U+FFFD for a part of a character."""
        return self._texts[token_id]


class _ByteLevelStream(TextStream):
    """Tokens are bytes; a codec makes characters of them."""

    def __init__(self, pieces: _TokenBytes, prompt: Sequence[int]) -> None:
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for token in reversed(prompt):
            tail = pieces[token] + tail
            if len(tail) >= _LONGEST_INCOMPLETE:
                break
        self._decoder.decode(tail)  # whole characters are the prompt's; an incomplete one stays in the decoder

    def push(self, token_ids: Sequence[int]) -> str:
        return self._decoder.decode(b"".join(map(self._pieces.__getitem__, token_ids)))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class _NeighbourStream(TextStream):
    """Tokens are decoded behind the one before them; runs of byte tokens are held until they end."""

    def __init__(self, backend: Tokenizer, kinds: _TokenKinds, prompt: Sequence[int]) -> None:
        self._backend = backend
        self._kinds = kinds
        #: what a decoder may look at: the last token whose text was given out, or more where that one's is empty
        self._context: list[int] = []
        run: list[int] = []
        for token in reversed(prompt):
            kind = kinds[token]
            if kind == _TEXT:
                self._context = [token]
                break
            if kind >= 0 and len(run) < _LONGEST_INCOMPLETE:
                run.insert(0, token)
        #: tokens, all of them byte tokens, whose text is not settled
        self._pending = self._incomplete(run)

    def push(self, token_ids: Sequence[int]) -> str:
        kinds = self._kinds
        kept = [t for t in token_ids if kinds[t] != _DROPPED]
        cut = len(kept)
        while cut and kinds[kept[cut - 1]] >= 0:
            cut -= 1
        if not cut:
            self._pending += kept
            return ""
        text = self._decode(self._pending + kept[:cut])
        self._pending = kept[cut:]
        return text

    def flush(self) -> str:
        pending, self._pending = self._pending, []
        return self._decode(pending) if pending else ""

    def _decode(self, tokens: list[int]) -> str:
        known = self._backend.decode(self._context, skip_special_tokens=False)
        text = self._backend.decode(self._context + tokens, skip_special_tokens=False)
        self._context = tokens[-1:] if self._kinds[tokens[-1]] == _TEXT else self._context + tokens
        return text[len(known) :]

    def _incomplete(self, run: list[int]) -> list[int]:
        """The byte tokens at the end of `run` that begin a character without ending it."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(bytes(self._kinds[t] for t in run))
        held = len(decoder.getstate()[0])
        return run[len(run) - held :]


# --- what is known of a token ----------------------------------------------------------------------------------------


class _Vocabulary:
    """Token ids to the strings that decoders work on."""

    def __init__(self, backend: Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        self._special = frozenset(t.content for t in added if t.special)

    def token(self, token_id: int, skip_special: bool) -> str | None:
        """The token's string; None where decoding drops it: unknown, or special and skipped."""
        token = self._backend.id_to_token(token_id)
        return None if skip_special and token in self._special else token


class _TokenBytes(dict[int, bytes]):
    """Bytes of each token of a byte-level vocabulary, filled as tokens occur."""

    def __init__(self, vocabulary: _Vocabulary, skip_special: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip_special = skip_special

    def __missing__(self, token_id: int) -> bytes:
        token = self._vocabulary.token(token_id, self._skip_special) or ""
        try:
            piece = bytes(_BYTE_OF_CHAR[c] for c in token)
        except KeyError:  # an added token, written as itself
            piece = token.encode()
        self[token_id] = piece
        return piece


class _TokenTexts(dict[int, str]):
    """Texts of single tokens, special ones included, filled as they occur; empty for ids that are no token's."""

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> str:
        # Behind itself, since decoders drop a space at the beginning of a text.
        once = self._backend.decode([token_id], skip_special_tokens=False)
        twice = self._backend.decode([token_id, token_id], skip_special_tokens=False)
        self[token_id] = text = twice[len(once) :]
        return text


#: kinds of tokens; a byte-fallback token's kind is its byte
_TEXT, _EMPTY, _DROPPED = -1, -2, -3


class _TokenKinds(dict[int, int]):
    """What each token is to a neighbour decoder, filled as tokens occur: a byte, or one of the above."""

    def __init__(self, vocabulary: _Vocabulary, skip_special: bool, byte_fallback: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip_special = skip_special
        self._byte_fallback = byte_fallback

    def __missing__(self, token_id: int) -> int:
        token = self._vocabulary.token(token_id, self._skip_special)
        kind = _DROPPED if token is None else _TEXT if token else _EMPTY
        if token and self._byte_fallback and (byte := _BYTE_TOKEN.fullmatch(token)):
            kind = int(byte[1], 16)
        self[token_id] = kind
        return kind


def _decoder_kinds(backend: Tokenizer) -> set[str]:
    """Names of the backend's decoders, sequences flattened; empty where it has none."""
    if backend.decoder is None:
        return set()
    return set(_flatten(json.loads(backend.decoder.__getstate__())))


def _flatten(decoder: dict[str, Any]) -> Iterable[str]:
    yield decoder["type"]
    for part in decoder.get("decoders", ()):
        yield from _flatten(part)


def _byte_of_char() -> dict[str, int]:
    """GPT-2's map of characters to bytes: printable Latin-1 is itself, other bytes follow from U+0100 on, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF_CHAR = _byte_of_char()

"""Checks of one request's sampling parameters against the engine that is to run it.

`SamplingParams` knows what is wrong anywhere; here is what is wrong for this vocabulary, this tokenizer, these plugins. It
knows no prompt and no scheduler.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from enginebay.config.problems import describe
from enginebay.config.tree import dotted
from enginebay.errors import RequestError
from enginebay.plugins.records import LogitsProcessorRecord
from enginebay.plugins.selection import Selection
from enginebay.sampling.params import SamplingParams

Encode = Callable[[str], list[int]]


def processors_of(selections: Iterable[Selection]) -> dict[str, LogitsProcessorRecord]:
    """The logits processors that run, by name."""
    chosen = (selection.chosen for selection in selections)
    return {record.name: record for record in chosen if isinstance(record, LogitsProcessorRecord)}


class RequestChecks:
    """What an engine can be asked for.

    Parameters
    ----------
    vocab_size
        Ids from 0 up to, not including, this one exist.
    has_tokenizer
        Whether texts can be made, and looked for.
    processors
        Logits processors that run, by name.
    """

    def __init__(
        self, *, vocab_size: int, has_tokenizer: bool, processors: Mapping[str, LogitsProcessorRecord]
    ) -> None:
        self._vocab_size = vocab_size
        self._has_tokenizer = has_tokenizer
        self._processors = processors

    def check(self, params: SamplingParams, stop_token_ids: frozenset[int], max_output_tokens: int) -> SamplingParams:
        """Raise `RequestError` if the engine cannot do what `params` ask of it.

        Returns `params`, in which each logits processor is told what its model made of the request's words: of the
        declared types, defaults included.

        Parameters
        ----------
        stop_token_ids
            All ids that end the request, end-of-sequence ids included unless ignored.
        max_output_tokens
            Most tokens that it may produce.
        """
        self._check_ids("stop_token_ids", params.stop_token_ids)
        self._check_ids("logit_bias", params.logit_bias)
        self._check_ids("allowed_token_ids", params.allowed_token_ids or ())
        for name, number in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
            if number is not None and number > self._vocab_size:
                raise RequestError(
                    f"{name}={number} exceeds the vocabulary of {self._vocab_size}; -1 asks for all of it"
                )
        if not self._has_tokenizer:
            if params.bad_words:
                raise RequestError("the model has no tokenizer, so bad_words cannot be tokenised: use logit_bias")
            if params.detokenize:
                raise RequestError("the model has no tokenizer, so text cannot be made: set detokenize=False")
        self._check_min_tokens(params, stop_token_ids, max_output_tokens)
        for text in params.stop:
            check_unicode("a stop string", text)
        if not params.extra_args:
            return params
        return replace(params, extra_args={name: self._told(name, said) for name, said in params.extra_args.items()})

    def bad_words(self, words: Iterable[str], encode: Encode) -> tuple[tuple[int, ...], ...]:
        """Token sequences that write `words`, at the beginning of a text and behind a space.

        Tokens that the model does not have cannot be drawn, so sequences with one are left out.
        """
        sequences: dict[tuple[int, ...], None] = {}
        for word in words:
            check_unicode("a bad word", word)
            bare = word.lstrip(" ")
            plain = tuple(encode(bare or word))
            if not plain:
                raise RequestError(f"bad_words: {word!r:.80} has no tokens, so it cannot be kept out")
            sequences[plain] = None
            spaced = tuple(encode(f" {bare}")) if bare else plain
            # Where the space is a token of its own, the plain sequence is refused behind it too.
            if spaced[-len(plain) :] != plain:
                sequences[spaced] = None
        return tuple(s for s in sequences if max(s) < self._vocab_size)

    def _check_ids(self, name: str, token_ids: Iterable[int]) -> None:
        for token in token_ids:
            if token >= self._vocab_size:
                raise RequestError(f"{name} holds {token}; the vocabulary is 0 to {self._vocab_size - 1}")

    def _check_min_tokens(self, params: SamplingParams, stops: frozenset[int], max_output_tokens: int) -> None:
        if params.min_tokens > max_output_tokens:
            raise RequestError(
                f"min_tokens={params.min_tokens} cannot be reached: prompt and max_model_len leave room for "
                f"{max_output_tokens} new tokens; lower min_tokens, shorten the prompt, or raise max_model_len"
            )
        allowed = params.allowed_token_ids
        if params.min_tokens and allowed is not None and stops.issuperset(allowed):
            raise RequestError(
                f"allowed_token_ids holds nothing but ids that end the request, and min_tokens={params.min_tokens} forbids "
                "those: allow others too, or leave min_tokens at 0"
            )

    def _told(self, name: str, values: Mapping[str, object]) -> dict[str, Any]:
        record = self._processors.get(name)
        if record is None:
            running = sorted(self._processors)
            near = difflib.get_close_matches(name, running, 1)
            hint = f"did you mean {near[0]}?" if near else f"sampler.processors names {', '.join(running) or 'none'}"
            raise RequestError(f"extra_args.{name}: no such logits processor runs; {hint}")
        options = record.request_options
        try:
            # by alias, so that a processor may make the model anew of it
            return options.model_validate(dict(values)).model_dump(by_alias=True)
        except ValidationError as error:
            problems = describe(options, values, error, lambda path: dotted(("extra_args", name, *path)))
            raise RequestError("; ".join(problems)) from error


def check_unicode(what: str, text: str) -> None:
    """Refuse lone surrogates, which no tokenizer takes and no text holds."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"{what} is not valid Unicode at character {error.start}: {error.reason}") from error

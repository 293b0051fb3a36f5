"""The input processor: turns what a user wrote into a `Request`, or refuses it with the numbers.

It knows the tokenizer and the engine's limits; it knows no scheduler and no device. Whatever passes here cannot trouble
the engine: later parts trust that ids are in the vocabulary and that the request fits ``max_model_len``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, Protocol, TypedDict, TypeGuard, cast

import jinja2
import numpy as np
from tokenizers import Tokenizer

from enginebay.engine.family import draw_seed
from enginebay.engine.request_checks import RequestChecks, check_unicode
from enginebay.errors import RequestError, RequestTooLargeError
from enginebay.interfaces.scheduler import Int32Array, Request
from enginebay.plugins.records import LogitsProcessorRecord
from enginebay.sampling.params import SamplingParams


class TextPrompt(TypedDict):
    """A prompt as text; tokenised with the special tokens that the tokenizer adds by default."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids; `prompt` is only handed back in the output."""

    prompt_token_ids: Sequence[int]
    prompt: NotRequired[str]
    #: requests share cached blocks only with those of equal salt
    cache_salt: NotRequired[str]


Prompt = str | TextPrompt | TokensPrompt
#: ``{"role": …, "content": …}``, and what else the model's template reads
Message = Mapping[str, Any]


class ChatTokenizer(Protocol):
    """What is used of a transformers tokenizer."""

    chat_template: Any

    @property
    def backend_tokenizer(self) -> Tokenizer:
        """The `tokenizers` object."""

    def encode(self, text: str, *, add_special_tokens: bool, verbose: bool) -> list[int]:
        """Text to ids."""

    def apply_chat_template(
        self, conversation: list[Message], *, chat_template: str | None, add_generation_prompt: bool, tokenize: bool
    ) -> Any:
        """Messages to the text that the model was trained on."""


@dataclass(frozen=True, slots=True)
class ProcessedPrompt:
    """A checked prompt."""

    #: None where ids were given without text
    text: str | None
    #: int32 ``[P]``
    token_ids: Int32Array
    cache_salt: str | None = None


class InputProcessor:
    """Checks and tokenises.

    Parameters
    ----------
    tokenizer
        None where the model has none: prompts must be ids, and text cannot be asked for.
    vocab_size
        Ids from 0 up to, not including, this one exist.
    max_model_len
        Most tokens of prompt and output together.
    eos_token_ids
        Ids that end every request which does not set ``ignore_eos``.
    processors
        Logits processors that run, by name; they say what a request may tell them.
    """

    def __init__(
        self,
        tokenizer: ChatTokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_token_ids: Sequence[int] = (),
        processors: Mapping[str, LogitsProcessorRecord] | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._eos_token_ids = frozenset(eos_token_ids)
        self._checks = RequestChecks(
            vocab_size=vocab_size, has_tokenizer=tokenizer is not None, processors=processors or {}
        )
        self._num_requests = 0

    def process(self, prompt: Prompt, params: SamplingParams, priority: int = 0) -> tuple[Request, ProcessedPrompt]:
        """Make a request of a prompt and its parameters; it is that of the first completion.

        Raises
        ------
        RequestError
            The prompt is empty or of the wrong form, an id is outside the vocabulary, or what is asked cannot be done.
        RequestTooLargeError
            Prompt and ``max_tokens`` exceed ``max_model_len``.
        """
        if not isinstance(params, SamplingParams):
            raise RequestError(f"sampling_params must be SamplingParams, not {type(params).__name__}")
        processed = self.parse(prompt)
        max_tokens = self._output_limit(len(processed.token_ids), params.max_tokens)
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= self._eos_token_ids
        params = self._checks.check(params, stops, max_tokens)
        salt = processed.cache_salt
        request = Request(
            request_id=str(self._num_requests),
            prompt_token_ids=processed.token_ids,
            params=params,
            stop_token_ids=stops,
            max_output_tokens=max_tokens,
            seed=draw_seed() if params.seed is None else params.seed,
            priority=_checked_priority(priority),
            bad_words=self._checks.bad_words(params.bad_words, self._encode_plain),
            cache_extras=() if salt is None else (("salt", salt),),
        )
        self._num_requests += 1
        return request, processed

    def parse(self, prompt: Prompt) -> ProcessedPrompt:
        """Bring a prompt of any form into ids, and check those."""
        if isinstance(prompt, str):
            return self._tokenised(prompt)
        forms = "a string, {'prompt': str} or {'prompt_token_ids': [int, ...]}"
        if not isinstance(prompt, Mapping):
            raise RequestError(f"a prompt must be {forms}, not {type(prompt).__name__}")
        unknown = [key for key in prompt if key not in ("prompt", "prompt_token_ids", "cache_salt")]
        if unknown or not prompt:
            raise RequestError(f"a prompt must be {forms}; its keys are {', '.join(map(repr, prompt)) or 'missing'}")
        text, salt = prompt.get("prompt"), _checked_salt(prompt.get("cache_salt"))
        has_ids = "prompt_token_ids" in prompt
        if not isinstance(text, str) and not (text is None and has_ids):
            raise RequestError(f"'prompt' must be a string, not {type(text).__name__}")
        if has_ids:
            return ProcessedPrompt(text, self._checked_ids(cast(TokensPrompt, prompt)["prompt_token_ids"]), salt)
        return self._tokenised(cast(str, text), salt)

    def chat_prompt(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True, chat_template: str | None = None
    ) -> TokensPrompt:
        """Render a conversation with the model's template, or `chat_template`, and tokenise it.

        The template writes the special tokens itself, so the tokenizer adds none.
        """
        tokenizer = self._require_tokenizer("a conversation cannot be rendered; give {'prompt_token_ids': [...]}")
        if chat_template is None and tokenizer.chat_template is None:
            raise RequestError(
                "the model's tokenizer has no chat template: pass chat_template, or a prompt to generate()"
            )
        for index, message in enumerate(messages):
            if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
                raise RequestError(
                    f"messages[{index}] must be a dictionary with 'role' and 'content', not {message!r:.80}"
                )
        if not messages:
            raise RequestError("the conversation is empty: give at least one message")
        try:
            text = tokenizer.apply_chat_template(
                list(messages),
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                tokenize=False,
            )
        except (
            jinja2.TemplateError,
            TypeError,
            ValueError,
            LookupError,
            ArithmeticError,
        ) as error:  # a template is a program
            raise RequestError(f"the chat template refused the conversation: {error}") from error
        return {"prompt_token_ids": self._encode(text, add_special_tokens=False), "prompt": text}

    def _tokenised(self, text: str, cache_salt: str | None = None) -> ProcessedPrompt:
        return ProcessedPrompt(text, self._checked_ids(self._encode(text, add_special_tokens=True)), cache_salt)

    def _encode_plain(self, text: str) -> list[int]:
        return self._encode(text, add_special_tokens=False)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        tokenizer = self._require_tokenizer("text cannot be tokenised; give {'prompt_token_ids': [...]}")
        check_unicode("the prompt", text)
        return tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)

    def _require_tokenizer(self, consequence: str) -> ChatTokenizer:
        if self._tokenizer is None:
            raise RequestError(f"the model has no tokenizer, so {consequence}")
        return self._tokenizer

    def _checked_ids(self, token_ids: Sequence[int]) -> Int32Array:
        if not _is_id_list(token_ids):
            raise RequestError(f"prompt_token_ids must be a list of integers, not {type(token_ids).__name__}")
        for index, token in enumerate(token_ids):
            if isinstance(token, bool) or not isinstance(token, int | np.integer):
                raise RequestError(f"prompt_token_ids[{index}] must be an integer, not {token!r}")
            if not 0 <= token < self._vocab_size:
                raise RequestError(
                    f"prompt_token_ids[{index}] is {token}; the vocabulary is 0 to {self._vocab_size - 1}"
                )
        if not len(token_ids):
            raise RequestError("the prompt is empty: it must hold at least one token")
        return np.array(token_ids, dtype=np.int32)

    def _output_limit(self, num_prompt_tokens: int, max_tokens: int | None) -> int:
        """Most tokens that the request may produce, once it is sure to fit."""
        if num_prompt_tokens >= self._max_model_len:
            raise RequestTooLargeError(
                f"the prompt has {num_prompt_tokens} tokens, but max_model_len is {self._max_model_len} and must leave "
                f"room for at least one new token: shorten the prompt, or raise max_model_len"
            )
        room = self._max_model_len - num_prompt_tokens
        if max_tokens is None:
            return room
        if max_tokens > room:
            raise RequestTooLargeError(
                f"the prompt's {num_prompt_tokens} tokens and max_tokens={max_tokens} make "
                f"{num_prompt_tokens + max_tokens}, but max_model_len is {self._max_model_len}: set max_tokens to at "
                f"most {room}, shorten the prompt, or raise max_model_len"
            )
        return max_tokens


def _checked_priority(priority: int) -> int:
    """The priority, if it is one that every policy's sort key holds exactly."""
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise RequestError(f"priority must be an integer, smaller being more urgent, not {priority!r:.80}")
    if not -(2**31) <= priority < 2**31:
        raise RequestError(f"priority must be between -2147483648 and 2147483647, not {priority}")
    return priority


def _checked_salt(salt: object) -> str | None:
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise RequestError(f"'cache_salt' must be a text of at least one character, not {salt!r:.80}")
    if salt is not None:
        check_unicode("'cache_salt'", salt)
    return salt


def _is_id_list(value: object) -> TypeGuard[Sequence[int]]:
    if isinstance(value, np.ndarray):
        return value.ndim == 1
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray | memoryview)

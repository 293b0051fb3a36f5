"""`SamplingParams`: how one request's tokens are drawn. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Self

from enginebay.errors import RequestError

#: Bounds of what the sampler's float32 and the batch's arrays hold, so that no value fails in a worker.
_FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
_FLOAT32_LEAST = 2.0**-149
_INT32_MAX = 2**31 - 1

#: vLLM parameters that this version refuses by name rather than as unknown words, and what to do instead.
_REFUSED = {
    "best_of": "set n, and choose among the completions",
    "priority": "it is an argument of generate() and stream()",
    "logits_processors": "name a plugin in sampler.processors, and speak to it in extra_args",
    "guided_decoding": "not in this version",
    "structured_outputs": "not in this version",
    "truncate_prompt_tokens": "shorten the prompt's token ids",
}

#: Sampling `n` completions of one prompt at most, lest a typo fill the queue.
_MAX_N = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw the tokens of one request; the names are vLLM's. Sequences are kept as tuples.

    Raises
    ------
    RequestError
        A value is of the wrong type, not finite, or out of range, or there is no such parameter.
    """

    #: completions of the prompt, each drawn with its own seed; they share the prompt's blocks
    n: int = 1
    #: 0 takes the most likely token, whatever the other filters say
    temperature: float = 1.0
    #: keep the smallest set of tokens whose probability reaches top_p, in (0, 1]
    top_p: float = 1.0
    #: keep the top_k most likely tokens; 0 or -1 keeps all
    top_k: int = 0
    #: drop tokens less likely than min_p times the most likely one, in [0, 1]
    min_p: float = 0.0
    #: equal seeds and prompts give equal tokens; None draws a seed. Completion i of several is drawn with seed + i
    seed: int | None = None
    #: subtracted from the logit of every token that the output holds, in [-2, 2]
    presence_penalty: float = 0.0
    #: subtracted once for each time that the output holds the token, in [-2, 2]
    frequency_penalty: float = 0.0
    #: logits of tokens in prompt or output are divided by it where positive, multiplied where negative; above 0, at least
    #: the smallest float32
    repetition_penalty: float = 1.0
    #: added to the logits of these token ids
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    #: if given, no other token is drawn
    allowed_token_ids: Sequence[int] | None = None
    #: texts that the output never holds, as sequences of tokens
    bad_words: Sequence[str] = ()
    #: most tokens to produce; None goes on to the end of max_model_len
    max_tokens: int | None = 16
    #: end no sooner: stop ids are not drawn and stop strings not looked for before; at most max_tokens
    min_tokens: int = 0
    #: go on after an end-of-sequence token
    ignore_eos: bool = False
    #: further ids that end the request
    stop_token_ids: Sequence[int] = ()
    #: texts that end the request as soon as they occur; one text or several
    stop: Sequence[str] = ()
    #: keep the stop string in the text
    include_stop_str_in_output: bool = False
    #: log-probabilities of each output token and of this many likeliest ones; -1: of the whole vocabulary
    logprobs: int | None = None
    #: the same for the prompt's tokens but the first
    prompt_logprobs: int | None = None
    #: leave special tokens out of the text
    skip_special_tokens: bool = True
    #: False leaves ``text`` empty and spares the work
    detokenize: bool = True
    #: what the logits processors of ``sampler.processors`` are told, by their name
    extra_args: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)

    def __new__(cls, *_: Any, **values: Any) -> Self:
        """Refuse unknown names, with a suggestion; `__init__` would only know them as a TypeError."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name in _REFUSED:
                raise RequestError(f"{name} is not a sampling parameter of this version: {_REFUSED[name]}")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
                raise RequestError(f"unknown sampling parameter {name!r}{hint}")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, nothing in (("stop_token_ids", ()), ("logit_bias", {}), ("extra_args", {})):
            if getattr(self, name) is None:
                object.__setattr__(self, name, nothing)
        for f in fields(self):  # numpy's scalars become Python's
            if type(value := getattr(self, f.name)).__module__ == "numpy" and getattr(value, "ndim", 1) == 0:
                object.__setattr__(self, f.name, value.item())
        _integer("n", self.n, 1, _MAX_N)
        _number("temperature", self.temperature, 0.0, _FLOAT32_MAX)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, not 0; use temperature=0 for greedy tokens")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        self._check_penalties()
        self._check_ends()
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), -1, _INT32_MAX)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize", "include_stop_str_in_output"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.extra_args, Mapping) or not all(
            isinstance(k, str) and isinstance(v, Mapping) for k, v in self.extra_args.items()
        ):
            raise RequestError(
                f"extra_args must map a logits processor's name to a mapping, not {self.extra_args!r:.80}"
            )

    def _check_penalties(self) -> None:
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, _FLOAT32_MAX)
        if self.repetition_penalty < _FLOAT32_LEAST:
            raise RequestError(
                f"repetition_penalty must be above 0, at least the smallest float32 ({_FLOAT32_LEAST:.3g}), "
                f"not {self.repetition_penalty!r}; 1 switches it off"
            )
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, not {self.logit_bias!r:.80}")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias: a token id", token, 0)
            _number(f"logit_bias[{token}]", bias, -_FLOAT32_MAX, _FLOAT32_MAX)
        if self.allowed_token_ids is not None:
            self._make_tuple("allowed_token_ids", "token ids")
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty: no token could be drawn; leave it out to allow all")
            for token in self.allowed_token_ids:
                _integer("allowed_token_ids", token, 0)
        self._make_texts("bad_words")

    def _check_ends(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _integer("min_tokens", self.min_tokens, 0, _INT32_MAX)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens={self.min_tokens} must not exceed max_tokens={self.max_tokens}")
        self._make_tuple("stop_token_ids", "token ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)
        self._make_texts("stop")
        if self.stop and not self.detokenize:
            raise RequestError("stop strings are looked for in the text: leave detokenize at true")

    def _make_tuple(self, name: str, of: str) -> None:
        value = getattr(self, name)
        if not isinstance(value, Iterable) or isinstance(value, str | bytes | bytearray | Mapping):
            raise RequestError(f"{name} must be a list of {of}, not {value!r:.80}")
        object.__setattr__(self, name, tuple(value))

    def _make_texts(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, str) or value is None:
            object.__setattr__(self, name, () if value is None else (value,))
        self._make_tuple(name, "texts")
        for text in getattr(self, name):
            if not isinstance(text, str) or not text:
                raise RequestError(f"{name} must hold texts of at least one character, not {text!r:.80}")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature == 0.0


def _number(name: str, value: Any, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number, not {value!r}")
    if not low <= value <= high:  # false for NaN too
        allowed = f"at least {low:g} and finite" if high == _FLOAT32_MAX else f"between {low:g} and {high:g}"
        raise RequestError(f"{name} must be {allowed}, not {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        allowed = f"at least {low}" if high is None else f"between {low} and {high}"
        raise RequestError(f"{name} must be {allowed}, not {value!r}")

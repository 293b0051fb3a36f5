"""`SamplingParams`: how one request's tokens are drawn. No torch here."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

from enginebay.errors import RequestError

#: Bounds of what the sampler's float32 and the batch's arrays hold, so that no value fails in a worker.
_FLOAT32_MAX = (2.0 - 2.0**-23) * 2.0**127
_INT32_MAX = 2**31 - 1

#: vLLM parameters that this version refuses by name rather than as unknown words.
_NOT_YET = frozenset(
    (
        "n", "best_of", "presence_penalty", "frequency_penalty", "repetition_penalty", "stop", "min_tokens", "logprobs",
        "include_stop_str_in_output", "prompt_logprobs", "logit_bias", "allowed_token_ids", "bad_words", "priority",
        "guided_decoding", "structured_outputs", "truncate_prompt_tokens", "logits_processors", "extra_args",
    )
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw the tokens of one request; the names are vLLM's.

    Raises
    ------
    RequestError
        A value is of the wrong type, not finite, or out of range. `SamplingParams.of` also refuses unknown names.
    """

    #: 0 takes the most likely token, whatever the other filters say
    temperature: float = 1.0
    #: keep the smallest set of tokens whose probability reaches top_p, in (0, 1]
    top_p: float = 1.0
    #: keep the top_k most likely tokens; 0 or -1 keeps all
    top_k: int = 0
    #: drop tokens less likely than min_p times the most likely one, in [0, 1]
    min_p: float = 0.0
    #: equal seeds and prompts give equal tokens; None draws a seed
    seed: int | None = None
    #: most tokens to produce
    max_tokens: int = 16
    #: go on after an end-of-sequence token
    ignore_eos: bool = False
    #: further ids that end the request
    stop_token_ids: tuple[int, ...] = ()
    #: leave special tokens out of the text
    skip_special_tokens: bool = True
    #: False leaves ``text`` empty and spares the work
    detokenize: bool = True

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, _FLOAT32_MAX)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be above 0 and at most 1, not 0; use temperature=0 for greedy tokens")
        _number("min_p", self.min_p, 0.0, 1.0)
        _integer("top_k", self.top_k, -1, _INT32_MAX)
        _integer("max_tokens", self.max_tokens, 1)
        if self.seed is not None:
            _integer("seed", self.seed, 0, 2**64 - 1)
        for name in ("ignore_eos", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}")
        if not isinstance(self.stop_token_ids, Iterable):
            raise RequestError(f"stop_token_ids must be a list of token ids, not {self.stop_token_ids!r}")
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0)

    @classmethod
    def of(cls, **values: Any) -> SamplingParams:
        """Build from outside input: an unknown name is a `RequestError` with a suggestion."""
        known = [f.name for f in fields(cls)]
        for name in values:
            if name in _NOT_YET:
                raise RequestError(f"{name} is not supported by this version; supported: {', '.join(known)}")
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(known)}"
                raise RequestError(f"unknown sampling parameter {name!r}{hint}")
        return cls(**values)

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

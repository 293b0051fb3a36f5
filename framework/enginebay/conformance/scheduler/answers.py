"""The made-up model of the simulation: its next token is a function of the tokens so far, and of nothing else.

Whatever the arrangement of steps, a request must therefore get the tokens of `reference`.
"""

from __future__ import annotations

from collections.abc import Sequence

from enginebay.interfaces.scheduler import FinishReason, Request

#: tokens are ``0 .. VOCABULARY - 1``
VOCABULARY = 13


def next_token(tokens: Sequence[int]) -> int:
    """What the model answers to a sequence."""
    return (7 * tokens[-1] + 3 * len(tokens) + sum(tokens)) % VOCABULARY


def reference(request: Request) -> tuple[list[int], FinishReason]:
    """The outputs of `request`, and how it ends, when it runs alone and to its end."""
    tokens = request.prompt_token_ids.tolist()
    for _ in range(request.max_output_tokens):
        tokens.append(next_token(tokens))
        if tokens[-1] in request.stop_token_ids:
            return tokens[request.num_prompt_tokens :], "stop"
    return tokens[request.num_prompt_tokens :], "length"


def written(request: Request, tokens: Sequence[int]) -> list[int]:
    """What the cache holds at each position of `tokens`: a number that stands for all of them up to it, and for the extras."""
    marks = [hash(request.cache_extras)]
    for token in tokens:
        marks.append(hash((marks[-1], token)))
    return marks[1:]

"""Steps for an executor to carry, what they are answered with, and a digest that tells whether an object arrived unchanged.

What a step means to a model is of no interest here; every field is filled, so that one that is lost is missed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np

from enginebay.interfaces.scheduler import (
    ModelOutput,
    NewBlocks,
    NewRequest,
    PromptLogprobs,
    SchedulerOutput,
    TokenLogprobs,
)
from enginebay.sampling.params import SamplingParams


def step(number: int) -> SchedulerOutput:
    """Step `number`, of one to four rows, with a new request."""
    draw = np.random.default_rng(number)
    rows, blocks = 1 + number % 4, 2 + number % 3

    def integers(count: int) -> Any:
        return draw.integers(0, 1000, count).astype(np.int32)

    request = NewRequest(
        request_id=f"request-{number}",
        slot=number % 7,
        token_ids=integers(5 + number),
        num_prompt_tokens=3,
        num_computed_tokens=number % 3,
        params=SamplingParams(
            temperature=0.5, seed=number, logit_bias={3: -1.5}, stop=("end",), extra_args={"a": {"b": number}}
        ),
        seed=2**63 + number,
        stop_token_ids=frozenset({2, number}),
        bad_words=((1, 2), (number,)),
    )
    return SchedulerOutput(
        step=number,
        new_requests=[request],
        slots=np.arange(rows, dtype=np.int32),
        num_scheduled_tokens=integers(rows) + 1,
        num_computed_tokens=integers(rows),
        num_decode_rows=rows // 2,
        samples=np.arange(rows) % 2 == 0,
        output_index=integers(rows),
        new_blocks=(NewBlocks(integers(blocks), integers(blocks), integers(blocks)),) * 2,
    )


def answer(output: SchedulerOutput) -> ModelOutput:
    """What a worker answers to a step: a function of the step."""
    rows, number = output.num_rows, output.step
    token_ids = (output.slots * 31 + output.num_computed_tokens + number).astype(np.int32)[:, None]
    scores = TokenLogprobs(
        np.repeat(token_ids, 3, axis=1),
        -np.arange(rows * 3, dtype=np.float32).reshape(rows, 3) - np.float32(number),
        np.full(rows, number, dtype=np.int32),
    )
    prompt = {0: PromptLogprobs(number, scores.of(0, 1))}
    return ModelOutput(token_ids, output.samples.astype(np.int32), scores, prompt)


def digest(value: Any) -> str:
    """The SHA-256 of an object's content: classes, names, dtypes, shapes and values; equal for a copy of it."""
    found = hashlib.sha256()
    _feed(found, value)
    return found.hexdigest()


def _feed(found: Any, value: Any) -> None:
    if isinstance(value, np.ndarray):
        found.update(f"array {value.dtype} {value.shape}".encode())
        found.update(np.ascontiguousarray(value).tobytes())
    elif is_dataclass(value) and not isinstance(value, type):
        found.update(type(value).__qualname__.encode())
        _feed(found, {field.name: getattr(value, field.name) for field in fields(value)})
    elif isinstance(value, Mapping):
        found.update(f"mapping {len(value)}".encode())
        for key in sorted(value, key=repr):
            _feed(found, key)
            _feed(found, value[key])
    elif isinstance(value, list | tuple | frozenset):
        found.update(f"{type(value).__name__} {len(value)}".encode())
        for item in sorted(value, key=repr) if isinstance(value, frozenset) else value:
            _feed(found, item)
    else:
        found.update(f"{type(value).__name__} {value!r};".encode())

"""The digest tells an object from every other, and not from its copy."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from enginebay.conformance.executor.steps import answer, digest, step


@pytest.mark.parametrize("number", range(5))
def test_a_copy_has_the_same_digest(number: int) -> None:
    for value in (step(number), answer(step(number))):
        assert digest(pickle.loads(pickle.dumps(value))) == digest(value)


def test_steps_and_answers_differ() -> None:
    values = [value for number in range(6) for value in (step(number), answer(step(number)))]
    assert len({digest(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (np.zeros(2, np.int32), np.zeros(2, np.int64)),
        (np.zeros((2, 1), np.int32), np.zeros((1, 2), np.int32)),
        ([1, 2], (1, 2)),
        (["ab"], ["a", "b"]),
        ({"a": 1}, {"a": 1.0}),
        (step(1), replace(step(1), num_decode_rows=2)),
        (step(1), replace(step(1), new_requests=[])),
    ],
)
def test_what_differs_has_another_digest(left: object, right: object) -> None:
    assert digest(left) != digest(right)

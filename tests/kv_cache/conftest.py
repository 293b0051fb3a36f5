"""Requests for tests of the KV accounting."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from enginebay.interfaces.scheduler import Request
from enginebay.sampling.params import SamplingParams


@pytest.fixture(scope="session")
def make_request() -> Callable[..., Request]:
    """Makes a request of a prompt, outputs known, extras, and whether it asks for prompt_logprobs."""

    def make(
        prompt: Iterable[int],
        outputs: Iterable[int] = (),
        extras: tuple[tuple[str, str], ...] = (),
        prompt_logprobs: int | None = None,
    ) -> Request:
        request = Request(
            request_id="r",
            prompt_token_ids=np.array(list(prompt), dtype=np.int32),
            params=SamplingParams(prompt_logprobs=prompt_logprobs),
            stop_token_ids=frozenset(),
            max_output_tokens=1000,
            seed=0,
            cache_extras=extras,
        )
        request.output_token_ids.extend(outputs)
        return request

    return make

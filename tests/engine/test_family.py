"""The requests that the engine runs for one of the user's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from enginebay.engine.family import family
from enginebay.interfaces.scheduler import Request
from enginebay.sampling.params import SamplingParams


def make_request(name: str = "7", **params: Any) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=np.array([1, 2], dtype=np.int32),
        params=SamplingParams(**params),
        stop_token_ids=frozenset({3}),
        max_output_tokens=9,
        seed=params.get("seed") or 0,
        priority=4,
        bad_words=((5, 6),),
        cache_extras=(("salt", "s"),),
    )


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_one_completion_is_the_request_itself(prefix_caching: bool) -> None:
    request = make_request()
    assert family(request, prefix_caching=prefix_caching) == (request,)
    assert request.cache_extras == (("salt", "s"),)


def test_siblings_follow_a_leader_and_keep_what_was_asked_c36() -> None:
    leader, *rest = family(make_request(n=3, bad_words="x"), prefix_caching=True)
    assert [r.request_id for r in (leader, *rest)] == ["7", "7-1", "7-2"]
    for sibling in rest:
        assert sibling.bad_words == ((5, 6),)
        assert (sibling.priority, sibling.max_output_tokens, sibling.stop_token_ids) == (4, 9, frozenset({3}))
        assert sibling.params is leader.params
        assert sibling.cache_extras == (("salt", "s"),)


def test_nothing_that_grows_is_shared() -> None:
    leader, sibling = family(make_request(n=2), prefix_caching=True)
    sibling.output_token_ids.append(1)
    sibling.block_keys.append(b"key")
    assert (leader.output_token_ids, leader.block_keys) == ([], [])


def test_seeds_count_up_modulo_2_64() -> None:
    seed = 2**64 - 2
    assert [r.seed for r in family(make_request(n=4, seed=seed), prefix_caching=True)] == [seed, seed + 1, 0, 1]


def test_absent_seeds_differ_c34() -> None:
    seeds = {r.seed for r in family(make_request(n=20), prefix_caching=True)[1:]}
    assert len(seeds) == 19
    assert all(0 <= seed < 2**64 for seed in seeds)


def test_without_a_prefix_cache_a_family_shares_a_tag_of_its_own_c27() -> None:
    first = family(make_request(n=3), prefix_caching=False)
    second = family(make_request(n=3), prefix_caching=False)
    tags = [{r.cache_extras for r in members} for members in (first, second)]
    assert [len(t) for t in tags] == [1, 1]
    assert tags[0] != tags[1]
    [extras] = tags[0]
    assert [tag for tag, _ in extras] == ["salt", "family"]


def test_the_leader_alone_scores_the_prompt_c28() -> None:
    leader, *rest = family(make_request(n=3, prompt_logprobs=2, logprobs=1), prefix_caching=True)
    assert leader.params.prompt_logprobs == 2
    assert [(r.params.prompt_logprobs, r.params.logprobs) for r in rest] == [(None, 1)] * 2

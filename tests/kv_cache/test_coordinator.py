"""Several groups over one pool: all or nothing, found only what was computed, nothing beyond a window."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from enginebay.interfaces.scheduler import Int32Array, KVCacheManager, Request
from enginebay.kv_cache.coordinator import KVCacheCoordinator

MakeRequest = Callable[..., Request]


def ids(*values: int) -> Int32Array:
    return np.array(values, dtype=np.int32)


def make(
    groups: int = 2,
    num_blocks: int = 11,
    windows: Sequence[int | None] | None = None,
    max_model_len: int = 20,
    prefix_caching: bool = True,
    max_tokens_in_flight: int | None = None,
) -> KVCacheCoordinator:
    return KVCacheCoordinator(
        windows=[None] * groups if windows is None else windows,
        block_size=4,
        num_blocks=num_blocks,
        max_num_seqs=4,
        max_model_len=max_model_len,
        prefix_caching=prefix_caching,
        max_tokens_in_flight=max_tokens_in_flight,
    )


def test_implements_the_protocol_and_leaves_the_null_block_out() -> None:
    kv: KVCacheManager = make()
    assert kv.num_blocks == kv.num_free_blocks == 10


def test_each_group_gets_its_own_blocks() -> None:
    kv = make()
    new = kv.allocate(ids(0, 2), ids(5, 4))
    assert new is not None
    assert [n.slots.tolist() for n in new] == [[0, 0, 2]] * 2
    assert [n.columns.tolist() for n in new] == [[0, 1, 0]] * 2
    assert sorted(np.concatenate([n.block_ids for n in new]).tolist()) == [1, 2, 3, 4, 5, 6]
    assert kv.num_free_blocks == 4


def test_short_blocks_change_nothing() -> None:
    kv = make()
    kv.allocate(ids(0), ids(12))
    assert kv.blocks_needed(ids(0, 1), ids(13, 8)) == 6
    assert kv.blocks_needed_by_row(ids(0, 1), ids(13, 8)).tolist() == [2, 4]
    assert kv.allocate(ids(0, 1), ids(13, 8)) is None
    assert kv.num_free_blocks == 4
    assert kv.blocks_needed(ids(0, 1), ids(13, 8)) == 6


def test_within_a_block_nothing_is_gained() -> None:
    kv = make()
    kv.allocate(ids(3), ids(5))
    free = kv.num_free_blocks
    new = kv.allocate(ids(3), ids(8))
    assert new is not None
    assert [len(n.block_ids) for n in new] == [0, 0]
    assert kv.num_free_blocks == free


def test_fits_compares_with_the_empty_pool_over_all_groups() -> None:
    kv = make()
    kv.allocate(ids(0), ids(20))
    assert kv.num_free_blocks == 0
    assert kv.fits(20)
    assert not kv.fits(21)
    assert make(groups=1).fits(40)


class Slots:
    """A coordinator and requests that are computed at once, one slot each."""

    def __init__(self, kv: KVCacheCoordinator) -> None:
        self.kv = kv

    def run(self, slot: int, request: Request) -> int:
        """Seat the request and compute all its known tokens; returns the tokens found."""
        hit = self.kv.find_prefix(request)
        self.kv.seat(slot, request, hit)
        assert self.kv.allocate(ids(slot), ids(request.num_tokens)) is not None
        self.kv.commit(ids(slot), ids(request.num_tokens))
        return hit.num_tokens


def test_c30_a_prompt_of_exactly_k_blocks_twice_leaves_something_to_compute(make_request: MakeRequest) -> None:
    kv = make(groups=2, num_blocks=30)
    slots = Slots(kv)
    assert slots.run(0, make_request(range(12))) == 0
    assert slots.run(1, make_request(range(12))) == 8
    assert slots.run(2, make_request(range(13))) == 12
    assert slots.run(3, make_request(range(1))) == 0
    assert kv.prefix_stats == (12 + 12 + 13 + 1, 20)


def test_c31_equal_tokens_under_other_extras_share_nothing(make_request: MakeRequest) -> None:
    slots = Slots(make(groups=1, num_blocks=40))
    assert slots.run(0, make_request(range(12), extras=(("salt", "a"),))) == 0
    assert slots.run(1, make_request(range(12), extras=(("salt", "b"),))) == 0
    assert slots.run(2, make_request(range(12))) == 0
    assert slots.run(3, make_request(range(12), extras=(("salt", "a"),))) == 8


def test_c28_who_wants_prompt_logprobs_finds_nothing_but_is_found(make_request: MakeRequest) -> None:
    kv = make(groups=1, num_blocks=40)
    slots = Slots(kv)
    assert slots.run(0, make_request(range(12), prompt_logprobs=0)) == 0
    assert slots.run(1, make_request(range(12), prompt_logprobs=0)) == 0
    assert kv.prefix_stats == (0, 0)
    assert slots.run(2, make_request(range(13))) == 12


def test_c29_after_a_reset_nothing_old_is_found_and_who_ran_publishes_no_more(make_request: MakeRequest) -> None:
    kv = make(groups=1, num_blocks=40)
    slots, running = Slots(kv), make_request(range(8))
    slots.run(0, running)
    kv.reset_prefix_cache()
    running.output_token_ids.extend(range(8, 14))
    kv.allocate(ids(0), ids(14))
    kv.commit(ids(0), ids(14))
    assert kv.find_prefix(make_request(range(14))).num_tokens == 0
    assert slots.run(1, make_request(range(14))) == 0
    assert slots.run(2, make_request(range(14))) == 12


def test_without_prefix_caching_only_families_share(make_request: MakeRequest) -> None:
    kv = make(groups=1, num_blocks=60, prefix_caching=False)
    slots = Slots(kv)
    assert slots.run(0, make_request(range(12))) == 0
    assert kv.find_prefix(make_request(range(12))).num_tokens == 0
    assert len(kv.pool.index) == 0
    family, other = (("family", "1"),), (("family", "2"),)
    assert slots.run(1, make_request(range(12), extras=family)) == 0
    assert slots.run(2, make_request(range(12), extras=other)) == 0
    assert slots.run(3, make_request(range(12), extras=family)) == 8


def test_outputs_are_found_as_their_blocks_fill(make_request: MakeRequest) -> None:
    kv = make(groups=1, num_blocks=40)
    request = make_request(range(6))
    Slots(kv).run(0, request)
    for token in range(6, 13):
        request.output_token_ids.append(token)
        kv.allocate(ids(0), ids(token + 1))
        kv.commit(ids(0), ids(token + 1))
        assert kv.find_prefix(make_request(range(20))).num_tokens == (token + 1) // 4 * 4


def test_only_computed_tokens_are_found(make_request: MakeRequest) -> None:
    kv = make(groups=1, num_blocks=40)
    request = make_request(range(20))
    kv.seat(0, request, kv.find_prefix(request))
    kv.allocate(ids(0), ids(20))
    assert kv.find_prefix(make_request(range(20))).num_tokens == 0
    kv.commit(ids(0), ids(11))
    assert kv.find_prefix(make_request(range(20))).num_tokens == 8


def test_the_tails_of_all_groups_are_reused_before_their_beginnings(make_request: MakeRequest) -> None:
    kv = make(groups=2, num_blocks=7)
    slots = Slots(kv)
    slots.run(0, make_request(range(12)))
    kv.free(0)
    kv.allocate(ids(1), ids(4))  # a block of each group
    assert kv.find_prefix(make_request(range(13))).num_tokens == 8


def test_growth_is_what_the_pool_loses(make_request: MakeRequest) -> None:
    kv = make(groups=2, num_blocks=30)
    slots = Slots(kv)
    slots.run(0, make_request(range(16)))
    kv.free(0)
    slots.run(1, make_request(range(8)))
    request, free = make_request(range(20)), kv.num_free_blocks
    hit = kv.find_prefix(request)
    # Of each group slot 1 holds the first block of four that are found, and one more is new.
    assert (hit.num_tokens, hit.num_idle, kv.growth(hit, 20)) == (16, 6, 8)
    slots.run(0, request)
    assert free - kv.num_free_blocks == 8


def test_a_seat_that_is_taken_is_a_fault(make_request: MakeRequest) -> None:
    kv = make(groups=1, num_blocks=30)
    Slots(kv).run(0, make_request(range(8)))
    with pytest.raises(RuntimeError, match="slot 0, which is taken"):
        kv.seat(0, make_request(range(8)), kv.find_prefix(make_request(range(3))))


def test_a_long_prompt_takes_a_window_of_blocks_from_a_window_group(make_request: MakeRequest) -> None:
    kv = make(windows=[None, 6], num_blocks=31, max_model_len=100, max_tokens_in_flight=8)
    # 5 tokens of the window and 8 in flight lie on 5 blocks at most.
    assert kv.fits(100)
    assert not make(windows=[None, 6], num_blocks=30, max_model_len=100, max_tokens_in_flight=8).fits(100)
    request = make_request(range(100))
    hit = kv.find_prefix(request)
    assert kv.growth(hit, 100) == 25 + 5
    kv.seat(0, request, hit)
    for end in range(4, 101, 4):
        assert kv.allocate(ids(0), ids(end), reserve=ids(100)) is not None
        assert kv.num_blocks - kv.num_free_blocks <= 25 + 3
        kv.commit(ids(0), ids(end))
    assert kv.num_blocks - kv.num_free_blocks == 25 + 2
    kv.free(0)
    assert kv.num_free_blocks == kv.num_blocks
    # The full group has the whole prompt, and the window group what the tokens after it read.
    again = kv.find_prefix(make_request(range(101)))
    assert (again.num_tokens, again.first_columns, [len(b) for b in again.block_ids]) == (100, (0, 23), [25, 2])


@pytest.mark.parametrize("windows", [[None], [6], [None, None], [None, 6], [3, 6], [1]])
@pytest.mark.parametrize("num_blocks", [2, 3, 4, 9, 26])
def test_the_longest_request_fits_and_no_longer_one(windows: list[int | None], num_blocks: int) -> None:
    kv = make(windows=windows, num_blocks=num_blocks, max_model_len=50, max_tokens_in_flight=8)
    assert kv.longest == max((n for n in range(1, 51) if kv.fits(n)), default=0)


def test_two_requests_that_share_a_window_block_may_give_it_up_in_one_step(make_request: MakeRequest) -> None:
    kv = make(windows=[6], num_blocks=20, max_tokens_in_flight=8)
    slots = Slots(kv)
    slots.run(0, make_request(range(8)))
    kv.free(0)
    for slot in (0, 1):
        request = make_request([*range(8), slot])
        kv.seat(slot, request, kv.find_prefix(request))
        assert kv.allocate(ids(slot), ids(9)) is not None
    kv.commit(ids(0, 1), ids(9, 9))
    assert kv.num_blocks - kv.num_free_blocks == 3
    kv.free(0)
    kv.free(1)
    assert kv.num_free_blocks == kv.num_blocks


def test_c24_a_request_that_ends_at_a_block_edge_with_a_step_in_flight_leaks_nothing(make_request: MakeRequest) -> None:
    kv = make(windows=[None, 3], num_blocks=12, max_tokens_in_flight=8)
    request = make_request(range(7))
    Slots(kv).run(0, request)
    request.output_token_ids.append(7)
    kv.allocate(ids(0), ids(8))
    kv.allocate(ids(0), ids(9))  # scheduled before the token that ends the request is known
    kv.commit(ids(0), ids(8))
    kv.commit(ids(0), ids(9))
    kv.free(0)
    kv.free(0)
    assert kv.num_free_blocks == kv.num_blocks
    assert kv.find_prefix(make_request(range(9))).num_tokens == 8

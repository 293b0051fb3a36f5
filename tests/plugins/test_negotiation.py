from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from enginebay.errors import ResolutionError
from enginebay.plugins.negotiation import LEAST_BLOCK, CacheUser, common_block_size, common_kv_dtype, negotiate_layout
from enginebay.plugins.records import HND, NHD, AttentionRecord, KVLayout
from enginebay.plugins.requirements import AttentionSpec
from hypothesis import given
from hypothesis import strategies as st

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=64, scale=0.125)
OTHER = KVLayout("OTHER", ("kv", "blocks", "block", "kv_heads", "head_dim"))


def record(
    name: str,
    layouts: tuple[KVLayout, ...] = (NHD,),
    kernel_blocks: tuple[int, ...] = (16,),
    kv_dtypes: tuple[str, ...] = ("float32",),
) -> AttentionRecord:
    return AttentionRecord(
        name=name,
        summary="fake",
        factory=print,
        api_version=0,
        dtypes=("float32",),
        kv_dtypes=kv_dtypes,
        layouts=layouts,
        kernel_blocks=kernel_blocks,
    )


def test_one_backend_gets_what_it_wants_most() -> None:
    assert negotiate_layout([CacheUser(record("a", (HND, NHD)), [SPEC])]) == (HND, 16)


def test_the_common_layout_is_taken() -> None:
    a, b = record("a", (HND, NHD)), record("b", (NHD,))
    assert negotiate_layout([CacheUser(a, [SPEC]), CacheUser(b, [SPEC])])[0] == NHD


def test_preferences_are_summed() -> None:
    a = record("a", (HND, OTHER, NHD))
    b = record("b", (OTHER, NHD, HND))
    assert negotiate_layout([CacheUser(a, [SPEC]), CacheUser(b, [SPEC])])[0] == OTHER


def test_first_backend_breaks_a_tie() -> None:
    a, b = record("a", (HND, NHD)), record("b", (NHD, HND))
    assert negotiate_layout([CacheUser(a, [SPEC]), CacheUser(b, [SPEC])])[0] == HND
    assert negotiate_layout([CacheUser(b, [SPEC]), CacheUser(a, [SPEC])])[0] == NHD


def test_layouts_are_equal_by_axes_whatever_their_names() -> None:
    mine = KVLayout("mine", NHD.axes)
    assert negotiate_layout([CacheUser(record("a", (NHD,)), [SPEC]), CacheUser(record("b", (mine,)), [SPEC])])[0] == NHD


def test_no_common_layout_names_the_parts_that_cannot_share() -> None:
    users = [
        CacheUser(record("a", (NHD, HND)), [SPEC], "attention.full"),
        CacheUser(record("b", (HND,)), [SPEC], "attention.sliding.decode"),
        CacheUser(record("c", (OTHER, NHD)), [SPEC], "attention.sliding.prefill"),
    ]
    with pytest.raises(ResolutionError) as caught:
        negotiate_layout(users)
    assert str(caught.value).splitlines() == [
        "the attention backends read one KV cache, but have no KV layout in common:",
        "  attention.full: a: NHD, HND",
        "  attention.sliding.decode: b: HND",
        "  attention.sliding.prefill: c: OTHER, NHD",
        "attention.sliding.decode (b) cannot share with attention.sliding.prefill (c)",
    ]


def test_layouts_may_depend_on_the_spec() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Picky(AttentionRecord):
        def kv_layouts(self, spec: AttentionSpec) -> tuple[KVLayout, ...]:
            return (HND,) if spec.head_dim > 64 else (NHD, HND)

    picky = Picky(name="p", summary="s", factory=print, api_version=0, dtypes=("float32",), kv_dtypes=("float32",))
    wide = AttentionSpec(num_heads=4, num_kv_heads=2, head_dim=128, scale=0.1)
    assert negotiate_layout([CacheUser(picky, [SPEC])])[0] == NHD
    assert negotiate_layout([CacheUser(picky, [SPEC, wide])])[0] == HND


def test_without_layers_the_declared_layouts_count() -> None:
    assert negotiate_layout([CacheUser(record("a", (HND, NHD)), [])])[0] == HND


@pytest.mark.parametrize(
    ("kernel_blocks", "expected"),
    [
        ([(16,)], 16),
        ([(1,)], 16),
        ([(1,), (16, 32, 64)], 16),
        ([(64,), (16,)], 64),
        ([(24,), (16, 48)], 48),
        ([(24,), (16,)], 48),
        ([(5,)], 20),
        ([(3, 128), (128,)], 128),
    ],
)
def test_smallest_common_block(kernel_blocks: list[tuple[int, ...]], expected: int) -> None:
    assert common_block_size([record(str(i), kernel_blocks=k) for i, k in enumerate(kernel_blocks)]) == expected


blocks = st.lists(st.lists(st.integers(1, 48), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3)


@given(blocks)
def test_block_fits_all_and_no_smaller_one_does(kernel_blocks: list[tuple[int, ...]]) -> None:
    size = common_block_size([record(str(i), kernel_blocks=k) for i, k in enumerate(kernel_blocks)])

    def fits(n: int) -> bool:
        return n >= LEAST_BLOCK and all(any(n % k == 0 for k in ks) for ks in kernel_blocks)

    assert fits(size)
    assert not any(fits(n) for n in range(LEAST_BLOCK, size))
    assert size <= math.lcm(*(ks[0] for ks in kernel_blocks)) * LEAST_BLOCK


def test_users_block_is_kept_or_refused() -> None:
    a, b = record("a", kernel_blocks=(16,)), record("b", kernel_blocks=(32, 48))
    assert common_block_size([a, b], 96) == 96
    assert common_block_size([a], 8 * 16) == 128
    with pytest.raises(ResolutionError, match=r"cache\.block_size 16 (?s:.*)b: multiples of 32 or of 48"):
        common_block_size([a, b], 16)


def test_kv_dtype_must_suit_all() -> None:
    a, b = record("a", kv_dtypes=("float32", "bfloat16")), record("b", kv_dtypes=("bfloat16", "fp8"))
    assert common_kv_dtype([a, b], "bfloat16") == "bfloat16"
    with pytest.raises(ResolutionError, match=r"cache\.dtype float32 (?s:.*)Set cache\.dtype to bfloat16\."):
        common_kv_dtype([a, b], "float32")
    with pytest.raises(ResolutionError, match="none in common"):
        common_kv_dtype([a, record("c", kv_dtypes=("fp8",))], "float32")

"""`ResolvedConfig` is a value: frozen, and completed by replacement."""

from __future__ import annotations

import dataclasses

import pytest
from enginebay.config import ResolvedConfig


def test_the_pool_is_filled_in_after_measuring() -> None:
    before = ResolvedConfig(
        dtype="float32",
        kv_dtype="float32",
        device="cpu",
        max_model_len=128,
        block_size=16,
        max_num_batched_tokens=2048,
        why={"dtype": "float32 on cpu"},
    )
    after = dataclasses.replace(before, num_kv_blocks=9)
    assert (before.num_kv_blocks, after.num_kv_blocks, after.why) == (None, 9, before.why)
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.dtype = "bfloat16"  # type: ignore[misc]

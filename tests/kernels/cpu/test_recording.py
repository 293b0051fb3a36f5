"""Recordings: kernel calls run again over what stands at their addresses now."""

from __future__ import annotations

import threading

import pytest
import torch
from enginebay.kernels.cpu import ops
from enginebay.kernels.cpu.library import library
from enginebay.kernels.cpu.recording import ACTIVE, Recording

pytestmark = pytest.mark.skipif(library() is None, reason="no C++ compiler here: the kernels cannot be built")


def test_a_replay_computes_anew_from_the_same_addresses() -> None:
    x, weight = torch.randn(3, 64), torch.rand(64)
    recording = Recording()
    with recording.record():
        out = ops.silu_mul(ops.rms_norm(x.view(3, 64), None, weight, 1e-5))
    first = out.clone()
    assert recording.foreign == set()
    x.copy_(torch.randn(3, 64))
    recording.replay()
    assert not torch.equal(out, first)
    assert torch.equal(out, ops.silu_mul(ops.rms_norm(x, None, weight, 1e-5)))


def test_memory_between_the_calls_is_held_and_counted() -> None:
    x, weight = torch.randn(2, 64), torch.rand(64)
    recording = Recording()
    with recording.record():
        for _ in range(50):
            x = ops.rms_norm(x, None, weight, 1e-5)
    assert recording.num_bytes == 50 * 2 * 64 * 4


@pytest.mark.parametrize(
    ("step", "name"),
    [
        (lambda x: x + 1, "aten::add"),
        (lambda x: x.mul_(2), "aten::mul_"),
        (lambda x: x.t().contiguous(), "aten::clone"),
        (lambda x: torch.zeros(3), "aten::zeros"),
        (lambda x: x[torch.tensor([0])], "aten::index"),
    ],
)
def test_torch_operators_beside_the_kernels_are_named(step: object, name: str) -> None:
    assert callable(step)
    recording = Recording()
    x = torch.randn(3, 4)
    with recording.record():
        step(x)
    assert name in recording.foreign


def test_nothing_is_kept_once_the_block_has_ended_even_by_an_error() -> None:
    recording = Recording()
    x, weight = torch.randn(2, 64), torch.rand(64)
    with pytest.raises(ValueError, match="stop"), recording.record():
        raise ValueError("stop")
    assert ACTIVE.recording is None
    ops.rms_norm(x, None, weight, 1e-5)
    assert recording.num_bytes == 0


def test_what_another_thread_computes_meanwhile_is_no_part_of_a_recording() -> None:
    x, weight, other = torch.randn(2, 64), torch.rand(64), torch.randn(3, 128)
    kept: list[torch.Tensor] = []
    recording = Recording()
    with recording.record():
        thread = threading.Thread(target=lambda: kept.append(ops.silu_mul(other)))
        thread.start()
        thread.join()
        out = ops.rms_norm(x, None, weight, 1e-5)
    kept[0].zero_()
    out.zero_()
    recording.replay()
    assert torch.equal(out, ops.rms_norm(x, None, weight, 1e-5))
    assert not kept[0].any()  # the other thread's call was not run again

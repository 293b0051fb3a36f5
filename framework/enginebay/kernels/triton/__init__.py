"""Triton kernels for CUDA. Each pairs with a torch twin, which says what it computes and serves every other device."""

from __future__ import annotations

import functools
from importlib.util import find_spec

from torch import Tensor


def usable(*tensors: Tensor) -> bool:
    """Whether all are CUDA tensors and triton can be imported."""
    return all(t.is_cuda for t in tensors) and _installed()


@functools.cache
def _installed() -> bool:
    return find_spec("triton") is not None

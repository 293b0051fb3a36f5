"""The in-tree attention backends pass the suite that every author runs; what needs a GPU is tried on one."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import replace
from typing import Any

import pytest
import torch
from enginebay.conformance import AttentionConformance
from enginebay.plugins.records import AttentionRecord

INTERPRETED = not torch.cuda.is_available() and importlib.util.find_spec("triton") is not None


class TestTorch(AttentionConformance):
    plugin = "torch"


@pytest.mark.skipif(not INTERPRETED, reason="Triton's interpreter stands in for a GPU where there is none")
class TestTritonInterpreted(AttentionConformance):
    """Our kernels on a CPU, in what the interpreter computes rightly: float16, of few tokens."""

    plugin = "triton"

    @classmethod
    def load_record(cls) -> tuple[Any, Any]:
        record, identity = super().load_record()
        assert isinstance(record, AttentionRecord)
        assert os.environ.get("TRITON_INTERPRET") == "1" or not INTERPRETED
        narrow: dict[str, Any] = {"devices": ("cpu",), "dtypes": ("float16",), "kv_dtypes": ("float16",)}
        return replace(record, head_dims=(64, 96), min_capability=None, check=None, **narrow), identity

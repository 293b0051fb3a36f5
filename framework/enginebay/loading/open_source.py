"""Opening a model's files as a weight source. It knows which format a folder is in, and no model."""

from __future__ import annotations

from enginebay.loading.gguf_source import GGUFSource
from enginebay.loading.safetensors_source import SafetensorsSource
from enginebay.loading.source import WeightSource
from enginebay.models.reference import ModelFiles


def open_source(files: ModelFiles) -> WeightSource:
    """Open the checkpoint for reading; whoever opens it closes it. Raises `WeightsError` if it is damaged."""
    if files.kind == "gguf":
        return GGUFSource(files.gguf_path)
    return SafetensorsSource(files.path)

"""The right source for a model's files."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from enginebay.loading.gguf_source import GGUFSource
from enginebay.loading.open_source import open_source
from enginebay.loading.safetensors_source import SafetensorsSource
from enginebay.models.reference import ModelFiles
from safetensors.torch import save_file


def test_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    source = open_source(ModelFiles(kind="hf_dir", path=tmp_path, name="m"))
    assert isinstance(source, SafetensorsSource)
    assert source.names() == ["a"]


def test_gguf(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "qwen3")
    writer.add_block_count(1)
    writer.add_tensor("output_norm.weight", np.ones(4, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    source = open_source(ModelFiles(kind="gguf", path=tmp_path, gguf_file="m.gguf", name="m"))
    assert isinstance(source, GGUFSource)
    assert source.names() == ["model.norm.weight"]

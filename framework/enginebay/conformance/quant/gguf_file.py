"""Writes a GGUF file of a checkpoint's tensors with the ``gguf`` package, as a Qwen2 model: its rows stand in plain order.

It knows no encoding: bytes come encoded, and say of which type they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import torch
from torch import Tensor


def write_gguf(path: Path, tensors: Mapping[str, Tensor], storage: str) -> None:
    """Write uint8 tensors as encoded rows of the type `storage`, others as float32; names are Hugging Face's."""
    to_gguf = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN2, 1)
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(1)
    for name, tensor in tensors.items():
        module, _, last = name.rpartition(".")
        kind = gguf.GGMLQuantizationType[storage] if tensor.dtype == torch.uint8 else None
        writer.add_tensor(f"{to_gguf.get_name(module)}.{last}", tensor.contiguous().numpy(), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

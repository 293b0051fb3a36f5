"""Weights of a GGUF file under their Hugging Face names.

Names come from the gguf package's map. What llama.cpp's converter changed is undone: llama's q and k rows stand in
another order, gemma's norms have 1 added. F32, F16 and BF16 come plain, everything else as its encoded rows, which a
quant plugin decodes. Architectures: `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path

import numpy as np
import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from torch import Tensor

from enginebay.errors import ModelError, WeightsError
from enginebay.loading.gguf_header import GGUFHeader, TensorInfo
from enginebay.loading.source import RawTensor

#: GGUF architecture -> the gguf package's name map
ARCHITECTURES: dict[str, MODEL_ARCH] = {
    "llama": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
    "gemma3": MODEL_ARCH.GEMMA3,
}
#: Tensors that are no weights: llama.cpp's rotary factors, which `enginebay.loading.gguf_config` reads as settings.
ROPE_FACTORS = "rope_freqs.weight"

_PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_TOP_MODULES = ("model.embed_tokens", "model.norm", "lm_head")
_LAYER_MODULES = (
    "input_layernorm",
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
    "self_attn.o_proj",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "post_feedforward_layernorm",
)


class GGUFSource:
    """A `WeightSource` over one GGUF file.

    Raises
    ------
    ModelError
        The architecture has no name map here, or the file is one part of several.
    WeightsError
        The file is truncated, or has tensors that the architecture does not.
    """

    def __init__(self, path: Path) -> None:
        self._header = GGUFHeader.read(path)
        if self._header.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"{path} is one part of a split GGUF file; join the parts first (llama-gguf-split --merge)"
            )
        to_hf = dict(_hf_names(self._header))
        wanted = [name for name in self._header.tensors if name != ROPE_FACTORS]
        unknown = [name for name in wanted if name not in to_hf]
        if unknown:
            raise WeightsError(
                f"{path} has tensors that {self._header.architecture} does not: {', '.join(unknown[:10])}"
                f"{f' and {len(unknown) - 10} more' if len(unknown) > 10 else ''}"
            )
        self._tensors = {to_hf[name]: self._header.tensors[name] for name in wanted}
        self._file: np.memmap[tuple[int], np.dtype[np.uint8]] | None = np.memmap(path, dtype=np.uint8, mode="r")

    def names(self) -> list[str]:
        """Every tensor by its Hugging Face name, in file order."""
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """Logical shape."""
        return self._info(name).shape

    def load(self, name: str) -> RawTensor:
        """Read one tensor: plain, or as uint8 ``[rows, bytes a row]`` with encoding ``gguf:<TYPE>``."""
        info = self._info(name)
        if self._file is None:
            raise WeightsError(f"{self._header.path} is closed, so {name} cannot be read")
        encoded = torch.from_numpy(np.array(self._file[info.offset : info.offset + info.num_bytes]))
        plain = _PLAIN.get(info.type)
        rows = encoded.view(plain).view(info.shape) if plain else encoded.view(prod(info.shape[:-1]), info.row_bytes)
        return RawTensor(
            name=name,
            shape=info.shape,
            data=self._as_hf(name, info, rows),
            encoding=None if plain else f"gguf:{info.type}",
        )

    def close(self) -> None:
        """Release the file."""
        self._file = None

    def _info(self, name: str) -> TensorInfo:
        try:
            return self._tensors[name]
        except KeyError:
            raise WeightsError(f"{self._header.path} has no tensor for {name}") from None

    def _as_hf(self, name: str, info: TensorInfo, rows: Tensor) -> Tensor:
        """Undo what the converter did; it works on whole rows, so encoded ones do as well."""
        if self._header.architecture == "llama":
            heads = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}.get(name.split(".")[-2])
            if heads is not None:
                return unpermute_rows(rows, self._head_count(heads, info))
        if self._header.architecture == "gemma3" and name.endswith("norm.weight"):
            if info.type not in _PLAIN:
                raise WeightsError(f"{self._header.path}: {name} is stored as {info.type}; norms are to be plain")
            return rows - 1
        return rows

    def _head_count(self, key: str, info: TensorInfo) -> int:
        count = self._header.get(key, self._header.require("attention.head_count"))
        if not isinstance(count, int) or count < 1 or info.shape[0] % (2 * count):
            raise WeightsError(
                f"{self._header.path}: {info.name} has {info.shape[0]} rows, which {key} = {count} does not divide "
                "into heads of even size"
            )
        return count


def unpermute_rows(rows: Tensor, num_heads: int) -> Tensor:
    """Put a llama projection's rows back from llama.cpp's rotary order into Hugging Face's.

    llama.cpp pairs neighbours, Hugging Face pairs halves::

        head of 6 rows   stored  0 3 1 4 2 5   ->   0 1 2 3 4 5

    `rows` is ``[heads * d, ...]``, weights or encoded weights or a bias; the result is a copy.
    """
    paired = rows.view(num_heads, rows.shape[0] // num_heads // 2, 2, *rows.shape[1:])
    return paired.transpose(1, 2).reshape(rows.shape)


def _hf_names(header: GGUFHeader) -> Iterator[tuple[str, str]]:
    """Pairs of a GGUF tensor name and its Hugging Face name."""
    if header.architecture not in ARCHITECTURES:
        raise ModelError(
            f"{header.path} is of the GGUF architecture {header.architecture!r}; those that can be read are "
            f"{', '.join(ARCHITECTURES)}"
        )
    num_layers = header.require("block_count")
    to_gguf: Callable[[str], str | None] = get_tensor_name_map(ARCHITECTURES[header.architecture], num_layers).get_name
    layers = [f"model.layers.{index}.{module}" for index in range(num_layers) for module in _LAYER_MODULES]
    for module in (*_TOP_MODULES, *layers):
        stored = to_gguf(module)
        if stored is not None:
            yield f"{stored}.weight", f"{module}.weight"
            yield f"{stored}.bias", f"{module}.bias"

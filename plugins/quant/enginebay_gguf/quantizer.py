"""Decodes GGUF's block encodings to plain weights with the ``gguf`` package. It keeps nothing encoded."""

from __future__ import annotations

import math

import gguf
import torch
from enginebay.errors import ModelError, WeightsError
from enginebay.interfaces.quant import QuantContext, Quantizer
from enginebay.loading.source import RawTensor
from torch import Tensor

#: what every encoding of this quantizer starts with: ``gguf:Q4_1``
PREFIX = "gguf:"
#: weights decoded at once: bounds the float32 copy to 64 MiB beside the result
_CHUNK_WEIGHTS = 16 * 1024 * 1024


class GGUFQuantizer(Quantizer):
    """Every layer is plain once its tensors are decoded."""

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> GGUFQuantizer:
        """A GGUF file describes its tensors itself, so there are no settings.

        Raises
        ------
        ModelError
            The checkpoint has settings, or they are of some other method.
        """
        method = context.quantization_config.get("quant_method", "gguf")
        if method != "gguf":
            raise ModelError(f"the checkpoint's quant_method is {method!r}, not 'gguf'; leave quant at auto")
        if unknown := sorted(context.quantization_config.keys() - {"quant_method"}):
            raise ModelError(
                f"quantization_config has {', '.join(unknown)}, but a GGUF file's tensors say themselves how they are encoded; "
                "remove the settings"
            )
        return cls()

    def decode(self, raw: RawTensor, dtype: torch.dtype) -> Tensor:
        """Decode rows of encoded bytes, uint8 ``[rows, bytes a row]``, to ``raw.shape`` in `dtype`.

        Raises
        ------
        WeightsError
            The encoding is unknown, or the bytes do not make up the shape.
        """
        kind = _kind(raw)
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        width = raw.shape[-1] if raw.shape else 1
        rows = math.prod(raw.shape[:-1])
        row_bytes = width // block * block_bytes
        data = raw.data
        if data.dtype != torch.uint8 or width % block or data.numel() != rows * row_bytes:
            raise WeightsError(
                f"{raw.name}: {data.numel()} x {data.dtype} are not {list(raw.shape)} weights in {raw.encoding}; "
                f"those take {rows * row_bytes} bytes, in blocks of {block} weights: the file is damaged"
            )
        data = data.reshape(rows, row_bytes)
        out = torch.empty(rows, width, dtype=dtype)
        step = max(1, _CHUNK_WEIGHTS // max(1, width))
        for start in range(0, rows, step):
            try:
                chunk = gguf.dequantize(data[start : start + step].numpy(), kind)
            except NotImplementedError as error:
                raise WeightsError(f"{raw.name}: the gguf package does not decode {kind.name}") from error
            out[start : start + step].copy_(torch.from_numpy(chunk))
        return out.reshape(raw.shape)


def _kind(raw: RawTensor) -> gguf.GGMLQuantizationType:
    name = (raw.encoding or "").removeprefix(PREFIX)
    if raw.encoding == name or name not in gguf.GGMLQuantizationType.__members__:
        raise WeightsError(f"{raw.name}: unknown encoding {raw.encoding!r}; this quantizer reads 'gguf:<type>'")
    return gguf.GGMLQuantizationType[name]

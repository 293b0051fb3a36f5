"""`QuantSample`: one checkpoint format of a quantizer, told from the checkpoint's side.

The conformance suite makes checkpoints of these, so a sample is written apart from the quantizer: it encodes weights as the
tool that makes such checkpoints does, and says in plain float32 what the encoded tensors mean. It knows no layer, rank or
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from enginebay.errors import PluginError
from enginebay.interfaces.quant import LayerKind

#: the largest `QuantSample.tolerance`: beyond it a lost zero point could hide
MOST_TOLERANCE = 0.125


@dataclass(frozen=True, kw_only=True)
class QuantSample:
    """A point of the grid that a quantizer declares: bits, group size, symmetric or not, and whatever else it has.

    Raises
    ------
    PluginError
        `tolerance` is beyond `MOST_TOLERANCE`, or a unit is below 1.
    """

    #: what tells it from the record's other samples: ``"int4, groups of 32, zero points"``
    name: str
    #: the checkpoint's ``quantization_config``, ``quant_method`` included; what JSON can hold
    config: Mapping[str, Any] = field(hash=False)
    #: float32 ``[out, in]`` on CPU, whole and of whole units, to the checkpoint's tensors by the last segment of their names
    encode: Callable[[Tensor], Mapping[str, Tensor]]
    #: what `encode` gave to float32 ``[out, in]``; it shares no code with the quantizer
    dequantize: Callable[[Mapping[str, Tensor]], Tensor]
    #: kinds of layers that such a checkpoint encodes; others stand plain in it
    layers: tuple[LayerKind, ...] = ("linear",)
    #: weights along an axis that the format cannot divide: a group, a packed word, a block
    in_unit: int = 1
    out_unit: int = 1
    #: error of a product beyond rounding to the compute dtype, as a share of the root of the summed squares of its terms:
    #: 0 unless the method rounds activations too
    tolerance: float = 0.0
    #: the setting that lists modules left plain (``modules_to_not_convert``); None if the format has none
    skip_key: str | None = None
    #: the checkpoint is a GGUF file and `encode` gives ``{"weight": uint8 [out, bytes a row]}`` of this storage type
    #: (``"Q4_1"``); None: safetensors
    gguf_type: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.tolerance <= MOST_TOLERANCE:
            raise PluginError(
                f"quantization sample {self.name!r}: tolerance {self.tolerance} is not in [0, {MOST_TOLERANCE}]"
            )
        if min(self.in_unit, self.out_unit) < 1:
            raise PluginError(f"quantization sample {self.name!r}: a unit is one weight at least")

    def __str__(self) -> str:
        return self.name

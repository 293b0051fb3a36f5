"""GGUF tensors, decoded when they are loaded. Importing this imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from enginebay import hookimpl
from enginebay.plugins.records import QuantRecord

if TYPE_CHECKING:
    from enginebay.interfaces.quant import QuantContext, Quantizer
    from enginebay.interfaces.quant_sample import QuantSample


def make(context: QuantContext) -> Quantizer:
    """Build the quantizer."""
    from enginebay_gguf.quantizer import GGUFQuantizer

    return GGUFQuantizer.from_checkpoint(context)


def make_samples() -> Iterable[QuantSample]:
    """Checkpoints for the conformance suite."""
    from enginebay_gguf.samples import samples

    return samples()


@hookimpl
def enginebay_quantizers() -> Iterable[QuantRecord]:
    """The one method."""
    return [
        QuantRecord(
            name="gguf",
            summary="GGUF files, decoded to the compute dtype at load",
            factory=make,
            api_version=0,
            requires=("gguf",),
            install="gguf",
            checkpoint_methods=("gguf",),
            samples=make_samples,
        )
    ]

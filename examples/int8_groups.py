"""A quantizer in one file: int8 weights in groups, each with a scale, in about half of bfloat16's memory.

Make a checkpoint of it from a folder in Hugging Face form, and run that:

    python examples/int8_groups.py path/to/model path/to/model-int8 --group-size 64
    enginebay run examples/quickstart.yaml --set model=path/to/model-int8 --set 'plugins=[examples/int8_groups.py]' \\
        --prompt "The capital of France is"

and see that it keeps the contract:

    enginebay conformance run quant:int8_groups --local examples/int8_groups.py

The checkpoint holds, for each matrix ``[out, in]``:

    weight_packed   int32    [out, in / 4]           four codes a word, the first one in the lowest byte
    weight_scale    float32  [out, in / group_size]

A weight is its code (-127 to 127) times its group's scale; there are no zero points. Modules that ``modules_to_not_convert``
names, or that stand below one of them, are plain. Weights stay int8 in memory: each product decodes them anew, some rows at a
time, which costs time and saves memory.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from enginebay import hookimpl
from enginebay.errors import ModelError
from enginebay.interfaces.quant import (
    Axis,
    EmbeddingMethod,
    LayerInfo,
    LinearMethod,
    QuantContext,
    Quantizer,
    WeightSpec,
)
from enginebay.interfaces.quant_sample import QuantSample
from enginebay.plugins.records import QuantRecord
from torch import Tensor, nn
from torch.nn import functional

METHOD = "int8_groups"
#: weights decoded at once in a product: 16 MiB in float32
CHUNK_WEIGHTS = 4 * 1024 * 1024


# --- what a layer keeps and computes -----------------------------------------------------------------------------------


def specs(group_size: int) -> dict[str, WeightSpec]:
    """The two tensors of a matrix. The core shards them by their units, and refuses ranks that would cut a group."""
    return {
        "weight_packed": WeightSpec(axes=(Axis("out"), Axis("in", 4)), dtype=torch.int32),
        "weight_scale": WeightSpec(axes=(Axis("out"), Axis("in", group_size)), dtype=torch.float32),
    }


def decoded(layer: nn.Module, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
    """Some rows of a layer's matrix, ``[rows, in]``; rounded once."""
    codes = layer.get_parameter("weight_packed").data[rows].view(torch.int8)
    scale = layer.get_parameter("weight_scale").data[rows].unsqueeze(-1)
    groups = codes.reshape(*scale.shape[:2], codes.shape[1] // scale.shape[1])
    return (groups.float() * scale).flatten(1).to(dtype)


def product(layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x [T, in]`` to ``[T, out]``, some rows of the matrix after others."""
    outputs, words = layer.get_parameter("weight_packed").shape
    step = max(1, CHUNK_WEIGHTS // (4 * words))
    out = x.new_empty(x.shape[0], outputs)
    for start in range(0, outputs, step):
        rows = slice(start, start + step)
        out[:, rows] = functional.linear(x, decoded(layer, rows, x.dtype), None if bias is None else bias[rows])
    return out


class Int8Linear(LinearMethod):
    """A linear layer, or several fused: parts stand one after another, each row with its own scales."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        return specs(self.group_size)

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None) -> Tensor:
        return product(layer, x, bias)

    def dense_weight(self, layer: nn.Module) -> Tensor:
        assert isinstance(layer.info, LayerInfo)
        return decoded(layer, slice(None), layer.info.dtype)


class Int8Embedding(EmbeddingMethod):
    """An embedding, a head, or one matrix that serves as both."""

    def __init__(self, group_size: int) -> None:
        self.group_size = group_size

    def weights(self, layer: LayerInfo) -> dict[str, WeightSpec]:
        return specs(self.group_size)

    def embed(self, layer: nn.Module, ids: Tensor) -> Tensor:
        assert isinstance(layer.info, LayerInfo)
        return decoded(layer, ids, layer.info.dtype)

    def logits(self, layer: nn.Module, x: Tensor) -> Tensor:
        return product(layer, x)


# --- which layers -----------------------------------------------------------------------------------------------------


class Int8Groups(Quantizer):
    """A checkpoint's settings: ``group_size``, and what is left plain."""

    def __init__(self, group_size: int, skipped: tuple[str, ...] = ()) -> None:
        self.group_size = group_size
        self.skipped = skipped

    @classmethod
    def from_checkpoint(cls, context: QuantContext) -> Int8Groups:
        config = dict(context.quantization_config)
        config.pop("quant_method", None)
        group_size = config.pop("group_size", None)
        skipped = config.pop("modules_to_not_convert", None) or ()
        if config:
            raise ModelError(f"quantization_config has {', '.join(sorted(config))}, which {METHOD} does not have")
        if not isinstance(group_size, int) or group_size < 4 or group_size % 4:
            raise ModelError(f"quantization_config.group_size is {group_size!r}; it is to be a multiple of 4")
        return cls(group_size, tuple(skipped))

    def method_for(self, layer: LayerInfo) -> LinearMethod | EmbeddingMethod | None:
        plain = [is_named(module, self.skipped) for module in layer.checkpoint_names]
        if all(plain):
            return None
        if any(plain):
            raise ModelError(
                f"{layer.name}: modules_to_not_convert names some of {', '.join(layer.checkpoint_names)}, which are one "
                "layer here; name all of them, or none"
            )
        return Int8Linear(self.group_size) if layer.kind == "linear" else Int8Embedding(self.group_size)


def is_named(module: str, entries: Iterable[str]) -> bool:
    """Whether a list names a module, or one that it stands in."""
    return any(module == entry or module.startswith(f"{entry}.") for entry in entries)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def encode(weight: Tensor, group_size: int) -> dict[str, Tensor]:
    """A matrix ``[out, in]`` as its two tensors."""
    groups = weight.float().reshape(len(weight), -1, group_size)
    scale = (groups.abs().amax(-1) / 127).clamp(min=1e-12)
    codes = (groups / scale[..., None]).round().to(torch.int8).flatten(1)
    return {"weight_packed": codes.contiguous().view(torch.int32), "weight_scale": scale}


def convert(source: Path, target: Path, group_size: int, skipped: tuple[str, ...] = ()) -> list[str]:
    """Write a checkpoint of this format from a folder of safetensors; returns the modules that stay plain in it.

    Matrices are encoded, other tensors copied. A matrix stays plain where `skipped` names its module, or where `group_size`
    does not divide its rows.
    """
    from safetensors import safe_open
    from safetensors.torch import save_file

    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ModelError(f"{source} is quantized already, as {config['quantization_config'].get('quant_method')}")
    tensors: dict[str, Tensor] = {}
    plain = list(skipped)
    for file in sorted(source.glob("*.safetensors")):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                tensor, (module, _, last) = opened.get_tensor(name), name.rpartition(".")
                if last != "weight" or tensor.dim() != 2 or is_named(module, plain):
                    tensors[name] = tensor
                elif tensor.shape[1] % group_size:
                    tensors[name] = tensor
                    plain.append(module)
                else:
                    tensors |= {f"{module}.{key}": value for key, value in encode(tensor, group_size).items()}
    target.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.is_file() and file.suffix in (".json", ".txt", ".jinja", ".model") and ".index." not in file.name:
            shutil.copy(file, target / file.name)
    config["quantization_config"] = {"quant_method": METHOD, "group_size": group_size}
    if plain:
        config["quantization_config"]["modules_to_not_convert"] = plain
    (target / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    save_file(tensors, target / "model.safetensors")
    return plain


# --- the plugin -------------------------------------------------------------------------------------------------------


def samples() -> list[QuantSample]:
    """What the conformance suite makes checkpoints of; the meaning is computed in another way than `decoded` does."""

    def sample(group_size: int) -> QuantSample:
        def meaning(tensors: Mapping[str, Tensor]) -> Tensor:
            packed = tensors["weight_packed"].long()
            codes = torch.stack([packed >> shift & 255 for shift in (0, 8, 16, 24)], -1).flatten(1)
            signed = torch.where(codes > 127, codes - 256, codes)
            return signed * tensors["weight_scale"].repeat_interleave(group_size, 1)

        return QuantSample(
            name=f"groups of {group_size}",
            config={"quant_method": METHOD, "group_size": group_size},
            encode=lambda weight: encode(weight, group_size),
            dequantize=meaning,
            layers=("linear", "embedding", "head"),
            in_unit=group_size,
            skip_key="modules_to_not_convert",
        )

    return [sample(group_size) for group_size in (4, 32, 128)]


@hookimpl
def enginebay_quantizers() -> Iterable[QuantRecord]:
    return [
        QuantRecord(
            name=METHOD,
            summary="int8 weights in groups along the inputs, decoded in each product",
            factory=Int8Groups.from_checkpoint,
            api_version=0,
            checkpoint_methods=(METHOD,),
            samples=samples,
        )
    ]


def main(arguments: list[str]) -> None:
    import argparse

    parser = argparse.ArgumentParser(description="Write an int8_groups checkpoint from a folder of safetensors.")
    parser.add_argument("source", type=Path)
    parser.add_argument("target", type=Path)
    parser.add_argument("--group-size", type=int, default=64)
    parser.add_argument("--skip", nargs="*", default=[], metavar="MODULE", help="modules to leave plain")
    given = parser.parse_args(arguments)
    plain = convert(given.source, given.target, given.group_size, tuple(given.skip))
    sys.stdout.write(f"{given.target}: plain are {', '.join(plain) or 'no matrices'}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

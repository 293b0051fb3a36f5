"""The suite on plugins that give it little: no samples, no dense weight, plain embeddings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from enginebay.cli import cli

#: a row's scale; linear layers alone, without what is optional
LOCAL = """\
from enginebay import hookimpl
from enginebay.plugins.records import QuantRecord


def make(context):
    import torch
    from enginebay.errors import ModelError
    from enginebay.interfaces.quant import Axis, LinearMethod, Quantizer, WeightSpec

    if unknown := set(context.quantization_config) - {"quant_method"}:
        raise ModelError(f"unknown settings: {unknown}")

    class Rows(LinearMethod):
        def weights(self, layer):
            codes = WeightSpec(axes=(Axis("out"), Axis("in")), dtype=torch.int8)
            return {"codes": codes, "scale": WeightSpec(axes=(Axis("out"),), dtype=torch.float32)}

        def apply(self, layer, x, bias):
            out = (x @ layer.codes.to(x.dtype).T) * layer.scale.to(x.dtype)
            return out if bias is None else out + bias

    class Mine(Quantizer):
        @classmethod
        def from_checkpoint(cls, context):
            return cls()

        def method_for(self, layer):
            return Rows() if layer.kind == "linear" else None

    return Mine()


def samples():
    from enginebay.interfaces.quant_sample import QuantSample

    def encode(weight):
        scale = weight.abs().amax(1) / 127
        return {"codes": (weight / scale[:, None]).round().char(), "scale": scale}

    def dequantize(tensors):
        return tensors["codes"].float() * tensors["scale"][:, None]

    return [QuantSample(name="rows", config={"quant_method": "mine"}, encode=encode, dequantize=dequantize)]


@hookimpl
def enginebay_quantizers():
    return [
        QuantRecord(
            name="mine", summary="mine", factory=make, api_version=0, devices=("cpu",), dtypes=("bfloat16",),
            checkpoint_methods=("mine",), <<samples>>
        )
    ]
"""


@pytest.mark.parametrize(
    ("samples", "status", "verdict"), [("samples=samples", 0, "passed"), ("", 2, "not judged")], ids=["samples", "none"]
)
def test_a_plain_plugin_passes_by_its_samples_and_is_not_judged_without(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], samples: str, status: int, verdict: str
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(LOCAL.replace("<<samples>>", samples))
    arguments = ["conformance", "run", "quant:mine", "--local", str(file), "--report", "json", "--out", str(tmp_path)]
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == status, capfd.readouterr().out
    (plugin,) = json.loads((tmp_path / "conformance-quant-mine.json").read_text())["plugins"]
    assert plugin["verdict"] == verdict
    laws = {law["law"]: law for law in plugin["laws"]}
    if samples:
        assert laws["a_cut_unit_is_refused_or_padded"]["outcome"] == "skipped"  # there is no unit to cut
        assert "gives no dense weight" in laws["dense_weight_equals_the_reference"]["reasons"][0]
    else:
        assert "has no samples" in laws["every_declared_method_has_a_sample"]["reasons"][0]

"""The suite on a model that transformers does not know by itself: the author registers it, and nothing else is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner
from enginebay.cli import cli

LOCAL = """\
from enginebay import hookimpl
from enginebay.plugins.records import ModelRecord


def tiny_config():
    from enginebay.conformance.model.samples import SIZES
    from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

    class AcmeConfig(LlamaConfig):
        model_type = "acme"

    class AcmeForCausalLM(LlamaForCausalLM):
        config_class = AcmeConfig

    AutoConfig.register("acme", AcmeConfig, exist_ok=True)
    AutoModelForCausalLM.register(AcmeConfig, AcmeForCausalLM, exist_ok=True)
    return AcmeConfig(**SIZES)


def make(context):
    from enginebay.layers.decoder import DecoderLM, DecoderOptions

    model = DecoderLM(context.config, context.build, DecoderOptions())
    model.replayable = False
    return model


@hookimpl
def enginebay_models():
    return [
        ModelRecord(
            name="AcmeForCausalLM", summary="acme", factory=make, api_version=0, max_tensor_parallel=1{fields}
        )
    ]
"""


def run(folder: Path, fields: str) -> int:
    file = folder / "acme.py"
    file.write_text(LOCAL.format(fields=fields))
    arguments = ["conformance", "run", "model:AcmeForCausalLM", "--local", str(file)]
    return CliRunner().invoke(cli, arguments).exit_code


def test_a_model_that_transformers_was_told_of_passes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    status = run(tmp_path, ", tiny_config=tiny_config")
    out = capfd.readouterr().out
    assert status == 0, out
    assert "model:AcmeForCausalLM on cpu, core: passed" in out


def test_a_model_without_a_reference_is_told_what_to_do(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path, "") != 0
    assert "give the record a tiny_config" in " ".join(capfd.readouterr().out.split())

"""The GGUF quantizer against the gguf package's own arrays."""

from __future__ import annotations

import enginebay_gguf
import gguf
import numpy as np
import pytest
import torch
from enginebay.errors import ModelError, WeightsError
from enginebay.interfaces.quant import QuantContext, Quantizer
from enginebay.loading.source import RawTensor
from enginebay_gguf import block_formats, enginebay_quantizers, quantizer, samples


def make(**config: str) -> Quantizer:
    return enginebay_gguf.make(QuantContext(quantization_config=config, dtype=torch.float32))


def encoded(kind: gguf.GGMLQuantizationType, shape: tuple[int, ...]) -> tuple[RawTensor, torch.Tensor]:
    """A tensor of random weights in the encoding, and what they decode to."""
    weights = np.random.default_rng(0).normal(size=(int(np.prod(shape[:-1])), shape[-1])).astype(np.float32)
    data = gguf.quantize(weights, kind).view(np.uint8)
    want = torch.from_numpy(gguf.dequantize(data, kind)).reshape(shape)
    return RawTensor("a.weight", shape, torch.from_numpy(data), f"gguf:{kind.name}"), want


Q = gguf.GGMLQuantizationType


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0, Q.BF16, Q.F16, Q.F32], ids=lambda k: k.name)
def test_decodes_what_gguf_decodes(kind: gguf.GGMLQuantizationType, dtype: torch.dtype) -> None:
    raw, want = encoded(kind, (6, 64))
    got = make().decode(raw, dtype)
    assert got.dtype == dtype
    assert torch.equal(got, want.to(dtype))


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K, Q.IQ4_NL, Q.IQ4_XS], ids=lambda k: k.name)
def test_decodes_super_blocks(kind: gguf.GGMLQuantizationType) -> None:
    """gguf decodes these and does not encode them: bytes of a fixed pattern stand in."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = np.tile(np.arange(size, dtype=np.uint8) % 60, (3, 2))
    raw = RawTensor("a.weight", (3, 2 * block), torch.from_numpy(data), f"gguf:{kind.name}")
    assert torch.equal(make().decode(raw, torch.float32), torch.from_numpy(gguf.dequantize(data, kind)))


def test_decodes_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quantizer, "_CHUNK_WEIGHTS", 3 * 64)
    raw, want = encoded(Q.Q4_1, (10, 64))
    assert torch.equal(make().decode(raw, torch.float32), want)


@pytest.mark.parametrize("shape", [(2, 5, 32), (32,)])
def test_keeps_the_logical_shape(shape: tuple[int, ...]) -> None:
    raw, want = encoded(Q.Q8_0, shape)
    got = make().decode(raw, torch.float32)
    assert got.shape == shape
    assert torch.equal(got, want)


@pytest.mark.parametrize("shape", [(6, 32), (5, 64), (6, 60)])
def test_bytes_that_do_not_make_up_the_shape_are_refused(shape: tuple[int, ...]) -> None:
    raw, _ = encoded(Q.Q4_1, (6, 64))
    with pytest.raises(WeightsError, match=r"a\.weight: .* the file is damaged"):
        make().decode(RawTensor(raw.name, shape, raw.data, raw.encoding), torch.float32)


@pytest.mark.parametrize("encoding", ["gguf:Q99", "Q4_1", "awq:4"])
def test_unknown_encodings_are_refused(encoding: str) -> None:
    with pytest.raises(WeightsError, match=rf"a\.weight: .*'{encoding}'"):
        make().decode(RawTensor("a.weight", (1, 32), torch.zeros(1, 20, dtype=torch.uint8), encoding), torch.float32)


def test_a_type_that_gguf_cannot_decode_is_refused() -> None:
    kind = Q.Q8_K
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = RawTensor("a.weight", (1, block), torch.zeros(1, size, dtype=torch.uint8), f"gguf:{kind.name}")
    with pytest.raises(WeightsError, match=r"a\.weight: the gguf package does not decode Q8_K"):
        make().decode(raw, torch.float32)


def test_settings_of_another_method_are_refused() -> None:
    with pytest.raises(ModelError, match="quant_method is 'gptq'"):
        make(quant_method="gptq")


def test_settings_beside_the_method_are_refused() -> None:
    with pytest.raises(ModelError, match="quantization_config has bits, group_size"):
        make(quant_method="gguf", group_size="32", bits="4")


@pytest.mark.parametrize("kind", block_formats.MEANINGS)
def test_samples_mean_what_gguf_decodes(kind: str) -> None:
    """The samples' own decoding is checked against the package's, so that neither can be wrong alone."""
    (sample,) = (sample for sample in samples.samples() if sample.name == kind)
    weights = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    rows = sample.encode(weights)["weight"]
    want = torch.from_numpy(gguf.dequantize(rows.numpy(), Q[kind]))
    torch.testing.assert_close(sample.dequantize({"weight": rows}), want, rtol=1e-6, atol=1e-6)
    bits = int(kind[1])
    assert (want - weights).norm() / weights.norm() < 2.0 ** (1 - bits) * 1.1


def test_the_record() -> None:
    (record,) = enginebay_quantizers()
    assert (record.name, record.checkpoint_methods) == ("gguf", ("gguf",))

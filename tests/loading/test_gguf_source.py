"""Weights of GGUF files under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import pytest
import torch
from enginebay.errors import ModelError, WeightsError
from enginebay.loading.gguf_source import GGUFSource, unpermute_rows
from enginebay.loading.source import RawTensor

HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32
Array = npt.NDArray[np.float32]
Write = Callable[..., Path]


def permuted(weights: Array, num_heads: int) -> Array:
    """What llama.cpp's converter does to the rows of q and k."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weights.shape))


def array(*shape: int) -> Array:
    return np.random.default_rng(sum(shape)).standard_normal(shape, dtype=np.float32)


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def make(
        tensors: Mapping[str, npt.NDArray[np.generic]],
        architecture: str = "llama",
        quantized: Mapping[str, gguf.GGMLQuantizationType] | None = None,
        heads: int = HEADS,
        split: int = 1,
    ) -> Path:
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, architecture)
        writer.add_block_count(1)
        writer.add_head_count(heads)
        writer.add_head_count_kv(KV_HEADS)
        if split > 1:
            writer.add_uint16("split.count", split)
        for name, values in tensors.items():
            kind = (quantized or {}).get(name)
            writer.add_tensor(name, values if kind is None else gguf.quantize(values, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return make


def dequantized(raw: RawTensor) -> torch.Tensor:
    assert raw.encoding is not None
    kind = gguf.GGMLQuantizationType[raw.encoding.removeprefix("gguf:")]
    return torch.from_numpy(gguf.dequantize(raw.data.numpy(), kind)).view(raw.shape)


def test_names_in_file_order(write: Write) -> None:
    path = write(
        {
            "blk.0.ffn_down.weight": array(HIDDEN, 64),
            "token_embd.weight": array(10, HIDDEN),
            "blk.0.ffn_norm.weight": array(HIDDEN),
            "blk.0.attn_v.bias": array(16),
            "output.weight": array(10, HIDDEN),
            "rope_freqs.weight": array(4),
        }
    )
    source = GGUFSource(path)
    assert source.names() == [
        "model.layers.0.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.self_attn.v_proj.bias",
        "lm_head.weight",
    ]
    assert source.shape("model.embed_tokens.weight") == (10, HIDDEN)


def test_gemma_has_norms_around_both_blocks(write: Write) -> None:
    stored = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm", "attn_q_norm")
    path = write({f"blk.0.{name}.weight": array(HIDDEN) for name in stored}, "gemma3")
    assert GGUFSource(path).names() == [
        f"model.layers.0.{name}.weight"
        for name in (
            "input_layernorm",
            "post_attention_layernorm",
            "pre_feedforward_layernorm",
            "post_feedforward_layernorm",
            "self_attn.q_norm",
        )
    ]


@pytest.mark.parametrize(("stored", "dtype"), [(np.float32, torch.float32), (np.float16, torch.float16)])
def test_floats_come_plain(write: Write, stored: type[np.floating[npt.NBitBase]], dtype: torch.dtype) -> None:
    values = array(10, HIDDEN).astype(stored)
    raw = GGUFSource(write({"token_embd.weight": values})).load("model.embed_tokens.weight")
    assert (raw.encoding, raw.shape, raw.data.dtype) == (None, (10, HIDDEN), dtype)
    assert torch.equal(raw.data, torch.from_numpy(values))


def test_bfloat16_comes_plain(write: Write) -> None:
    values = array(10, HIDDEN)
    kinds = {"token_embd.weight": gguf.GGMLQuantizationType.BF16}
    raw = GGUFSource(write({"token_embd.weight": values}, quantized=kinds)).load("model.embed_tokens.weight")
    assert (raw.encoding, raw.data.dtype) == (None, torch.bfloat16)
    assert torch.equal(raw.data, torch.from_numpy(values).bfloat16())


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_others_come_as_rows_of_blocks(write: Write, kind: str) -> None:
    values, quantization = array(10, 64), gguf.GGMLQuantizationType[kind]
    path = write({"token_embd.weight": values}, quantized={"token_embd.weight": quantization})
    raw = GGUFSource(path).load("model.embed_tokens.weight")
    assert (raw.encoding, raw.shape, raw.data.dtype) == (f"gguf:{kind}", (10, 64), torch.uint8)
    expected = gguf.quantize(values, quantization)
    assert raw.data.shape == expected.shape
    assert np.array_equal(raw.data.numpy(), expected)


@pytest.mark.parametrize(("stored", "module", "heads"), [("attn_q", "q_proj", HEADS), ("attn_k", "k_proj", KV_HEADS)])
def test_llama_rows_return_to_their_order(write: Write, stored: str, module: str, heads: int) -> None:
    weights, bias = array(heads * HEAD_DIM, HIDDEN), array(heads * HEAD_DIM)
    name = f"blk.0.{stored}"
    source = GGUFSource(
        write({f"{name}.weight": permuted(weights, heads), f"{name}.bias": permuted(bias, heads)}, heads=HEADS)
    )
    layer = f"model.layers.0.self_attn.{module}"
    assert torch.equal(source.load(f"{layer}.weight").data, torch.from_numpy(weights))
    assert torch.equal(source.load(f"{layer}.bias").data, torch.from_numpy(bias))


def test_encoded_llama_rows_return_to_their_order(write: Write) -> None:
    weights, name = array(HEADS * HEAD_DIM, 64), "blk.0.attn_q.weight"
    path = write({name: permuted(weights, HEADS)}, quantized={name: gguf.GGMLQuantizationType.Q8_0})
    raw = GGUFSource(path).load("model.layers.0.self_attn.q_proj.weight")
    torch.testing.assert_close(dequantized(raw), torch.from_numpy(weights), atol=0.02, rtol=0.02)


@pytest.mark.parametrize("architecture", ["qwen2", "qwen3", "gemma3"])
def test_rows_of_other_families_stay(write: Write, architecture: str) -> None:
    weights = array(HEADS * HEAD_DIM, HIDDEN)
    source = GGUFSource(write({"blk.0.attn_q.weight": weights}, architecture))
    assert torch.equal(source.load("model.layers.0.self_attn.q_proj.weight").data, torch.from_numpy(weights))


def test_gemma_norms_lose_the_one_that_the_converter_adds(write: Write) -> None:
    values = array(HIDDEN)
    tensors = {
        "output_norm.weight": values + 1,
        "blk.0.attn_q_norm.weight": values + 1,
        "token_embd.weight": values[None],
    }
    source = GGUFSource(write(tensors, "gemma3"))
    for name in ("model.norm.weight", "model.layers.0.self_attn.q_norm.weight"):
        torch.testing.assert_close(source.load(name).data, torch.from_numpy(values))
    assert torch.equal(source.load("model.embed_tokens.weight").data[0], torch.from_numpy(values))


def test_unpermute_rows_in_small() -> None:
    assert unpermute_rows(torch.tensor([0, 3, 1, 4, 2, 5]), 1).tolist() == [0, 1, 2, 3, 4, 5]


def test_unknown_architecture(write: Write) -> None:
    with pytest.raises(
        ModelError, match=r"architecture 'mamba'; those that can be read are llama, qwen2, qwen3, gemma3"
    ):
        GGUFSource(write({"token_embd.weight": array(2, 32)}, "mamba"))


def test_unexpected_tensor_is_named(write: Write) -> None:
    with pytest.raises(WeightsError, match=r"tensors that llama does not: blk\.0\.surprise\.weight"):
        GGUFSource(write({"blk.0.surprise.weight": array(2, 32)}))


def test_rows_that_do_not_divide_into_heads(write: Write) -> None:
    source = GGUFSource(write({"blk.0.attn_q.weight": array(20, HIDDEN)}, heads=3))
    with pytest.raises(WeightsError, match=r"blk\.0\.attn_q\.weight has 20 rows"):
        source.load("model.layers.0.self_attn.q_proj.weight")


def test_split_file(write: Write) -> None:
    with pytest.raises(ModelError, match="one part of a split GGUF file"):
        GGUFSource(write({"token_embd.weight": array(2, 32)}, split=3))


def test_truncated_file_is_an_error_naming_file_and_tensor_c51(write: Write) -> None:
    path = write({"token_embd.weight": array(10, HIDDEN)})
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 100)
    with pytest.raises(WeightsError, match=r"m\.gguf is truncated: token_embd\.weight"):
        GGUFSource(path)


def test_absent_tensor_and_closed_source(write: Write) -> None:
    source = GGUFSource(write({"token_embd.weight": array(10, HIDDEN)}))
    with pytest.raises(WeightsError, match=r"has no tensor for lm_head\.weight"):
        source.load("lm_head.weight")
    source.close()
    with pytest.raises(WeightsError, match="is closed"):
        source.load("model.embed_tokens.weight")


@pytest.mark.model
def test_smollm2(smollm2: Path) -> None:
    source = GGUFSource(smollm2)
    kinds = [source.load(name).encoding for name in source.names()]
    counts = {kind: kinds.count(kind) for kind in set(kinds)}
    assert counts == {"gguf:Q4_1": 210, None: 61, "gguf:Q8_0": 1}
    assert source.shape("model.layers.29.self_attn.k_proj.weight") == (192, 576)
    source.close()

"""The header of a GGUF file, against the gguf package's writer and reader."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from enginebay.errors import ModelError, WeightsError
from enginebay.loading.gguf_header import GGUFHeader


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with every kind of metadata and three tensors."""
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("llama.block_count", 7)
    writer.add_int32("i32", -70000)
    writer.add_float32("f32", 0.25)
    writer.add_uint64("u64", 2**40)
    writer.add_int64("i64", -(2**40))
    writer.add_float64("f64", 1.5)
    writer.add_bool("yes", True)
    writer.add_string("text", "grüße")
    writer.add_array("numbers", [1, 2, 3])
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "", "日本"])
    writer.add_string("after", "still in step")
    writer.add_tensor("plain", np.arange(6, dtype=np.float32).reshape(2, 3))
    quantized = gguf.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", quantized, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("vector", np.ones(5, np.float16))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata(file: Path) -> None:
    header = GGUFHeader.read(file)
    expected = {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "llama.block_count": 7,
        "i32": -70000,
        "f32": 0.25,
        "u64": 2**40,
        "i64": -(2**40),
        "f64": 1.5,
        "yes": True,
        "text": "grüße",
        "numbers": [1, 2, 3],
        "after": "still in step",
        "tokenizer.ggml.tokens": 4,
    }
    assert {key: header.metadata[key] for key in expected} == expected
    assert header.architecture == "llama"
    assert header.get("block_count") == header.require("block_count") == 7
    assert header.get("nothing", 3) == 3
    kept = GGUFHeader.read(file, string_arrays=("tokenizer.ggml.tokens",))
    assert kept.metadata == header.metadata | {"tokenizer.ggml.tokens": ["a", "bc", "", "日本"]}
    with pytest.raises(ModelError, match=r"lacks the metadata key llama\.nothing"):
        header.require("nothing")


def test_tensors_lie_where_the_packages_reader_finds_them(file: Path) -> None:
    header = GGUFHeader.read(file)
    theirs = gguf.GGUFReader(file).tensors
    assert list(header.tensors) == [tensor.name for tensor in theirs] == ["plain", "blocks", "vector"]
    for tensor in theirs:
        ours = header.tensors[tensor.name]
        assert (ours.offset, ours.num_bytes, ours.type) == (tensor.data_offset, tensor.n_bytes, tensor.tensor_type.name)
        assert ours.shape == tuple(reversed(tensor.shape.tolist()))
    assert header.tensors["blocks"].row_bytes == 2 * 34


def test_any_truncation_is_an_error(file: Path) -> None:
    whole = file.read_bytes()
    # up to there: the writer pads the end of the data
    for length in [*range(1, len(whole) - 64, 37), len(whole) - 64]:
        file.write_bytes(whole[:length])
        with pytest.raises((WeightsError, ModelError), match=r"truncated|not a GGUF file"):
            GGUFHeader.read(file)


def test_a_truncated_tensor_is_named(file: Path) -> None:
    header = GGUFHeader.read(file)
    with file.open("rb+") as stream:
        stream.truncate(header.tensors["blocks"].offset + 10)
    with pytest.raises(WeightsError, match=r"m\.gguf is truncated: blocks ends at byte"):
        GGUFHeader.read(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read as a GGUF file"),
        (b"PK\x03\x04" + bytes(40), "is not a GGUF file: it does not start with b'GGUF'"),
        (b"GGUF\x09\0\0\0" + bytes(40), "GGUF version 9"),
        (b"GGUF\0\0\0\x03" + bytes(40), "big-endian"),
    ],
)
def test_other_files(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GGUFHeader.read(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read as a GGUF file"):
        GGUFHeader.read(tmp_path / "none.gguf")

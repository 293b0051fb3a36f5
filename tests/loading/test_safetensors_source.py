"""Weights of safetensors folders; whatever is missing or damaged is found at opening (C51)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from enginebay.errors import WeightsError
from enginebay.loading.safetensors_source import _DTYPES, SafetensorsSource
from safetensors.torch import save_file

FIRST = {"a.weight": torch.arange(6.0).view(2, 3), "b.weight": torch.ones(4, dtype=torch.bfloat16)}
SECOND = {"c.weight": torch.full((2,), 7, dtype=torch.int32), "scalar": torch.tensor(3.0)}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    for shard, tensors in zip(SHARDS, (FIRST, SECOND), strict=True):
        save_file(tensors, tmp_path / shard)
    write_index(tmp_path, {**dict.fromkeys(FIRST, SHARDS[0]), **dict.fromkeys(SECOND, SHARDS[1])})
    return tmp_path


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_single_file(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "model.safetensors")
    save_file(SECOND, tmp_path / "consolidated.safetensors")  # another copy that some checkpoints carry
    source = SafetensorsSource(tmp_path)
    assert sorted(source.names()) == sorted(FIRST)
    assert source.shape("a.weight") == (2, 3)
    raw = source.load("a.weight")
    assert (raw.name, raw.shape, raw.encoding) == ("a.weight", (2, 3), None)
    assert torch.equal(raw.data, FIRST["a.weight"])
    source.close()


def test_single_file_of_another_name(tmp_path: Path) -> None:
    save_file(FIRST, tmp_path / "weights.safetensors")
    assert sorted(SafetensorsSource(tmp_path).names()) == sorted(FIRST)


def test_shards(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    assert set(source.names()) == FIRST.keys() | SECOND.keys()
    for name, expected in {**FIRST, **SECOND}.items():
        raw = source.load(name)
        assert raw.data.dtype == expected.dtype
        assert torch.equal(raw.data, expected)
        assert source.shape(name) == raw.shape == tuple(expected.shape)


def test_the_index_is_the_allow_list(sharded: Path) -> None:
    save_file({"stray": torch.ones(1)}, sharded / "stray.safetensors")
    write_index(sharded, {"a.weight": SHARDS[0]})
    assert SafetensorsSource(sharded).names() == ["a.weight"]


def test_missing_shard_is_an_error_naming_file_and_tensor_c51(sharded: Path) -> None:
    (sharded / SHARDS[1]).unlink()
    with pytest.raises(WeightsError, match=rf"lacks {SHARDS[1]}, where .* puts c\.weight, scalar"):
        SafetensorsSource(sharded)


def test_tensor_absent_from_its_shard_c51(sharded: Path) -> None:
    save_file({"a.weight": FIRST["a.weight"]}, sharded / SHARDS[0])
    with pytest.raises(WeightsError, match=rf"{SHARDS[0]} lacks b\.weight"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("cut", [1, 20, 10**9])
def test_truncated_shard_is_named_c51(sharded: Path, cut: int) -> None:
    shard = sharded / SHARDS[1]
    shard.write_bytes(shard.read_bytes()[: max(0, shard.stat().st_size - cut)])
    with pytest.raises(WeightsError, match=rf"{SHARDS[1]} is truncated or damaged"):
        SafetensorsSource(sharded)


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"weight_map": {"a": 3}}', '{"weight_map": 3}'])
def test_damaged_index(tmp_path: Path, content: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(WeightsError, match="is not an index of safetensors files"):
        SafetensorsSource(tmp_path)


def test_index_stays_in_its_folder(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": "../other/model.safetensors"})
    with pytest.raises(WeightsError, match="names files outside its folder"):
        SafetensorsSource(tmp_path)


def test_several_files_without_an_index(tmp_path: Path) -> None:
    for name in ("x", "y"):
        save_file(FIRST, tmp_path / f"{name}.safetensors")
    with pytest.raises(WeightsError, match=r"holds x\.safetensors, y\.safetensors, but no model\.safetensors\.index"):
        SafetensorsSource(tmp_path)


def test_pickles_are_not_read(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"holds no safetensors file$"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin cannot be read, for a pickle may run code"):
        SafetensorsSource(tmp_path)


def test_a_span_holds_the_tensors_bytes(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    for name, expected in {**FIRST, **SECOND}.items():
        span = source.locate(name)
        content = bytearray(span.path.read_bytes()[span.offset : span.offset + span.num_bytes])
        assert (span.shape, span.dtype) == (tuple(expected.shape), expected.dtype)
        assert torch.equal(torch.frombuffer(content, dtype=span.dtype).view(span.shape), expected)


@pytest.mark.parametrize("dtype", list(_DTYPES.values()), ids=list(_DTYPES))
def test_spans_know_every_dtype_as_safetensors_does(tmp_path: Path, dtype: torch.dtype) -> None:
    save_file({"a": torch.zeros(3, dtype=torch.uint8).to(dtype)}, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    assert source.locate("a").dtype == dtype == source.load("a").data.dtype


def test_a_span_of_a_dtype_that_torch_lacks_is_refused(tmp_path: Path) -> None:
    header = json.dumps({"a": {"dtype": "F6_E2M3", "shape": [4], "data_offsets": [0, 3]}}).encode()
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(3))
    with pytest.raises(WeightsError, match=r"a has a dtype in .*model\.safetensors that torch does not have"):
        SafetensorsSource(tmp_path).locate("a")


def test_closed(sharded: Path) -> None:
    source = SafetensorsSource(sharded)
    source.close()
    with pytest.raises(WeightsError, match=r"no tensor a\.weight, or it is closed"):
        source.load("a.weight")
    with pytest.raises(WeightsError, match=r"no tensor a\.weight, or it is closed"):
        source.locate("a.weight")
